"""Verification steps (q tokens a request): equal to decoding one by one, whatever was taken back before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from targets.base import Options, UnknownOption, Workload, find
from targets.kimi_k3 import disturb
from targets.kimi_k3.floors import expert_bytes
from targets.kimi_k3.generate import shape_of
from targets.reference import Tensors
from tests.targets.kimi import rel, run, tensors, workload
from tests.targets.test_kimi_kda import parallel_kda
from tests.targets.test_kimi_mla import expanded_mla


def verify(part: str, q: int, requests: int, **more: object) -> Workload:
    extra = {"q": q, **more.pop("extra", {})}  # type: ignore[dict-item]
    return workload(part, rows=q * requests, extra=extra, **more)


def walked(w: Workload, t: Tensors, steps: int) -> tuple[list[Tensors], list[Tensors]]:
    """Inputs and results of oracle steps on carried states."""
    given, got = [], []
    for step in range(steps):
        new = {k: v for k, v in tensors(w, step=step).items() if k.startswith("inputs.")}
        t = {**t, **new}
        given.append(t)
        got.append(run(w, t).tensors)
        t = {**t, **{k: v for k, v in got[-1].items() if k.startswith("states.")}}
    return given, got


@pytest.mark.parametrize("q", [2, 4, 8])
def test_kda_with_tokens_taken_back_equals_the_kept_sequence_from_scratch(q: int) -> None:
    """After steps that keep 1 to q tokens each, every slot holds the state of the kept sequence up to its token."""
    w = verify("kda", q, 2, layers=1)
    t = tensors(w)
    for name in ("S", "conv"):
        t[f"states.layers.0.{name}"] = torch.zeros_like(t[f"states.layers.0.{name}"])
    given, got = walked(w, t, 6)
    weights = {k.rsplit(".", 1)[1]: v for k, v in t.items() if k.startswith("weights.")}
    counts = torch.stack([g["inputs.accepted"] for g in given])
    assert len(set(counts[1:].flatten().tolist())) > 1
    for b in range(2):
        rows = slice(b * q, (b + 1) * q)
        kept = torch.zeros(0, int(w.dims["hidden"]), dtype=torch.bfloat16)
        for step, (g, result) in enumerate(zip(given, got, strict=True)):
            keep = int(given[step + 1]["inputs.accepted"][b]) if step + 1 < len(given) else q
            xs = torch.cat([kept, g["inputs.x.0"][rows]])
            for tokens in range(1, q + 1):
                y, S = parallel_kda(
                    xs[: len(kept) + tokens], weights, int(w.dims["kda_heads"]), 128
                )
                slot = int(g["inputs.slots"][b, tokens - 1])
                assert rel(result["states.layers.0.S"][slot], S) < 1e-6
            assert rel(result["outputs.y.0"][rows], y[-q:]) < 1e-3
            kept = xs[: len(kept) + keep]


def test_conv_page_keeps_two_old_taps_and_all_new_tokens() -> None:
    q = 4
    w = verify("kda", q, 2, layers=1)
    t = tensors(w)
    got = run(w, t)
    d = 3 * int(w.dims["kda_dim"])
    y = (t["inputs.x.0"].double() @ t["weights.layers.0.in_proj"].double().T).bfloat16()[:, :d]
    for b in range(2):
        slot, kept = int(t["inputs.slots"][b, 0]), int(t["inputs.accepted"][b])
        page, old = got.tensors["states.layers.0.conv"][slot], t["states.layers.0.conv"][slot]
        assert page.shape[0] == q + 2
        assert torch.equal(page[:2], old[kept : kept + 2])
        assert torch.equal(page[2:], y[b * q : (b + 1) * q])
    touched = got.masks["states.layers.0.conv"].flatten(1).any(1).nonzero().flatten()
    assert set(touched.tolist()) == set(t["inputs.slots"][:, 0].tolist())
    touched = got.masks["states.layers.0.S"].flatten(1).any(1).nonzero().flatten()
    assert set(touched.tolist()) == set(t["inputs.slots"].flatten().tolist())


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_mla_rows_see_earlier_new_rows_and_no_later_ones(kv: str) -> None:
    """Each row against un-absorbed attention on the cache that holds the rows inserted before it."""
    q = 4
    w = verify("mla", q, 2, layers=1, extra={"kv": kv})
    t = tensors(w)
    got = run(w, t).tensors
    page = int(w.dims["page"])
    for m in range(w.rows):
        b = m // q
        seen = dict(t)
        seen["states.layers.0.kv"] = got["states.layers.0.kv"].float()
        if kv == "fp8":
            seen["states.layers.0.kv"] *= t["weights.layers.0.k_scale"]
        length = int(t["inputs.lengths"][b]) - q + 1 + m % q
        seen["inputs.lengths"] = torch.full((w.rows,), length)
        seen["inputs.block_table"] = t["inputs.block_table"].repeat_interleave(q, 0)
        assert rel(got["outputs.y.0"][m], expanded_mla(w, seen, m)) < (
            0.01 if kv == "bf16" else 0.06
        )
        later = dict(t)
        later["inputs.x.0"] = t["inputs.x.0"].clone()
        later["inputs.x.0"][m + 1 :] += 1
        same = run(w, later).tensors["outputs.y.0"]
        assert torch.equal(same[: m + 1], got["outputs.y.0"][: m + 1])
        row = int(t["inputs.block_table"][b, (length - 1) // page]) * page + (length - 1) % page
        assert row == int(t["inputs.slot_mapping"][m])


def test_a_verified_stack_equals_decoding_the_tokens_one_by_one() -> None:
    """All tokens accepted: the outputs of one step with q = 4 are those of four steps with one token, bit for bit."""
    q = 4
    w = verify("decode", q, 2, extra={"taps": "dspark"})
    t = tensors(w)
    t["inputs.accepted"][:] = 1
    got = run(w, t).tensors
    single = workload("decode", rows=2)
    s = {k: v for k, v in t.items() if k.startswith("weights.")}
    start = t["inputs.slots"][:, 0]
    for name, value in t.items():
        if name.startswith("states."):
            s[name] = value[:, :3] if name.endswith(".conv") else value.clone()
    s["inputs.slots"], s["inputs.block_table"] = start, t["inputs.block_table"]
    for token in range(q):
        rows = torch.arange(2) * q + token
        s["inputs.x0"] = t["inputs.x0"][rows]
        s["inputs.lengths"] = t["inputs.lengths"] - q + 1 + token
        s["inputs.slot_mapping"] = t["inputs.slot_mapping"][rows]
        one = run(single, s).tensors
        assert torch.equal(one["outputs.out"], got["outputs.out"][rows])
        assert torch.equal(one["outputs.ids"], got["outputs.ids"][:, rows])
        for name, value in one.items():
            if name.endswith(".S"):
                # between steps the state is FP32, inside one the oracle keeps FP64
                verified = got[name][t["inputs.slots"][:, token].long()]
                assert rel(value[start.long()], verified) < 1e-6
        s.update({k: v for k, v in one.items() if k.startswith("states.")})
    assert all(torch.equal(s[k], got[k]) for k in got if k.endswith(".kv"))
    assert got["outputs.taps"].shape == (2, w.rows, int(w.dims["hidden"]))


def test_taps_are_the_stream_on_entry_of_their_layers() -> None:
    """In a run that ends before a tapped layer's sum, the closing prefix is what a longer run taps there."""
    long, short = (workload("decode", rows=2, layers=n, extra={"taps": "dspark"}) for n in (5, 4))
    assert (long.dims["taps"], short.dims["taps"]) == ("1,4", "1")
    t = tensors(long)
    names = {b.name for b in short.buffers}
    a, b = run(long, t).tensors, run(short, {k: v for k, v in t.items() if k in names}).tensors
    assert torch.equal(a["outputs.taps"][1], b["outputs.prefix"])
    assert torch.equal(a["outputs.taps"][0], b["outputs.taps"][0])
    whole = workload("decode", "tp8", layers=93, extra={"first": 0, "taps": "dspark"})
    assert whole.dims["taps"] == "3,24,48,72,90"


