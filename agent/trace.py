"""A profile as a Chrome trace (Perfetto, chrome://tracing): phases of blocks in time, or launches one after another.

Microseconds, as the format wants them. It draws nothing and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent.views import clean

Event = dict[str, Any]


def chrome(profile: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The JSON object of a trace file; None where the profile has neither marks nor launches."""
    timeline = profile.get("timeline")
    if timeline:
        events = list(_marks(timeline))
        how = f"{timeline['kind']}, marks in the kernel, {timeline['overhead']} x the step without them"
    elif profile.get("launches"):
        events = list(_launches(profile["launches"]))
        how = str(profile.get("method", ""))
    else:
        return None
    return {
        "traceEvents": events, "displayTimeUnit": "ns",
        "otherData": {"candidate": name, "step_us": profile.get("step_us"), "times": how},
    }  # fmt: skip


def _marks(timeline: Mapping[str, Any]) -> Iterator[Event]:
    """A process a role, a thread a block; blocks of one SM carry its number."""
    names = [(clean(str(n)), str(k)) for n, k in timeline["phases"]]
    for role in sorted({t["role"] for t in timeline["tracks"]}):
        yield _meta("process_name", role, 0, f"role {role}" if role else "blocks")
    for t in timeline["tracks"]:
        yield _meta("thread_name", t["role"], t["block"], f"block {t['block']} (SM {t['sm']})")
        marks = t["marks"]
        for (begin, phase, layer), (end, _, _) in zip(marks, marks[1:], strict=False):
            name, kind = names[phase]
            if kind != "end":
                yield {
                    "name": name, "cat": kind, "ph": "X", "ts": begin, "dur": round(end - begin, 4), "pid": t["role"],
                    "tid": t["block"], "args": {"layer": layer, "sm": t["sm"]},
                }  # fmt: skip


def _launches(rows: list[Mapping[str, Any]]) -> Iterator[Event]:
    yield _meta("process_name", 0, 0, "launches of a step")
    at = 0.0
    for x in rows:
        us = max(0.0, float(x["us"]))
        told = {k: v for k, v in x.items() if k not in ("kernel", "us", "parts")}
        yield {
            "name": clean(str(x["kernel"])), "cat": "launch", "ph": "X", "ts": round(at, 4), "dur": us, "pid": 0,
            "tid": 0, "args": told,
        }  # fmt: skip
        at += us


def _meta(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
