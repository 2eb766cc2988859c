"""A run killed at random points and resumed ends with the same record as one left alone, and pays nothing twice."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from agent.budget import Ledger, spent_before
from agent.heartbeat import beating, elapsed_of
from agent.models.base import StopRun
from agent.search import Limits, Spent
from agent.store import Queries, Store
from agent.workspace import RunFiles, Workspace
from tests.agent import child
from tests.agent.models.provider_server import serve

# What a run is, without its name, its times and its dates.
TABLES = {
    "candidates": "seq, round, direction, note, predicted_gain, source, tunables, artifact, status,"
    " outcome, duplicate_of, message",
    "verdicts": "step, artifact, tier, status, outcome, trust, origin, tunables, rule, message",
    "measurements": "us, speedup_incumbent, incumbent_low, incumbent_high",
    "lessons": "round, n, text",
    "decisions": "round, kind, reason",
    "model_calls": "scope, n, role, model, answer, input_tokens, output_tokens, cost, error",
    "runs": "state, stop, incumbent, rounds",
}


def start(folder: Path) -> BaseProcess:
    """A forked child that has everything imported: a kill meets the run, not the start of Python."""
    folder.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=child.main, args=(folder,))
    process.start()
    return process


def finish(folder: Path) -> float:
    """Let a child work to the end; returns the seconds it took."""
    began = time.monotonic()
    process = start(folder)
    process.join(120)
    assert process.exitcode == 0
    return time.monotonic() - began


def record(folder: Path) -> dict[str, list[dict[str, Any]]]:
    store = Store(folder / "runs.db")
    queries = Queries(store, Workspace.beside(store.path))
    order = {"candidates": "seq", "verdicts": "candidate, step, tier", "measurements": "verdict"}
    answered = {"model_calls": "where coalesce(error, '') not like 'Lost:%'"}
    return {
        table: queries.rows(
            f"select {what} from {table} {answered.get(table, '')} order by {order.get(table, what)}"
        )
        for table, what in TABLES.items()
    }


def lost(folder: Path, least: float = 0.01) -> int:
    """Calls that the record says may have been paid for nothing, each charged at its estimate."""
    store = Store(folder / "runs.db")
    rows = Queries(store, Workspace.beside(store.path)).rows(
        "select cost, input_tokens + output_tokens as tokens from model_calls"
        " where error like 'Lost:%'"
    )
    assert all(r["cost"] >= least and r["tokens"] >= 110 for r in rows)
    return len(rows)


def winners(folder: Path) -> list[str]:
    return sorted(p.read_text() for p in (folder / "kernels_out").glob("*/*/*/kernel.py"))


def kill_and_compare(tmp_path: Path, kills: int, seed: int) -> None:
    alone = tmp_path / "alone"
    lasts = finish(alone)
    expected = record(alone)
    assert len(expected["candidates"]) == 7
    assert any(v["tier"] == "promote" for v in expected["verdicts"])
    rng = random.Random(seed)
    killed = trial = 0
    while killed < kills:
        trial += 1
        folder = tmp_path / f"killed-{trial}"
        for _ in range(min(4, kills - killed)):
            process = start(folder)
            time.sleep(rng.uniform(0, lasts / 2))
            if process.exitcode is not None:
                break
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += 1
        finish(folder)
        assert record(folder) == expected
        assert winners(folder) == winners(alone)
        # This model hands out an answer once: a call cut off may be billed, and is recorded as lost.
        twice = len((folder / "bill").read_text().split()) - len(expected["model_calls"])
        assert 0 <= twice <= lost(folder)


def test_killed_a_few_times_it_ends_with_the_record_of_one_left_alone(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, 4, seed=3)


def dying(folder: Path, at: int) -> None:
    """Works on the run until the `at`-th checkpoint of the outer graph is due, and is gone before it is written: what
    the superstep's tasks wrote is stored by then.
    """
    put, count = SqliteSaver.put, iter(range(at))

    def dies(self: Any, config: Any, *rest: Any) -> Any:
        if not config["configurable"].get("checkpoint_ns") and next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, config, *rest)

    SqliteSaver.put = dies  # type: ignore[method-assign]
    child.main(folder)


def test_killed_before_any_checkpoint_it_ends_with_the_record_of_one_left_alone(
    tmp_path: Path,
) -> None:
    alone = tmp_path / "alone"
    finish(alone)
    expected = record(alone)
    for at in (0, 2, 3, 4, 5):  # the start; then plan, candidate, record and reflect of round 0
        folder = tmp_path / f"killed-{at}"
        folder.mkdir()
        process = multiprocessing.get_context("fork").Process(target=dying, args=(folder, at))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        finish(folder)
        assert record(folder) == expected, at


@pytest.mark.slow
def test_killed_twenty_times_it_ends_with_the_record_of_one_left_alone(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, 20, seed=7)


@pytest.mark.slow
def test_killed_while_a_provider_streams_no_answer_is_paid_for_twice(tmp_path: Path) -> None:
    """Over HTTP: what was cut off is fetched by its id; before there is one, it is counted as lost."""
    with serve(by=child.served) as s:

        def new(name: str) -> Path:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "url").write_text(s.url + "/v1")
            return folder

        alone = new("alone")
        lasts = finish(alone)
        expected = record(alone)
        assert len(s.requests) == len(expected["model_calls"]) > 8
        rng = random.Random(11)
        for trial in range(2):
            folder, before = new(f"killed-{trial}"), len(s.requests)
            for _ in range(4):
                process = start(folder)
                time.sleep(rng.uniform(0, lasts / 2))
                if process.exitcode is None and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
            finish(folder)
            assert record(folder) == expected
            twice = len(s.requests) - before - len(expected["model_calls"])
            assert 0 <= twice <= lost(folder, least=0.0001)


def test_the_minutes_of_a_killed_session_are_spent_all_the_same(tmp_path: Path) -> None:
    def work() -> None:
        with beating(Ledger(Limits(), Spent(minutes=2.0)), tmp_path / "clock.json", 0.05):
            time.sleep(600)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    end = time.monotonic() + 120
    while elapsed_of(tmp_path / "clock.json") < 120.3 and time.monotonic() < end:
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    known = elapsed_of(tmp_path / "clock.json")
    assert 120.3 <= known < 300
    ledger = Ledger(Limits(minutes=2.0), spent_before(RunFiles(tmp_path), known))
    with pytest.raises(StopRun) as stop:
        ledger.check()
    assert stop.value.reason == "minutes"


@pytest.fixture(autouse=True)
def fake_target() -> None:
    """The child registers its own."""