def test_null_requests_and_slots_touch_nothing() -> None:
    q = 4
    w = verify("kda", q, 2, layers=1)
    t = tensors(w)
    plain = run(w, t)
    null = disturb.apply(w, "null_request", 1, t)
    got = run(w, null)
    assert got.tensors["outputs.y.0"][:q].abs().max() == 0
    assert torch.equal(got.tensors["outputs.y.0"][q:], plain.tensors["outputs.y.0"][q:])
    lost = set(t["inputs.slots"][0].tolist())
    for name in ("S", "conv"):
        written = set(
            got.masks[f"states.layers.0.{name}"].flatten(1).any(1).nonzero().flatten().tolist()
        )
        assert written and not written & (lost | {0})
    store = disturb.apply(w, "null_store", 1, t)
    assert int(store["inputs.slots"][-1, -1]) == -1 and int(store["inputs.accepted"][-1]) < q
    got = run(w, store)
    slot = int(t["inputs.slots"][-1, -1])
    assert torch.equal(got.tensors["states.layers.0.S"][slot], t["states.layers.0.S"][slot])
    assert got.tensors["outputs.y.0"][-1].abs().max() > 0


def test_lengths_follow_what_was_accepted() -> None:
    w = verify("mla", 4, 4)
    steps = [tensors(w, step=s) for s in range(4)]
    kda = [tensors(verify("kda", 4, 4), step=s)["inputs.accepted"] for s in range(4)]
    for before, after, kept in zip(steps, steps[1:], kda[1:], strict=False):
        assert torch.equal(after["inputs.lengths"] - before["inputs.lengths"], kept)


