"""The proof beside a diff, as sections of lines and tables: one content for terminal, page and comment.

Text of candidates and models appears as it is: whoever shows it must clean or escape it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agent import difference, waterfall
from agent.difference import Side
from agent.review.changes import KernelTime, floors, label
from agent.review.decide import Decision
from agent.review.dossier import Dossier
from agent.review.risks import closest, used
from sandbox.verdict import Correctness, Verdict

SHOWN_TENSORS = 12
SHOWN_KERNELS = 24
SHOWN_RESOURCES = 40
SHOWN_CHANGES = 24
WORD = {"approve": "approved", "reject": "rejected", "send_back": "sent back"}


@dataclass(frozen=True)
class Section:
    """`lines` are sentences, `rows` a table under `head`; `tone` `warn` wants to be seen first."""

    key: str
    title: str
    lines: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    tone: Literal["plain", "warn"] = "plain"


def headline(d: Dossier) -> str:
    """One line: who, what came of it."""
    v = d.me.verdict
    state = "not judged" if v is None else f"{v.status}" + (f", {v.outcome}" if v.outcome else "")
    paired = next((s for s in d.speedups if s.against == "the incumbent"), None)
    gain = "" if paired is None else f", {_ratio(paired.ratio.value, paired.ratio)} x the incumbent"
    word = f"; {WORD[d.standing.kind]} by {d.standing.who}" if d.standing else ""
    return f"{state}{gain}{word}"


def sections(d: Dossier) -> tuple[Section, ...]:
    """In the order in which a reviewer needs them; empty ones are left out."""
    v = d.me.verdict
    found = [_risks(d), _speedups(d), _waterfall(d), _kernels(d), _resources(d)]
    if v is not None:
        found += [_checked(v), _not_verified(v), _tensors(v), _findings(v)]
    found += [_about(d), Section("lessons", "Lessons of the run", d.lessons), _decisions(d)]
    return tuple(s for s in found if s.lines or s.rows)


def _risks(d: Dossier) -> Section:
    lines = tuple(f"{'look: ' if r.level == 'look' else ''}{r.message} ({r.rule})" for r in d.risks)
    none = ("no pattern of the list got more frequent than in the parent",)
    return Section("risks", "Risks", lines or none, tone="warn" if lines else "plain")


def _speedups(d: Dossier) -> Section:
    v = d.me.verdict
    if v is None or v.timing is None:
        return Section("speedups", "Speed-up", ("not timed",), tone="warn")
    rows = tuple(
        (s.workload, s.regime, s.against, f"{s.ratio.value:.4f}",
         f"{s.ratio.low:.4f} to {s.ratio.high:.4f}", f"{s.us:.2f}", s.floor)
        for s in d.speedups
    ) or tuple(
        (label(w), w.regime, "nothing", "", "", f"{w.us:.2f}", floors(w))
        for w in v.timing.workloads
    )  # fmt: skip
    head = ("workload", "regime", "against", "speed-up", "95 % interval", "us a step",
            "of floor (at the specified rate)")  # fmt: skip
    gain = d.me.row["predicted_gain"]
    lines = [f"times are {v.timing.kind}; paired and interleaved by the judge"]
    if gain is not None:
        lines.append(f"predicted by the author: {gain:.3f} x its parent")
    if v.timing.aa_half_width is not None:
        lines.append(f"the same kernel against itself: +-{v.timing.aa_half_width:.2%}")
    return Section("speedups", "Speed-up", tuple(lines), head, rows)


def _waterfall(d: Dossier) -> Section:
    """Parts that add up to the step, the parent's beside them; the largest losses and what changed, in words."""
    fall = waterfall.of(d.me.verdict.profile) if d.me.verdict else None
    if fall is None:
        return Section("waterfall", "Waterfall of a step")
    base = d.parent
    old = waterfall.of(base.verdict.profile) if base and base.verdict else None
    before = {words.split(":")[0]: us for words, us, _ in waterfall.parts(old)} if old else {}
    rows = []
    for words, us, share in waterfall.parts(fall):
        was = before.get(words.split(":")[0])
        change = ("", "") if was is None else (f"{was:.2f}", f"{us - was:+.2f}")
        rows.append((words, f"{us:.2f}", f"{share:.1%}", *change))
    lines = [waterfall.head(fall)]
    lines += [f"loss {i}: {x['us']:.2f} us, {x['text']}" for i, x in enumerate(fall["losses"], 1)]
    if base is not None:
        sides = (Side(base.source, base.verdict), Side(d.me.source, d.me.verdict))
        lines += [f"against the parent: {x}" for x in difference.lines(*sides)[:SHOWN_CHANGES]]
    head = ("part", "us", "of the step", "us of the parent", "change")
    return Section("waterfall", "Waterfall of a step", tuple(lines), head, tuple(rows))


