"""Router, MXFP4 experts and latent MoE against plain loops, proved ties, and the exchange of two ranks."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3 import disturb
from targets.kimi_k3.maths import ffn
from targets.kimi_k3.maths.layer import Layer, layer_of
from targets.kimi_k3.maths.mxfp4 import dequantise, quantise, scale_value
from targets.kimi_k3.maths.precision import ORACLE, SCHEDULES, bf, linear
from targets.kimi_k3.routing import legitimate, near_ties, valid
from targets.reference import Tensors
from tests.targets.kimi import rel, run, tensors, workload

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_the_low_nibble_is_the_even_column() -> None:
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 3] = 0x92, 0x7F
    got = dequantise(codes, torch.tensor([[128]], dtype=torch.uint8), torch.float64)[0]
    assert got[:2].tolist() == [2.0, -1.0]
    assert got[6:8].tolist() == [-12.0, 12.0]
    assert got[8:].abs().max() == 0


def test_scales_are_exact_powers_of_two() -> None:
    every = scale_value(torch.arange(256, dtype=torch.uint8))
    assert [math.log2(v) for v in every[:255].double().tolist()] == [b - 127 for b in range(255)]
    assert math.isnan(every[255])


def test_quantise_keeps_what_the_format_holds() -> None:
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (5, 64), generator=g, dtype=torch.uint8)
    codes[:, 0::16] = 0x77  # every group holds the largest magnitude, so its scale is determined
    scale = torch.randint(118, 122, (5, 4), generator=g, dtype=torch.uint8)
    values = dequantise(codes, scale, torch.float32)
    again = quantise(values)
    assert torch.equal(again[1], scale)
    assert torch.equal(dequantise(*again, torch.float32), values)


def expert_matrix(w: Tensors, name: str, e: int) -> np.ndarray:
    codes, scale = w[name][e].numpy(), w[f"{name}_scale"][e].numpy()
    out = np.zeros((codes.shape[0], codes.shape[1] * 2))
    for j in range(codes.shape[1]):
        for half, nibble in enumerate((codes[:, j] & 15, codes[:, j] >> 4)):
            sign = np.where(nibble & 8, -1.0, 1.0)
            column = 2 * j + half
            value = sign * np.take(E2M1, nibble & 7)
            out[:, column] = value * 2.0 ** (scale[:, column // 32].astype(int) - 127)
    return out


def rounded(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(x, dtype=np.float64)).bfloat16().double().numpy()


def situ(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    return 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)


def plain_moe(w: Tensors, y: np.ndarray, topk: int) -> tuple[list[int], np.ndarray]:
    """One row on one rank, by the book."""
    f64 = {k: v.double().numpy() for k, v in w.items() if v.dtype != torch.uint8}
    logit = f64["router"] @ y
    s = 1 / (1 + np.exp(-logit))
    ids = sorted(range(len(s)), key=lambda e: (-(s[e] + f64["router_bias"][e]), e))[:topk]
    latent = rounded(f64["latent_down"] @ y)
    acc = np.zeros_like(latent)
    for e in ids:
        weight = rounded(s[e] / (s[ids].sum() + 1e-20))
        h = rounded(situ(expert_matrix(w, "w1", e) @ latent, expert_matrix(w, "w3", e) @ latent))
        acc += weight * rounded(expert_matrix(w, "w2", e) @ h)
    z = rounded(acc)
    normed = rounded(z / np.sqrt((z**2).mean() + 1e-5) * f64["latent_norm"])
    up = rounded(f64["latent_up"] @ normed)
    gate, value = np.split(rounded(f64["shared_gate_up"] @ y), 2)
    shared = rounded(f64["shared_down"] @ rounded(situ(gate, value)))
    return ids, rounded(up + shared)


def test_products_then_sums_are_the_batched_product() -> None:
    """What a GPU runs in place of the batched product that this machine runs."""
    g = torch.Generator().manual_seed(4)
    x, weight = torch.randn(3, 96, generator=g), torch.randn(3, 5, 96, generator=g)
    exact = torch.einsum("pnk,pk->pn", weight.double(), x.double())
    for name, bound in (("oracle", 1e-15), ("f32", 1e-6), ("split", 1e-6), ("mixed", 1e-6)):
        s = SCHEDULES[name]
        a, b = x.to(s.dtype), weight.to(s.dtype)
        for got in (ffn.multiplied(s, a, b), ffn._batched(s, a, b)):
            assert got.dtype == s.dtype and rel(got, exact) < bound


def test_latent_moe_equals_plain_loops() -> None:
    w = workload("latent-moe", rows=2, layers=1)
    t = tensors(w)
    got = run(w, t).tensors
    weights = dict(layer_of(t, 0).weights)
    for m in range(2):
        ids, delta = plain_moe(weights, t["inputs.x.0"][m].double().numpy(), int(w.dims["topk"]))
        assert got["outputs.ids"][0, m].tolist() == ids
        assert rel(got["outputs.y.0"][m], torch.from_numpy(delta)) < 1e-4


def permuted_experts(w: Workload, t: Tensors, order: Tensor) -> Tensors:
    p = dict(t)
    for i in range(w.layers):
        for name in ("router", "router_bias", "w1", "w1_scale", "w2", "w2_scale", "w3", "w3_scale"):
            p[f"weights.layers.{i}.{name}"] = t[f"weights.layers.{i}.{name}"][order]
    return p


def test_permuting_experts_changes_only_their_names() -> None:
    w = workload("latent-moe", rows=4)
    t = tensors(w)
    order = torch.randperm(int(w.dims["experts"]), generator=torch.Generator().manual_seed(1))
    plain, other = run(w, t).tensors, run(w, permuted_experts(w, t, order)).tensors
    assert torch.equal(order[other["outputs.ids"].long()], plain["outputs.ids"].long())
    assert rel(other[f"outputs.y.{w.layers - 1}"], plain[f"outputs.y.{w.layers - 1}"]) < 1e-4


def test_exact_ties_go_to_the_lower_id_and_are_allowed() -> None:
    w = workload("router", rows=4)
    got = run(w, disturb.apply(w, "router_ties", 0, tensors(w)))
    ids = got.tensors["outputs.ids"]
    assert bool((ids[..., 0::2] % 2 == 0).all()) and bool(
        (ids[..., 1::2] == ids[..., 0::2] + 1).all()
    )
    assert bool(got.ties[0].allowed.all())


def test_ordinary_routing_is_not_excused() -> None:
    w = workload("router", rows=8)
    tie = run(w, tensors(w)).ties[0]
    assert not tie.allowed.any()
    assert tie.eligible is not None
    assert int(tie.eligible.sum()) == w.layers * 8 * int(w.dims["topk"])


def test_all_rows_choose_the_first_and_last_expert_when_told() -> None:
    w = workload("latent-moe", rows=4)
    ids = run(w, disturb.apply(w, "one_choice", 9, tensors(w))).tensors["outputs.ids"]
    chosen = {frozenset(row) for row in ids.flatten(0, 1).tolist()}
    assert all({0, int(w.dims["experts"]) - 1} <= row for row in chosen)


def test_forced_choices_are_followed_and_judged_by_the_oracle() -> None:
    w = workload("latent-moe", rows=2)
    t = tensors(w)
    plain = run(w, t)
    ids = plain.tensors["outputs.ids"].clone()
    wrong = ids.clone()
    wrong[0, 1, -1] = next(e for e in range(32) if e not in ids[0, 1].tolist())
    forced = run(w, t, ids=wrong)
    assert not forced.ties[0].allowed[0, 1]
    assert torch.equal(forced.tensors["outputs.ids"][0], ids[0])
    assert rel(forced.tensors["outputs.y.0"][1], plain.tensors["outputs.y.0"][1]) > 1e-2
    assert torch.equal(forced.tensors["outputs.y.0"][0], plain.tensors["outputs.y.0"][0])
    tied = disturb.apply(w, "router_ties", 0, t)
    swapped = run(w, tied).tensors["outputs.ids"].clone()
    swapped[0] = swapped[0][:, [1, 0, *range(2, swapped.shape[-1])]]
    assert bool(run(w, tied, ids=swapped).ties[0].allowed[0].all())


def test_impossible_choices_never_reach_the_mathematics() -> None:
    w = workload("latent-moe", rows=2)
    t = tensors(w)
    ids = run(w, t).tensors["outputs.ids"]
    for bad in (-1, 32, 1 << 30):
        broken = ids.clone()
        broken[0, 0, 0] = bad
        assert torch.equal(
            run(w, t, ids=broken).tensors["outputs.y.0"], run(w, t).tensors["outputs.y.0"]
        )
    assert valid(torch.tensor([[1, 1], [0, 3], [-1, 2], [0, 4]]), 4).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_margins() -> None:
    z = torch.tensor([[0.9, 0.8, 0.7, 0.1], [0.9, 0.8, 0.7999, 0.1]]).double()
    bound = torch.full_like(z, 1e-3)
    assert near_ties(z, bound, 2).tolist() == [False, True]
    assert legitimate(torch.tensor([[0, 1], [0, 2]]), z, bound).tolist() == [True, True]
    assert legitimate(torch.tensor([[1, 0], [2, 0]]), z, bound).tolist() == [False, False]
    assert legitimate(torch.tensor([[0, 2], [0, 3]]), z, bound).tolist() == [False, False]


def slices(weights: Tensors, rank: int) -> Tensors:
    """Rank `rank` of two, from the tiny model on one rank."""
    out = dict(weights)

    def half(x: Tensor, dim: int) -> Tensor:
        return x.chunk(2, dim)[rank].contiguous()

    for name in ("w1", "w3"):
        out[name], out[f"{name}_scale"] = half(weights[name], 1), half(weights[f"{name}_scale"], 1)
    out["w2"], out["w2_scale"] = half(weights["w2"], 2), half(weights["w2_scale"], 2)
    out["latent_down"], out["latent_up"] = (
        half(weights["latent_down"], 0),
        half(weights["latent_up"], 0),
    )
    gate, up = weights["shared_gate_up"].chunk(2, 0)
    out["shared_gate_up"] = torch.cat([half(gate, 0), half(up, 0)])
    out["shared_down"] = half(weights["shared_down"], 1)
    return out


def test_two_ranks_in_loopback_are_the_whole_model() -> None:
    """Rank 0 with what rank 1 would send gives the unsplit layer, to the rounding of the partials."""
    whole, split = (
        workload("latent-moe", rows=2, layers=1),
        workload("latent-moe", "tiny-tp2", rows=2, layers=1),
    )
    t = tensors(whole)
    expected = run(whole, t).tensors
    weights, y = dict(layer_of(t, 0).weights), t["inputs.x.0"].double()
    one = slices(weights, 1)
    ids = expected["outputs.ids"][0].long()
    routing = ffn.weigh(ffn.route(ORACLE, y, Layer(one, {}, {})), one["router_bias"], ids)
    latent = bf(linear(ORACLE, y, weights["latent_down"]))
    partial = ffn.gated(ORACLE, y, one["shared_gate_up"], one["shared_down"])
    at, mine = (
        "inputs.remote.layers.0.",
        {f"weights.layers.0.{k}": v for k, v in slices(weights, 0).items()},
    )
    delta = expected["outputs.y.0"]
    remote = {
        f"{at}latent": latent[:, 128:].bfloat16(),
        f"{at}moe": ffn.combine(ffn.experts(ORACLE, latent, ids, one), routing.weights).float(),
        f"{at}shared": partial[:, :256].float(),
        f"{at}delta": delta[:, 256:],
    }
    got = run(split, {"inputs.x.0": t["inputs.x.0"], **mine, **remote}).tensors
    assert {k: v.shape for k, v in remote.items()} == {
        b.name: torch.Size(b.shape) for b in split.buffers if b.name.startswith(at)
    }
    assert torch.equal(got["outputs.ids"], expected["outputs.ids"])
    assert rel(got["outputs.y.0"], delta) < 5e-3
    own = ffn.gated(
        ORACLE, y, mine["weights.layers.0.shared_gate_up"], mine["weights.layers.0.shared_down"]
    )
    assert torch.equal(got["outputs.send.layers.0.shared"], own[:, 256:].bfloat16())


def test_sharding_the_front_of_the_ffn_changes_nothing_but_who_computes() -> None:
    """latent_down and router replicated or sharded give one result when the gathers bring the missing columns."""
    results = []
    base = workload("latent-moe", "tiny-tp2", rows=2, layers=1, extra={"latent_down": "replicated"})
    t = tensors(base)
    y, weights = t["inputs.x.0"].double(), layer_of(t, 0).weights
    results.append(run(base, t).tensors["outputs.y.0"])
    down, router = weights["latent_down"], weights["router"]
    for extra in ({"latent_down": "sharded"}, {"latent_down": "sharded", "router": "sharded"}):
        s = dict(t)
        s["weights.layers.0.latent_down"] = down[:128]
        s["inputs.remote.layers.0.latent"] = linear(ORACLE, y, down)[:, 128:].bfloat16()
        if "router" in extra:
            s["weights.layers.0.router"] = router[:16]
            s["inputs.remote.layers.0.logits"] = linear(ORACLE, y, router)[:, 16:].float()
        w = workload("latent-moe", "tiny-tp2", rows=2, layers=1, extra=extra)
        assert {b.name: torch.Size(b.shape) for b in w.buffers if b.group == "inputs"} == {
            k: v.shape for k, v in s.items() if k.startswith("inputs.")
        }
        results.append(run(w, s).tensors["outputs.y.0"])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
