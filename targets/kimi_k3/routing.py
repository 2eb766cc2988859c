"""Which experts a run uses, and which choices of a candidate are proved ties. Torch; part of the reference.

Two experts are tied when their selection scores differ by less than the noise of the logits: twice the largest
deviation from the oracle that correct working-precision schedules show on the same routing, plus float32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from targets.kimi_k3.maths.ffn import scores, top
from targets.reference import Tie

NOISE_FACTOR = 2.0
FLOAT32_NOISE = 2.0**-20
"""Relative to logits and scores near 1: float32 accumulation, sigmoid and bias."""


class Chooser:
    """Called once per MoE layer in order; uses `forced` ids where they are valid, the own selection elsewhere.

    Keeps logits [M, E], selection scores and ids of every layer for the proof of ties. One per run of a step.
    """

    def __init__(self, topk: int, forced: Tensor | None = None) -> None:
        self.topk = topk
        self.forced = forced
        self.logits: list[Tensor] = []
        self.z: list[Tensor] = []
        self.own: list[Tensor] = []
        self.ids: list[Tensor] = []

    def __call__(self, logits: Tensor, bias: Tensor) -> Tensor:
        _, z = scores(logits, bias)
        own = top(z, self.topk)
        used = own
        if self.forced is not None:
            wanted = self.forced[len(self.ids)].to(own.device).long()
            used = torch.where(valid(wanted, z.shape[-1])[:, None], wanted, own)
        self.logits.append(logits)
        self.z.append(z)
        self.own.append(own)
        self.ids.append(used)
        return used


def valid(ids: Tensor, experts: int) -> Tensor:
    """[M]: rows of distinct ids in range."""
    ranked = ids.sort(-1).values
    return (ranked[:, 0] >= 0) & (ranked[:, -1] < experts) & (ranked.diff(dim=-1) > 0).all(-1)


def noise(oracle: Chooser, shadows: list[Chooser]) -> list[Tensor]:
    """Bound of the error of z per layer, [M, E]: how far the logit noise of the row moves the sigmoid."""
    out = []
    for n, logits in enumerate(oracle.logits):
        seen = [
            (x.logits[n].to(logits.dtype) - logits).abs().amax(-1, keepdim=True) for x in shadows
        ]
        error = NOISE_FACTOR * torch.stack(seen).amax(0) + FLOAT32_NOISE * (1 + logits.abs())
        zero = torch.zeros_like(logits[0])
        s, low, high = (scores(logits + x, zero)[0] for x in (0.0, -error, error))
        out.append(torch.maximum(high - s, s - low) + FLOAT32_NOISE)
    return out


def near_ties(z: Tensor, bound: Tensor, topk: int) -> Tensor:
    """[M]: rows in which some pair of neighbours among the topk + 1 best is closer than its noise."""
    best = torch.sort(z, dim=-1, descending=True, stable=True)
    k = min(topk + 1, z.shape[-1])
    gap = -best.values[:, :k].diff(dim=-1)
    slack = bound.gather(-1, best.indices[:, :k])
    return (gap <= slack[:, 1:] + slack[:, :-1]).any(-1)


def legitimate(ids: Tensor, z: Tensor, bound: Tensor) -> Tensor:
    """[M]: no id ranks below another, chosen later or not at all, by more than the noise of both."""
    upper = z.gather(-1, ids) + bound.gather(-1, ids)
    lower = z.gather(-1, ids) - bound.gather(-1, ids)
    later = lower.flip(-1).cummax(-1).values.flip(-1)
    ordered = (later[:, 1:] <= upper[:, :-1]).all(-1)
    rest = (z - bound).scatter(-1, ids, -torch.inf).amax(-1)
    return ordered & (rest <= upper.amin(-1))


def eligible(z: Tensor, bound: Tensor, topk: int) -> Tensor:
    """[M, E]: ids that may be among the topk best."""
    best = torch.sort(z, dim=-1, descending=True, stable=True)
    last = best.indices[:, topk - 1 : topk]
    return z + bound >= z.gather(-1, last) - bound.gather(-1, last)


def tie(buffer: str, oracle: Chooser, shadows: list[Chooser]) -> Tie:
    """The proof for all layers: near ties of its own choices, legitimacy of forced ones."""
    allowed, may = [], []
    for n, bound in enumerate(noise(oracle, shadows)):
        z, used, own = oracle.z[n], oracle.ids[n], oracle.own[n]
        forced = (used != own).any(-1)
        near = near_ties(z, bound, oracle.topk)
        allowed.append(torch.where(forced, legitimate(used, z, bound), near))
        may.append(eligible(z, bound, oracle.topk))
    return Tie(buffer, torch.stack(allowed), torch.stack(may))


def explained(proof: Tie, own: Tie, ours: Tensor, theirs: Tensor) -> Tie:
    """`proof`, with those rows of choices `theirs` that `own` allows beside its own choices `ours`."""
    assert proof.eligible is not None and own.eligible is not None
    ids = theirs.to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < own.eligible.shape[-1]), ids, 0)
    among = (ids.unsqueeze(-1) == ours.to(torch.int64).unsqueeze(-2)).any(-1)
    fine = (among | own.eligible.gather(-1, ids)).all(-1)
    fine &= own.allowed | (theirs == ours).all(-1)
    chosen = torch.zeros_like(proof.eligible).scatter(-1, ids, True)
    return Tie(proof.buffer, proof.allowed | fine, proof.eligible | chosen & fine.unsqueeze(-1))
