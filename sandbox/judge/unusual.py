"""Steps on disturbed problems: a distribution's inputs and states, and its weights in place of the usual ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from sandbox.judge.checks import Moment
from sandbox.judge.locate import Where
from sandbox.judge.observe import observe
from sandbox.judge.rig import Rig
from targets.reference import Tensors

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial


class Unusual(AbstractContextManager[Moment]):
    """One step on a disturbed problem; on leaving, weights are as before. Enter gives the moment to be judged."""

    def __init__(self, trial: Trial, name: str, index: int) -> None:
        self.trial, self.name, self.index = trial, name, index
        self._kept: Tensors = {}

    def __enter__(self) -> Moment:
        rig, case = self.trial.rig, self.trial.rig.case
        seed = case.seeds.of("unusual", self.name)
        weights = {b.name: rig.arena[b.name] for b in case.buffers("weights")}
        plain = {**weights, **self.trial.states(seed), **self.trial.inputs(seed, 0)}
        made = case.reference.disturb(case.workload, self.name, seed, plain)
        changed = {n: made[n] for n in weights if made[n] is not weights[n]}
        self._kept = exchange(rig, changed)
        rig.set_states(made)
        inputs = {b.name: made[b.name] for b in case.buffers("inputs")}
        where = Where(self.index, 0, self.name, case.axes)
        return observe(rig, inputs, ("random", seed), where)

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            exchange(self.trial.rig, self._kept)


def exchange(rig: Rig, weights: Mapping[str, torch.Tensor]) -> Tensors:
    """Put other weights in place, prepare again, return what was there. Raises Faulted."""
    kept = {n: rig.arena[n].clone() for n in weights}
    if weights:
        for name, value in weights.items():
            rig.arena[name].copy_(value)
        rig.renew()
    return kept
