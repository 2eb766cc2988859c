"""A process that is gone before the n-th thing that it would change on disk: kills by count, not by time.

What counts: every file opened for writing, every rename, removal and new folder, and every commit of a database, in
the order in which they happen. Between two of them the disk stays as it is, so that dying before each leaves every
state that a kill can leave, but for half a write. Not counted is what nobody reads before its rename (names in
`.new-`), and a flush: a kill leaves the system's buffers alone, only a power cut would not. Threads may take turns
differently from run to run: then another state is met, which must do as well.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
NEVER = 1 << 40
LIMIT_S = 120


class Watch:
    """Counts changes below `folder`, writes their names to `log`, and kills its process before number `at`."""

    def __init__(self, folder: Path, at: int, log: Path) -> None:
        self.folder, self.at = str(folder), at
        self.lock, self.count = threading.Lock(), 0
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def change(self, what: str) -> None:
        with self.lock:
            os.write(self.log, f"{what}\n".encode())
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1

    def audited(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            if not isinstance(path, (str, bytes, os.PathLike)):
                return
            if (isinstance(mode, str) and set(mode) & set("wax+")) or flags & WRITING:
                self.named("open", path)
        elif event in CHANGES and not (event == "os.mkdir" and os.path.exists(args[0])):
            self.named(event, args[1] if event == "os.rename" else args[0])

    def named(self, event: str, path: Any) -> None:
        name = os.fsdecode(path)
        ours = name.startswith(self.folder) or not name.startswith(
            "/"
        )  # a tree's removal names what is in it
        if ours and "/.new-" not in name and "/jail" not in name:
            self.change(f"{event} {name.removeprefix(self.folder)}")


def armed(watch: Watch) -> None:
    """From here on this process is watched; there is no way back."""
    connect = unflushed()

    def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        conn = connect(*args, **kwargs)
        conn.set_trace_callback(lambda sql: watch.change(sql) if sql == "COMMIT" else None)
        return conn

    sqlite3.connect = traced  # type: ignore[assignment]
    sys.addaudithook(watch.audited)


def unflushed() -> Callable[..., sqlite3.Connection]:
    """Spare this process the waits for the disk; returns how it connects now."""
    connect = sqlite3.connect

    def quick(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        conn = connect(*args, **kwargs)
        conn.execute("PRAGMA synchronous = OFF")
        return conn

    sqlite3.connect = quick  # type: ignore[assignment]
    os.fsync = lambda fd: None  # type: ignore[assignment]
    return quick


def die_at(n: int, work: Callable[[Path], object], folder: Path) -> bool:
    """Let a forked child do `work(folder)` until its `n`-th change; False if it came to its end before."""

    def doomed() -> None:
        armed(Watch(folder, n, folder.with_name(f"{folder.name}.changes")))
        work(folder)

    process = multiprocessing.get_context("fork").Process(target=doomed)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode in (0, -signal.SIGKILL), f"change {n}: exit code {process.exitcode}"
    return process.exitcode != 0


def changes(work: Callable[[Path], object], folder: Path) -> list[str]:
    """The names of all changes of an undisturbed run."""
    assert not die_at(NEVER, work, folder)
    return folder.with_name(f"{folder.name}.changes").read_text().splitlines()
