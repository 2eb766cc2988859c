"""Lessons: what was tried, where, with what effect on which device, and why; found again by target, device, technique.

The record writes one for each candidate of a round, failures first, whatever the proposer adds in words of its own. A
lesson is one line of text, kept in runs.db across runs: `[techniques] what (where; device): effect. why`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent import waterfall
from agent.store import Queries
from agent.types import Direction, Task, Tried
from agent.workspace import read_json, write_json
from sandbox.verdict import Status, short_name

MOST_OF_ROUND = 6
MOST_SHOWN = 16
TECHNIQUES = {
    "ring": r"\bring\b|\bstages?\b|producer|bulk cop|cp\.async|\btma\b",
    "edges": r"\bedges?\b|grid barrier|\bbarriers?\b|\bflags?\b|counter|arriv",
    "launches": r"launch|\bpdl\b|cuda graph|persistent|cooperative",
    "fusion": r"\bfus(e|ed|ion|ing)\b|merge",
    "tiles": r"\btiles?\b|\bblock size|threads|warps a block|rows a warp",
    "vector loads": r"vectori[sz]|128-bit|16 bytes a|wide loads|loads in flight|unroll",
    "prefetch": r"prefetch|preload|load.{0,12}early|ahead of",
    "cache hints": r"evict|cache hint|l2 (hint|persist)|\.cs\b|no.allocate",
    "registers": r"register|spill|occupancy|min_blocks",
    "shared memory": r"shared memory|\bsmem\b|bank conflict|swizzl",
    "tensor cores": r"tensor core|\bmma\b|wgmma|\bhmma\b",
    "split-k": r"split.?k\b|partial sums?|reduction tree|last arriver",
    "clusters": r"cluster|dsmem|multicast",
    "balance": r"balanc|imbalance|waves?\b|skew|flatten",
    "precision": r"\bfp8\b|\bbf16\b|mxfp4|dequant|conversion|lop3|\bprmt\b",
    "recompute": r"recomput|redundant|replicat",
}
_FIND = {name: re.compile(pattern, re.I) for name, pattern in TECHNIQUES.items()}
_HEAD = re.compile(r"^\[([^\]]*)\]")
SILENT = (Status.INFRA, Status.CANCELLED)


@dataclass(frozen=True)
class Lesson:
    """`effect` is measured against the incumbent of then, with its 95 % interval, or the fault."""

    techniques: tuple[str, ...]
    what: str
    where: str
    device: str
    effect: str
    why: str
    worked: bool

    def text(self) -> str:
        head = f"[{', '.join(self.techniques)}] " if self.techniques else ""
        why = f" {self.why}" if self.why else ""
        return f"{head}{self.what} ({self.where}; {self.device}): {self.effect}.{why}"[:600]


def techniques(text: str) -> tuple[str, ...]:
    """What a text is about, in the order of the vocabulary."""
    return tuple(name for name, pattern in _FIND.items() if pattern.search(text))


def of_round(task: Task, tried: Sequence[Tried], all_: Sequence[Tried]) -> list[Lesson]:
    """One for each candidate that says something, what failed or lost first. `all_`: the history, for parents."""
    found = [lesson(task, t, parent_of(t, all_)) for t in tried if t.verdict.status not in SILENT]
    return sorted(found, key=lambda x: x.worked)[:MOST_OF_ROUND]


def parent_of(t: Tried, all_: Sequence[Tried]) -> Tried | None:
    return next((x for x in all_ if x.seq == t.parent), None)


def lesson(task: Task, t: Tried, parent: Tried | None) -> Lesson:
    what = " ".join((t.direction or t.note or f"candidate {t.seq}").split())[:160]
    work = ", ".join(
        f"{k}={task.workload[k]}" for k in ("preset", "layers", "rows") if k in task.workload
    )
    v = t.verdict
    device = str(v.device.get("name") or v.device.get("kind") or task.device)
    effect, worked = _effect(t)
    why = "" if t.twin is not None else _why_moved(t, parent)
    if v.failure is not None:
        why = _why_failed(t)
    where = f"{task.target.rsplit('/', 1)[-1]}, {work}"
    return Lesson(techniques(f"{what} {t.note}"), what, where, device, effect, why, worked)


def _effect(t: Tried) -> tuple[str, bool]:
    v = t.verdict
    said = f", predicted {t.predicted_gain:.3f}x" if t.predicted_gain else ""
    if t.twin is not None:  # its verdict is the other's, against another incumbent perhaps
        return f"the same machine work as candidate {t.twin}{said}", False
    if v.failure is not None:
        return f"{v.status}, {v.failure.rule}{said}", False
    ratio = (
        next((w.speedup_incumbent for w in v.timing.workloads if w.speedup_incumbent), None)
        if v.timing
        else None
    )
    if ratio is None:
        us = f"{t.us:.2f} us a step" if t.us is not None else "not timed"
        return f"{us}{said}", t.promoted
    kind = "" if v.timing and v.timing.kind == "measured" else " (modelled)"
    missed = ""
    if t.predicted_gain and not ratio.low <= t.predicted_gain <= ratio.high:
        missed = ", the prediction missed"
    text = f"{ratio.value:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]{kind}{said}{missed}"
    return text, ratio.low > 1.0


def _why_failed(t: Tried) -> str:
    assert t.verdict.failure is not None
    return " ".join(t.verdict.failure.message.split())[:240]


def _why_moved(t: Tried, parent: Tried | None) -> str:
    """The part of the waterfall that moved most against the parent, else what the profile's largest loss is."""
    new = waterfall.of(t.verdict.profile)
    old = waterfall.of(parent.verdict.profile) if parent else None
    parts = []
    if new and old and old["method"] == new["method"] and old["kind"] == new["kind"]:
        moved = {k: new["parts"][k] - old["parts"].get(k, 0.0) for k in new["parts"]}
        top = sorted((k for k in moved if abs(moved[k]) >= 0.01), key=lambda k: -abs(moved[k]))[:2]
        parts += [f"{waterfall.WORDS[k]} {moved[k]:+.2f} us" for k in top]
    if new and new.get("losses"):
        parts.append(f"largest loss: {new['losses'][0]['text']}")
    spilled = [r for r in t.verdict.resources if r.spill_loads + r.spill_stores]
    parts += [f"{short_name(spilled[0].kernel)} spills registers"] if spilled else []
    return "; ".join(parts)


