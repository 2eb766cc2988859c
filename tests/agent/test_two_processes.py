"""Two processes at one record: who looks disturbs nobody, who works on a run keeps others from it, and no one is taken
for another.
"""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import agent.commands.optimize
from agent import fakes, runner
from agent.locks import RunBusy, held, hold
from agent.store import Queries, Store, database
from agent.workspace import RunFiles, Workspace
from tests.agent.conftest import Kit
from tests.agent.test_cli import TARGET, call, optimize  # noqa: F401 (a fixture)

Call = Callable[..., Result]


@contextmanager
def at_work(files: RunFiles) -> Iterator[None]:
    """Another process holds the run."""
    ready, done = multiprocessing.Event(), multiprocessing.Event()

    def work() -> None:
        with hold(files):
            ready.set()
            done.wait(60)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        done.set()
        process.join(60)


def test_looking_whether_a_run_is_held_writes_nothing_and_is_in_nobodys_way(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    assert not held(files)
    assert not files.folder.exists()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            held(files)

    with hold(files):
        assert held(files)
    lookers = [threading.Thread(target=look) for _ in range(2)]
    for t in lookers:
        t.start()
    try:
        for _ in range(50):
            with hold(files):
                pass
    finally:
        over.set()
        for t in lookers:
            t.join()
    with at_work(files), pytest.raises(RunBusy), hold(files):
        pass


def test_resume_of_a_run_that_another_process_works_on_starts_and_changes_nothing(
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = json.loads(optimize(call, "--json", "--rounds", "1").stdout)["run"]
    files = Workspace.beside(Path("runs.db")).run(run)
    before = files.settings.read_text()
    started: list[Any] = []
    monkeypatch.setattr(agent.commands.optimize, "start", lambda *a: started.append(a))
    with at_work(files):
        done = call("resume", run, "--rounds", "9")
        assert "killed" not in call("runs").stdout
    assert (done.exit_code, started) == (1, [])
    assert done.stderr.splitlines() == [f"kernelgen: another process is working on run {run}"]
    assert files.settings.read_text() == before


def test_a_run_that_says_it_runs_and_is_not_worked_on_is_killed_everywhere(call: Call) -> None:  # noqa: F811
    run = json.loads(optimize(call, "--json", "--rounds", "1").stdout)["run"]
    Store(Path("runs.db")).set_run(run, state="running", stop=None)
    for command in (("runs",), ("show", run), ("report", run, "--format", "md")):
        assert "killed" in call(*command).stdout, command
    with at_work(Workspace.beside(Path("runs.db")).run(run)):
        for command in (("runs",), ("show", run)):
            assert "killed" not in call(*command).stdout, command


def test_files_being_judged_are_no_killed_run(
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    judge = fakes.FakeJudge.judge

    def judged(self: fakes.FakeJudge, job: Any) -> Any:
        seen.append(call("runs").stdout)
        return judge(self, job)

    monkeypatch.setattr(fakes.FakeJudge, "judge", judged)
    assert call("evaluate", "--target", TARGET, "--device", "cpu", "seed").exit_code == 0
    assert "running" in seen[0]


def test_the_last_run_is_the_one_opened_last_whatever_the_clock_says(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for when in ("2026-12-01T00:00:00Z", "1970-01-01T00:00:00Z", "2026-01-01T00:00:00Z"):
        monkeypatch.setattr(runner, "now", lambda when=when: when)
        ids.append(kit.new())
    queries: Queries = kit.queries
    assert queries.run("last")["id"] == ids[-1]
    assert [r["id"] for r in queries.runs()] == ids[::-1]


def test_a_replay_reports_on_its_own_run_though_another_began_meanwhile(
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = json.loads(optimize(call, "--json", "--rounds", "1").stdout)["run"]
    summarise = agent.commands.optimize.summarise

    def late(*args: Any) -> Any:
        """Somebody else opens a run before this one has ended."""
        monkeypatch.setattr(agent.commands.optimize, "summarise", summarise)
        optimize(call, "--rounds", "0")
        return summarise(*args)

    monkeypatch.setattr(agent.commands.optimize, "summarise", late)
    done = call("replay", of, "--device", "cpu", "--json")
    assert done.exit_code in (0, 1), done.output
    data = json.loads(done.stdout)
    newest = json.loads(call("runs", "--json").stdout)["runs"][0]["id"]
    assert data["run"] != newest
    assert data["of"] == of


@contextmanager
def locked(db: Path, seconds: float) -> Iterator[None]:
    """Another process writes to the record and does not come to an end."""
    ready = multiprocessing.Event()

    def work() -> None:
        conn = sqlite3.connect(db)
        conn.execute("BEGIN EXCLUSIVE")
        ready.set()
        time.sleep(seconds)

    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        process.kill()
        process.join(60)


def test_a_record_that_is_locked_for_a_while_is_waited_for_and_for_long_is_said_in_one_line(
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = json.loads(optimize(call, "--json", "--rounds", "1").stdout)
    args = ("review", "last", "--send-back", "1", "--note", "no")
    with locked(Path("runs.db"), 1.0):
        assert call(*args).exit_code == 0
    monkeypatch.setattr(database, "BUSY_S", 0.2)
    with locked(Path("runs.db"), 600):
        for again in (("review", "last", "--reject", "1", "--note", "no"), ("resume", "last")):
            done = call(*again)
            assert done.exit_code == 1, done.output
            assert done.stderr.splitlines()[-1] == (
                "kernelgen: runs.db: another process has kept it locked for 0.2 s"
            )
        assert call("runs").exit_code == 0  # who only reads is not kept waiting
    on = call("resume", "last", "--rounds", "2", "--json")
    assert on.exit_code in (0, 1), on.output
    assert json.loads(on.stdout)["candidates"] > first["candidates"]


def _opened(path: Path, together: Any, said: Any) -> None:
    together.wait(60)
    try:
        Store(path)
        said.put("")
    except Exception as error:
        said.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("old", [False, True], ids=["new", "rollback-journal"])
def test_processes_that_make_a_record_at_the_same_moment_wait_for_each_other(
    tmp_path: Path, old: bool
) -> None:
    """SQLite answers `locked` at once, whatever the timeout, while another changes the journal's mode."""
    fork = multiprocessing.get_context("fork")
    for turn in range(4):
        path = tmp_path / str(turn) / "runs.db"
        path.parent.mkdir()
        if old:
            sqlite3.connect(path).execute("PRAGMA user_version = 1").close()
        together, said = fork.Barrier(5), fork.Queue()
        all_of_them = [fork.Process(target=_opened, args=(path, together, said)) for _ in range(5)]
        for one in all_of_them:
            one.start()
        assert [said.get(timeout=60) for _ in all_of_them] == [""] * 5
        for one in all_of_them:
            one.join(60)
