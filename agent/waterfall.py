"""A profile's waterfall as lines of text, and as rows for pages: where a step's time goes and what is lost.

Reads `sandbox.judge.waterfall`'s form out of a verdict (docs/verdict.md). Old verdicts have none: then there is
nothing to show. Untrusted names are the caller's to clean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORDS = {
    "floor": "byte floor", "edge_latency": "exposed latency of edges", "waits": "waits for flags and barriers",
    "skew": "skew across SMs", "launch_gaps": "launch gaps", "rest": "rest",
}  # fmt: skip
SHOWN_PHASES = 14


def of(profile: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The waterfall of a profile, None where there is none."""
    found = profile.get("waterfall")
    return found if isinstance(found, Mapping) and found.get("parts") else None


def parts(fall: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(words, microseconds, share of the step); they add up to the step. An unexplained rest is named so."""
    step = float(fall["step_us"]) or 1.0
    out = []
    for key, words in WORDS.items():
        us = float(fall["parts"].get(key, 0.0))
        if key == "rest" and fall.get("unexplained"):
            words = "rest: UNEXPLAINED, over 10 %"
        out.append((words, us, us / step))
    return out


def ranks(profile: Mapping[str, Any]) -> list[str]:
    """How far the ranks of a job on several GPUs lay apart; a step takes as long as the slowest."""
    found = profile.get("ranks")
    if not found:
        return []
    return [
        f"ranks: the slowest counts; apart by {found['median_us']:.2f} us (median) and {found['most_us']:.2f} us (most)"
        f" in {found['intervals']} timed intervals"
    ]


def lines(profile: Mapping[str, Any], layers: bool = True) -> list[str]:
    """All of it, for people; `layers` off for a prompt."""
    fall = of(profile)
    if fall is None:
        return ranks(profile)
    out = [head(fall)]
    out += [f"  {us:10.2f} us {share:6.1%}  {words}" for words, us, share in parts(fall)]
    if fall.get("hidden_us"):
        out.append(
            f"  ({fall['hidden_us']:.2f} us of waiting are hidden behind bytes that stream on)"
        )
    out += [
        f"  loss {i}: {x['us']:.2f} us ({x['share']:.1%}): {x['text']}"
        for i, x in enumerate(fall["losses"], 1)
    ]
    out += _phases(fall.get("phases", ()))
    if layers:
        out += _layers(fall.get("layers", ()))
    return out


def head(fall: Mapping[str, Any]) -> str:
    """What was measured how, in one line."""
    text = f"waterfall ({fall['kind']}, {fall['method']}): a step of {fall['step_us']:.2f} us"
    if fall.get("overhead"):
        text += f" in the build with marks, which takes {fall['overhead']:.3f} x the {fall['plain_us']:.2f} us without"
    return text + f"; floor {fall['floor_us']:.2f} us"


def _phases(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    out = (
        ["  phase (mean over blocks, sum over layers): us, times, of edges latency + skew"]
        if rows
        else []
    )
    for p in rows[:SHOWN_PHASES]:
        edge = f"   {p['latency']:.2f} + {p['skew']:.2f}" if p["kind"] == "edge" else ""
        out.append(f"  {p['us']:10.2f} us  {p['calls']:4d} x  {p['kind']:5s} {p['phase']}{edge}")
    if len(rows) > SHOWN_PHASES:
        rest = sum(float(p["us"]) for p in rows[SHOWN_PHASES:])
        out.append(f"  {rest:10.2f} us in {len(rows) - SHOWN_PHASES} more phases")
    return out


def _layers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(rows) < 2 or len(rows) > 128:
        return []
    out = ["  layer or launch: us = work + edge latency + skew + waits"]
    for x in rows:
        sums = " + ".join(f"{x[k]:.2f}" for k in ("work", "latency", "skew", "waits"))
        out.append(f"  {x['layer']:5d} {x['us']:9.2f} = {sums}")
    return out
