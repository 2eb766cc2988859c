"""Opening runs.db: one short-lived connection per use, foreign keys on, writes in BEGIN IMMEDIATE.

Nodes run on several threads and LangGraph writes to the same file, so no connection is shared and
no write begins as a read (that upgrade ignores the busy timeout).
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from agent.store.migrations import migrations

BUSY_S = 30.0


class Corrupt(Exception):
    """runs.db is no database of ours, or was written by a newer version."""


@contextmanager
def connect(path: Path) -> Iterator[Database]:
    """A connection of one thread. Raises Corrupt, OSError."""
    try:
        conn = _open(path)
        try:
            conn.execute("PRAGMA foreign_keys = ON")
            yield Database(conn, execute_plugins=False)
        finally:
            conn.close()
    except sqlite3.DatabaseError as error:
        raise translate(error, path) from error


def _open(path: Path) -> sqlite3.Connection:
    """Where the folder cannot be written SQLite opens no WAL database at all; all of this one lies in its one file
    unless a process has it open or was killed, so it is read as it lies there.
    """
    if path.is_file() and not _writable(path) and not _unmerged(path):
        where = f"{path.resolve().as_uri()}?immutable=1"
        return sqlite3.connect(where, uri=True, timeout=BUSY_S)
    return sqlite3.connect(str(path), timeout=BUSY_S)


def _writable(path: Path) -> bool:
    return os.access(path.resolve().parent, os.W_OK)


def _unmerged(path: Path) -> bool:
    return path.with_name(f"{path.name}-wal").exists()


def translate(error: sqlite3.DatabaseError, path: Path) -> Exception:
    """SQLite's own failures in words; a broken constraint is a bug here and stays what it is."""
    text = str(error)
    if isinstance(error, sqlite3.IntegrityError):
        return error
    if "full" in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    if "locked" in text:
        return _busy(path)
    if "readonly" in text:
        return OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
    if "unable to open" in text and not _writable(path):
        left = f", and {path.name}-wal holds what came last: read a copy of the folder"
        return OSError(
            errno.EROFS, f"its folder cannot be written{left if _unmerged(path) else ''}", str(path)
        )
    return Corrupt(f"{path}: {text}")


@contextmanager
def transaction(path: Path) -> Iterator[Database]:
    """All or nothing; waits for other writers."""
    with connect(path) as db:
        db.conn.execute("BEGIN IMMEDIATE")
        try:
            yield db
        except BaseException:
            db.conn.rollback()
            raise
        db.conn.execute("COMMIT")


def migrate(path: Path) -> None:
    """Creates the file and brings its tables up to date. Raises Corrupt, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with connect(path) as db:
        if _current(db, path):
            return
    with _alone(path), connect(path) as db:  # SQLite waits for nobody while it changes to WAL
        if not _current(db, path):
            db.conn.execute("PRAGMA journal_mode = WAL")
            migrations.apply(db)


def _current(db: Database, path: Path) -> bool:
    """Whether nothing is to be done. Raises Corrupt for what is not ours to change."""
    tables = set(db.table_names()) - {"checkpoints", "writes"}  # LangGraph's
    if tables and "_sqlite_migrations" not in tables:
        raise Corrupt(f"{path} is another program's database, no record of kernelgen")
    applied = {m.name for m in migrations.applied(db)}
    unknown = sorted(applied - _known())
    if unknown:
        raise Corrupt(
            f"{path} was written by a newer kernelgen ({unknown[0]}): use that one, or another record"
        )
    mode = db.execute("PRAGMA journal_mode").fetchone()[0]
    return not migrations.pending(db) and mode == "wal"


@cache
def _known() -> frozenset[str]:
    """Names of all migrations: those that an empty database still needs."""
    with closing(sqlite3.connect(":memory:")) as conn:
        return frozenset(m.name for m in migrations.pending(Database(conn, execute_plugins=False)))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time makes or changes the tables: a lock of the folder, gone when the process is. Not
    of the file, for SQLite's own locks end when anybody in the process closes that. Raises OSError."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + BUSY_S
        while not _locked(fd):
            if time.monotonic() > until:
                raise _busy(path)
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system that has no such locks
    return True


def _busy(path: Path) -> OSError:
    return OSError(errno.EBUSY, f"another process has kept it locked for {BUSY_S:g} s", str(path))


def checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, refusing NaN and infinity: SQLite would store NaN as NULL without a word."""
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}: only finite numbers are recorded")
    return dict(row)
