"""What a report and the pages show of a run, read once: points, lineage, spending, dossiers.

Plain frozen data from the record; plots, HTML and Markdown are made of it elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agent.locks import state_of
from agent.review.decide import Decision, decisions, standing
from agent.review.dossier import Dossier, Version, dossier, promoted
from agent.store import Queries


@dataclass(frozen=True)
class Point:
    """A recorded candidate as a point of the plots. `us` microseconds a step, `low` to `high` its
    95 % interval as far as the paired speed-up gives one; `usd` and `minutes` since the start.
    """

    seq: int
    round: int
    parent: int | None
    result: str
    promoted: bool
    direction: str
    us: float | None
    low: float | None
    high: float | None
    fraction_measured: float | None
    fraction_spec: float | None
    speedup: tuple[float, float, float] | None
    predicted: float | None
    usd: float | None
    minutes: float | None
    word: str

    @property
    def fraction(self) -> float | None:
        got = self.fraction_measured
        return got if got is not None else self.fraction_spec


@dataclass(frozen=True)
class Spent:
    """Of the whole run. `usd` counts priced calls only; `unpriced` is how many were not."""

    minutes: float
    usd: float
    tokens: int
    calls: int
    unpriced: int


@dataclass(frozen=True)
class RunView:
    """A run. `dossiers`: the promoted candidates, the newest first. `kinds`: measured, modelled."""

    run: Mapping[str, Any]
    workload: Mapping[str, Any]
    points: tuple[Point, ...]
    dossiers: tuple[Dossier, ...]
    lessons: tuple[str, ...]
    decisions: tuple[Decision, ...]
    spent: Spent
    kinds: tuple[str, ...]

    @property
    def best(self) -> Dossier | None:
        return self.dossiers[0] if self.dossiers else None

    @property
    def live(self) -> bool:
        return bool(self.run["state"] == "running")


def run_view(queries: Queries, run: Mapping[str, Any]) -> RunView:
    """Raises Missing for a lost source or verdict of a promoted candidate."""
    run = {**run, "state": state_of(queries.workspace, run)}
    rows = queries.candidates(run["id"])
    calls = queries.calls(run["id"])
    priced = [c["cost"] for c in calls if c["cost"] is not None]
    known: dict[int, Version] = {}
    tokens = sum((c["input_tokens"] or 0) + (c["output_tokens"] or 0) for c in calls)
    return RunView(
        run=run, workload=json.loads(run["workload"] or "{}"),
        points=tuple(point(queries, run, row, calls) for row in rows),
        dossiers=tuple(dossier(queries, run, s, known) for s in promoted(queries, run["id"])),
        lessons=queries.lessons(run["id"]), decisions=decisions(queries, run["id"]),
        spent=Spent(run["elapsed"] / 60, sum(priced), tokens, len(calls), len(calls) - len(priced)),
        kinds=tuple(sorted({r["kind"] for r in rows if r["kind"]})),
    )  # fmt: skip


def point(
    queries: Queries, run: Mapping[str, Any], row: Mapping[str, Any], calls: list[dict[str, Any]]
) -> Point:
    us, ratio = row["us"], row["speedup_incumbent"]
    bounds = (row["incumbent_low"], row["incumbent_high"])
    paired = ratio is not None and None not in bounds and min(bounds) > 0
    word = standing(queries, row) if row["promoted"] and row["seq"] else None
    result = str(row["outcome"] or row["status"])
    if row["duplicate_of"] is not None:
        result = f"same work as {row['duplicate_of']}"
    return Point(
        seq=row["seq"], round=row["round"], parent=row["parent_seq"], result=result,
        promoted=bool(row["promoted"]), direction=row["direction"] or "", us=us,
        low=us * ratio / bounds[1] if paired and us else None,
        high=us * ratio / bounds[0] if paired and us else None,
        fraction_measured=row["fraction_of_floor_measured"],
        fraction_spec=row["fraction_of_floor_spec"],
        speedup=(ratio, *bounds) if paired else None, predicted=row["predicted_gain"],
        usd=_paid(calls, row["created"]), minutes=_minutes(run["started"], row["created"]),
        word=word.kind if word else "",
    )  # fmt: skip


def _paid(calls: list[dict[str, Any]], upto: str | None) -> float | None:
    """Dollars for model calls until then; None where nothing was priced."""
    if upto is None or all(c["cost"] is None for c in calls):
        return None
    return float(sum(c["cost"] or 0.0 for c in calls if (c["date"] or "") <= upto))


def _minutes(start: str, end: str | None) -> float | None:
    try:
        began, ended = datetime.fromisoformat(start), datetime.fromisoformat(end or "")
    except ValueError:
        return None
    return (ended - began).total_seconds() / 60
