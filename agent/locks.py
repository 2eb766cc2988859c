"""One process at a time works on a run: a file lock that the kernel drops when the process dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from agent.workspace import RunFiles


class RunBusy(Exception):
    """Another process is at work on this run."""


@contextmanager
def hold(files: RunFiles) -> Iterator[None]:
    """Raises RunBusy."""
    files.folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(files.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunBusy(f"another process is working on run {files.folder.name}") from error
        yield
    finally:
        os.close(fd)


def held(files: RunFiles) -> bool:
    """Whether a process works on the run now."""
    try:
        with hold(files):
            return False
    except RunBusy:
        return True
