"""Times a correct candidate: interleaved ABBA blocks of chained steps against its rivals, every timed output compared.

The regime, the order, the clock and the buffers are the judge's. On the cpu device times are modelled by the device,
exact, and never called measured. What the numbers mean for promotion is in `sandbox.judge.ranking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sandbox.artifact import Artifact
from sandbox.devices.base import Bound, Faulted, Program, Timer
from sandbox.judge import lanes as lane_memory
from sandbox.judge import modelled, ranking, series, stats
from sandbox.judge.arms import Arm, PlanArm
from sandbox.judge.atomics import float_atomics
from sandbox.judge.chains import ChainCheck, Watch
from sandbox.judge.checks import Checker
from sandbox.judge.clock import clock_of
from sandbox.judge.ending import Ended
from sandbox.judge.ranking import Measured, Timed
from sandbox.judge.report import Draft
from sandbox.judge.retrial import UNCHECKED, Retrial
from sandbox.judge.rig import Rig
from sandbox.judge.session import (
    CANDIDATE,
    INCUMBENT,
    TWIN,
    Session,
    Twin,
    broke_the_gpu,
    find_rival,
    make_arms,
)
from sandbox.judge.stats import Samples
from sandbox.judge.tiers import Effort
from sandbox.verdict import Failure, Status

WARM_US, WARM_ROUNDS = 50_000.0, 8
SOME, AGAIN = 2, 4
MOST_DRIFT, MOST_MHZ = 0.02, 50
SLOWED = {"hardware slowdown", "thermal", "hardware thermal", "power brake"}


def run(rig: Rig, checker: Checker, draft: Draft, todo: Effort) -> Timed:
    """Time the candidate of a rig that has passed its trial. Raises Ended, Refused or Faulted."""
    case = rig.case
    clock = clock_of(case.device)
    rival = find_rival(rig, draft)
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
    make_arms(session, rival)
    measured = _measure(session)
    unquiet = _unquiet(measured)
    if unquiet:
        draft.findings.append(Failure(*unquiet))
        measured = _measure(session)
        again = _unquiet(measured)
        if again and again[0] == "drift":
            draft.findings.append(
                Failure(again[0], again[1].replace("timed again", "it drifted twice"))
            )
    if not measured.self_test.sound:
        message = f"one kernel against itself differs: {measured.self_test.ratio}; the machine is not quiet"
        raise Ended(Status.INFRA, Failure("aa", message))
    draft.seconds["gpu_timed"] = round(session.timed_us / 1e6, 6)
    return series.added(ranking.rank(case, measured, draft), session)


def _unquiet(m: Measured) -> tuple[str, str] | None:
    """Rule and sentence where a run should be repeated: one kernel differs from itself, or the machine drifted."""
    if not m.self_test.sound:
        return "aa", f"A/A missed 1: {m.self_test.ratio}; timed again"
    original = INCUMBENT if INCUMBENT in m.samples else CANDIDATE
    moved = stats.drift(m.samples[original])
    clocks = m.conditions.get("sm_mhz")
    if abs(moved) > MOST_DRIFT:
        return (
            "drift",
            f"{original} became {moved:+.1%} slower from the first blocks to the last; timed again",
        )
    if clocks and clocks[2] - clocks[0] > MOST_MHZ:
        return (
            "drift",
            f"the SM clock moved from {clocks[0]} to {clocks[2]} MHz during the blocks; timed again",
        )
    return None


def _summary(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Least, median and largest of each reading over the blocks; throttle reasons with their number of blocks."""
    out: dict[str, Any] = {}
    for name in ("sm_mhz", "memory_mhz", "watts", "celsius"):
        seen = sorted(c[name] for c in readings if name in c)
        if seen:
            out[name] = [seen[0], seen[len(seen) // 2], seen[-1]]
    reasons = [r for c in readings for r in c.get("throttle", ())]
    return {**out, "throttled_blocks": {r: reasons.count(r) for r in sorted(set(reasons))}}


def _measure(s: Session) -> Measured:
    """All rounds of ABBA blocks. Raises Ended if a timed output is wrong."""
    samples: dict[str, list[list[float]]] = {a.name: [] for a in s.arms}
    fresh: list[int] = []
    before = dict(s.clock.conditions())
    _warm_up(s)
    retrial = Retrial(s.rig, s.lanes)
    check = ChainCheck(s.case, s.lanes, s.checker, retrial)
    parts = _split(s.effort.blocks, s.effort.rounds)
    for round_, blocks in enumerate(parts):
        s.lanes.refresh(round_)
        check.begin(round_)
        fresh.append(sum(len(x) for x in (samples[CANDIDATE],)))
        for i in range(blocks):
            block(s, i, samples, check)
        # the incumbent has had its own trial: for it the bits of timed and untimed runs are enough
        last = round_ + 1 == len(parts)
        for plan in s.plan_arms():
            check.untimed(plan, _watched(s, last) if plan.name == CANDIDATE else Watch())
    check.end(s.plan_arms(), s.rig)
    if retrial.done:
        alike = "within noise" if float_atomics(s.rig.artifact) else "bit for bit"
        line = f"{retrial.done} steps of timed chains once more as in the trial, {alike}"
        s.draft.checked.append(line)
    elif not retrial.possible:
        s.draft.not_verified.append(UNCHECKED)
    kept = _kept(s, samples)
    conditions = {
        "before": before, "after": dict(s.clock.conditions()), "dropped_blocks": kept[1],
        **_summary(s.conditions[-len(samples[CANDIDATE]) :]),
    }  # fmt: skip
    table = kept[0]
    original = INCUMBENT if INCUMBENT in table else CANDIDATE
    even = stats.paired(table)
    tested = stats.self_test(even[original], even[TWIN], s.effort.resamples)
    cold, warm = _isolated(s, check) if s.effort.cold else ({}, {})
    launches = s.plan_arms()[0].launches
    return Measured(
        table, even, tested, tuple(fresh), s.lanes.sets, s.lanes.steps, launches, check.floor_bytes(), cold,
        conditions, s.effort.resamples, min(s.clock.time(lambda: None) for _ in range(5)), warm,
    )  # fmt: skip


def _watched(s: Session, last: bool) -> Watch:
    """How many steps of a round are looked at: in the last round of the higher tiers all are run as in the trial, and
    one of every set of weights goes to the oracle, as a kernel can tell these apart."""
    if not s.effort.fresh_bands:
        return Watch(SOME, AGAIN) if last else Watch()
    return Watch(max(SOME, s.lanes.sets), s.lanes.steps) if last else Watch(SOME, AGAIN)


def _warm_up(s: Session) -> None:
    """Clocks and caches up before the first block."""
    spent = 0.0
    for _ in range(WARM_ROUNDS):
        for arm in s.arms:
            s.lanes.restore()
            spent += _lap(s, arm)
        if spent > WARM_US:
            return


def _lap(s: Session, arm: Arm) -> float:
    """Raises Ended (`infra`) where a baseline breaks the GPU: that is not the candidate's doing."""
    try:
        return s.clock.time(arm.replay)
    except Faulted as end:
        if isinstance(arm, PlanArm | Twin):
            raise
        raise broke_the_gpu(arm.name, end) from end


def block(
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
        us = _lap(s, arm)
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


def _isolated(s: Session, check: ChainCheck) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """One step alone, for candidate and incumbent, interleaved: [blocks, 1] in microseconds after an L2 flush, and
    after another step. What each leaves must be what the same steps leave untimed."""
    cold: dict[str, list[list[float]]] = {a.name: [] for a in s.plan_arms()}
    warm: dict[str, list[list[float]]] = {a.name: [] for a in s.plan_arms()}
    singles = {a.name: _single(s, a) for a in s.plan_arms()}
    for arm in s.plan_arms():
        s.lanes.restore()
        for kind in ("cold", "warm"):  # the second from the states that the first left
            arm.step(0)
            s.case.device.synchronize()
            check.alone(arm, kind)
    for i in range(s.effort.blocks):
        order = s.plan_arms() if i % 2 == 0 else s.plan_arms()[::-1]
        for arm in order:
            s.lanes.restore()
            s.clock.flush_l2()
            s.case.device.synchronize()
            cold[arm.name].append([s.clock.time(singles[arm.name].launch)])
            check.alone(arm, "cold")
            warm[arm.name].append([s.clock.time(singles[arm.name].launch)])
            check.alone(arm, "warm")
    tables = (
        {n: np.asarray(x, dtype=np.float64) for n, x in found.items()} for found in (cold, warm)
    )
    return next(tables), next(tables)


def _single(s: Session, arm: PlanArm) -> Bound:
    return s.case.device.record(lambda: arm.step(0), arm.launches)