@pytest.mark.parametrize(
    "layer, stock, sharded",
    [(12, (398.9, 487.3), (353.9, 442.3)), (15, (363.7, 452.1), (318.7, 407.1))],
)
def test_floors_of_verification_match_the_published_table(
    layer: int, stock: tuple[float, float], sharded: tuple[float, float]
) -> None:
    """One request, eight tokens, TP8: 80 distinct experts, or as many as of independent tokens (120.3)."""
    for latent, bounds in (("replicated", stock), ("sharded", sharded)):
        extra = {"first": layer, "q": 8, "latent_down": latent}
        w = workload("decode", "tp8", rows=8, layers=1, context=8, extra=extra)
        own = sum(
            b.nbytes for b in w.buffers if b.name.startswith(("inputs.remote", "outputs.send"))
        )
        taps = 2 * 4608 * (3 + 10) if layer == 12 else 0
        cache = 8 * 2 * 576 if layer == 15 else 0
        high = (w.floor.bytes - own - taps - cache) / 1e6
        assert high == pytest.approx(bounds[1], abs=0.2)
        assert high - 40.3 * expert_bytes(shape_of(w)) / 1e6 == pytest.approx(bounds[0], abs=0.2)


@pytest.mark.parametrize("rows, q", [(6, 4), (8, 9), (8, 0), (24, 8), (128, 8)])
def test_rows_are_whole_requests(rows: int, q: int) -> None:
    with pytest.raises(UnknownOption):
        find("kimi-k3-kda").workload(Options(rows=rows, extra={"q": q}))


def test_attn_res_has_no_tokens() -> None:
    with pytest.raises(UnknownOption):
        find("kimi-k3-attn-res").workload(Options(rows=4, extra={"q": 4}))


@pytest.mark.parametrize("extra, most", [({"experts": "nvfp4"}, 0.06), ({"kv": "fp8"}, 0.2)])
def test_schedules_stay_near_the_oracle_in_every_slot(extra: dict[str, str], most: float) -> None:
    """An E4M3 query moves by a sixteenth where it rounds the other way, so its band is wide."""
    w = verify("decode", 4, 2, extra=extra)
    t = tensors(w)
    oracle = run(w, t)
    for schedule in ("split", "rounded", "framework"):
        got: dict[str, Tensor] = run(w, t, schedule, oracle.tensors["outputs.ids"]).tensors
        worst = {k: rel(v, oracle.tensors[k]) for k, v in got.items() if v.is_floating_point()}
        assert max(worst.values()) < most, worst
