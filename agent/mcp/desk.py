"""What the tools do, without the protocol: read a run's record and files, queue submissions.

Writes nothing but submissions. A candidate's stage is read from the files that each node leaves,
so it is right whichever process works on the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import diffs
from agent.book import Book, describe, folded
from agent.budget import spent_before
from agent.claims import MAX_SOURCE_BYTES
from agent.config import RunSettings
from agent.mcp import reports
from agent.mcp.shapes import (
    Best,
    BudgetView,
    CandidateView,
    Comparison,
    Guide,
    History,
    Line,
    Report,
    Submission,
    TaskView,
)
from agent.models import inbox
from agent.models.inbox import Offer
from agent.review.remarks import remarks
from agent.runner import load_settings, task_of
from agent.seats import folder_of
from agent.store import Queries, Store
from agent.store.queries import NotFound
from agent.summary import STOPS
from agent.types import Task
from agent.workspace import Place, RunFiles, read_json
from sandbox.verdict import Status, Verdict
from targets.base import find

ENDED = ("done", "review", "spent")
SIGNATURE = "step(t, cfg, stream)"
MOST_HISTORY = 200
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


def read_task(desk: Desk) -> TaskView:
    task, queries = desk.task, desk.queries
    row = queries.run(desk.run)
    best = _best(desk, row)
    us = None
    if best is not None and best.report.us and best.report.fraction_of_floor:
        us = best.report.us * best.report.fraction_of_floor
    lessons = [*queries.lessons(desk.run), *remarks(queries.decisions(desk.run))]
    return TaskView(
        run=desk.run, target=task.target, summary=task.summary, mathematics=task.brief,
        device=task.device, arch=task.arch, workload=dict(task.workload), dims=dict(task.dims),
        signature=SIGNATURE, buffers=folded([describe(b) for b in task.buffers]),
        floor_read_bytes=task.floor.read_bytes, floor_write_bytes=task.floor.write_bytes,
        floor_flops=task.floor.flops, floor_us=us, best=best, lessons=lessons[-MOST_LESSONS:],
        earlier_lessons=_earlier(desk, task.target), state=_state(desk, row),
    )  # fmt: skip


def read_guide(desk: Desk) -> Guide:
    return Guide(Book().stable(desk.task))


def submit(desk: Desk, offer: Offer) -> Submission:
    """Raises Refused."""
    row = desk.queries.run(desk.run)
    if row["state"] in ENDED:
        raise Refused(f"run {desk.run} takes no more candidates: {_stopped(row)}")
    try:
        size = len(offer.source.encode())
    except UnicodeEncodeError as error:
        raise Refused("the source is no valid Unicode text") from error
    if size > MAX_SOURCE_BYTES:
        raise Refused(f"the source has {size} bytes, more than {MAX_SOURCE_BYTES}")
    if not offer.source.strip():
        raise Refused("the source is empty")
    at = inbox.submit(desk.folder, offer, lambda seq: _blameless(desk, seq))
    return status(desk, at.ticket)


def status(desk: Desk, ticket: str) -> Submission:
    """Raises Refused for a ticket that nobody was given here."""
    at = inbox.find(desk.folder, ticket)
    if at is None:
        raise Refused(f"there is no submission {ticket!r} in run {desk.run}")
    row = desk.queries.run(desk.run)
    if at.seq is None:
        note = _stopped(row) if row["state"] in ENDED else ""
        return Submission(ticket, None, "queued", False, at.ahead, note, None)
    found = _recorded(desk, row, at.seq)
    if found is not None:
        return Submission(ticket, at.seq, "recorded", True, 0, "", _report(desk, found))
    stage = _stage(desk, at.seq)
    verdict = _unrecorded(desk, at.seq) if stage == "judged" else None
    note = "its round is not over: promotion is decided then" if verdict else ""
    # Of a wider round the others may not even be proposed yet: nobody waits for them.
    done = verdict is not None and desk.settings.k > 1
    return Submission(ticket, at.seq, stage, done, 0, note, verdict)


def candidate(desk: Desk, seq: int) -> CandidateView:
    row = _row(desk, seq)
    source = desk.queries.workspace.text(row["source"])
    diff = ""
    if row["parent_seq"] is not None:
        parent = desk.queries.workspace.text(_row(desk, row["parent_seq"])["source"])
        diff = diffs.make(parent, source, f"a/{row['parent_seq']}.py", f"b/{seq}.py")
    return CandidateView(source, diff, _report(desk, row))


def compare(desk: Desk, a: int, b: int) -> Comparison:
    """Raises Refused for a candidate without a verdict."""
    rows = [_row(desk, seq) for seq in (a, b)]
    missing = [row["seq"] for row in rows if not row["blob"]]
    if missing:
        raise Refused(f"candidate {missing[0]} has no verdict")
    found = [_profiled(desk, row) for row in rows]
    sources = [desk.queries.workspace.text(row["source"]) for row in rows]
    return reports.comparison(rows, found, sources)


def history(desk: Desk) -> History:
    rows = desk.queries.candidates(desk.run)
    shown = rows[-MOST_HISTORY:]
    return History(
        desk.run, desk.queries.run(desk.run)["incumbent"], len(rows) - len(shown),
        [reports.history_row(row) for row in shown], inbox.waiting(desk.folder),
    )  # fmt: skip


def budget(desk: Desk) -> BudgetView:
    row = desk.queries.run(desk.run)
    limits = load_settings(desk.place, desk.run).limits
    spent = spent_before(desk.files, row["elapsed"])
    count = sum(r["seq"] > 0 for r in desk.queries.candidates(desk.run))
    lines = [
        Line("candidates", limits.candidates, count), Line("rounds", limits.rounds, row["rounds"]),
        Line("minutes", limits.minutes, spent.minutes),
        Line("GPU seconds", limits.gpu_seconds, spent.gpu_seconds),
        Line("dollars for models", limits.usd, spent.usd),
        Line("tokens of models", limits.tokens, spent.tokens),
    ]  # fmt: skip
    stopped = _stopped(row) if row["state"] in ENDED else ""
    return BudgetView(_state(desk, row), stopped, len(inbox.waiting(desk.folder)), lines)


def _best(desk: Desk, run: Mapping[str, Any]) -> Best | None:
    """None until the seed was judged."""
    row = next(
        (r for r in desk.queries.candidates(desk.run) if r["seq"] == (run["incumbent"] or 0)), None
    )
    found = _report(desk, row) if row else None
    if row is None or found is None:
        return None
    return Best(row["seq"], desk.queries.workspace.text(row["source"]), found)


def _row(desk: Desk, seq: int) -> dict[str, Any]:
    try:
        return desk.queries.candidate(f"{desk.run}-{seq}")
    except NotFound as error:
        raise Refused(f"run {desk.run} has no recorded candidate {seq}") from error


def _report(desk: Desk, row: Mapping[str, Any]) -> Report | None:
    if not row["blob"]:
        return None
    parent = None
    if row["parent_seq"] is not None:
        above = _row(desk, row["parent_seq"])
        parent = _profiled(desk, above) if above["blob"] else None
    verdict = desk.queries.workspace.verdict(row["blob"])
    return reports.report(row, verdict, _profiled(desk, row), parent)


def _profiled(desk: Desk, row: Mapping[str, Any]) -> Verdict:
    """The candidate's last verdict with times by kernel, else its last one."""
    workspace = desk.queries.workspace
    last = workspace.verdict(row["blob"])
    if last.status is not Status.PASSED:
        return last
    for earlier in reversed(desk.queries.verdicts(row["id"])):
        if earlier["artifact"] == row["artifact"]:
            verdict = workspace.verdict(earlier["blob"])
            if verdict.profile.get("kernels"):
                return verdict
    return last


