"""Uids of boxes: one program at a time has one, also while no process of it runs yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.box import uids

ROOT = Path(__file__).resolve().parents[3]
OTHER = """
import sys
from sandbox.box import uids
uids.RANGE = range({uid}, {uid} + 1)
print(uids.take(), flush=True)
sys.stdin.readline()
uids.give_back({uid})
print("given back", flush=True)
sys.stdin.readline()
"""


def test_what_another_program_has_taken_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = 50000 + os.getpid() % 10000  # not of those that boxes beside us may get meanwhile
    monkeypatch.setattr(uids, "RANGE", range(uid, uid + 1))
    command = [sys.executable, "-c", OTHER.format(uid=uid)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == f"{uid}\n"
        with pytest.raises(OSError, match="no unused uid"):
            uids.take()
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "given back\n"
        assert uids.take() == uid
        with pytest.raises(OSError, match="no unused uid"):
            uids.take()
        uids.give_back(uid)
        assert uids.take() == uid
        uids.give_back(uid)
