"""What a recorded round means: counters, the incumbent, and the reasons, as notes for the record.

The numbers decide (`agent.search`). It writes kernels_out; the notes are written to runs.db by
`agent.record`, which is the only one that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent import search
from agent.state import Deps, RunState
from agent.store.store import CandidateRow
from agent.winners import write_winner
from agent.workspace import read_json
from sandbox.verdict import Status, Verdict

Note = Callable[[str, int, str], None]


def decide(state: RunState, deps: Deps, rows: list[CandidateRow], note: Note) -> dict[str, Any]:
    """Counters and the incumbent after this round; `note` takes kind, candidate and reason."""
    if state["round"] == 0:
        return _seed(deps, rows[0].verdict, note)
    infra = state.get("infra", 0)
    for row in rows:
        infra = infra + 1 if row.verdict.status is Status.INFRA else 0
    incumbent = state["incumbent"]
    base = deps.workspace.verdict(read_json(deps.files.result(incumbent))["verdict"])
    fit: list[tuple[int, Verdict]] = []
    for row in rows:
        if row.duplicate_of is None:
            ok, reason = search.promotable(base, row.verdict, deps.settings.confirm)
            if ok:
                fit.append((row.seq, row.verdict))
            elif search.better(row.verdict):
                note("keep", row.seq, reason)
    top = search.winner(fit, {seq: _lines(deps, seq) for seq, _ in fit})
    if top is None:
        return {"stale": state.get("stale", 0) + 1, "infra": infra}
    chosen = dict(fit)[top]
    reason = search.promotable(base, chosen, deps.settings.confirm)[1]
    for seq, verdict in fit:
        if seq == top:
            continue
        shorter = (search.gain(verdict) or 0.0) >= (search.gain(chosen) or 0.0)
        why = "is shorter and cannot be told apart by its time" if shorter else "gains more"
        note("keep", seq, f"better than candidate {incumbent}, but candidate {top} {why}")
    note("promote", top, reason)
    promote(deps, top, reason)
    return {"incumbent": top, "stale": 0, "infra": infra}


def _lines(deps: Deps, seq: int) -> int:
    source = deps.workspace.get(read_json(deps.files.result(seq))["source"])
    return search.code_lines(source.decode("utf-8", "replace"))


def promote(deps: Deps, seq: int, reason: str) -> None:
    write_winner(deps, seq, alone=True)
    deps.reporter.promoted(seq, reason)


def _seed(deps: Deps, verdict: Verdict, note: Note) -> dict[str, Any]:
    if verdict.status is not Status.PASSED:
        why = verdict.failure.message if verdict.failure else str(verdict.status)
        note("stop", 0, f"the seed did not pass: {why}"[:500])
        return {"stop": "seed_failed", "incumbent": 0}
    reason = "the seed: what the run starts from"
    note("promote", 0, reason)
    promote(deps, 0, reason)
    return {"incumbent": 0, "stale": 0}
