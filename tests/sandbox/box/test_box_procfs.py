"""Looking at processes while their threads come and go."""

from __future__ import annotations

import os
import subprocess

import pytest

from sandbox.box import procfs


def test_a_thread_that_ends_meanwhile_hides_no_child_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listdir = os.listdir
    child = subprocess.Popen(["sleep", "60"])
    try:
        monkeypatch.setattr(os, "listdir", lambda path: ["4194304", *listdir(path)])
        assert child.pid in procfs.children(os.getpid())
        assert child.pid in procfs.tree(os.getpid())
    finally:
        child.kill()
        child.wait()
    assert child.pid not in procfs.children(os.getpid())
