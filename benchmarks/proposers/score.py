"""Scores of a proposer's run: the best share of the byte floor so far against candidates, tokens and dollars.

Pure functions over what the record holds. The floor of a modelled time is taken at the rate of the machine that the cpu
device imitates, and such a score is said to be modelled; it compares with other modelled scores alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent.types import Tried
from sandbox.verdict import Status

MODELLED_RATE = 4.3e12  # bytes a second


@dataclass(frozen=True)
class Point:
    """After `candidates` beside the seed: the best share of the floor so far, and what was paid until then."""

    candidates: int
    best: float
    tokens: int
    usd: float


@dataclass(frozen=True)
class Score:
    """One task. `gain`: the seed's time over the best one's; `failed`: candidates that did not pass."""

    task: str
    run: str
    kind: str
    seed: float
    best: float
    gain: float
    candidates: int
    passed: int
    failed: int
    tokens: int
    usd: float
    unpriced: int
    curve: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def share(t: Tried) -> float | None:
    """Of the byte floor, for a candidate that passed; None without a time."""
    if t.verdict.status is not Status.PASSED or t.us is None or t.verdict.timing is None:
        return None
    if t.fraction is not None:
        return t.fraction
    return t.verdict.timing.workloads[0].floor_bytes / MODELLED_RATE * 1e6 / t.us


def score(
    task: str,
    run: str,
    history: Sequence[Tried],
    calls: Sequence[Mapping[str, Any]],
    when: Mapping[int, str],
) -> Score | None:
    """`when`: candidate number -> the date it was done, to say what had been paid by then. None without a seed."""
    seed = next((t for t in history if t.seq == 0), None)
    start = share(seed) if seed else None
    if seed is None or start is None or seed.us is None:
        return None
    best, best_us, curve = start, seed.us, [Point(0, start, 0, 0.0)]
    tried = [t for t in history if t.seq > 0]
    for n, t in enumerate(tried, 1):
        reached = share(t)
        if reached is not None and reached > best and t.us is not None:
            best, best_us = reached, t.us
        tokens, usd = _paid(calls, when.get(t.seq, ""))
        curve.append(Point(n, best, tokens, usd))
    passed = sum(t.verdict.status is Status.PASSED for t in tried)
    tokens, usd = _paid(calls, "~")
    return Score(
        task, run, seed.verdict.timing.kind if seed.verdict.timing else "", start, best, seed.us / best_us, len(tried),
        passed, len(tried) - passed, tokens, usd, sum(c["cost"] is None for c in calls), tuple(curve),
    )  # fmt: skip


def _paid(calls: Sequence[Mapping[str, Any]], upto: str) -> tuple[int, float]:
    """Tokens and dollars of calls until a date; dates are ISO text, which sorts."""
    mine = [c for c in calls if (c["date"] or "") <= upto]
    tokens = sum((c["input_tokens"] or 0) + (c["output_tokens"] or 0) for c in mine)
    return tokens, sum(c["cost"] or 0.0 for c in mine)


def total(scores: Sequence[Score]) -> dict[str, float]:
    """Over all tasks: geometric means, so that no task outweighs the others, and what was paid."""
    if not scores:
        return {}
    mean = lambda values: math.exp(sum(math.log(max(v, 1e-9)) for v in values) / len(scores))  # noqa: E731
    return {
        "best": mean([s.best for s in scores]), "gain": mean([s.gain for s in scores]),
        "candidates": sum(s.candidates for s in scores), "failed": sum(s.failed for s in scores),
        "tokens": sum(s.tokens for s in scores), "usd": sum(s.usd for s in scores),
    }  # fmt: skip


def table(scores: Sequence[Score]) -> str:
    """For people: one line a task, then the means."""
    lines = [
        f"{'task':12s} {'seed':>8s} {'best':>8s} {'gain':>7s} {'tried':>6s} {'failed':>7s} {'tokens':>9s} {'$':>8s}"
    ]
    for s in scores:
        lines.append(
            f"{s.task:12s} {s.seed:8.2%} {s.best:8.2%} {s.gain:7.3f} {s.candidates:6d} {s.failed:7d} {s.tokens:9d} "
            f"{s.usd:8.3f}"
        )  # fmt: skip
        best_at = next(p for p in s.curve if p.best == s.best)
        lines.append(
            f"{'':12s} best after {best_at.candidates} candidates, {best_at.tokens} tokens, ${best_at.usd:.3f}"
        )
    all_ = total(scores)
    if all_:
        lines.append(
            f"{'mean':12s} {'':8s} {all_['best']:8.2%} {all_['gain']:7.3f} {int(all_['candidates']):6d} "
            f"{int(all_['failed']):7d} {int(all_['tokens']):9d} {all_['usd']:8.3f}"
        )
    kinds = sorted({s.kind for s in scores})
    return "\n".join(
        [
            *lines,
            f"times are {' and '.join(kinds) or 'missing'}; share of the byte floor, gain over the seed",
        ]
    )
