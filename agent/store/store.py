"""Store: the only writer of runs.db. Every method is idempotent: recording twice leaves one record.

It writes rows from finished results; the texts they name lie in the workspace as blobs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from agent.store.database import checked, migrate, transaction
from sandbox.artifact import Artifact
from sandbox.verdict import Ratio, Verdict, WorkloadTiming


@dataclass(frozen=True)
class RunRow:
    """A new run. `kind`: optimize, or evaluate for files judged by hand."""

    id: str
    target: str
    kind: str
    device: str
    proposer: str
    model: str
    workload: Mapping[str, Any]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    started: str


@dataclass(frozen=True)
class JudgedRow:
    """One verdict of one version (`step`) of a candidate. `blob` is the verdict's sha256 in the
    workspace.
    """

    step: int
    verdict: Verdict
    blob: str
    tunables: Mapping[str, Any]
    artifact: str | None = None
    origin: str = "local"


@dataclass(frozen=True)
class CandidateRow:
    """A finished candidate. `parent` is a `seq` of the same run."""

    seq: int
    round: int
    parent: int | None
    proposer: str
    direction: str
    note: str
    predicted_gain: float | None
    source: str
    tunables: Mapping[str, Any]
    declared: Mapping[str, Any]
    artifact: str | None
    verdict: Verdict
    created: str
    duplicate_of: int | None = None
    judged: tuple[JudgedRow, ...] = ()
    artifacts: tuple[Artifact, ...] = field(default_factory=tuple)


class Store:
    """Opened once per process; holds no connection."""

    def __init__(self, path: Path) -> None:
        """Creates the file and brings its tables up to date. Raises Corrupt, OSError."""
        self.path = path
        migrate(path)

    def add_run(self, run: RunRow) -> None:
        row = {
            "id": run.id, "target": run.target, "kind": run.kind, "device": run.device,
            "proposer": run.proposer, "model": run.model, "workload": _json(run.workload),
            "settings": _json(run.settings), "versions": _json(run.versions),
            "started": run.started, "updated": run.started, "state": "running", "rounds": 0,
            "elapsed": 0.0,
        }  # fmt: skip
        with transaction(self.path) as db:
            db.table("runs").insert(row, pk="id", ignore=True)

    def set_run(self, run: str, **values: Any) -> None:
        """Change `state`, `stop`, `message`, `incumbent`, `rounds`, `elapsed`, `updated`,
        `settings`.
        """
        if "settings" in values:
            values["settings"] = _json(values["settings"])
        with transaction(self.path) as db:
            db.table("runs").update(run, checked(values))

    def add_candidates(self, run: str, rows: Iterable[CandidateRow]) -> None:
        with transaction(self.path) as db:
            for row in sorted(rows, key=lambda r: r.seq):
                _add_candidate(db, run, row)

    def add_verdict(self, run: str, seq: int, judged: JudgedRow) -> None:
        """A verdict that arrived later, such as one judged on another host."""
        with transaction(self.path) as db:
            _add_verdict(db, _candidate_id(db, run, seq), judged)

    def add_calls(self, run: str, calls: Iterable[Mapping[str, Any]]) -> None:
        with transaction(self.path) as db:
            rows = [{"run": run, **checked(call)} for call in calls]
            db.table("model_calls").insert_all(rows, ignore=True)

    def add_lessons(self, run: str, round: int, lessons: Iterable[str]) -> None:
        with transaction(self.path) as db:
            rows = [
                {"run": run, "round": round, "n": n, "text": text} for n, text in enumerate(lessons)
            ]
            db.table("lessons").insert_all(rows, ignore=True)

    def add_decision(self, run: str, row: Mapping[str, Any]) -> None:
        """`row`: round, kind, seq (or None), reason, date. One of a kind in a round per
        candidate.
        """
        with transaction(self.path) as db:
            seq = row.get("seq")
            candidate = None if seq is None else _candidate_id(db, run, seq)
            known = {"run": run, "round": row["round"], "kind": row["kind"], "candidate": candidate}
            where = "run = :run and round = :round and kind = :kind and candidate is :candidate"
            if db.table("decisions").count_where(where, known) == 0:
                db.table("decisions").insert(
                    {**known, "reason": row["reason"], "date": row["date"]}
                )

    def add_review(self, run: str, seq: int, row: Mapping[str, Any]) -> None:
        """A person's decision. `row`: round, kind, reason, date, who, hashes. Minds may change, so
        decisions add up; one that repeats the candidate's last word is not recorded again.
        """
        with transaction(self.path) as db:
            known = {
                "run": run, "candidate": _candidate_id(db, run, seq),
                **{k: row[k] for k in ("round", "kind", "reason", "who")},
                "hashes": _json(row["hashes"]),
            }  # fmt: skip
            last = next(
                db.query(
                    "select * from decisions where candidate = ? and who is not null"
                    " order by id desc limit 1", [known["candidate"]],
                ),
                {},
            )  # fmt: skip
            if any(last.get(k) != v for k, v in known.items()):
                db.table("decisions").insert({**known, "date": row["date"]})

    def add_export(self, run: str, seq: int, row: Mapping[str, Any]) -> None:
        """`row`: kind, path, date."""
        with transaction(self.path) as db:
            candidate = _candidate_id(db, run, seq)
            known = {"run": run, "candidate": candidate, "kind": row["kind"], "path": row["path"]}
            where = "candidate = :candidate and kind = :kind and path = :path"
            if db.table("exports").count_where(where, known) == 0:
                db.table("exports").insert({**known, "date": row["date"]})


def _add_candidate(db: Database, run: str, row: CandidateRow) -> None:
    for artifact in row.artifacts:
        db.table("artifacts").insert(_artifact(artifact), pk="sha256", ignore=True)
    v = row.verdict
    values = {
        "run": run, "seq": row.seq, "round": row.round, "proposer": row.proposer,
        "parent": None if row.parent is None else _candidate_id(db, run, row.parent),
        "direction": row.direction, "note": row.note, "predicted_gain": row.predicted_gain,
        "source": row.source, "tunables": _json(row.tunables), "declared": _json(row.declared),
        "artifact": row.artifact, "status": str(v.status),
        "outcome": str(v.outcome) if v.outcome else None,
        "duplicate_of": row.duplicate_of, "message": v.failure.message if v.failure else None,
        "created": row.created,
    }  # fmt: skip
    db.table("candidates").insert(checked(values), ignore=True)
    candidate = _candidate_id(db, run, row.seq)
    for judged in row.judged:
        _add_verdict(db, candidate, judged)


def _add_verdict(db: Database, candidate: int, judged: JudgedRow) -> None:
    known = {"candidate": candidate, "blob": judged.blob}
    if db.table("verdicts").count_where("candidate = :candidate and blob = :blob", known):
        return
    v = judged.verdict
    inserted = db.table("verdicts").insert(checked({
        **known, "step": judged.step, "artifact": judged.artifact, "tier": str(v.tier),
        "status": str(v.status), "outcome": str(v.outcome) if v.outcome else None,
        "trust": str(v.trust), "device": str(v.device.get("name", "")), "origin": judged.origin,
        "tunables": _json(judged.tunables), "rule": v.failure.rule if v.failure else None,
        "message": v.failure.message if v.failure else None, "date": v.date,
        "seconds": float(sum(v.seconds.values())),
    }))  # fmt: skip
    if v.timing:
        for workload in v.timing.workloads:
            row = _measurement(int(str(inserted.last_pk)), v.timing.kind, workload)
            db.table("measurements").insert(checked(row))


def _measurement(verdict: int, kind: str, w: WorkloadTiming) -> dict[str, Any]:
    row = {
        "verdict": verdict, "kind": kind, "preset": w.preset, "layers": w.layers, "m": w.m,
        "q": w.q, "context": w.context, "ranks": w.ranks, "launches": w.launches, "us": w.us,
        "us_per_layer": w.us_per_layer, "gb_per_s": w.gb_per_s, "floor_bytes": w.floor_bytes,
        "fraction_of_floor_measured": w.fraction_of_floor_measured,
        "fraction_of_floor_spec": w.fraction_of_floor_spec, "best_baseline": w.best_baseline,
    }  # fmt: skip
    ratios: tuple[tuple[str, Ratio | None], ...] = (
        ("incumbent", w.speedup_incumbent), ("graph", w.speedup_graph), ("best", w.speedup_best),
    )  # fmt: skip
    for name, ratio in ratios:
        row[f"speedup_{name}"] = ratio.value if ratio else None
        row[f"{name}_low"] = ratio.low if ratio else None
        row[f"{name}_high"] = ratio.high if ratio else None
    return row


def _artifact(a: Artifact) -> dict[str, Any]:
    return {
        "sha256": a.sha256, "ptx_sha256": a.ptx_sha256, "source_sha256": a.source_sha256,
        "target": a.target, "arch": a.arch, "launches": len(a.step.launches),
        "workload": _json(a.workload), "toolchain": _json(a.toolchain),
    }  # fmt: skip


def _candidate_id(db: Database, run: str, seq: int) -> int:
    for row in db.query("select id from candidates where run = ? and seq = ?", [run, seq]):
        return int(row["id"])
    raise LookupError(f"run {run} has no candidate {seq}")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
