"""Landlock rules of a box: which files it may touch where no mount namespace can be had.

The rules are plain data; the launcher inside applies them. Landlock guards files, TCP and (ABI 6) signals and abstract
sockets. It does not guard UDP, pathname sockets or System V objects: the filters do. Sizes are for the watchdog.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

CREATE_RULESET, VERSION_FLAG = 444, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FIRST_RIGHTS = (1 << 13) - 1

READ = READ_FILE | READ_DIR
RUN = READ | EXECUTE
USE = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV
OWN = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER | TRUNCATE
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")


def abi() -> int:
    """The kernel's Landlock ABI; 0 where there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return max(0, int(libc.syscall(CREATE_RULESET, None, 0, VERSION_FLAG)))


def handled(version: int) -> tuple[int, int, int]:
    """All rights of that ABI: files, network, scope. Rights that are handled and in no rule are refused."""
    files = FIRST_RIGHTS
    files |= REFER if version >= 2 else 0
    files |= TRUNCATE if version >= 3 else 0
    files |= IOCTL_DEV if version >= 5 else 0
    return files, 3 if version >= 4 else 0, 3 if version >= 6 else 0


def rules(version: int, runnable: list[Path], scratch: str) -> dict[str, Any]:
    """Rules for the launcher."""
    files, network, scope = handled(version)
    paths = [(name, RUN) for name in SYSTEM]
    paths += [(str(path), RUN) for path in runnable]
    paths += [("/proc/self", READ), (scratch, OWN), ("/dev/null", USE), ("/dev/urandom", USE)]
    return {
        "handled": [files, network, scope],
        "size": 24 if version >= 6 else 16 if version >= 4 else 8,
        "file_rights": ON_FILES,
        "paths": [[name, rights & files] for name, rights in paths],
    }
