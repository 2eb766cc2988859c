"""The reference as the judge uses it: forms, determinism, bands, distributions, and the layer schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from targets.kimi_k3.maths.precision import ORACLE
from targets.kimi_k3.maths.step import Step
from targets.kimi_k3.options import resolve
from targets.kimi_k3.reference import DTYPES
from targets.kimi_k3.routing import Chooser
from tests.targets.kimi import PARTS, REFERENCE, rel, run, tensors, workload


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("preset, rows", [("tiny", 2), ("tiny-tp2", 1)])
def test_tensors_have_the_declared_form(part: str, preset: str, rows: int) -> None:
    w = workload(part, preset, rows=rows)
    t = tensors(w)
    before = {k: v.clone() for k, v in t.items()}
    expected = run(w, t)
    assert all(torch.equal(t[k], before[k]) for k in t)
    given = {b.name: b for b in w.buffers if b.group in ("inputs", "weights", "states")}
    assert set(given) == set(t)
    made = {b.name: b for b in w.buffers if b.group in ("outputs", "states")}
    assert set(made) == set(expected.tensors)
    for name, b in {**given, **made}.items():
        for value in [x[name] for x in (t, expected.tensors) if name in x]:
            assert (tuple(value.shape), value.dtype) == (b.shape, DTYPES[b.dtype]), name
            assert bool(torch.isfinite(value.float()).all()), name


def test_values_depend_on_seed_and_step_alone() -> None:
    w = workload("decode", rows=2)
    a, same, seed, step = tensors(w), tensors(w), tensors(w, seed=2), tensors(w, step=1)
    assert all(torch.equal(a[k], same[k]) for k in a)
    constant = {"inputs.block_table"}
    for name in a:
        assert not torch.equal(a[name], seed[name]) or a[name].numel() <= 2, name
        if name.startswith("inputs.") and name not in constant | {"inputs.slots"}:
            assert not torch.equal(a[name], step[name]), name
        elif not name.startswith("inputs."):
            assert torch.equal(a[name], step[name])


def test_no_two_layers_share_weights() -> None:
    t = tensors(workload("decode"))
    for leaf in ("o_proj", "w1", "latent_down", "attn_res_proj"):
        found = [v for k, v in t.items() if k.endswith(f".{leaf}") and k.startswith("weights.")]
        pairs = [(x, y) for i, x in enumerate(found) for y in found[:i] if x.shape == y.shape]
        assert pairs and not any(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("part", PARTS)
def test_schedules_agree_with_the_oracle_but_not_bit_for_bit(part: str) -> None:
    w = workload(part, "tiny-tp2", rows=4)
    t = tensors(w)
    oracle = run(w, t)
    ids = oracle.tensors.get("outputs.ids")
    assert len(REFERENCE.schedules) >= 3 and "oracle" not in REFERENCE.schedules
    bands: dict[str, float] = {}
    for schedule in REFERENCE.schedules:
        got = run(w, t, schedule, ids)
        assert set(got.masks) == set(oracle.masks)
        for name, value in got.tensors.items():
            if value.is_floating_point():
                bands[name] = max(bands.get(name, 0.0), rel(value, oracle.tensors[name]))
    assert max(bands.values()) < 0.05
    if part in ("decode", "kda", "mla", "latent-moe"):
        last = "outputs.out" if part == "decode" else f"outputs.y.{w.layers - 1}"
        assert bands[last] > 1e-4


@pytest.mark.parametrize("part", PARTS)
def test_distributions_change_something_and_stay_finite(part: str) -> None:
    w = workload(part, rows=2)
    t = tensors(w)
    names = REFERENCE.distributions(w)
    assert {"large", "small", "spike", "constant"} <= set(names)
    assert ("null_request" in names) == (part in ("decode", "kda", "mla"))
    assert ("router_ties" in names) == (part in ("decode", "latent-moe", "router"))
    copy = {k: v.clone() for k, v in t.items()}
    for name in names:
        changed = REFERENCE.disturb(w, name, 3, t)
        assert {k for k in t if not torch.equal(t[k], changed[k])}, name
        for value in run(w, changed, "f32").tensors.values():
            assert bool(torch.isfinite(value.float()).all()), name
    assert all(torch.equal(t[k], copy[k]) for k in t)


def test_disturbed_values_reach_the_result() -> None:
    """Each distribution moves the outputs, except those that must not."""
    w = workload("decode", rows=2)
    t = tensors(w)
    plain = run(w, t, "f32").tensors["outputs.out"]
    for name in REFERENCE.distributions(w):
        changed = REFERENCE.disturb(w, name, 2, t)
        moved = not torch.equal(run(w, changed, "f32").tensors["outputs.out"], plain)
        assert moved == (name != "stale_cache"), name


class Recorded(Step):
    """Attention and FFN replaced by simple functions, so that only the schedule and AttnRes are left."""

    def attention(self, n: int, kind: str, x: Tensor) -> Tensor:
        return (0.5 * x + n).bfloat16().double()

    def ffn(self, n: int, kind: str, y: Tensor) -> Tensor:
        return (0.25 * y - n).bfloat16().double()


def literal_stack(
    x0: Tensor, t: dict[str, Tensor], layers: int, block: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One row through the stack, following the definition of AR word by word. First layer 0."""
    bank: dict[int, Tensor] = {}
    P = x0

    def rounded(v: Tensor) -> Tensor:
        return v.bfloat16().double()

    def rms(m: Tensor, weight: Tensor) -> Tensor:
        return m / (m.square().mean() + 1e-5).sqrt() * weight

    def AR(delta: Tensor | None, n: int, w: tuple[Tensor, Tensor, Tensor | None], b: int) -> Tensor:
        nonlocal P
        if delta is not None:
            P = rounded(P + delta)
        if b >= 0:
            bank[b] = P
        sources = [bank[i] for i in range(n)] + [P]
        scores = torch.stack(
            [(v * w[0] * w[1]).sum() / (v.square().mean() + 1e-5).sqrt() for v in sources]
        )
        m = sum(p * v for p, v in zip(torch.softmax(scores, 0), sources, strict=True))
        assert isinstance(m, Tensor)
        return rounded(m) if w[2] is None else rounded(rms(m, w[2]))

    def vectors(*names: str) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = (t[f"weights.{n}"].double() for n in names)
        return a, b, c

    delta: Tensor | None = None
    for i in range(layers):
        at = f"layers.{i}."
        n = -(-i // block)
        first = i % block == 0
        w = vectors(f"{at}attn_res_norm", f"{at}attn_res_proj", f"{at}attn_norm")
        x = AR(delta, n, w, i // block if first else -1)
        a = rounded(0.5 * x + i)
        w = vectors(f"{at}mlp_res_norm", f"{at}mlp_res_proj", f"{at}mlp_norm")
        if first:
            P = a
            y = AR(None, n + 1, w, -1)
        else:
            y = AR(a, n, w, -1)
        delta = rounded(0.25 * y - i)
    out_norm, out_proj, final = vectors("out_res_norm", "out_res_proj", "out_norm")
    h = AR(delta, -(-layers // block), (out_norm, out_proj, None), -1)
    return rounded(rms(h, final)), P, [bank[b] for b in sorted(bank)]


@pytest.mark.parametrize("preset, layers", [("tiny", 6), ("tiny-end", 5)])
def test_layer_schedule_and_attn_res_follow_the_definition(preset: str, layers: int) -> None:
    w = workload("decode", preset, rows=2)
    t = tensors(w)
    step = Recorded(resolve("decode", w.options), t, ORACLE, lambda a, b: a)
    step.decode()
    for m in range(2):
        out, prefix, bank = literal_stack(t["inputs.x0"][m].double(), t, layers, 2)
        assert len(bank) == 3
        assert rel(step.out["outputs.out"][m], out) < 1e-4
        assert rel(step.out["outputs.prefix"][m], prefix) < 1e-4
        assert rel(step.out["outputs.bank"][m], torch.stack(bank)) < 1e-4


def test_the_model_ends_in_two_mla_layers_with_caches_of_their_own() -> None:
    """Their caches hold different rows, and the last one's cache reaches the output through its own attention."""
    w = workload("decode", "tiny-end", rows=2)
    assert (w.dims["attn"], w.dims["ffn"]) == ("KKKMM", "DEEEE")
    real = workload("decode", "tp8", layers=5, extra={"first": 88})
    assert (real.dims["attn"], real.dims["bank_old"], real.dims["bank_rows"]) == ("KKKMM", 8, 8)
    t = tensors(w)
    got = run(w, t).tensors
    rows = t["inputs.slot_mapping"]
    third, last = (got[f"states.layers.{n}.kv"].flatten(0, 1)[rows] for n in (3, 4))
    assert rel(third, last) > 0.5
    swapped = dict(t)
    for a, b in ((3, 4), (4, 3)):
        swapped[f"states.layers.{a}.kv"] = t[f"states.layers.{b}.kv"]
    assert rel(run(w, swapped).tensors["outputs.out"], got["outputs.out"]) > 0.05


@pytest.mark.parametrize(
    "preset, cut", [("tiny", 1), ("tiny", 2), ("tiny", 3), ("tiny", 4), ("tiny-end", 4)]
)
def test_a_run_of_layers_continues_an_earlier_one(preset: str, cut: int) -> None:
    """Layers 0 to cut - 1, then the rest on their prefix, delta and bank, equal the whole stack bit for bit."""
    whole = workload("decode", preset, rows=2)
    t = tensors(whole)
    expected = run(whole, t).tensors
    head = workload("decode", preset, rows=2, layers=cut)
    step = _Stopped(resolve("decode", head.options), t, ORACLE, Chooser(4))
    step.decode()
    rest = whole.layers - cut
    tail = workload("decode", preset, rows=2, layers=rest, extra={"first": cut})
    s = {k: v for k, v in t.items() if k.startswith("inputs.") or k.startswith("weights.out")}
    for name, value in t.items():
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) >= cut:
            s[".".join([*parts[:2], str(int(parts[2]) - cut), *parts[3:]])] = value
    s["inputs.x0"], s["inputs.delta"] = step.prefix.bfloat16(), step.delta.bfloat16()
    s["inputs.bank"] = step.out["outputs.bank"].bfloat16()
    declared = {b.name for b in tail.buffers if b.group != "outputs"}
    got = run(tail, {k: v for k, v in s.items() if k in declared}).tensors
    assert torch.equal(got["outputs.out"], expected["outputs.out"])
    assert torch.equal(got["outputs.prefix"], expected["outputs.prefix"])


class _Stopped(Step):
    """Keeps prefix and delta before the closing step adds them."""

    def ffn(self, n: int, kind: str, y: Tensor) -> Tensor:
        self.delta = super().ffn(n, kind, y)
        return torch.zeros_like(self.delta) if n == self.run.layers - 1 else self.delta

    def decode(self) -> None:
        super().decode()
        self.prefix = self.out["outputs.prefix"]


def test_one_layer_cannot_stand_in_for_another() -> None:
    """Swapping the weights of two layers, or of two experts that are used, shows in the output."""
    w = workload("decode", rows=1)
    t = tensors(w)
    plain = run(w, t)
    swapped = dict(t)
    a, b = "weights.layers.1.o_proj", "weights.layers.2.o_proj"
    swapped[a], swapped[b] = t[b], t[a]
    assert rel(run(w, swapped).tensors["outputs.out"], plain.tensors["outputs.out"]) > 0.05
    used = plain.tensors["outputs.ids"][0, 0, 0]
    other = dict(t)
    other["weights.layers.1.w2"] = t["weights.layers.1.w2"].clone()
    other["weights.layers.1.w2"][used] ^= 0x11
    assert not torch.equal(run(w, other).tensors["outputs.out"], plain.tensors["outputs.out"])
