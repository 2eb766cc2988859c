"""One run as its authors see it: the record's rows, verdicts and files behind the tools.

Reads only. A candidate's stage is read from the files that each node leaves, so it is right
whichever process works on the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent import difference, profiles
from agent.config import RunSettings
from agent.difference import Side
from agent.mcp import reports
from agent.mcp.shapes import Best, Report
from agent.runner import load_settings, task_of
from agent.seats import folder_of
from agent.store import Queries, Store
from agent.store.queries import NotFound
from agent.summary import STOPS
from agent.types import Task
from agent.workspace import Place, RunFiles, read_json
from sandbox.verdict import Verdict
from targets.base import find

ENDED = ("done", "review", "spent")
MOST_LESSONS = 40


class Refused(Exception):
    """What was asked for cannot be done; the message says why."""


@dataclass(frozen=True)
class Desk:
    """One run, as its authors see it."""

    place: Place
    run: str
    settings: RunSettings
    queries: Queries
    folder: Path

    @staticmethod
    def of(place: Place, run: str) -> Desk:
        """Raises LookupError."""
        settings = load_settings(place, run)
        queries = Queries(Store(place.db), place.workspace)
        return Desk(place, run, settings, queries, folder_of(place, run, settings))

    @property
    def files(self) -> RunFiles:
        return self.place.workspace.run(self.run)

    @property
    def task(self) -> Task:
        return task_of(self.run, self.settings, find(self.settings.target))


def best_of(desk: Desk, run: Mapping[str, Any]) -> Best | None:
    """None until the seed was judged."""
    row = next(
        (r for r in desk.queries.candidates(desk.run) if r["seq"] == (run["incumbent"] or 0)), None
    )
    found = report_of(desk, row) if row else None
    if row is None or found is None:
        return None
    return Best(row["seq"], desk.queries.workspace.text(row["source"]), found)


def row_of(desk: Desk, seq: int) -> dict[str, Any]:
    try:
        return desk.queries.candidate(f"{desk.run}-{seq}")
    except NotFound as error:
        raise Refused(f"run {desk.run} has no recorded candidate {seq}") from error


def report_of(desk: Desk, row: Mapping[str, Any]) -> Report | None:
    if not row["blob"]:
        return None
    parent = None
    if row["parent_seq"] is not None:
        above = row_of(desk, row["parent_seq"])
        parent = profiled(desk, above) if above["blob"] else None
    verdict = desk.queries.workspace.verdict(row["blob"])
    made = reports.report(row, verdict, profiled(desk, row), parent)
    return (
        made if parent is None else replace(made, difference=_difference(desk, row, above, parent))
    )


def _difference(
    desk: Desk, row: Mapping[str, Any], above: Mapping[str, Any], parent: Verdict
) -> list[str]:
    text = desk.queries.workspace.text
    return difference.lines(
        Side(text(above["source"]), parent), Side(text(row["source"]), profiled(desk, row))
    )


def profiled(desk: Desk, row: Mapping[str, Any]) -> Verdict:
    """The verdict that holds the candidate's profile, of one that has a verdict."""
    found = profiles.profiled(desk.queries, row)
    assert found is not None
    return found


def recorded(desk: Desk, run: Mapping[str, Any], seq: int) -> dict[str, Any] | None:
    """The candidate's row once its round is decided."""
    for row in desk.queries.candidates(desk.run):
        if row["seq"] == seq:
            return row if run["rounds"] >= row["round"] else None
    return None


def unrecorded(desk: Desk, seq: int) -> Report | None:
    result = read_json(desk.files.result(seq))
    verdict = desk.place.workspace.verdict(result["verdict"])
    row = {**result, "parent_seq": None, "promoted": False}
    return reports.report(row, verdict, verdict, None)


def stage_of(desk: Desk, seq: int) -> str:
    files, step = desk.files, 0
    if files.result(seq).exists():
        return "judged"
    while files.proposal(seq, step + 1).exists():
        step += 1
    if not files.compiled(seq, step).exists():
        return "compiling"
    done = files.judged(seq, step, str(desk.settings.tier)).exists()
    return "confirming" if done else "judging"


def blameless(desk: Desk, seq: int) -> bool:
    """Its last word says nothing about the candidate: the machine failed, or a budget ended it."""
    result = read_json(desk.files.result(seq))
    if result is None:
        return False
    return not desk.place.workspace.verdict(result["verdict"]).status.cacheable


def earlier_lessons(desk: Desk, target: str) -> list[str]:
    """Lessons of other runs of this target, the latest last."""
    rows = desk.queries.rows(
        "select l.text, r.device from lessons l join runs r on r.id = l.run"
        " where r.target = :target and r.id != :run order by l.id desc limit :most",
        {"target": target, "run": desk.run, "most": MOST_LESSONS},
    )
    return [f"({row['device']}) {row['text']}" for row in reversed(rows)]


def state_of(row: Mapping[str, Any]) -> str:
    return "ended" if row["state"] in ENDED else str(row["state"])


def why_stopped(row: Mapping[str, Any]) -> str:
    why = STOPS.get(row["stop"] or "", row["stop"] or row["state"])
    return f"{why}; a person can go on with `kernelgen resume {row['id']}` under other limits"
