"""Tables of runs.db, as migrations in order. Never edit one that was released: append another.

Money in dollars, times in seconds except `us` (microseconds a step). Text ids for runs, integer ids
elsewhere; `seq` counts candidates within a run and 0 is the seed. Sources, prompts, artifacts and
verdicts are blobs on disk, named here by sha256.
"""

from __future__ import annotations

from sqlite_utils import Database, Migrations

migrations = Migrations("kernelgen")


@migrations()
def runs_and_candidates(db: Database) -> None:
    db.table("runs").create(
        {
            "id": str, "target": str, "kind": str, "device": str, "proposer": str, "model": str,
            "workload": str, "settings": str, "versions": str, "state": str, "stop": str,
            "message": str, "incumbent": int, "rounds": int, "elapsed": float, "started": str,
            "updated": str,
        },
        pk="id", strict=True,
        not_null={"target", "kind", "device", "proposer", "state", "started", "rounds", "elapsed"},
    )  # fmt: skip
    db.table("artifacts").create(
        {
            "sha256": str, "ptx_sha256": str, "source_sha256": str, "target": str, "arch": str,
            "launches": int, "workload": str, "toolchain": str,
        },
        pk="sha256", strict=True, not_null={"ptx_sha256", "target", "arch", "launches"},
    )  # fmt: skip
    db.table("candidates").create(
        {
            "id": int, "run": str, "seq": int, "round": int, "parent": int, "proposer": str,
            "direction": str, "note": str, "predicted_gain": float, "source": str,
            "tunables": str, "declared": str, "artifact": str, "status": str, "outcome": str,
            "duplicate_of": int, "message": str, "created": str,
        },
        pk="id", strict=True, not_null={"run", "seq", "round", "source", "status"},
        foreign_keys=[("run", "runs", "id"), ("parent", "candidates", "id"),
                      ("artifact", "artifacts", "sha256")],
    )  # fmt: skip
    db.table("candidates").create_index(["run", "seq"], unique=True)


@migrations()
def verdicts_and_measurements(db: Database) -> None:
    db.table("verdicts").create(
        {
            "id": int, "candidate": int, "step": int, "artifact": str, "tier": str, "status": str,
            "outcome": str, "trust": str, "device": str, "origin": str, "tunables": str,
            "rule": str, "message": str, "blob": str, "date": str, "seconds": float,
        },
        pk="id", strict=True,
        not_null={"candidate", "step", "tier", "status", "trust", "origin", "blob"},
        foreign_keys=[("candidate", "candidates", "id"), ("artifact", "artifacts", "sha256")],
    )  # fmt: skip
    db.table("verdicts").create_index(["candidate", "blob"], unique=True)
    db.table("measurements").create(
        {
            "id": int, "verdict": int, "kind": str, "preset": str, "layers": int, "m": int,
            "q": int, "context": int, "ranks": int, "launches": int, "us": float,
            "us_per_layer": float, "gb_per_s": float, "floor_bytes": int,
            "fraction_of_floor_measured": float, "fraction_of_floor_spec": float,
            "speedup_incumbent": float, "incumbent_low": float, "incumbent_high": float,
            "speedup_graph": float, "graph_low": float, "graph_high": float,
            "speedup_best": float, "best_low": float, "best_high": float, "best_baseline": str,
        },
        pk="id", strict=True, not_null={"verdict", "kind", "us"},
        foreign_keys=[("verdict", "verdicts", "id")],
    )  # fmt: skip


@migrations()
def calls_lessons_decisions_exports(db: Database) -> None:
    db.table("model_calls").create(
        {
            "id": int, "run": str, "scope": str, "n": int, "role": str, "model": str,
            "prompt": str, "answer": str, "input_tokens": int, "output_tokens": int,
            "cache_read_tokens": int, "cache_write_tokens": int, "cost": float, "seconds": float,
            "error": str, "date": str,
        },
        pk="id", strict=True, not_null={"run", "scope", "n", "role", "model", "prompt"},
        foreign_keys=[("run", "runs", "id")],
    )  # fmt: skip
    db.table("model_calls").create_index(["run", "scope", "n"], unique=True)
    db.table("lessons").create(
        {"id": int, "run": str, "round": int, "n": int, "text": str},
        pk="id", strict=True, not_null={"run", "round", "n", "text"},
        foreign_keys=[("run", "runs", "id")],
    )  # fmt: skip
    db.table("lessons").create_index(["run", "round", "n"], unique=True)
    db.table("decisions").create(
        {"id": int, "run": str, "round": int, "kind": str, "candidate": int, "reason": str,
         "date": str},
        pk="id", strict=True, not_null={"run", "round", "kind", "reason"},
        foreign_keys=[("run", "runs", "id"), ("candidate", "candidates", "id")],
    )  # fmt: skip
    db.table("exports").create(
        {"id": int, "run": str, "candidate": int, "kind": str, "path": str, "date": str},
        pk="id", strict=True, not_null={"run", "candidate", "kind", "path"},
        foreign_keys=[("run", "runs", "id"), ("candidate", "candidates", "id")],
    )  # fmt: skip


@migrations()
def people_decide(db: Database) -> None:
    """Who decided and about which hashes (JSON); null for the loop's own decisions."""
    db.table("decisions").add_column("who", str)
    db.table("decisions").add_column("hashes", str)


@migrations()
def attempts_are_paid_too(db: Database) -> None:
    """A call may take several paid attempts; `estimated`: the provider did not say what was used."""
    calls = db.table("model_calls")
    for index in calls.indexes:
        if index.columns == ["run", "scope", "n"]:
            db.execute(f"drop index [{index.name}]")
    calls.add_column("attempt", int, not_null_default=0)
    calls.add_column("estimated", int, not_null_default=0)
    calls.create_index(["run", "scope", "n", "attempt"], unique=True)
