"""FFN of one rank: the router, the routed FP4 experts on the latent, the shared expert, and the dense layer 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.maths.mxfp4 import dequantise
from targets.kimi_k3.maths.precision import (
    Schedule,
    added_up,
    bf,
    inverse_rms,
    linear,
    linear_wide,
    sigmoid,
    situ,
)  # fmt: skip

Choose = Callable[[Tensor, Tensor], Tensor]
"""(logits [M, E], bias [E]) -> ids int64 [M, topk] by descending rank."""
PAIRS = 64
"""(row, expert) pairs computed at a time: bounds the dequantised copies."""


@dataclass(frozen=True)
class Routing:
    """`logits` [M, E], `ids` [M, topk] by descending rank, `weights` [M, topk] BF16 values."""

    logits: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class MoeResult:
    """`delta` [M, hidden]; `send` [M, hidden - hidden_local], None on one rank."""

    delta: Tensor
    routing: Routing
    send: Tensor | None


def scores(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(s, z): sigmoid scores (NaN counts 0) and selection scores (NaN ranks last)."""
    s = sigmoid(logits)
    z = s + bias.to(s.dtype)
    return s.nan_to_num(nan=0.0), torch.where(torch.isnan(z), torch.full_like(z, -torch.inf), z)


def top(z: Tensor, k: int) -> Tensor:
    """Ids of the k largest by descending rank; ties go to the lower id. Scores compare as real numbers, as torch's
    topk and sort compare them; vLLM's kernel compares the bits of FP32, which differs for signed zeros only."""
    return torch.sort(z, dim=-1, descending=True, stable=True).indices[:, :k]


def route(s: Schedule, y: Tensor, layer: Layer) -> Tensor:
    """Logits [M, E], never rounded; gathered where this rank has only some of the router's rows."""
    own = linear_wide(s, y, layer.weights["router"])
    whole = own.shape[-1] == layer.weights["router_bias"].shape[0]
    return own if whole else layer.exchange.all_gather("logits", own)


def weigh(logits: Tensor, bias: Tensor, ids: Tensor) -> Routing:
    """Weights of the chosen ids: from the scores, not from the biased ones."""
    s, _ = scores(logits, bias)
    chosen = s.gather(-1, ids)
    return Routing(logits, ids, bf(chosen / (chosen.sum(-1, keepdim=True) + 1e-20)))


def experts(s: Schedule, latent: Tensor, ids: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """f_e = bf(w2 bf(SiTU(w1 l, w3 l))) for every (row, rank): latent [M, L], ids [M, topk] -> [M, topk, L].

    l and h are BF16, as in vLLM's path for Hopper, where weights alone are quantised; its path for Blackwell makes both
    MXFP8. The higher precision is the definition, and no schedule has MXFP8 activations."""
    rows = torch.arange(ids.shape[0], device=ids.device).repeat_interleave(ids.shape[1])
    out = []
    for row, chosen in zip(rows.split(PAIRS), ids.flatten().split(PAIRS), strict=True):
        x = latent[row]
        gate, up = (expert(s, x, w, (name, chosen)) for name in ("w1", "w3"))
        out.append(bf(expert(s, bf(situ(gate, up)), w, ("w2", chosen))))
    return torch.cat(out).reshape(*ids.shape, -1)


def expert(s: Schedule, x: Tensor, w: Mapping[str, Tensor], which: tuple[str, Tensor]) -> Tensor:
    """x [P, K] times the matrix `which` = (name, expert of each row), not rounded. NVFP4's factor comes last: codes
    times scales are exact in BF16, with it they are not."""
    name, chosen = which
    y = _batched(s, x, dequantise(w[name][chosen], w[f"{name}_scale"][chosen], s.dtype))
    factor = w.get(f"{name}_factor")
    return y if factor is None else y * factor[chosen].to(s.dtype)[:, None]


def _batched(s: Schedule, x: Tensor, weight: Tensor) -> Tensor:
    """x [P, K] with one weight matrix per pair -> [P, N]."""
    if weight.is_cuda:  # bound by memory alone, whatever a library makes of batches with one column
        return multiplied(s, x, weight)
    if s.chunks == 1:
        return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)
    parts = [
        torch.bmm(a, b.unsqueeze(-1)).squeeze(-1)
        for a, b in zip(weight.chunk(s.chunks, -1), x.chunk(s.chunks, -1), strict=True)
    ]
    return added_up(parts)


def multiplied(s: Schedule, x: Tensor, weight: Tensor) -> Tensor:
    """As `_batched`, products first and then their sums."""
    return added_up([c.sum(-1) for c in (weight * x.unsqueeze(1)).chunk(s.chunks, -1)])


def combine(f: Tensor, weights: Tensor) -> Tensor:
    """bf of the weighted sum in rank order; f [M, topk, L], weights [M, topk]."""
    acc = torch.zeros_like(f[:, 0])
    for rank in range(f.shape[1]):
        acc = acc + weights[:, rank, None] * f[:, rank]
    return bf(acc)


def moe(s: Schedule, y: Tensor, layer: Layer, choose: Choose) -> MoeResult:
    """The latent MoE with its shared expert. `choose` turns logits and bias into the ids used."""
    w, ranks = layer.weights, layer.exchange
    logits = route(s, y, layer)
    routing = weigh(logits, w["router_bias"], choose(logits, w["router_bias"]))
    latent = bf(linear(s, y, w["latent_down"]))
    if latent.shape[-1] < w["latent_norm"].shape[0]:
        latent = ranks.all_gather("latent", latent)
    z = ranks.all_reduce("moe", combine(experts(s, latent, routing.ids, w), routing.weights))
    normed = bf(z * inverse_rms(s, z, s.round_squares) * w["latent_norm"].to(s.dtype))
    u = bf(linear(s, normed, w["latent_up"]))
    partial = gated(s, y, w["shared_gate_up"], w["shared_down"])
    mine, send = ranks.reduce_scatter("shared", partial, u.shape[-1])
    return MoeResult(ranks.all_gather("delta", bf(u + mine)), routing, send)


def gated(s: Schedule, y: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """bf(bf(SiTU(G, U)) W_down^T) with G, U = bf(y W^T): the shared expert's and layer 0's partial."""
    gate, up = bf(linear(s, y, gate_up)).chunk(2, -1)
    return bf(linear(s, bf(situ(gate, up)), down))
