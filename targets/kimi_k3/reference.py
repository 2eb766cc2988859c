"""The reference of all Kimi K3 targets: `targets.reference.Reference` over the equations in `maths`.

Values are made in `generate`, unusual ones in `disturb`. It does not judge: bands and limits are the judge's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sandbox.artifact import on_rank
from targets.base import Workload
from targets.kimi_k3 import checkpoint, disturb, generate, held_out, ranks, smaller
from targets.kimi_k3.maths.precision import ORACLE, SCHEDULES, SPARE, Schedule
from targets.kimi_k3.maths.step import Step, walk
from targets.kimi_k3.options import Run, resolve, split
from targets.kimi_k3.routing import Chooser, explained, tie
from targets.reference import Expected, Tensors, Tie

IDS = "outputs.ids"
DTYPES = {
    "bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
SHADOWS = ("split", "rounded")
"""Working schedules that measure the logit noise for the proof of ties."""


class KimiReference:
    """`run(..., "oracle")` is float64; the others are working precision. Routing follows `forced` where given.

    For a noise band, run the schedules with the oracle's ids forced, so that a routing flip is no noise.
    """

    schedules = tuple(name for name in SCHEDULES if name != ORACLE.name)
    spare = tuple(SPARE)
    axes: Mapping[str, tuple[str, ...]] = {
        "S": ("slot", "head", "value", "key"), "conv": ("slot", "tap", "channel"), "kv": ("page", "row", "channel"),
        "ids": ("MoE layer", "token", "rank"), "weights": ("layer", "token", "rank"),
        "bank": ("token", "bank row", "channel"), "prefix": ("token", "channel"), "out": ("token", "channel"),
        "y": ("token", "channel"),
    }  # fmt: skip

    def weights(self, w: Workload, seed: int, device: str) -> Tensors:
        if w.options.extra.get("weights"):
            return checkpoint.load(w, device)
        if ranks.gpus(w) > 1:
            return ranks.drawn(w, seed, lambda one, s: generate.weights(one, s, device))
        return generate.weights(w, seed, device)

    def states(self, w: Workload, seed: int, device: str) -> Tensors:
        if ranks.gpus(w) > 1:
            return ranks.drawn(w, seed, lambda one, s: generate.states(one, s, device))
        return generate.states(w, seed, device)

    def inputs(self, w: Workload, seed: int, step: int, device: str) -> Tensors:
        if ranks.gpus(w) > 1:
            return ranks.drawn(w, seed, lambda one, s: generate.inputs(one, s, step, device))
        return generate.inputs(w, seed, step, device)

    def replicated(self, w: Workload) -> tuple[str, ...]:
        """Outputs, by their names on rank 0, that all ranks must hold with the same bits."""
        return tuple(b.name for b in w.buffers if b.group == "outputs" and b.rank == 0)

    def distributions(self, w: Workload) -> tuple[str, ...]:
        return disturb.names(w)

    def held_out(self, w: Workload) -> tuple[str, ...]:
        return held_out.names(w)

    def smaller(self, w: Workload, tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
        return iter(()) if ranks.gpus(w) > 1 else smaller.cases(w, tensors)

    def disturb(self, w: Workload, name: str, seed: int, tensors: Tensors) -> Tensors:
        """A public distribution or a held-out case."""
        module = held_out if name.startswith("held-out.") else disturb
        if ranks.gpus(w) > 1:
            return ranks.each(w, tensors, lambda one, t: module.apply(one, name, seed, t))
        return module.apply(w, name, seed, tensors)

    def run(
        self,
        w: Workload,
        tensors: Tensors,
        schedule: str,
        forced: Mapping[str, Tensor] | None = None,
    ) -> Expected:
        return self._run(w, tensors, (_named(schedule), SHADOWS), forced)

    def closely(
        self,
        w: Workload,
        tensors: Tensors,
        after: Tensors,
        forced: Mapping[str, Tensor] | None = None,
    ) -> Expected:
        """The oracle, its ties proved with every schedule there is and, in a chain of FFNs, by what the candidate left.

        All schedules may happen to round a token as the oracle does; then there is no noise to measure, and a right
        kernel that rounds one element of y otherwise has other choices behind it. Its y are outputs, judged as such:
        a choice that is right for its own y needs the noise of one instance only.
        """
        found = self._run(w, tensors, (ORACLE, (*self.schedules, *self.spare)), forced)
        if split(w.target)[1] != "latent-moe" or ranks.gpus(w) > 1:
            return found
        left = {f"left.{n}": t for n, t in after.items() if n.startswith("outputs.y.")}
        own = self._run(w, {**tensors, **left}, (ORACLE, SHADOWS), {IDS: after[IDS]})
        return replace(
            found, ties=(explained(found.ties[0], own.ties[0], own.tensors[IDS], after[IDS]),)
        )

    def _run(
        self,
        w: Workload,
        tensors: Tensors,
        how: tuple[Schedule, tuple[str, ...]],
        forced: Mapping[str, Tensor] | None,
    ) -> Expected:
        schedule, others = how
        part = split(w.target)[1]
        run = resolve(w.target, w.options)
        wanted = (forced or {}).get(IDS)
        chooser = Chooser(run.shape.sizes.topk, wanted)
        step = _steps(part, run, tensors, (schedule, chooser))
        out = step.out
        ties: tuple[Tie, ...] = ()
        if chooser.ids:
            out[IDS] = torch.stack(chooser.own)
            for rank in range(1, run.shape.gpus):  # the others route as rank 0 does
                out[on_rank(IDS, rank)] = torch.stack(chooser.ids)
            if schedule is ORACLE:
                used = torch.stack(chooser.ids)
                shadows = [_shadow(part, run, tensors, (name, used)) for name in others]
                ties = (tie(IDS, chooser, shadows),)
        dtypes = {b.name: DTYPES[b.dtype] for b in w.buffers}
        return Expected({k: v.to(dtypes[k]) for k, v in out.items()}, ties, step.masks)


@torch.no_grad()
def _steps(part: str, run: Run, tensors: Tensors, how: tuple[Schedule, Chooser]) -> Step:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        if run.shape.gpus > 1:
            return ranks.walk_all(part, run, tensors, how)
        step = Step(run, tensors, *how)
        walk(part, step)
        return step
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def walked(run: Run, tensors: Tensors, how: tuple[Schedule, Chooser]) -> Step:
    """One step of a stack under a schedule, routing by `how`'s chooser; for studies that carry states by themselves."""
    return _steps("decode", run, tensors, how)


def _shadow(part: str, run: Run, tensors: Tensors, how: tuple[str, Tensor]) -> Chooser:
    name, ids = how
    chooser = Chooser(run.shape.sizes.topk, ids)
    _steps(part, run, tensors, (_named(name), chooser))
    return chooser


def _named(schedule: str) -> Schedule:
    return SPARE[schedule] if schedule in SPARE else SCHEDULES[schedule]
