"""A waterfall that adds up: step = byte floor + edge latency + waits + skew + launch gaps + rest.

From spans inside kernels (`sandbox.judge.timeline`) or, for plans of many launches, from their times. Every block's
time is accounted for, and the parts are means over blocks, so that their sum is the step. An edge is split at the last
arrival: what blocks wait until then is skew, what passes after it is latency. Where memory streams on while blocks
wait (work alone is shorter than the floor), the hidden share is taken off all waiting alike, so that only exposed time
counts. Arithmetic only; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PARTS = ("floor", "edge_latency", "waits", "skew", "launch_gaps", "rest")
UNEXPLAINED = 0.1
LOSSES = 3
LONGEST_GAP_US = 3.0  # a boundary between launches of one graph costs 1 to 3 us on an H200


@dataclass(frozen=True)
class Span:
    """A phase of one block. Times in microseconds from any common zero. `nth` counts its repeats in a layer."""

    track: int
    phase: str
    kind: str
    layer: int
    begin: float
    end: float
    nth: int = 0


@dataclass(frozen=True)
class Row:
    """A phase of one layer, means over blocks in microseconds; `latency` and `skew` of edges."""

    phase: str
    kind: str
    layer: int
    calls: int
    us: float
    latency: float = 0.0
    skew: float = 0.0


@dataclass(frozen=True)
class Step:
    """What the parts must add up to. `floor_us`: bytes that must move, at the rate memory gives."""

    us: float
    floor_us: float
    kind: str = "measured"


@dataclass(frozen=True)
class Loss:
    """Time over the floor with one cause, in microseconds of the step."""

    us: float
    text: str
    phase: str = ""


@dataclass
class _Sums:
    rows: list[Row] = field(default_factory=list)
    ends: float = 0.0
    gaps: float = 0.0


def of_spans(spans: Sequence[Span], step: Step) -> dict[str, Any]:
    """The waterfall of one kernel's blocks; `spans` of the role that does the work, all blocks of it."""
    sums = _Sums(_rows(spans))
    blocks: dict[int, tuple[float, float]] = {}
    for s in spans:
        begin, end = blocks.get(s.track, (s.begin, s.end))
        blocks[s.track] = (min(begin, s.begin), max(end, s.end))
    if not blocks:
        return {}
    first, last = min(b for b, _ in blocks.values()), max(e for _, e in blocks.values())
    sums.ends = sum((b - first) + (last - e) for b, e in blocks.values()) / len(blocks)
    covered = sum(e - b for b, e in blocks.values()) / len(blocks)
    unmarked = covered - sum(r.us for r in sums.rows)
    if unmarked > 1e-9:
        sums.rows.append(Row("between marks", "work", -1, 1, unmarked))
    sums.gaps = max(0.0, step.us - (last - first))
    total = last - first + sums.gaps  # a device clock may run longer than the events around it
    return _report("marks inside the kernel", sums, Step(total, step.floor_us, step.kind))


def _rows(spans: Iterable[Span]) -> list[Row]:
    tracks: set[int] = set()
    groups: dict[tuple[str, str, int, int], list[Span]] = {}
    for s in spans:
        tracks.add(s.track)
        groups.setdefault((s.phase, s.kind, s.layer, s.nth), []).append(s)
    n = max(1, len(tracks))
    table: dict[tuple[str, str, int], Row] = {}
    for (phase, kind, layer, _), same in groups.items():
        us = sum(s.end - s.begin for s in same) / n
        latency = skew = 0.0
        if kind == "edge":
            arrival = max(s.begin for s in same)
            skew = sum(min(arrival, s.end) - s.begin for s in same) / n
            latency = us - skew
        old = table.get((phase, kind, layer), Row(phase, kind, layer, 0, 0.0))
        table[phase, kind, layer] = Row(
            phase, kind, layer, old.calls + 1, old.us + us, old.latency + latency, old.skew + skew
        )
    return list(table.values())


