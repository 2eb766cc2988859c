"""Unused numbers for boxes that root starts: one uid per box, without a passwd entry, with no process of its own.

A uid that is taken has no process yet for a moment, so a name in the kernel keeps other programs that start boxes from
taking it as well: who ends one box kills all that its uid owns. The name goes with its process. It does not reach
into other network namespaces.
"""

from __future__ import annotations

import errno
import os
import pwd
import random
import socket
import threading

from sandbox.box import procfs

# Below 65534 (nobody), inside what a container with 65,536 mapped ids still has.
RANGE = range(64000, 65534)
_lock = threading.Lock()
_taken: dict[int, socket.socket] = {}


def take() -> int:
    """Reserve a uid on this machine. Raises OSError when none is free."""
    with _lock:
        for uid in random.sample(RANGE, len(RANGE)):
            name = None if uid in _taken or _named(uid) else _name(uid)
            if name is None:
                continue
            if procfs.owned_by(uid):
                name.close()
                continue
            _taken[uid] = name
            return uid
    raise OSError(0, "no unused uid is left for a box")


def give_back(uid: int) -> None:
    with _lock:
        name = _taken.pop(uid, None)
    if name is not None:
        name.close()


def own() -> int:
    return os.getuid()


def _name(uid: int) -> socket.socket | None:
    """A name that one process at a time can have; None when another has it. Raises OSError."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0kernelgen-box-uid-{uid}")
    except OSError as error:
        name.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return name


def _named(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
