"""One process at a time works on a run: a file lock that the kernel drops when the process dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agent.workspace import RunFiles, Workspace

LOOKS, PAUSE_S = 5, 0.05


class RunBusy(Exception):
    """Another process is at work on this run."""


@contextmanager
def hold(files: RunFiles) -> Iterator[None]:
    """Raises RunBusy, OSError."""
    files.folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(files.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _taken(fd):
            raise RunBusy(f"another process is working on run {files.folder.name}")
        yield
    finally:
        os.close(fd)


def _taken(fd: int) -> bool:
    """A few looks: who only asks whether the run is held (`held`) has the lock for an instant."""
    for look in range(LOOKS):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if look + 1 < LOOKS:
                time.sleep(PAUSE_S)
    return False


def held(files: RunFiles) -> bool:
    """Whether a process works on the run now. Writes nothing: whoever may read the run may ask. Raises OSError."""
    try:
        fd = os.open(files.folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def state_of(workspace: Workspace, run: Mapping[str, Any]) -> str:
    """The state of a run's row; `killed` for one that says it is running and is not."""
    if run["state"] == "running" and not held(workspace.run(run["id"])):
        return "killed"
    return str(run["state"])
