"""The single writer of runs.db: the graph's node `record`, and with it the opening and closing of
runs, files judged by hand, evidence from other hosts, people's decisions and exports.

Nothing else calls the store's writing methods (a test reads every module for that), each of which is
one immediate transaction, so writers wait for each other. The facts lie on disk before they come
here: written again after a kill they leave the same rows. LangGraph keeps its checkpoints in the
same file by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.plan import direction_of
from agent.promote import decide
from agent.state import Deps, RunState
from agent.store import RunRow, Store
from agent.store.store import CandidateRow, JudgedRow
from agent.workspace import Place, Workspace, read_json, write_json
from sandbox import artifact_store
from sandbox.artifact import Artifact

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

    def note(kind: str, seq: int, reason: str) -> None:
        decision = {"round": state["round"], "kind": kind, "seq": seq, "reason": reason}
        deps.store.add_decision(deps.task.run, {**decision, "date": deps.now()})

    out = decide(state, deps, rows, note)
    deps.store.set_run(
        deps.task.run, rounds=state["round"], elapsed=deps.ledger.elapsed, updated=deps.now(),
        incumbent=out.get("incumbent", state.get("incumbent")),
    )  # fmt: skip
    return {**out, "done": None}


def sync(deps: Deps, upto: int) -> None:
    """What lies in the run's folder and not yet in the database: calls, lessons, evidence."""
    run = deps.task.run
    calls = [
        {
            **{k: c[k] for k in CALL_COLUMNS},
            "attempt": c.get("attempt", 0),
            "estimated": int(c.get("estimated", False)),
            "prompt": c["prompt_blob"],
            "answer": deps.workspace.put(c["answer"]),
        }
        for c in deps.files.calls()
    ]
    deps.store.add_calls(run, calls)
    for round in range(1, upto + 1):
        deps.store.add_lessons(run, round, read_json(deps.files.lessons(round)) or [])
    _take_evidence(deps.store, deps.workspace, run)


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


def opened(db: Path, row: RunRow) -> None:
    """A new run. Raises Corrupt, OSError."""
    Store(db).add_run(row)


def changed(db: Path, run: str, **values: Any) -> None:
    """The run's row: `state`, `stop`, `message`, `elapsed`, `settings`, `updated`."""
    Store(db).set_run(run, **values)


def closed(deps: Deps, round: int, **values: Any) -> None:
    """The last pass of a session: what no round took in any more, and how it ended."""
    sync(deps, round)
    deps.store.set_run(deps.task.run, **values)


def by_hand(db: Path, run: str, row: CandidateRow) -> None:
    """A file that was judged outside the loop."""
    Store(db).add_candidates(run, [row])


def evidence(place: Place, run: str, seq: int, judged: JudgedRow) -> None:
    """A further verdict on what the run has judged; it lies in the run's folder first."""
    path = place.workspace.run(run).evidence(judged.blob)
    said = {"seq": seq, "step": judged.step, "tunables": dict(judged.tunables)}
    write_json(path, {**said, "artifact": judged.artifact, "blob": judged.blob})
    _take_evidence(Store(place.db), place.workspace, run)


def _take_evidence(store: Store, workspace: Workspace, run: str) -> None:
    for path in sorted(workspace.run(run).evidence("").parent.glob("*.json")):
        e = read_json(path)
        verdict = workspace.verdict(e["blob"])
        row = JudgedRow(e["step"], verdict, e["blob"], e["tunables"], e["artifact"], "imported")
        store.add_verdict(run, e["seq"], row)


def reviewed(db: Path, run: str, seq: int, row: Mapping[str, Any]) -> None:
    """A person's decision; `row` as `Store.add_review` takes it."""
    Store(db).add_review(run, seq, row)


def exported(db: Path, run: str, seq: int, row: Mapping[str, Any]) -> None:
    """A bundle or patch that left; `row`: kind, path, date."""
    Store(db).add_export(run, seq, row)
