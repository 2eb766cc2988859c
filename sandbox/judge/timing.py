"""Times a correct candidate: interleaved ABBA blocks of chained steps against its rivals, every timed output compared.

The regime, the order, the clock and the buffers are the judge's. On the cpu device times are modelled by the device,
exact, and never called measured. What the numbers mean for promotion is in `sandbox.judge.ranking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandbox.artifact import Artifact
from sandbox.devices.base import Bound, Faulted, Program, Refused, Timer
from sandbox.judge import arms as arm_kinds
from sandbox.judge import baselines, modelled, ranking, stats
from sandbox.judge import lanes as lane_memory
from sandbox.judge.arms import Arm, PlanArm
from sandbox.judge.case import Case, read_artifact
from sandbox.judge.chains import ChainCheck
from sandbox.judge.checks import Checker
from sandbox.judge.clock import clock_of
from sandbox.judge.ending import Ended
from sandbox.judge.lanes import Lanes
from sandbox.judge.ranking import Measured, Timed
from sandbox.judge.report import Draft
from sandbox.judge.rig import Rig
from sandbox.judge.stats import Samples
from sandbox.judge.tiers import Effort
from sandbox.verdict import Failure, Status

CANDIDATE, TWIN, INCUMBENT = "candidate", "twin", "incumbent"
WARM_US, WARM_ROUNDS = 50_000.0, 8
SLOWED = {"hardware slowdown", "thermal", "hardware thermal", "power brake"}


@dataclass
class Session:
    """Everything one timing run needs."""

    case: Case
    rig: Rig
    checker: Checker
    draft: Draft
    effort: Effort
    clock: Timer
    lanes: Lanes
    arms: list[Arm] = field(default_factory=list)
    conditions: list[dict[str, Any]] = field(default_factory=list)
    timed_us: float = 0.0

    def plan_arms(self) -> list[PlanArm]:
        return [a for a in self.arms if isinstance(a, PlanArm)]


@dataclass(frozen=True)
class Twin:
    """A second name for an arm: the A/A comparison."""

    of: Arm
    name: str = TWIN

    @property
    def steps(self) -> int:
        return self.of.steps

    @property
    def launches(self) -> int:
        return self.of.launches

    def replay(self) -> None:
        self.of.replay()


def run(rig: Rig, checker: Checker, draft: Draft, todo: Effort) -> Timed:
    """Time the candidate of a rig that has passed its trial. Raises Ended, Refused or Faulted."""
    case = rig.case
    clock = clock_of(case.device)
    rival = _rival(rig, draft)
    if clock is None:
        return modelled.run(rig, rival, draft)
    try:
        return _timed((rig, checker, draft), todo, clock, rival)
    except Ended as end:
        if rival is None or end.failure.rule != "incumbent":
            raise
        draft.findings.append(end.failure)
        return _timed((rig, checker, draft), todo, clock, None)


def _timed(
    who: tuple[Rig, Checker, Draft],
    todo: Effort,
    clock: Timer,
    rival: tuple[Artifact, Program] | None,
) -> Timed:
    rig, checker, draft = who
    case = rig.case
    session = Session(
        case, rig, checker, draft, todo, clock, lane_memory.build(case, rig.arena, todo.chain)
    )
    _make_arms(session, rival)
    measured = _measure(session)
    if not measured.self_test.sound:
        draft.findings.append(
            Failure("aa", f"A/A missed 1: {measured.self_test.ratio}; timed again")
        )
        measured = _measure(session)
    if not measured.self_test.sound:
        message = f"one kernel against itself differs: {measured.self_test.ratio}; the machine is not quiet"
        raise Ended(Status.INFRA, Failure("aa", message))
    draft.seconds["gpu_timed"] = round(session.timed_us / 1e6, 6)
    return ranking.rank(case, measured, draft)


def _rival(rig: Rig, draft: Draft) -> tuple[Artifact, Program] | None:
    """The incumbent, loaded; None where there is none or it is the candidate itself."""
    case = rig.case
    if case.job.incumbent is None:
        return None
    try:
        artifact = read_artifact(case.job.incumbent, case)
        if artifact.ptx_sha256 == rig.artifact.ptx_sha256:
            draft.findings.append(
                Failure("same", "the incumbent has the same PTX and plan; nothing to compare")
            )
            return None
        return artifact, case.device.load(artifact)
    except Refused as error:
        draft.findings.append(
            Failure("incumbent", f"the incumbent cannot be timed: {error.failure.message}")
        )
        return None


def _make_arms(s: Session, rival: tuple[Artifact, Program] | None) -> None:
    s.lanes.refresh(-1)
    candidate = arm_kinds.plan_arm(CANDIDATE, (s.rig.artifact, s.rig.program), s.lanes, s.rig)
    candidate.record()
    s.arms.append(candidate)
    reference: Arm = candidate
    if rival is not None:
        incumbent = arm_kinds.plan_arm(INCUMBENT, rival, s.lanes)
        incumbent.record()
        s.arms.append(incumbent)
        reference = incumbent
    s.arms.append(Twin(reference))
    for name in s.case.job.baselines:
        _add_baseline(s, name)


def _add_baseline(s: Session, name: str) -> None:
    """A baseline is a comparison: where it fails, that is said and the candidate's verdict does not hang on it."""
    where = getattr(s.case.target, "baselines", {}).get(name)
    if where is None:
        s.draft.not_verified.append(f"baseline {name}: this target has none")
        return
    try:
        arm = baselines.baseline_arm(name, where, s.lanes, s.checker)
    except Faulted:
        raise
    except Exception as error:
        s.draft.findings.append(Failure("baseline", f"baseline {name} failed: {str(error)[:300]}"))
        return
    if arm.failure is not None:
        message = f"baseline {name} is wrong and not timed: {arm.failure.message}"
        s.draft.findings.append(Failure("baseline", message, arm.failure.where))
        return
    s.arms.append(arm)


