"""Verdicts as the tools show them: reports, differences between two candidates, rows of the
history.

Pure functions over rows of the record and verdicts; nothing is measured or written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent import diffs, search, waterfall
from agent.mcp.shapes import (
    Change,
    Comparison,
    HistoryRow,
    KernelChange,
    KernelRow,
    Problem,
    Report,
    Resources,
    Speedup,
    WrongTensor,
)
from agent.review import changes
from agent.review.changes import Used
from sandbox.verdict import Failure, Status, Verdict, short_name

LONGEST_MESSAGE = 4000
LONGEST_NOTE = 300
MOST_ROWS = 40

Row = Mapping[str, Any]


def report(row: Row, v: Verdict, profiled: Verdict, parent: Verdict | None) -> Report:
    """`profiled`: the candidate's verdict that holds a profile, else `v` itself; `parent`: the
    same of its parent.
    """
    w = search.workload(v)
    ratio = w.speedup_incumbent if w else None
    return Report(
        candidate=row["seq"], parent=row["parent_seq"], status=str(v.status),
        outcome=None if v.outcome is None else str(v.outcome), promoted=bool(row["promoted"]),
        duplicate_of=row["duplicate_of"], tier=str(v.tier), trust=str(v.trust),
        device=str(v.device.get("name") or v.device.get("kind")), note=row["note"] or "",
        predicted_gain=row["predicted_gain"],
        speedup_incumbent=None if ratio is None else Speedup(ratio.value, ratio.low, ratio.high),
        kind=v.timing.kind if v.timing else None, us=w.us if w else None,
        launches=w.launches if w else None, gb_per_s=w.gb_per_s if w else None,
        fraction_of_floor=search.fraction(v),
        failure=None if v.failure is None else problem(v.failure), wrong=wrong(v),
        kernels=kernels(profiled, parent), profile_note=profile_note(profiled),
        resources=[
            Resources(short_name(r.kernel), r.registers, r.spill_stores + r.spill_loads, r.smem_static)
            for r in v.resources[:MOST_ROWS]
        ],
        findings=[problem(f) for f in v.findings[:MOST_ROWS]], not_verified=list(v.not_verified),
        waterfall=waterfall.lines(profiled.profile), difference=[],
    )  # fmt: skip


def problem(f: Failure) -> Problem:
    return Problem(f.rule, f.message[:LONGEST_MESSAGE], dict(f.where))


def wrong(v: Verdict) -> list[WrongTensor]:
    """The tensors that were outside their bounds."""
    checks = v.correctness.tensors if v.correctness else ()
    bad = [t for t in checks if not t.ok]
    return [WrongTensor(t.name, t.rel_l2, t.rel_l2_bound, t.where) for t in bad[:MOST_ROWS]]


def kernels(v: Verdict, parent: Verdict | None) -> list[KernelRow]:
    """Time by kernel, the costliest first; empty where the device has no clock or nothing passed."""
    before = {r.kernel: r.us_before for r in changes.kernel_times(parent, v)}
    return [
        KernelRow(k["kernel"], k["calls"], k["us"], k["share"], before.get(k["kernel"]))
        for k in v.profile.get("kernels", ())[:MOST_ROWS]
    ]


def profile_note(v: Verdict) -> str:
    """What the kernel times are, or why there are none."""
    if v.profile.get("kernels"):
        return f"{v.profile.get('method', 'timed')}; {v.profile.get('step_us')} us in all"
    if v.status is not Status.PASSED:
        return "no kernel times: only what passed is profiled"
    return "no kernel times: this device or plan was not profiled"


def history_row(row: Row) -> HistoryRow:
    measured = row["fraction_of_floor_measured"]
    note = " ".join((row["note"] or "").split())
    result = str(row["outcome"] or row["status"])
    if row["duplicate_of"] is not None:
        result = f"the same machine work as {row['duplicate_of']}"
    return HistoryRow(
        candidate=row["seq"], parent=row["parent_seq"], result=result,
        promoted=bool(row["promoted"]), us=row["us"],
        fraction_of_floor=measured if measured is not None else row["fraction_of_floor_spec"],
        speedup_incumbent=row["speedup_incumbent"], predicted_gain=row["predicted_gain"],
        note=note if len(note) <= LONGEST_NOTE else note[: LONGEST_NOTE - 1] + "…",
    )  # fmt: skip


def comparison(rows: Sequence[Row], found: Sequence[Verdict], sources: Sequence[str]) -> Comparison:
    """Of two candidates: each argument holds both, in order."""
    a, b = found
    us = [row["us"] for row in rows]
    fair = a.device == b.device and a.tier is b.tier and us[0] and us[1]
    used = [Used(v, changes.launches(v)) for v in found]
    return Comparison(
        a=rows[0]["seq"], b=rows[1]["seq"],
        a_result=str(a.outcome or a.status), b_result=str(b.outcome or b.status),
        a_us=us[0], b_us=us[1], ratio=us[0] / us[1] if fair else None,
        kernels=[
            KernelChange(r.kernel, r.us_before, r.us, r.delta) for r in changes.kernel_times(a, b)
        ][:MOST_ROWS],
        resources=[
            Change(r.kernel, r.what, r.before, r.after)
            for r in changes.resources(used[0], used[1]) if r.changed
        ][:MOST_ROWS],
        diff=diffs.make(
            sources[0], sources[1], f"a/{rows[0]['seq']}.py", f"b/{rows[1]['seq']}.py"
        ),
    )  # fmt: skip