def _kernels(d: Dossier) -> Section:
    times = d.kernel_times
    head = ("kernel", "launches before", "now", "us before", "us now", "change, us")
    rows = tuple(_kernel(k) for k in times[:SHOWN_KERNELS])
    more = len(times) - SHOWN_KERNELS
    lines = (f"and {more} more kernels",) if more > 0 else ()
    return Section("kernels", "Where the time goes", lines, head, rows)


def _kernel(k: KernelTime) -> tuple[str, ...]:
    def us(x: float | None) -> str:
        return "" if x is None else f"{x:.2f}"

    return (
        k.kernel, _count(k.calls_before), _count(k.calls), us(k.us_before), us(k.us),
        f"{k.delta:+.2f}",
    )  # fmt: skip


def _resources(d: Dossier) -> Section:
    rows = [
        (r.kernel, r.what, _count(r.before), _count(r.after), "changed" if r.changed else "")
        for r in d.resources
    ]
    more = len(rows) - SHOWN_RESOURCES
    lines = (f"and {more} more figures",) if more > 0 else ()
    head = ("kernel", "resource", "before", "now", "")
    return Section("resources", "Resources", lines, head, tuple(rows[:SHOWN_RESOURCES]))


def _checked(v: Verdict) -> Section:
    lines = list(dict.fromkeys((*v.checked, *(v.correctness.checked if v.correctness else ()))))
    if v.correctness:
        lines.insert(0, _extent(v.correctness))
    return Section("checked", "What was checked", tuple(lines) or ("nothing is listed",))


def _extent(c: Correctness) -> str:
    near = closest(c)
    worst = f"; closest to its bound: {near[0].name}, {near[1]:.0%} of it" if near else ""
    return f"{len(c.tensors)} tensors over {c.seeds} seeds, {c.steps} steps, {c.repeats} repeats{worst}"


def _not_verified(v: Verdict) -> Section:
    listed = dict.fromkeys(
        (*v.not_verified, *(v.correctness.not_verified if v.correctness else ()))
    )
    none = ("nothing is listed; that is no proof that nothing is missing",)
    return Section("not_verified", "What was not verified", tuple(listed) or none, tone="warn")


def _tensors(v: Verdict) -> Section:
    if v.correctness is None:
        return Section("tensors", "Errors against their bounds")
    near = sorted(v.correctness.tensors, key=lambda t: -used(t))
    rows = tuple(
        (t.name, _pair(t.rel_l2, t.rel_l2_bound), _pair(t.max_abs, t.max_abs_bound),
         _pair(t.norm_ratio, t.norm_ratio_bound), f"{used(t):.0%}")
        for t in near[:SHOWN_TENSORS]
    )  # fmt: skip
    head = ("tensor", "relative L2 / bound", "largest / bound", "norm / bound", "used")
    more = len(near) - SHOWN_TENSORS
    lines = (f"and {more} more tensors, further from their bounds",) if more > 0 else ()
    return Section("tensors", "Errors against their bounds", lines, head, rows)


def _findings(v: Verdict) -> Section:
    lines = [f"{f.rule}: {f.message}" for f in v.findings]
    if v.failure is not None:
        lines.insert(0, f"failure {v.failure.rule}: {v.failure.message}")
    return Section("findings", "Findings", tuple(lines))


def _about(d: Dossier) -> Section:
    rows = list(_facts(d))
    rows += [(f"sha256 of {k}", x) for k, x in sorted(d.hashes.items())]
    return Section("about", "About it", head=("what", "value"), rows=tuple(rows))


def _facts(d: Dossier) -> Iterator[tuple[str, str]]:
    row, v = d.me.row, d.me.verdict
    yield "candidate", d.me.name
    yield "parent", d.parent.name if d.parent else "none"
    yield "direction", row["direction"] or ""
    yield "note", row["note"] or ""
    yield "proposer", row["proposer"] or ""
    if tunables := json.loads(row["tunables"] or "{}"):
        yield "tunables", ", ".join(f"{k}={x}" for k, x in sorted(tunables.items()))
    if d.promoted_because:
        yield "promoted because", d.promoted_because
    if v is not None:
        yield "device", str(v.device.get("name") or v.device.get("kind") or "")
        yield "judged", f"tier {v.tier}, trust {v.trust}, {v.date}"
        yield "jail", str(v.isolation.get("tier", "not recorded"))


def _decisions(d: Dossier) -> Section:
    return Section("decisions", "Decisions", tuple(_decision(x) for x in d.decisions))


def _decision(x: Decision) -> str:
    about = x.hashes.get("artifact", "")[:12]
    note = f": {x.note}" if x.note else ""
    return f"{x.date} {WORD.get(x.kind, x.kind)} by {x.who}{note} (artifact {about or 'none'})"


def _ratio(value: float, r: object) -> str:
    low, high = getattr(r, "low", value), getattr(r, "high", value)
    return f"{value:.4f} [{low:.4f}, {high:.4f}]"


def _pair(error: float, bound: float) -> str:
    return f"{error:.3g} / {bound:.3g}"


def _count(x: int | None) -> str:
    return "" if x is None else f"{x}"
