"""runs.db: strict rows, foreign keys, idempotent writes, several writers, and failures in words."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agent.store import Corrupt, Queries, RunRow, Store, database
from agent.store.database import connect, migrate, transaction
from agent.store.queries import NotFound
from agent.store.store import CandidateRow, JudgedRow
from agent.workspace import Missing, Workspace
from sandbox.verdict import Failure, Status, Tier, Trust, Verdict

RUN = RunRow("01ABC", "t", "optimize", "cpu", "tuner", "", {}, {}, {}, "2026-01-01T00:00:00Z")
FAILED = Verdict(
    Status.WRONG, "t", "", {"kind": "cpu", "name": "c"}, Tier.SCREEN, Trust.JUDGED, {}, "d",
    failure=Failure("rule", "message"),
)  # fmt: skip


def candidate(store: Path, seq: int, parent: int | None = None) -> CandidateRow:
    w = Workspace.beside(store)
    judged = JudgedRow(0, FAILED, w.put_verdict(FAILED), {})
    return CandidateRow(
        seq=seq, round=seq, parent=parent, proposer="p", direction="d", note="n", predicted_gain=None,
        source=w.put("source"), tunables={}, declared={}, artifact=None, verdict=FAILED, created="now",
        judged=(judged,),
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "runs.db")
    store.add_run(RUN)
    return store


def counts(store: Store) -> dict[str, int]:
    with connect(store.path) as db:
        tables = (
            "runs",
            "candidates",
            "verdicts",
            "model_calls",
            "lessons",
            "decisions",
            "exports",
        )
        return {t: db.table(t).count for t in tables}


CALL = {
    "scope": "plan-1", "n": 0, "role": "plan", "model": "m", "prompt": "p", "answer": "a",
    "input_tokens": 1, "output_tokens": 2, "cache_read_tokens": 0, "cache_write_tokens": 0,
    "cost": 0.5, "seconds": 1.0, "error": None, "date": "now",
}  # fmt: skip


def test_recording_twice_leaves_one_record(store: Store) -> None:
    for _ in range(2):
        store.add_run(RUN)
        store.add_candidates("01ABC", [candidate(store.path, 0), candidate(store.path, 1, 0)])
        store.add_calls("01ABC", [CALL])
        store.add_lessons("01ABC", 1, ["a", "b"])
        store.add_decision(
            "01ABC", {"round": 1, "kind": "keep", "seq": 1, "reason": "r", "date": "d"}
        )
        store.add_export("01ABC", 1, {"kind": "bundle", "path": "x", "date": "d"})
    assert counts(store) == {
        "runs": 1, "candidates": 2, "verdicts": 2, "model_calls": 1, "lessons": 2, "decisions": 1,
        "exports": 1,
    }  # fmt: skip


def test_opening_again_migrates_nothing_and_loses_nothing(store: Store) -> None:
    store.add_candidates("01ABC", [candidate(store.path, 0)])
    assert counts(Store(store.path))["candidates"] == 1


def test_an_orphan_is_refused(store: Store) -> None:
    with pytest.raises(Exception, match="FOREIGN KEY"):
        store.add_lessons("no such run", 1, ["x"])
    with pytest.raises(LookupError):
        store.add_candidates("01ABC", [candidate(store.path, 1, parent=0)])
    assert counts(store)["candidates"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused_instead_of_becoming_null(
    store: Store, value: float
) -> None:
    with pytest.raises(ValueError, match="finite"):
        store.add_candidates("01ABC", [replace(candidate(store.path, 0), predicted_gain=value)])
    with pytest.raises(ValueError, match="finite"):
        store.add_calls("01ABC", [{**CALL, "cost": value}])
    assert counts(store)["candidates"] == 0


def test_wrong_types_are_refused(store: Store) -> None:
    with pytest.raises(Exception, match="cannot store TEXT"):
        store.add_calls("01ABC", [{**CALL, "cost": "much"}])


def test_a_failed_batch_leaves_nothing(store: Store) -> None:
    with pytest.raises(LookupError):
        store.add_candidates(
            "01ABC", [candidate(store.path, 0), candidate(store.path, 2, parent=1)]
        )
    assert counts(store)["candidates"] == 0


def test_writers_on_many_threads_wait_for_each_other(store: Store) -> None:
    errors: list[Exception] = []

    def write(n: int) -> None:
        try:
            with transaction(store.path) as db:
                db.table("lessons").insert({"run": "01ABC", "round": n, "n": 0, "text": "x"})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert counts(store)["lessons"] == 12


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    path.write_text("this is no database, and it is long enough to be seen as none" * 20)
    with pytest.raises(Corrupt, match=r"runs\.db"):
        Store(path)


def test_runs_are_found_by_part_of_their_id(store: Store) -> None:
    store.add_run(replace(RUN, id="01ABDXXXX"))
    queries = Queries(store, Workspace.beside(store.path))
    assert queries.run("01ABC")["id"] == "01ABC"
    assert queries.run("xxxx")["id"] == "01ABDXXXX"
    for name in ("01A", "nothing", "01AB", "____C", "01%%%C"):
        with pytest.raises(NotFound):
            queries.run(name)


def test_a_damaged_blob_is_missed_not_believed(tmp_path: Path) -> None:
    w = Workspace(tmp_path)
    name = w.put("text")
    assert w.text(name) == "text"
    next(tmp_path.glob(f"blobs/*/{name}")).write_text("other")
    with pytest.raises(Missing, match="damaged"):
        w.get(name)


def test_another_programs_database_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute("create table accounts (name text)")
    theirs.close()
    before = path.read_bytes()
    with pytest.raises(Corrupt, match="no record of kernelgen"):
        migrate(path)
    assert path.read_bytes() == before


def test_a_record_of_a_newer_version_is_refused_and_left_as_it_was(store: Store) -> None:
    with sqlite3.connect(store.path) as db:
        db.execute(
            "insert into _sqlite_migrations (migration_set, name, applied_at)"
            " values ('kernelgen', 'of_tomorrow', 'then')"
        )
    db.close()
    before = store.path.read_bytes()
    with pytest.raises(Corrupt, match=r"newer kernelgen \(of_tomorrow\)"):
        Store(store.path)
    assert store.path.read_bytes() == before


def test_a_record_in_a_folder_that_cannot_be_written_is_read_as_it_lies(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked through the seam, for root may write everywhere: what counts is that nothing is made beside it."""
    monkeypatch.setattr(database, "_writable", lambda path: False)
    with connect(store.path) as db:
        assert db.table("runs").count == 1
        assert sorted(p.name for p in store.path.parent.iterdir()) == ["runs.db"]
    assert Queries(Store(store.path), Workspace.beside(store.path)).run("last")["id"] == RUN.id
    with pytest.raises(OSError, match="Read-only"):
        store.add_lessons(RUN.id, 1, ["a lesson"])
    monkeypatch.undo()
    with connect(store.path):  # at work elsewhere: what it writes lies in another file
        store.add_lessons(RUN.id, 1, ["a lesson"])
        monkeypatch.setattr(database, "_writable", lambda path: False)
        assert Queries(store, Workspace.beside(store.path)).lessons(RUN.id) == ("a lesson",)
