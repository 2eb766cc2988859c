"""Baseline `nccl` of the pieces on two GPUs: the products and the mix of `mix`, and NCCL's all-reduce between them.

One process launches for both GPUs, rank by rank on each one's stream, as the judge does for a candidate; the all-reduce
is one call for both (`torch.cuda.nccl`). All memory is made in `prepare`, so that a step can be captured as a graph for
each rank. Where torch has no NCCL, or NCCL may not open what it needs, `prepare` raises and the judge says that it was
skipped. Not for the whole decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3.baseline import parts
from targets.kimi_k3.baseline.launcher import Launch
from targets.kimi_k3.options import Run, bank_rows, resolve, split
from targets.kimi_k3.ranks import gpus, tensors_of
from targets.reference import Tensors

PARTS = ("allreduce-attn-res", "oproj-allreduce")


def _nccl(partials: Sequence[Tensor]) -> None:
    torch.cuda.nccl.all_reduce(list(partials))


class Rank:
    """One rank's tensors, buffers and launches of an instance."""

    def __init__(self, w: Workload, tensors: Tensors) -> None:
        self.part = split(w.target)[1]
        self.run: Run = resolve(self.part, w.options)
        self.t = tensors
        self.device = tensors["inputs.x0"].device
        with self.on():
            self.make = parts.Maker(self.run.shape, self.device)
            self.total, self.partial = self.make.wide(), self.make.wide()

    def on(self) -> AbstractContextManager[object]:
        """This rank's GPU, torch's current one meanwhile."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def before(self, i: int) -> list[Launch]:
        """partial = this rank's share of instance i."""
        t, product = self.t, self.part == "oproj-allreduce"
        x = t[f"inputs.{'x' if product else 'partial'}.{i}"]
        found: list[Launch] = []
        if i > 0:
            y, total = t[f"outputs.y.{i - 1}"], self.total if product else self.partial
            found.append(_sum(x, y[:, : x.shape[1]], total[:, : x.shape[1]]))
            x = total[:, : x.shape[1]]
        elif not product:
            found.append(_copy(x, self.partial))
        if product:
            weight = t[f"weights.layers.{i}.o_proj"]
            found.append(self.make.linear("o_proj", (x, weight, self.partial)))
        return found

    def after(self, i: int) -> Launch:
        """The mix of instance i, once `partial` holds the sum of all ranks."""
        t, count = self.t, bank_rows(self.part, self.run)
        w = [t[f"weights.layers.{i}.{name}"] for name in ("res_norm", "res_proj", "out_norm")]
        banks = parts.Banks(None, t["outputs.bank"], t["outputs.prefix"], 0)
        prefix = t["outputs.prefix"] if i > 0 else t["inputs.x0"]
        row = i if i < count else -1
        mixed = parts.Mixed(
            prefix, self.partial, t[f"outputs.y.{i}"], min(i, count), row=row, early=False
        )
        return self.make.attn_res(banks, parts.Mix(*w), mixed)


class NcclBaseline:
    """A step as a list of calls, each of one rank or of all."""

    name = "nccl"
    notes: tuple[str, ...] = ()

    def __init__(self, reduce: Callable[[Sequence[Tensor]], None] = _nccl) -> None:
        self._reduce = reduce

    def prepare(self, w: Workload, tensors: Tensors) -> None:
        """Once per set of tensors. Raises NotImplementedError for another target, what NCCL raises without it."""
        if split(w.target)[1] not in PARTS:
            raise NotImplementedError(f"{w.target}: only {' and '.join(PARTS)}")
        self.ranks = [Rank(w, tensors_of(tensors, r)) for r in range(gpus(w))]
        self._reduce([r.partial for r in self.ranks])  # communicators are made here
        self.plan: list[Launch] = []
        for i in range(self.ranks[0].run.layers):
            self.plan += [_there(r, launch) for r in self.ranks for launch in _made(r, r.before, i)]
            self.plan.append(lambda: self._reduce([r.partial for r in self.ranks]))
            self.plan += [_there(r, launch) for r in self.ranks for launch in _made(r, r.after, i)]

    @torch.no_grad()
    def step(self) -> None:
        for launch in self.plan:
            launch()


def _made(rank: Rank, what: Callable[[int], Launch | list[Launch]], i: int) -> list[Launch]:
    with rank.on():
        found = what(i)
    return found if isinstance(found, list) else [found]


def _there(rank: Rank, launch: Launch) -> Launch:
    def run() -> None:
        with rank.on():
            launch()

    return run


def _sum(a: Tensor, b: Tensor, out: Tensor) -> Launch:
    def run() -> None:
        torch.add(a, b, out=out)

    return run


def _copy(a: Tensor, out: Tensor) -> Launch:
    def run() -> None:
        out.copy_(a)

    return run
