"""Node `record`: the single writer of runs.db. Takes a round's finished results from disk, decides
on promotion.

Idempotent: run again after a kill it leaves the same rows, the same decision and the same
kernels_out.
"""

from __future__ import annotations

from typing import Any

from agent import search
from agent.plan import direction_of
from agent.state import Deps, RunState
from agent.store.store import CandidateRow, JudgedRow
from agent.winners import write_winner
from agent.workspace import read_json
from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.verdict import Status, Verdict

CALL_COLUMNS = (
    "scope", "n", "role", "model", "input_tokens", "output_tokens", "cache_read_tokens",
    "cache_write_tokens", "cost", "seconds", "error", "date",
)  # fmt: skip


def record(state: RunState, deps: Deps) -> dict[str, Any]:
    """Rows for everything that finished, and the round's decision."""
    sync(deps, state.get("round", 0))
    seqs = [q for q in state.get("seqs", []) if read_json(deps.files.result(q)) is not None]
    if not seqs:
        return {"done": None}
    rows = [candidate_row(deps, state["round"], seq) for seq in seqs]
    deps.store.add_candidates(deps.task.run, rows)
    out = _decide(state, deps, rows)
    deps.store.set_run(
        deps.task.run, rounds=state["round"], elapsed=deps.ledger.elapsed, updated=deps.now(),
        incumbent=out.get("incumbent", state.get("incumbent")),
    )  # fmt: skip
    return {**out, "done": None}


def sync(deps: Deps, upto: int) -> None:
    """Model calls and lessons that lie in the run's folder and not yet in the database."""
    run = deps.task.run
    calls = [
        {
            **{k: c[k] for k in CALL_COLUMNS},
            "prompt": c["prompt_blob"],
            "answer": deps.workspace.put(c["answer"]),
        }
        for c in deps.files.calls()
    ]
    deps.store.add_calls(run, calls)
    for round in range(1, upto + 1):
        deps.store.add_lessons(run, round, read_json(deps.files.lessons(round)) or [])


def candidate_row(deps: Deps, round: int, seq: int) -> CandidateRow:
    result = read_json(deps.files.result(seq))
    direction = direction_of(deps, round, seq)
    artifacts: dict[str, Artifact] = {}
    judged = []
    for row in result["judged"]:
        if row["artifact"] and row["artifact"] not in artifacts:
            folder = deps.workspace.artifact(row["artifact"])
            artifacts[row["artifact"]] = artifact_store.load(folder)
        verdict = deps.workspace.verdict(row["blob"])
        judged.append(
            JudgedRow(row["step"], verdict, row["blob"], row["tunables"], row["artifact"])
        )
    return CandidateRow(
        seq=seq, round=round, parent=direction.parent if round else None,
        proposer="seed" if not round else deps.proposer.name, direction=direction.title,
        note=result["note"], predicted_gain=result["predicted_gain"], source=result["source"],
        tunables=result["tunables"], declared=result["declared"], artifact=result["artifact"],
        verdict=deps.workspace.verdict(result["verdict"]), created=result["date"],
        duplicate_of=result["duplicate_of"], judged=tuple(judged),
        artifacts=tuple(artifacts.values()),
    )  # fmt: skip


def _decide(state: RunState, deps: Deps, rows: list[CandidateRow]) -> dict[str, Any]:
    """Counters and the incumbent after this round; the decision is in the database and on disk."""
    if state["round"] == 0:
        return _seed(deps, rows[0].verdict)
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
                _note(deps, state["round"], "keep", row.seq, reason)
    top = search.winner(fit)
    for seq, _ in fit:
        if seq != top:
            reason = f"better than candidate {incumbent}, but candidate {top} gains more"
            _note(deps, state["round"], "keep", seq, reason)
    if top is None:
        return {"stale": state.get("stale", 0) + 1, "infra": infra}
    reason = search.promotable(base, dict(fit)[top], deps.settings.confirm)[1]
    promote(deps, state["round"], top, reason, replaces=incumbent)
    return {"incumbent": top, "stale": 0, "infra": infra}


def promote(deps: Deps, round: int, seq: int, reason: str, replaces: int | None) -> None:
    _note(deps, round, "promote", seq, reason)
    write_winner(deps, seq, replaces)
    deps.reporter.promoted(seq, reason)


def _seed(deps: Deps, verdict: Verdict) -> dict[str, Any]:
    if verdict.status is not Status.PASSED:
        why = verdict.failure.message if verdict.failure else str(verdict.status)
        _note(deps, 0, "stop", 0, f"the seed did not pass: {why}"[:500])
        return {"stop": "seed_failed", "incumbent": 0}
    promote(deps, 0, 0, "the seed: what the run starts from", None)
    return {"incumbent": 0, "stale": 0}


def _note(deps: Deps, round: int, kind: str, seq: int, reason: str) -> None:
    deps.store.add_decision(
        deps.task.run,
        {"round": round, "kind": kind, "seq": seq, "reason": reason, "date": deps.now()},
    )
