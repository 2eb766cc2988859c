"""Steps of a timed chain once more as in the trial: memory of their own, scratch as after `prepare`, the same bits.

A kernel may tell a chain from a trial by a count that it keeps, by new scratch, by addresses or by the set of weights,
and spare itself some of the steps that no oracle looks at. Here each of these is as in the trial, for any step of a
chain, at the price of one launch. Kernels whose float atomics reorder sums have no bits to compare: theirs are
compared by distance (`sandbox.judge.loose`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sandbox.judge import rig as rigs
from sandbox.judge.lanes import Lanes
from sandbox.judge.locate import Where
from sandbox.judge.observe import differs
from sandbox.judge.rig import Rig
from sandbox.verdict import Failure
from targets.reference import Tensors

MEMORY_SHARE = 4
UNCHECKED = "timed steps once more as in the trial: several ranks, or no memory for a second copy"


@dataclass
class Retrial:
    """`rig`: the one of the trial, left alone here. Call `before` and `after` around a step of the chain."""

    rig: Rig
    lanes: Lanes
    done: int = 0
    _twin: Rig | None = field(default=None, repr=False)
    _set: int = -1

    @property
    def possible(self) -> bool:
        if self.rig.case.ranks > 1:  # not tried yet on two GPUs
            return False
        total = sum(b.nbytes for b in self.rig.artifact.buffers)
        return total <= self.rig.device.facts().memory_bytes // MEMORY_SHARE

    def before(self, lane: int, where: Where) -> None:
        """The step in memory of its own, from what the chain finds there. Raises Refused, Faulted."""
        twin = self._with_weights(lane % self.lanes.sets)
        tensors = self.lanes.tensors(lane)
        twin.set_states(tensors)
        twin.set_inputs(tensors)
        for b in twin.case.buffers("outputs"):
            twin.arena[b.name].copy_(tensors[b.name])
        twin.dirty_scratch("random", twin.case.seeds.of("retrial", lane))
        twin.launch(where.text())
        self.done += 1

    def after(self, lane: int, where: Where) -> Failure | None:
        """What the step of the chain left against that."""
        tensors, mine = self.lanes.tensors(lane), self.left()
        return differs(mine, {n: tensors[n] for n in mine}, where)

    def left(self) -> Tensors:
        """Outputs and states of the step in memory of its own."""
        assert self._twin is not None
        return {
            b.name: self._twin.arena[b.name] for b in self._twin.case.buffers("outputs", "states")
        }

    def _with_weights(self, number: int) -> Rig:
        twin = self._twin
        if twin is None:
            main = self.rig
            twin = self._twin = rigs.build(main.case, main.artifact, main.program, "retrial")
        if number != self._set:
            twin.load_weights(self.lanes.weights[number])
            self._set = number
        return twin