def _measure(s: Session) -> Measured:
    """All rounds of ABBA blocks. Raises Ended if a timed output is wrong."""
    samples: dict[str, list[list[float]]] = {a.name: [] for a in s.arms}
    fresh: list[int] = []
    before = dict(s.clock.conditions())
    _warm_up(s)
    check = ChainCheck(s.case, s.lanes, s.checker)
    parts = _split(s.effort.blocks, s.effort.rounds)
    for round_, blocks in enumerate(parts):
        s.lanes.refresh(round_)
        check.begin(round_)
        fresh.append(sum(len(x) for x in (samples[CANDIDATE],)))
        for i in range(blocks):
            _block(s, i, samples, check)
        # the incumbent has had its own trial: for it the bits of timed and untimed runs are enough
        last = round_ + 1 == len(parts)
        for plan in s.plan_arms():
            check.untimed(plan, plan.name == CANDIDATE and (last or s.effort.fresh_bands))
    check.end(s.plan_arms(), s.rig)
    kept = _kept(s, samples)
    conditions = {"before": before, "after": dict(s.clock.conditions()), "dropped_blocks": kept[1]}
    table = kept[0]
    original = INCUMBENT if INCUMBENT in table else CANDIDATE
    even = stats.paired(table)
    tested = stats.self_test(even[original], even[TWIN], s.effort.resamples)
    cold = _cold(s) if s.effort.cold else {}
    launches = s.plan_arms()[0].launches
    return Measured(
        table, even, tested, tuple(fresh), s.lanes.sets, s.lanes.steps, launches, check.floor_bytes(), cold,
        conditions, s.effort.resamples, min(s.clock.time(lambda: None) for _ in range(5)),
    )  # fmt: skip


def _warm_up(s: Session) -> None:
    """Clocks and caches up before the first block."""
    spent = 0.0
    for _ in range(WARM_ROUNDS):
        for arm in s.arms:
            s.lanes.restore()
            spent += s.clock.time(arm.replay)
        if spent > WARM_US:
            return


def _block(
    s: Session, number: int, samples: dict[str, list[list[float]]], check: ChainCheck
) -> None:
    """A B C C B A: each arm twice, so that a drift inside the block falls on all alike. The next block of a round
    starts with the next arm, so that no arm is always first; the first starts with the candidate, whose inputs are
    new then."""
    mine: dict[str, list[float]] = {a.name: [] for a in s.arms}
    turn = number % len(s.arms)
    order = [*s.arms[turn:], *s.arms[:turn]]
    for arm in [*order, *reversed(order)]:
        s.lanes.restore()
        us = s.clock.time(arm.replay)
        s.timed_us += us
        mine[arm.name].append(us / arm.steps)
        plan = arm.of if isinstance(arm, Twin) else arm
        if isinstance(plan, PlanArm):
            check.timed(plan)
    for name, pair in mine.items():
        samples[name].append(pair)
    s.conditions.append(dict(s.clock.conditions()))


def _split(blocks: int, rounds: int) -> Sequence[int]:
    """Blocks of each round, at least one."""
    rounds = max(1, min(rounds, blocks))
    return [blocks // rounds + (1 if i < blocks % rounds else 0) for i in range(rounds)]


def _kept(s: Session, samples: dict[str, list[list[float]]]) -> tuple[dict[str, Samples], int]:
    """Blocks without thermal or power emergencies. Raises Ended (`infra`) if fewer than half are left."""
    count = len(samples[CANDIDATE])
    recent = s.conditions[-count:]
    good = [i for i, c in enumerate(recent) if not SLOWED & set(c.get("throttle", ()))]
    if 2 * len(good) < count:
        message = f"the GPU was throttled in {count - len(good)} of {count} blocks"
        raise Ended(Status.INFRA, Failure("throttle", message))
    return {
        name: np.asarray(x, dtype=np.float64)[good] for name, x in samples.items()
    }, count - len(good)


def _cold(s: Session) -> dict[str, Samples]:
    """One step after an L2 flush, for candidate and incumbent, interleaved: [blocks, 1] in microseconds."""
    found: dict[str, list[list[float]]] = {a.name: [] for a in s.plan_arms()}
    singles = {a.name: _single(s, a) for a in s.plan_arms()}
    for i in range(s.effort.blocks):
        order = s.plan_arms() if i % 2 == 0 else s.plan_arms()[::-1]
        for arm in order:
            s.lanes.restore()
            s.clock.flush_l2()
            s.case.device.synchronize()
            found[arm.name].append([s.clock.time(singles[arm.name].launch)])
    return {name: np.asarray(x, dtype=np.float64) for name, x in found.items()}


def _single(s: Session, arm: PlanArm) -> Bound:
    return s.case.device.record(lambda: arm.step(0), arm.launches)
