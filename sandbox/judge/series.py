"""Figures of each arm for reports: many steps one by one, isolated steps with a warm and a cold L2, energy.

Outputs of these steps are not compared (those of the timed chains are); nothing here decides a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sandbox.devices.base import Faulted, Timer
from sandbox.judge.arms import Arm, PlanArm
from sandbox.judge.baselines import BaselineArm
from sandbox.judge.ranking import Timed
from sandbox.judge.session import Session, broke_the_gpu

ISOLATED, FEWEST = 25, 5
BATCH = 256
"""Steps enqueued at once; each has an event of its own."""
WHOLE_US, SOME_US = 8e6, 2e6
"""All steps that were asked for are timed where they take less than the first; a slower arm has as many as take the
second, and says how many."""
ISOLATED_US = 3e5
"""Isolated steps of one kind end after this long where there have been enough."""
NEEDED_J_US = 2e5
"""Energy over less than this is rounding of the counter."""


def added(timed: Timed, s: Session) -> Timed:
    """The same with `detail.arms` (if the job asked for steps) and what was skipped."""
    if timed.timing is None:
        return timed
    row = timed.timing.workloads[0]
    more: dict[str, Any] = {"skipped": dict(s.skipped)} if s.skipped else {}
    if s.case.job.steps:
        more["arms"] = {a.name: _figures(s, a) for a in s.arms if a.name != "twin"}
        s.draft.not_verified.append("outputs of the steps that were timed one by one")
    filled = replace(row, detail={**row.detail, **more})
    return replace(timed, timing=replace(timed.timing, workloads=(filled,)))


def _figures(s: Session, arm: Arm) -> dict[str, Any]:
    try:
        return figures(s, arm)
    except Faulted as end:
        if isinstance(arm, PlanArm):
            raise
        raise broke_the_gpu(arm.name, end) from end


def figures(s: Session, arm: Arm) -> dict[str, Any]:
    """Percentiles in microseconds; `steps` is how many there are. joules per step where the GPU counts energy."""
    singles = _singles(s, arm)
    out: dict[str, Any] = {"launches": arm.launches}
    out |= _isolated(s, singles)
    count = _count(s.case.job.steps, out["isolated_us"])
    s.lanes.restore()
    begin = _joules(s.clock)
    laps = _laps(s.clock, [singles[i % len(singles)] for i in range(count)])
    end = _joules(s.clock)
    p50, p95, p99 = (float(x) for x in np.percentile(laps, [50, 95, 99]))
    out |= {"steps": len(laps), "p50_us": p50, "p95_us": p95, "p99_us": p99}
    if begin is not None and end is not None and sum(laps) >= NEEDED_J_US and end > begin:
        out["joules"] = (end - begin) / len(laps)
    if isinstance(arm, BaselineArm):
        out["ready_s"] = round(arm.ready_s, 2)
    notes = getattr(arm, "notes", ())
    return {**out, "notes": list(notes)} if notes else out


def _count(asked: int, us: float) -> int:
    return asked if asked * us <= WHOLE_US else min(asked, max(ISOLATED, int(SOME_US / us)))


def _singles(s: Session, arm: Arm) -> list[Callable[[], None]]:
    """One step as one replayable unit, for each set of weights."""
    if isinstance(arm, PlanArm):
        return [_recorded(s, arm, i) for i in range(s.lanes.sets)]
    assert isinstance(arm, BaselineArm)
    return list(arm.singles)


def _recorded(s: Session, arm: PlanArm, lane: int) -> Callable[[], None]:
    return s.case.device.record(lambda: arm.step(lane), arm.launches).launch


def _isolated(s: Session, singles: Sequence[Callable[[], None]]) -> dict[str, float]:
    """Median of steps with nothing else on the GPU: right after another, and after an L2 flush."""
    found: dict[str, list[float]] = {"isolated_us": [], "cold_us": []}
    for name, times in found.items():
        for i in range(ISOLATED):
            s.lanes.restore()
            if name == "cold_us":
                s.clock.flush_l2()
            else:
                singles[i % len(singles)]()
            s.case.device.synchronize()
            times.append(s.clock.time(singles[i % len(singles)]))
            if len(times) >= FEWEST and sum(times) > ISOLATED_US:
                break
    return {name: float(np.median(times)) for name, times in found.items()}


def _laps(clock: Timer, works: Sequence[Callable[[], None]]) -> list[float]:
    laps: Any = getattr(clock, "laps", None)
    if laps is None:
        return [clock.time(w) for w in works]
    found: list[float] = []
    for at in range(0, len(works), BATCH):
        found += laps(works[at : at + BATCH])
    return found


def _joules(clock: Timer) -> float | None:
    ask: Any = getattr(clock, "joules", None)
    found: float | None = ask() if ask is not None else None
    return found
