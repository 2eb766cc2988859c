"""Killed before any change that it makes on disk and done again, everything comes to the end that it would have come
to undisturbed: runs, a tuner's run, proposals by file and by queue, people's decisions, verdicts brought in.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.agent.crashing import changes, die_at, unflushed
from tests.agent.flows import FLOWS

QUICK = {"run": 1, "tuner": 1, "queue": 1, "send back": 2, "approve": 2, "record": 1}
SLOW = {"run": 12, "tuner": 5, "folder": 5, "queue": 5, "reject": 9, "send back": 9, "send back later": 9}


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
