"""Opening runs.db: one short-lived connection per use, foreign keys on, writes in BEGIN IMMEDIATE.

Nodes run on several threads and LangGraph writes to the same file, so no connection is shared and
no write begins as a read (that upgrade ignores the busy timeout).
"""

from __future__ import annotations

import errno
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        conn = sqlite3.connect(str(path), timeout=BUSY_S)
        try:
            conn.execute("PRAGMA foreign_keys = ON")
            yield Database(conn, execute_plugins=False)
        finally:
            conn.close()
    except sqlite3.DatabaseError as error:
        raise translate(error, path) from error


def translate(error: sqlite3.DatabaseError, path: Path) -> Exception:
    """SQLite's own failures in words; a broken constraint is a bug here and stays what it is."""
    text = str(error)
    if isinstance(error, sqlite3.IntegrityError):
        return error
    if "full" in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    if "locked" in text:
        return OSError(
            errno.EBUSY, f"another process has kept it locked for {BUSY_S:g} s", str(path)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with connect(path) as db:
        tables = set(db.table_names()) - {"checkpoints", "writes"}  # LangGraph's
        if tables and "_sqlite_migrations" not in tables:
            raise Corrupt(f"{path} is another program's database, no record of kernelgen")
        db.conn.execute("PRAGMA journal_mode = WAL")
        migrations.apply(db)


def checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, refusing NaN and infinity: SQLite would store NaN as NULL without a word."""
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}: only finite numbers are recorded")
    return dict(row)