def of_launches(
    launches: Sequence[Mapping[str, Any]], step: Step, gap_us: float | None = None
) -> dict[str, Any]:
    """The same from the times of launches. Each has `kernel`, `us`, and `bytes` if known; `parts` where they are
    modelled. A gap that was not measured is taken as the shortest launch's whole time, at most 3 us."""
    if not launches:
        return {}
    launches = _fitting(launches, step.us)
    calls = sum(_calls(x) for x in launches)
    shortest = min(x["us"] / _calls(x) for x in launches)
    gap = min(shortest, LONGEST_GAP_US) if gap_us is None else gap_us
    sums = _Sums()
    for n, x in enumerate(launches):
        parts = x.get("parts") or {}
        own = parts.get("launch", min(gap * _calls(x), x["us"]))
        latency, wait = parts.get("edges", 0.0), parts.get("barriers", 0.0)
        sums.gaps += own
        name = str(x["kernel"])
        if latency:
            sums.rows.append(Row(f"edges of {name}", "edge", n, 1, latency, latency))
        if wait:
            sums.rows.append(Row(f"barriers of {name}", "wait", n, 1, wait))
        sums.rows.append(Row(name, "work", n, _calls(x), max(0.0, x["us"] - own - latency - wait)))
    sums.gaps += max(0.0, step.us - sum(x["us"] for x in launches))
    total = sums.gaps + sum(r.us for r in sums.rows)
    found = _report("launches", sums, Step(total, step.floor_us, step.kind), _bytes(launches))
    found["gap_us"] = round(gap, 4)
    found["launch_count"] = calls
    return found


def _fitting(launches: Sequence[Mapping[str, Any]], us: float) -> list[Mapping[str, Any]]:
    """Differences of two measurements may fall below zero, and then the others are too long: they must fit the step."""
    whole = sum(max(0.0, x["us"]) for x in launches)
    scale = min(1.0, us / whole) if whole > 0 else 1.0
    return [{**x, "us": scale * max(0.0, x["us"])} for x in launches]


def _shares(work: Mapping[str, float], size: Mapping[str, float], floor: float) -> dict[str, float]:
    """The floor over phases of work by their bytes, none more than it took: a launch may name more than it reads."""
    share = dict.fromkeys(work, 0.0)
    left, open_ = min(floor, sum(work.values())), set(work)
    while left > 1e-9 and open_:
        whole = sum(size[k] for k in open_)
        if whole <= 0:
            break
        given = {k: min(left * size[k] / whole, work[k] - share[k]) for k in open_}
        for k, us in given.items():
            share[k] += us
        left -= sum(given.values())
        open_ = {k for k in open_ if work[k] - share[k] > 1e-9 and given[k] > 0}
    return share


def _calls(launch: Mapping[str, Any]) -> int:
    return int(launch.get("last", 0)) - int(launch.get("first", 0)) + 1


