"""Reading other processes through /proc: trees, status fields, memory. Everything may vanish while it is read."""

from __future__ import annotations

import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def children(pid: int) -> list[int]:
    """Direct children of all threads of `pid`. A thread that ends meanwhile hides nobody else's; its own go to another
    thread, which may have been read before: whoever must miss none looks again."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
        except OSError:
            continue
        found += [int(word) for word in text.split()]
    return found


def tree(pid: int) -> list[int]:
    """`pid` and its descendants, parents first."""
    found = [pid]
    for member in found:
        found += [child for child in children(member) if child not in found]
    return found


def alive(pid: int) -> bool:
    """False for what is gone and for zombies."""
    return status(pid).get("State", "Z")[:1] not in ("Z", "X")


def threads(pid: int) -> int:
    """Number of threads; 0 when gone."""
    return int(status(pid).get("Threads", "0"))


def resident(pid: int) -> int:
    """Resident bytes; 0 when gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def session(pid: int) -> int:
    """Session id; 0 when gone."""
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[3]
        )
    except (OSError, IndexError, ValueError):
        return 0


def owned_by(uid: int) -> list[int]:
    """Live processes whose owner is `uid`."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            owner = os.stat(f"/proc/{name}").st_uid
        except OSError:
            continue
        if owner == uid and alive(int(name)):
            found.append(int(name))
    return found


def memory(field: str) -> int:
    """A field of /proc/meminfo in bytes, such as Shmem or MemAvailable; 0 where it is missing."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    return 0