def _recorded(desk: Desk, run: Mapping[str, Any], seq: int) -> dict[str, Any] | None:
    """The candidate's row once its round is decided."""
    for row in desk.queries.candidates(desk.run):
        if row["seq"] == seq:
            return row if run["rounds"] >= row["round"] else None
    return None


def _unrecorded(desk: Desk, seq: int) -> Report | None:
    result = read_json(desk.files.result(seq))
    verdict = desk.place.workspace.verdict(result["verdict"])
    row = {**result, "parent_seq": None, "promoted": False}
    return reports.report(row, verdict, verdict, None)


def _stage(desk: Desk, seq: int) -> str:
    files, step = desk.files, 0
    if files.result(seq).exists():
        return "judged"
    while files.proposal(seq, step + 1).exists():
        step += 1
    if not files.compiled(seq, step).exists():
        return "compiling"
    done = files.judged(seq, step, str(desk.settings.tier)).exists()
    return "confirming" if done else "judging"


def _blameless(desk: Desk, seq: int) -> bool:
    """Its last word says nothing about the candidate: the machine failed, or a budget ended it."""
    result = read_json(desk.files.result(seq))
    if result is None:
        return False
    return not desk.place.workspace.verdict(result["verdict"]).status.cacheable


def _earlier(desk: Desk, target: str) -> list[str]:
    """Lessons of other runs of this target, the latest last."""
    rows = desk.queries.rows(
        "select l.text, r.device from lessons l join runs r on r.id = l.run"
        " where r.target = :target and r.id != :run order by l.id desc limit :most",
        {"target": target, "run": desk.run, "most": MOST_LESSONS},
    )
    return [f"({row['device']}) {row['text']}" for row in reversed(rows)]


def _state(desk: Desk, row: Mapping[str, Any]) -> str:
    return "ended" if row["state"] in ENDED else str(row["state"])


def _stopped(row: Mapping[str, Any]) -> str:
    why = STOPS.get(row["stop"] or "", row["stop"] or row["state"])
    return f"{why}; a person can go on with `kernelgen resume {row['id']}` under other limits"
