"""The guard of one box: looks at its processes from outside, ends it when a limit is passed, and leaves nothing of it.

It does not judge what the box returns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass

from sandbox.box import procfs
from sandbox.box.frames import Broken
from sandbox.box.spec import BoxTier, Isolation, Limits

WATCH_S = 0.025
STOP_S = 10.0


@dataclass
class ProcessGuard:
    """Watches and ends the processes below `child`."""

    child: subprocess.Popen[bytes]
    limits: Limits
    isolation: Isolation
    _next: float = 0.0

    def verify(self) -> Broken | None:
        if self.isolation.tier is BoxTier.NONE:
            return None
        return Broken("box", f"the tier {self.isolation.tier} cannot be verified")

    def watch(self) -> Broken | None:
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + WATCH_S
        members = procfs.tree(self.child.pid)
        if len(members) > self.limits.processes:
            return Broken("processes", f"more than {self.limits.processes} processes")
        if sum(map(procfs.resident, members)) > self.limits.memory:
            return Broken("memory", f"more than {self.limits.memory >> 20} MB of memory")
        return None

    def explain(self) -> Broken | None:
        return None

    def stop(self) -> None:
        until = time.monotonic() + STOP_S
        while time.monotonic() < until:
            members = [p for p in procfs.tree(self.child.pid) if procfs.alive(p)]
            for pid in members:
                _kill(pid)
            if self.child.poll() is not None and len(members) <= 1:
                return
            time.sleep(0.001)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
