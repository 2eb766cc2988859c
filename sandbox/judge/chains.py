"""Checks what timed chains left: the same bits as an untimed run from the same start, whose first and last steps are
compared with the oracle. It reads and launches between timed intervals, never inside one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sandbox.artifact import Artifact
from sandbox.devices.base import Faulted
from sandbox.judge.arms import PlanArm
from sandbox.judge.atomics import float_atomics
from sandbox.judge.case import Case
from sandbox.judge.checks import Checker, Moment
from sandbox.judge.ending import Ended
from sandbox.judge.lanes import Lanes
from sandbox.judge.locate import Where
from sandbox.judge.rig import Rig
from sandbox.verdict import Failure, Status
from targets.reference import Tensors


@dataclass
class ChainCheck:
    """`begin` after each refresh, `timed` after each timed chain, `untimed` once a round and arm, `end` at last."""

    case: Case
    lanes: Lanes
    checker: Checker
    _round: int = 0
    _inputs: dict[str, int] = field(default_factory=dict)
    _left: dict[str, dict[str, int]] = field(default_factory=dict)
    _loose: dict[str, bool] = field(default_factory=dict)
    _kept: dict[str, Tensors] = field(default_factory=dict)
    _floors: list[int] = field(default_factory=list)

    def begin(self, round_: int) -> None:
        self._round = round_
        self._left.clear()
        self._kept.clear()
        self._inputs = self.lanes.inputs_digest()

    def timed(self, arm: PlanArm) -> None:
        """After a timed chain. Raises Ended if it left other bits than an earlier one of this round."""
        if self._atomic(arm.artifact):
            self._kept[arm.name] = self._copy("outputs", 0)
            return
        now = self.lanes.digest()
        first = self._left.setdefault(arm.name, now)
        if now != first:
            self._end(
                Status.FLAKY,
                arm,
                "timed chains from the same start left different outputs or states",
            )

    def alone(self, arm: PlanArm, kind: str) -> None:
        """After isolated steps from the start of the round. Raises Ended if they left other bits than the first did."""
        if self._atomic(arm.artifact):
            return
        now = self.lanes.digest()
        if now != self._left.setdefault(f"{arm.name}, {kind}", now):
            self._end(
                Status.FLAKY, arm, f"isolated steps ({kind}) left different outputs or states"
            )

    def untimed(self, arm: PlanArm, oracle: bool) -> None:
        """The same steps one by one: the end against the timed chains, with `oracle` first and last against that."""
        last = self.lanes.steps - 1
        self.lanes.restore()
        arm.dirty(self.case.seeds.of("untimed", self._round, arm.name))
        moments = []
        for lane in range(self.lanes.steps):
            watched = oracle and lane in (0, last)
            before = self._around(lane) if watched else {}
            arm.step(lane)
            if watched:
                self.case.device.synchronize()
                moments.append((lane, before, self._around(lane)))
        self.case.device.synchronize()
        if not self._atomic(arm.artifact) and self.lanes.digest() != self._left.get(arm.name):
            self._end(
                Status.WRONG,
                arm,
                "a timed chain left other outputs or states than the same steps untimed",
            )
        if moments and self._atomic(arm.artifact):
            moments[0][2].update(self._kept.get(arm.name, {}))
        self._check_inputs()
        for lane, before, after in moments:
            self._judge(arm, lane, (before, after))
        self._note_floor()

    def end(self, arms: list[PlanArm], rig: Rig) -> None:
        """Inputs and weights unmodified, guard zones of all memory intact."""
        self._check_inputs()
        rig.check_guards("timing")
        rig.check_integrity("timing", ("weights", "constants"))
        for arena in [
            self.lanes.inputs,
            self.lanes.states,
            self.lanes.outputs,
            *(x for a in arms for x in a.arenas),
        ]:
            for zone in arena.broken():
                message = f"{zone.buffer}: memory outside was written, {zone.offset} bytes from the edge (timing)"
                raise Faulted(Status.CHEAT, Failure("guard", message, {"buffer": zone.buffer}))

    def _check_inputs(self) -> None:
        if self.lanes.inputs_digest() != self._inputs:
            message = "inputs were modified in a timed chain"
            raise Faulted(Status.CHEAT, Failure("read-only", message))

    def floor_bytes(self) -> int:
        """Bytes that a timed step must move: by the experts really routed where the target knows, else its floor."""
        if self._floors:
            return sum(self._floors) // len(self._floors)
        return self.case.workload.floor.bytes

    def _judge(self, arm: PlanArm, lane: int, around: tuple[Tensors, Tensors]) -> None:
        before, after = around
        weights = dict(self.lanes.weights[lane % self.lanes.sets])
        states = {b.name: before[b.name] for b in self.case.buffers("states")}
        given = {**weights, **states, **self.lanes.given(lane)}
        where = Where(self._round, lane, f"chain of {arm.name}", self.case.axes)
        failure = self.checker.check(Moment(given, before, after, where), "share")
        if failure is None:
            return
        if arm.name != "candidate":
            message = f"the incumbent is wrong in this run: {failure.message}"
            raise Ended(Status.INFRA, Failure("incumbent", message, failure.where))
        raise Ended(Status.WRONG, failure)

    def _end(self, status: Status, arm: PlanArm, message: str) -> None:
        where = {
            "arm": arm.name,
            "round": self._round,
            "steps": self.lanes.steps,
            "phase": "timing",
        }
        if arm.name != "candidate":
            raise Ended(Status.INFRA, Failure("incumbent", f"the incumbent: {message}", where))
        raise Ended(status, Failure("timed", message, where))

    def _around(self, lane: int) -> Tensors:
        return {**self._copy("outputs", lane), **self._copy("states", lane)}

    def _copy(self, group: str, lane: int) -> Tensors:
        tensors = self.lanes.tensors(lane)
        return {b.name: tensors[b.name].clone() for b in self.case.buffers(group)}

    def _atomic(self, artifact: Artifact) -> bool:
        key = artifact.sha256
        if key not in self._loose:
            self._loose[key] = float_atomics(artifact)
        return self._loose[key]

    def _note_floor(self) -> None:
        """Once: routing is data, and its mean over the lanes of one round says enough."""
        floor_for = getattr(self.case.target, "floor_for", None)
        named = {b.name for b in self.case.buffers("outputs")}
        if self._floors or floor_for is None or "outputs.ids" not in named:
            return
        ids = [self.lanes.outputs[f"{lane}/outputs.ids"] for lane in range(self.lanes.steps)]
        for nested in torch.stack(ids).tolist():
            self._floors.append(floor_for(self.case.workload, nested).bytes)
