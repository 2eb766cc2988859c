"""One process at a time works on a run: a lock of the open file, which the kernel drops when the process dies and tells
of without taking it."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agent.workspace import RunFiles, Workspace

FLOCK = "hhqqi4x"
"""type, whence, start, length and a process id that has to be 0, as Linux has them on 64 bits."""


class RunBusy(Exception):
    """Another process is at work on this run."""


@contextmanager
def hold(files: RunFiles) -> Iterator[None]:
    """Raises RunBusy, OSError."""
    files.folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(files.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _record(fcntl.F_WRLCK))
        except BlockingIOError as error:
            message = f"another process is working on run {files.folder.name}"
            raise RunBusy(message) from error
        yield
    finally:
        os.close(fd)


def held(files: RunFiles) -> bool:
    """Whether a process works on the run now. Takes no lock and writes nothing: whoever may read the run may ask, and
    is in nobody's way. Raises OSError.
    """
    try:
        fd = os.open(files.folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _record(fcntl.F_WRLCK))
        return bool(struct.unpack(FLOCK, found)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def _record(kind: int) -> bytes:
    """A `struct flock` over the whole file."""
    return struct.pack(FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def state_of(workspace: Workspace, run: Mapping[str, Any]) -> str:
    """The state of a run's row; `killed` for one that says it is running and is not."""
    if run["state"] == "running" and not held(workspace.run(run["id"])):
        return "killed"
    return str(run["state"])
