"""Killed before any change that it makes on disk and done again, everything comes to the end that it would have come
to undisturbed: runs, a tuner's run, proposals by file and by queue, people's decisions, verdicts brought in.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import sqlite3
from pathlib import Path

import pytest

from agent.commands.common import code_of, said
from tests.agent import child
from tests.agent.crashing import changes, die_at, unflushed
from tests.agent.flows import FLOWS, of_run
from tests.agent.test_kill import finish, lost

QUICK = {"run": 1, "tuner": 1, "queue": 1, "send back": 2, "approve": 2, "record": 1}
SLOW = {
    "run": 12,
    "tuner": 5,
    "folder": 5,
    "queue": 5,
    "reject": 9,
    "send back": 9,
    "send back later": 9,
}


@pytest.fixture(autouse=True)
def fake_target() -> None:
    """The flows register their own."""


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's, which no kill needs."""
    monkeypatch.setattr(sqlite3, "connect", sqlite3.connect)
    monkeypatch.setattr(os, "fsync", os.fsync)
    unflushed()


def kill_and_compare(tmp_path: Path, name: str, kills: int) -> None:
    """Kills spread evenly over the flow's changes, the last one among them."""
    flow = FLOWS[name]
    ready = tmp_path / "ready"
    ready.mkdir()
    flow.prepare(ready)
    alone = shutil.copytree(ready, tmp_path / "alone")
    made = changes(flow.work, alone)
    expected = flow.end(alone)
    for n in sorted({len(made) - 1 - i * len(made) // kills for i in range(kills)}):
        folder = shutil.copytree(ready, tmp_path / f"killed-{n}")
        die_at(n, flow.work, folder)
        flow.work(folder)
        assert flow.end(folder) == expected, f"killed before change {n}: {made[n]}"


@pytest.mark.parametrize("name", QUICK)
def test_killed_at_some_changes_and_done_again_it_ends_as_if_undisturbed(
    tmp_path: Path, name: str
) -> None:
    kill_and_compare(tmp_path, name, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_killed_at_many_changes_and_done_again_it_ends_as_if_undisturbed(
    tmp_path: Path, name: str
) -> None:
    kill_and_compare(tmp_path, name, SLOW[name])


def out_of_room(folder: Path, most: int) -> None:
    """Works on the run while no file may grow beyond `most` bytes, and writes down how that ended."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        child.main(folder)
        said_ = "it came to its end"
    except Exception as error:
        said_ = f"{code_of(error)} {said(error)}"
    (folder / "said").write_text(said_)


@pytest.mark.parametrize(
    "most", [90_000, *(pytest.param(n * 30_000, marks=pytest.mark.slow) for n in (1, 2, 5, 9))]
)
def test_without_room_a_run_ends_in_one_line_and_with_room_again_it_goes_on(
    tmp_path: Path, most: int
) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "cramped"
    for at in (alone, folder):
        at.mkdir()
    process = multiprocessing.get_context("fork").Process(target=out_of_room, args=(folder, most))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    found = (folder / "said").read_text()
    assert found.startswith(f"1 {folder}"), found
    assert "\n" not in found
    for at in (alone, folder):
        finish(at)
    assert of_run(folder) == of_run(alone)
    paid = [len((at / "bill").read_text().split()) for at in (alone, folder)]
    assert paid[1] - paid[0] <= lost(folder)
