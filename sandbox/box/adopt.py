"""This process as the guardian of its boxes: it adopts their orphans, hides its memory from its own uid, starts them.

Boxes are started from one thread that lives as long as the process: "die with the parent" means that thread, and a box
started from a short-lived thread would die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from sandbox.box import procfs

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
_lock = threading.Lock()


@dataclass
class _Keeper:
    """State of one process; a fork starts with its own, because threads and adoption are not inherited."""

    pid: int
    starter: ThreadPoolExecutor
    boxes: set[int] = field(default_factory=set)


_current: _Keeper | None = None


def _keeper() -> _Keeper:
    """This process's state; the first call makes it a guardian. Raises OSError when the kernel refuses."""
    global _current
    if _current is None or _current.pid != os.getpid():
        protect()
        starter = ThreadPoolExecutor(1, thread_name_prefix="box-starter")
        _current = _Keeper(os.getpid(), starter)
    return _current


def protect() -> None:
    """Become the reaper of orphans below this process, and close /proc/PID/environ and mem to code of the same uid."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(
                ctypes.get_errno(), "prctl refuses to protect the process that starts boxes"
            )


def spawn(work: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Run `work`, which starts a box, on the thread that outlives all boxes. Raises what `work` raises."""
    with _lock:
        keeper = _keeper()

    def job() -> subprocess.Popen[bytes]:
        with _lock:  # so that no new box is mistaken for an orphan
            child = work()
            keeper.boxes.add(child.pid)
            return child

    return keeper.starter.submit(job).result()


def forget(pid: int) -> None:
    with _lock:
        _keeper().boxes.discard(pid)


def escaped() -> list[int]:
    """Children that came to this process from a box whose own processes are gone: orphans of a double fork.

    A box's processes cannot shed no_new_privs and their filters, so those mark them; our own programs have neither.
    """
    with _lock:
        strangers = [pid for pid in procfs.children(os.getpid()) if pid not in _keeper().boxes]
    return [pid for pid in strangers if _marked(pid)]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def reap(pid: int) -> None:
    """Collect a dead orphan; harmless for what is not our child or not dead."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def reap_orphans() -> None:
    """Collect dead children that came from boxes. Their filters are gone with them, so the session has to tell:

    what this process starts is in its session or leads a new one, what a box orphans is in a box's session.
    """
    ours = os.getsid(0)
    with _lock:
        strangers = [pid for pid in procfs.children(os.getpid()) if pid not in _keeper().boxes]
    for pid in strangers:
        if not procfs.alive(pid) and procfs.session(pid) not in (ours, pid):
            reap(pid)


def filters_of_ours() -> int:
    """Seccomp programs that this process already had: a container's, under which boxes add their own."""
    return int(procfs.status(os.getpid()).get("Seccomp_filters", "0"))


def _marked(pid: int) -> bool:
    fields = procfs.status(pid)
    filters = int(fields.get("Seccomp_filters", "0"))
    return fields.get("NoNewPrivs") == "1" and filters > filters_of_ours()