def earlier(queries: Queries, run: str, task: Task) -> list[str]:
    """Lessons of runs that were over before this one began: of this target on this kind of device first, then of this
    target, then of other targets; failures were written first. Looked up once a run and written down: whatever becomes
    of the other runs, a resumed one asks the same of its model, whose answers are known by what was asked.
    """
    path = queries.workspace.run(run).earlier
    known: list[str] | None = read_json(path)
    if known is None:
        known = _earlier(queries, run, task)
        write_json(path, known)
    return known


def _earlier(queries: Queries, run: str, task: Task) -> list[str]:
    rows = queries.rows(
        "select l.text, r.target, r.device from lessons l join runs r on r.id = l.run join runs me on me.id = :run"
        " where r.id != :run and r.updated <= me.started order by l.id desc limit 400",
        {"run": run},
    )

    def near(row: dict[str, object]) -> int:
        same = row["target"] == task.target
        return 0 if same and row["device"] == task.device else 1 if same else 2

    ranked = sorted(rows, key=near)
    return list(
        dict.fromkeys(str(r["text"]) for r in ranked if near(r) < 2 or _HEAD.match(str(r["text"])))
    )[:MOST_SHOWN]


def for_direction(lessons: Iterable[str], d: Direction) -> tuple[str, ...]:
    """The same lessons, those about the direction's techniques first and said to be so."""
    about = set(techniques(f"{d.title} {d.detail}"))
    near: list[str] = []
    far: list[str] = []
    for text in lessons:
        head = _HEAD.match(text)
        shared = about & (
            {x.strip() for x in head[1].split(",")} if head else set(techniques(text))
        )
        (near if shared else far).append(
            f"TRIED BEFORE ({', '.join(sorted(shared))}): {text}" if shared else text
        )
    return (*near, *far)


def search(
    queries: Queries, target: str = "", device: str = "", technique: str = ""
) -> list[dict[str, object]]:
    """Lessons of all runs that fit, the newest first."""
    rows = queries.rows(
        "select l.text, l.round, l.run, r.target, r.device from lessons l join runs r on r.id = l.run"
        " where (:target = '' or r.target like '%' || :target || '%') and (:device = '' or r.device like :device || '%'"
        " or l.text like '%' || :device || '%') order by l.id desc",
        {"target": target, "device": device},
    )
    return [r for r in rows if not technique or technique in techniques_of(str(r["text"]))]


def techniques_of(text: str) -> tuple[str, ...]:
    """Of a lesson: what its head says, else what its words are about."""
    head = _HEAD.match(text)
    return tuple(x.strip() for x in head[1].split(",")) if head else techniques(text)
