"""Checks what timed chains left: the same bits as an untimed run from the same start. Of its steps some are run once
more as in the trial, and some compared with the oracle. Which ones is secret and drawn for each round: a kernel that
knew them could spare itself the others. It reads and launches between timed intervals, never inside one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

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
from sandbox.judge.loose import Loose
from sandbox.judge.retrial import Retrial
from sandbox.judge.rig import Rig
from sandbox.verdict import Failure, Status
from targets.reference import Tensors


@dataclass(frozen=True)
class Watch:
    """How many secret steps of a round go to the oracle, and how many are run once more as in the trial."""

    oracle: int = 0
    again: int = 0


@dataclass
class ChainCheck:
    """`begin` after each refresh, `timed` after each timed chain, `untimed` once a round and arm, `end` at last."""

    case: Case
    lanes: Lanes
    checker: Checker
    retrial: Retrial | None = None
    _round: int = 0
    _inputs: dict[str, int] = field(default_factory=dict)
    _left: dict[str, dict[str, int]] = field(default_factory=dict)
    _atomics: dict[str, bool] = field(default_factory=dict)
    _floors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loose = Loose(self.lanes, self.checker)

    def begin(self, round_: int) -> None:
        self._round = round_
        self._left.clear()
        self._loose.begin()
        self._inputs = self.lanes.inputs_digest()

    def timed(self, arm: PlanArm) -> None:
        """After a timed chain. Raises Ended if it left other bits than an earlier one of this round; with float
        atomics, a state that is further away than noise explains."""
        if self._atomic(arm.artifact):
            self._not_far(arm, self._loose.timed(arm.name))
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
            self._not_far(arm, self._loose.timed(f"{arm.name}, {kind}"))
            return
        now = self.lanes.digest()
        if now != self._left.setdefault(f"{arm.name}, {kind}", now):
            self._end(
                Status.FLAKY, arm, f"isolated steps ({kind}) left different outputs or states"
            )

    def untimed(self, arm: PlanArm, watch: Watch) -> None:
        """The same steps one by one: the end against the timed chains, some with the oracle and some with the trial's
        memory. Raises Ended."""
        atomic = self._atomic(arm.artifact)
        again = self._drawn(arm, "again", watch.again)
        self._walk(arm, self._drawn(arm, "watched", watch.oracle), again)
        if not atomic and self.lanes.digest() != self._left.get(arm.name):
            self._end(
                Status.WRONG,
                arm,
                "a timed chain left other outputs or states than the same steps untimed",
            )
        if atomic:
            self._not_far(arm, self._loose.untimed(arm.name))
        odd = self._loose.odd.get(arm.name, {})
        if odd:  # once more, for the states before these steps
            self._walk(arm, set(odd), set(), odd)
        self._check_inputs()
        self._note_floor()

    def _walk(
        self,
        arm: PlanArm,
        watched: set[int],
        again: set[int],
        odd: Mapping[int, Tensors] = MappingProxyType({}),
    ) -> None:
        """All steps of a round from its start, untimed. What the watched ones and the odd found and left goes to the
        oracle at once: copies of several would not fit beside each other where states are large. `odd`: what timed
        chains left of a step instead. Raises Ended."""
        self.lanes.restore()
        arm.dirty(self.case.seeds.of("untimed", self._round, arm.name))
        for lane in range(self.lanes.steps):
            before = self._around(lane) if lane in watched else {}
            strayed = None
            if lane in again:
                strayed = self._again(arm, lane)
            else:
                arm.step(lane)
            if lane in watched:
                self.case.device.synchronize()
                strayed = (before, {**self._around(lane), **odd.get(lane, {})})
            if strayed is not None:
                self._check_inputs()
                self._judge(arm, lane, strayed)
        self.case.device.synchronize()

    def _again(self, arm: PlanArm, lane: int) -> tuple[Tensors, Tensors] | None:
        """The step, and the same as in the trial. Raises Ended where they leave different bits. With float atomics:
        what the step found and left, if that is further away than noise explains."""
        if self.retrial is None or not self.retrial.possible:
            arm.step(lane)
            return None
        atomic = self._atomic(arm.artifact)
        before = self._around(lane) if atomic else {}
        where = Where(self._round, lane, f"chain of {arm.name} as in the trial", self.case.axes)
        self.retrial.before(lane, where)
        arm.step(lane)
        self.case.device.synchronize()
        if atomic:
            after = self._around(lane)
            return (before, after) if self._loose.apart(self.retrial.left(), after) else None
        failure = self.retrial.after(lane, where)
        if failure is not None:
            self._end(
                Status.WRONG,
                arm,
                f"a step of a chain is not what it is in a trial: {failure.message}",
            )
        return None

    def _drawn(self, arm: PlanArm, what: str, count: int) -> set[int]:
        """Secret steps, of as many different sets of weights as there are."""
        sets, steps = self.lanes.sets, self.lanes.steps
        choose = self.case.seeds.chooser(what, self._round, arm.name)
        order = sorted(range(steps), key=lambda lane: choose(1 << 30))
        chosen = [next(lane for lane in order if lane % sets == s) for s in range(sets)]
        chosen.sort(key=order.index)
        chosen += [lane for lane in order if lane not in chosen]
        return set(chosen[:count])

    def _not_far(self, arm: PlanArm, state: str) -> None:
        if state:
            self._end(Status.FLAKY, arm, f"{state} differs between chains by more than noise")

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
        weights = self.lanes.weights[lane % self.lanes.sets]
        weights = {n: self.case.here(t) for n, t in weights.items()}
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
        return {b.name: self.case.copy(tensors[b.name]) for b in self.case.buffers(group)}

    def _atomic(self, artifact: Artifact) -> bool:
        key = artifact.sha256
        if key not in self._atomics:
            self._atomics[key] = float_atomics(artifact)
        return self._atomics[key]

    def _note_floor(self) -> None:
        """Once: routing is data, and its mean over the lanes of one round says enough."""
        floor_for = getattr(self.case.target, "floor_for", None)
        named = {b.name for b in self.case.buffers("outputs")}
        if self._floors or floor_for is None or "outputs.ids" not in named:
            return
        ids = [self.lanes.outputs[f"{lane}/outputs.ids"] for lane in range(self.lanes.steps)]
        for nested in torch.stack(ids).tolist():
            self._floors.append(floor_for(self.case.workload, nested).bytes)
