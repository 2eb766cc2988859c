"""What each tool does, without the protocol: look at a run, queue a submission.

Writes nothing but submissions; refusals say why.
"""

from __future__ import annotations

from agent import diffs
from agent.book import Book, describe, folded
from agent.budget import spent_before
from agent.claims import MAX_SOURCE_BYTES
from agent.mcp import reports
from agent.mcp.desk import (
    ENDED,
    MOST_LESSONS,
    Desk,
    Refused,
    best_of,
    blameless,
    earlier_lessons,
    profiled,
    recorded,
    report_of,
    row_of,
    stage_of,
    state_of,
    unrecorded,
    why_stopped,
)
from agent.mcp.shapes import (
    BudgetView,
    CandidateView,
    Comparison,
    Guide,
    History,
    Line,
    Submission,
    TaskView,
)
from agent.models import inbox
from agent.models.inbox import Offer
from agent.review.remarks import remarks
from agent.runner import load_settings

SIGNATURE = "step(t, cfg, stream)"
MOST_HISTORY = 200


def read_task(desk: Desk) -> TaskView:
    task, queries = desk.task, desk.queries
    row = queries.run(desk.run)
    best = best_of(desk, row)
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
        earlier_lessons=earlier_lessons(desk, task.target), state=state_of(row),
    )  # fmt: skip


def read_guide(desk: Desk) -> Guide:
    return Guide(Book().stable(desk.task))


def submit(desk: Desk, offer: Offer) -> Submission:
    """Raises Refused."""
    row = desk.queries.run(desk.run)
    if row["state"] in ENDED:
        raise Refused(f"run {desk.run} takes no more candidates: {why_stopped(row)}")
    try:
        size = len(offer.source.encode())
    except UnicodeEncodeError as error:
        raise Refused("the source is no valid Unicode text") from error
    if size > MAX_SOURCE_BYTES:
        raise Refused(f"the source has {size} bytes, more than {MAX_SOURCE_BYTES}")
    if not offer.source.strip():
        raise Refused("the source is empty")
    at = inbox.submit(desk.folder, offer, lambda seq: blameless(desk, seq))
    return status(desk, at.ticket)


def status(desk: Desk, ticket: str) -> Submission:
    """Raises Refused for a ticket that nobody was given here."""
    at = inbox.find(desk.folder, ticket)
    if at is None:
        raise Refused(f"there is no submission {ticket!r} in run {desk.run}")
    row = desk.queries.run(desk.run)
    if at.seq is None:
        note = why_stopped(row) if row["state"] in ENDED else ""
        return Submission(ticket, None, "queued", False, at.ahead, note, None)
    found = recorded(desk, row, at.seq)
    if found is not None:
        return Submission(ticket, at.seq, "recorded", True, 0, "", report_of(desk, found))
    stage = stage_of(desk, at.seq)
    verdict = unrecorded(desk, at.seq) if stage == "judged" else None
    note = "its round is not over: promotion is decided then" if verdict else ""
    # Of a wider round the others may not even be proposed yet: nobody waits for them.
    done = verdict is not None and desk.settings.k > 1
    return Submission(ticket, at.seq, stage, done, 0, note, verdict)


def candidate(desk: Desk, seq: int) -> CandidateView:
    row = row_of(desk, seq)
    source = desk.queries.workspace.text(row["source"])
    diff = ""
    if row["parent_seq"] is not None:
        parent = desk.queries.workspace.text(row_of(desk, row["parent_seq"])["source"])
        diff = diffs.make(parent, source, f"a/{row['parent_seq']}.py", f"b/{seq}.py")
    return CandidateView(source, diff, report_of(desk, row))


def compare(desk: Desk, a: int, b: int) -> Comparison:
    """Raises Refused for a candidate without a verdict."""
    rows = [row_of(desk, seq) for seq in (a, b)]
    missing = [row["seq"] for row in rows if not row["blob"]]
    if missing:
        raise Refused(f"candidate {missing[0]} has no verdict")
    found = [profiled(desk, row) for row in rows]
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
    stopped = why_stopped(row) if row["state"] in ENDED else ""
    return BudgetView(state_of(row), stopped, len(inbox.waiting(desk.folder)), lines)