def _bytes(launches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for x in launches:
        if x.get("bytes"):
            out[str(x["kernel"])] = out.get(str(x["kernel"]), 0.0) + float(x["bytes"])
    return out


def _report(
    method: str, sums: _Sums, step: Step, weights: Mapping[str, float] | None = None
) -> dict[str, Any]:
    work = sum(r.us for r in sums.rows if r.kind == "work")
    raw = {
        "edge_latency": sum(r.latency for r in sums.rows),
        "waits": sum(r.us for r in sums.rows if r.kind == "wait"),
        "skew": sum(r.skew for r in sums.rows) + sums.ends,
        "launch_gaps": sums.gaps,
    }
    floor = min(step.floor_us, step.us)
    waiting = sum(raw.values())
    hidden = min(max(0.0, floor - work), waiting)
    exposed = (waiting - hidden) / waiting if waiting > 0 else 0.0
    parts = {"floor": floor, **{k: v * exposed for k, v in raw.items()}}
    parts["rest"] = step.us - sum(parts.values())
    losses = _losses(sums, floor, exposed, weights or {})
    return {
        "method": method, "kind": step.kind, "step_us": _r(step.us), "floor_us": _r(step.floor_us),
        "parts": {k: _r(parts[k]) for k in PARTS}, "hidden_us": _r(hidden),
        "unexplained": parts["rest"] > UNEXPLAINED * step.us,
        "losses": [{"us": _r(x.us), "share": _r(x.us / step.us), "phase": x.phase, "text": x.text} for x in losses],
        "phases": _phases(sums.rows), "layers": _layers(sums.rows),
    }  # fmt: skip


def _losses(sums: _Sums, floor: float, exposed: float, weights: Mapping[str, float]) -> list[Loss]:
    """All causes of time over the floor, the largest three. Work counts as far as it is over its share of the floor."""
    found = [
        Loss(sums.gaps * exposed, "launches: time in which no block of the step was running"),
        Loss(sums.ends * exposed, "blocks that start late or end early"),
    ]
    for p in _phases(sums.rows):
        name, calls = p["phase"], p["calls"]
        if p["kind"] == "edge":
            each = p["latency"] / calls
            words = f"{name}: after the last block has arrived the others go on {each:.2f} us later, {calls} times"
            found.append(Loss(p["latency"] * exposed, words, name))
            words = f"{name}: blocks arrive at different times and wait {p['skew'] / calls:.2f} us for the slowest"
            found.append(Loss(p["skew"] * exposed, words, name))
        elif p["kind"] == "wait":
            found.append(
                Loss(
                    p["us"] * exposed,
                    f"{name}: waits {p['us'] / calls:.2f} us, {calls} times",
                    name,
                )
            )
    work = [p for p in _phases(sums.rows) if p["kind"] == "work"]
    known = all(p["phase"] in weights for p in work) and bool(work)
    size = {p["phase"]: weights[p["phase"]] if known else p["us"] for p in work}
    shares = _shares({p["phase"]: p["us"] for p in work}, size, floor)
    for p in work:
        share = shares[p["phase"]]
        words = f"{p['phase']}: {p['us']:.2f} us of work for bytes that take {share:.2f} us"
        found.append(Loss(p["us"] - share, words, p["phase"]))
    positive = [x for x in found if x.us > 0.005]
    return sorted(positive, key=lambda x: -x.us)[:LOSSES]


def _phases(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Sums over layers, the costliest first."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for r in rows:
        p = table.setdefault(
            (r.phase, r.kind),
            {"phase": r.phase, "kind": r.kind, "calls": 0, "us": 0.0, "latency": 0.0, "skew": 0.0},
        )
        p["calls"] += r.calls
        for key, value in (("us", r.us), ("latency", r.latency), ("skew", r.skew)):
            p[key] = _r(p[key] + value)
    return sorted(table.values(), key=lambda p: -p["us"])


def _layers(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """By layer (launch number where there are no layers): time in work, edges (latency, skew) and waits."""
    table: dict[int, dict[str, Any]] = {}
    for r in rows:
        if r.layer < 0:
            continue
        x = table.setdefault(
            r.layer, {"layer": r.layer, "us": 0.0, "work": 0.0, "latency": 0.0, "skew": 0.0, "waits": 0.0, "phases": {}}
        )  # fmt: skip
        x["us"] = _r(x["us"] + r.us)
        x["work"] = _r(x["work"] + (r.us if r.kind == "work" else 0.0))
        x["waits"] = _r(x["waits"] + (r.us if r.kind == "wait" else 0.0))
        x["latency"], x["skew"] = _r(x["latency"] + r.latency), _r(x["skew"] + r.skew)
        x["phases"][r.phase] = _r(x["phases"].get(r.phase, 0.0) + r.us)
    return [table[k] for k in sorted(table)]


def _r(value: float) -> float:
    return round(float(value), 4)
