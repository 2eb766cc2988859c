"""Narrow this very process for good: no network, no new privileges, no capabilities, and files only as granted.

For a process that was forked and cannot be started in a box: Landlock, a seccomp program and resource limits, all put
on by the process itself in a few milliseconds. There is no mount or pid namespace: names of processes stay visible, and
where the kernel has no Landlock files stay as readable as the uid makes them; `Narrowed.missing` says so.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.box import landlock, seccomp
from sandbox.box.inside import launcher
from sandbox.box.landlock import OWN, READ, READ_DIR, RUN, SYSTEM, TRUNCATE, USE, WRITE_FILE

PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 24, 47, 4
CAPABILITY_VERSION_3 = 0x20080522
NODES = ("/dev/null", "/dev/zero", "/dev/urandom")
TEXTS = ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime")


@dataclass(frozen=True)
class Grant:
    """What stays open. `run`: read and execute; `read`: read; `names`: list folders; `own`: everything; `devices`:
    GPU nodes. `tasks`: the process may name its threads, as a GPU driver does. `limits`: RLIMIT name -> value."""

    run: tuple[Path, ...] = ()
    read: tuple[Path, ...] = ()
    names: tuple[Path, ...] = ()
    own: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Narrowed:
    """How far it went. `tier` is landlock, seccomp or none; `missing` says why not further."""

    tier: str
    landlock_abi: int
    filters: int
    no_new_privs: bool
    capabilities: bool
    uid: int
    missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "tier": self.tier, "landlock_abi": self.landlock_abi, "filters": self.filters, "uid": self.uid,
            "no_new_privs": self.no_new_privs, "no_capabilities": self.capabilities,
        }  # fmt: skip
        return {**out, "missing": list(self.missing)} if self.missing else out


def narrow(grant: Grant, files: bool = True, talks: bool = False) -> Narrowed:
    """Apply to this process, which must have one thread. `files` False leaves Landlock out; with `talks` it may use
    the network that it has. Never raises: what the kernel refuses is in `missing`, and the tier is what was really put
    on."""
    missing: list[str] = []
    for name, value in grant.limits:
        _limit(name, value)
    bare = _attempt(missing, "capabilities", drop_capabilities)
    libc = ctypes.CDLL(None, use_errno=True)
    locked = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    abi = landlock.abi() if files else 0
    if not abi:
        missing.append(
            "no Landlock in this kernel"
            if files
            else "Landlock left out: the device did not open under it"
        )
    elif not locked or not _attempt(
        missing, "Landlock", lambda: launcher.restrict(_rules(grant, abi, talks))
    ):
        abi = 0
    filtered = False
    if not seccomp.supported():
        missing.append("no filter for this machine's system calls")
    elif locked:
        program = seccomp.tool_filter() if talks else seccomp.judge_filter()
        filtered = _attempt(missing, "seccomp", lambda: launcher.load_filter(program))
    tier = "landlock" if abi and filtered else "seccomp" if filtered else "none"
    return Narrowed(tier, abi, int(filtered), locked, bare, os.getuid(), tuple(missing))


def _attempt(missing: list[str], what: str, work: Any) -> bool:
    try:
        work()
    except OSError as error:
        missing.append(f"{what}: {error.strerror or error}"[:120])
        return False
    return True


def _limit(name: str, value: int) -> None:
    """As asked, or the present hard limit where that is lower already."""
    number = getattr(resource, f"RLIMIT_{name}")
    _, hard = resource.getrlimit(number)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (most, most))


def drop_capabilities() -> None:
    """None left, and none to be had by exec; an ordinary user has none to drop. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def _rules(grant: Grant, abi: int, talks: bool) -> dict[str, Any]:
    """For the launcher's `restrict`. Threads' names are under /proc/PID/task; that folder is held open, because a rule
    is about an inode, and /proc makes new ones for what nobody holds."""
    files, network, scope = landlock.handled(abi)
    network = 0 if talks else network
    tasks = f"/proc/{os.getpid()}/task"
    os.open(tasks, os.O_PATH | os.O_CLOEXEC)
    paths: list[tuple[str, int]] = [(name, RUN) for name in SYSTEM]
    paths += [(name, READ) for name in (*TEXTS, "/proc", "/sys")]
    paths += [(tasks, READ | WRITE_FILE | TRUNCATE)] + [(name, USE) for name in NODES]
    for group, rights in (
        (grant.run, RUN), (grant.read, READ), (grant.names, READ_DIR), (grant.own, OWN), (grant.devices, USE),
    ):  # fmt: skip
        paths += [(str(path), rights) for path in _once(group)]
    return {
        "handled": [files, network, scope],
        "size": 24 if abi >= 6 else 16 if abi >= 4 else 8,
        "file_rights": landlock.ON_FILES,
        "paths": [[name, rights & files] for name, rights in paths],
    }


def _once(paths: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(p for p in paths if p.exists()))
