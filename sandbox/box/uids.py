"""Unused numbers for boxes that root starts: one uid per box, without a passwd entry, with no process of its own."""

from __future__ import annotations

import os
import pwd
import random
import threading

from sandbox.box import procfs

# Below 65534 (nobody), inside what a container with 65,536 mapped ids still has.
RANGE = range(64000, 65534)
_lock = threading.Lock()
_taken: set[int] = set()


def take() -> int:
    """Reserve a uid in this process. Raises OSError when none is free."""
    with _lock:
        for uid in random.sample(RANGE, len(RANGE)):
            if uid not in _taken and not _named(uid) and not procfs.owned_by(uid):
                _taken.add(uid)
                return uid
    raise OSError(0, "no unused uid is left for a box")


def give_back(uid: int) -> None:
    with _lock:
        _taken.discard(uid)


def own() -> int:
    return os.getuid()


def _named(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
