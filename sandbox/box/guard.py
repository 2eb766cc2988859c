"""The guard of one box: looks at its processes from outside, ends it when a limit is passed, and leaves nothing of it.

It does not judge what the box returns. What the kernel enforces (rlimits, tmpfs sizes, groups) it only explains.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass

from sandbox.box import adopt, procfs, scratch, uids
from sandbox.box.cgroup import Groups
from sandbox.box.frames import Broken, Reason
from sandbox.box.spec import GB, MB, BoxTier, Isolation, Limits

WATCH_S = 0.025
STOP_S = 10.0
SHORT = 512 * MB
TMPFS = ("box", "tmp", "dev/shm")
SPACES = ("pid", "mnt", "net", "ipc", "uts")


@dataclass
class ProcessGuard:
    """Watches and ends the processes of one box. `own_uid`: the box has its uid for itself."""

    child: subprocess.Popen[bytes]
    limits: Limits
    isolation: Isolation
    groups: Groups
    own_uid: bool
    folder: str | None
    filters: int
    _next: float = 0.0
    _shmem: int | None = None

    def worker(self) -> list[int]:
        """The box's processes that untrusted code may be in: all but bubblewrap's two, which hold the box up."""
        members = procfs.tree(self.child.pid)
        return members[2:] if self.isolation.tier is BoxTier.STRICT else members

    def verify(self) -> Broken | None:
        if self.isolation.tier is BoxTier.NONE:
            return None
        members = self.worker()
        if not members:
            return Broken("box", "no worker process is left to look at")
        for pid in members:
            wrong = self._wrong(pid)
            if wrong:
                return Broken("box", f"not isolated as asked: {wrong}")
        return None

    def _wrong(self, pid: int) -> str:
        """What the kernel says of a worker that it should not say, or ""."""
        fields = procfs.status(pid)
        want = [str(self.isolation.uid)] * 4
        if fields.get("Uid", "").split() != want or self.isolation.uid == 0:
            return f"uid {fields.get('Uid', 'unknown')}"
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd"):
            if name == "CapBnd" and not self.own_uid and self.isolation.tier is not BoxTier.STRICT:
                continue  # an ordinary user cannot empty the bounding set; no_new_privs makes it moot
            if int(fields.get(name, "1"), 16):
                return f"{name} {fields.get(name)}"
        if fields.get("NoNewPrivs") != "1":
            return "no_new_privs is off"
        count = fields.get("Seccomp_filters")
        if fields.get("Seccomp") != "2" or (count is not None and int(count) != self.filters):
            return f"{count} seccomp filters instead of {self.filters}"
        if self.isolation.tier is BoxTier.STRICT:
            return self._shared_namespace(pid)
        return ""

    def _shared_namespace(self, pid: int) -> str:
        for space in SPACES:
            try:
                inside = os.readlink(f"/proc/{pid}/ns/{space}")
            except OSError as error:
                return f"its {space} namespace cannot be read: {error.strerror}"
            if inside == os.readlink(f"/proc/self/ns/{space}"):
                return f"its {space} namespace is ours"
        return ""

    def watch(self) -> Broken | None:
        now = time.monotonic()
        if now < self._next:
            return None
        members = procfs.tree(self.child.pid)
        broken = self._memory(members) or self._disk(members)
        if broken is None and sum(map(procfs.threads, members)) > self.limits.processes:
            broken = Broken("processes", f"more than {self.limits.processes} processes and threads")
        # a slow look (a scratch folder full of files) must not become the load itself
        self._next = now + max(WATCH_S, 5 * (time.monotonic() - now))
        return broken

    def _memory(self, members: list[int]) -> Broken | None:
        resident = sum(map(procfs.resident, members))
        if resident > self.limits.memory:
            return Broken("memory", f"more than {self.limits.memory >> 20} MB of memory")
        if self.isolation.memory != "watchdog":
            return None
        grown = self._shmem_growth()
        if grown > self.limits.memory:
            return Broken("memory", f"shared memory grew by {grown >> 20} MB")
        if procfs.memory("MemAvailable") < SHORT:
            reason: Reason = "memory" if resident + grown > GB else "box"
            return Broken(reason, "the machine ran short of memory")
        return None

    def _shmem_growth(self) -> int:
        """Growth since the first look at a run, where the box can make memory that is in no resident size.

        The figure is the whole machine's: it is left out where the compile filter and sized mounts bound the box, and
        for code that is trusted anyway, which else is ended for what a neighbour takes.
        """
        tier = self.isolation.tier
        bounded = self.isolation.filters > 1 and tier in (BoxTier.STRICT, BoxTier.LANDLOCK)
        if bounded or tier is BoxTier.NONE:
            return 0
        now = procfs.memory("Shmem")
        if self._shmem is None:
            self._shmem = now
        return max(0, now - self._shmem)

    def _disk(self, members: list[int]) -> Broken | None:
        if self.folder is not None:
            size, entries = scratch.measure(self.folder, self.limits.scratch, self.limits.inodes)
            if size > self.limits.scratch or entries > self.limits.inodes:
                return Broken("disk", "the scratch folder is over its size or number of files")
            return None
        if self.isolation.tier is not BoxTier.STRICT or len(members) < 3:
            return None
        for place in TMPFS:
            try:
                facts = os.statvfs(f"/proc/{members[2]}/root/{place}")
            except OSError:
                continue
            if facts.f_files - facts.f_ffree > self.limits.inodes:
                return Broken("disk", f"more than {self.limits.inodes} files in /{place}")
        return None

    def explain(self) -> Broken | None:
        """Ask the group, which remembers; a resource limit shows in the worker's own error instead."""
        if self.groups.out_of_memory():
            return Broken("memory", f"more than {self.limits.memory >> 20} MB of memory")
        return None

    def stop(self) -> Broken | None:
        """Kill until nothing is left: groups at one blow, bubblewrap, descendants, the box's uid, orphans."""
        until = time.monotonic() + STOP_S
        self.groups.kill()
        left = self._left()
        while left or self.child.poll() is None:
            for pid in left:
                adopt.kill(pid)
            if time.monotonic() > until:
                return Broken("box", f"processes survive SIGKILL for {STOP_S:.0f} s: {left[:8]}")
            time.sleep(0.001)
            for pid in left:
                if pid != self.child.pid:
                    adopt.reap(pid)
            left = self._left()
        adopt.reap_orphans()
        adopt.forget(self.child.pid)
        return self._clear()

    def _left(self) -> list[int]:
        found = set(self.groups.members())
        if self.child.poll() is None:
            found.update(procfs.tree(self.child.pid))
        if self.own_uid:
            found.update(procfs.owned_by(self.isolation.uid))
        found.update(adopt.escaped())
        return [pid for pid in found if procfs.alive(pid)]

    def _clear(self) -> Broken | None:
        self.groups.remove()
        if self.own_uid:
            uids.give_back(self.isolation.uid)
        if self.folder is None:
            return None
        try:
            scratch.wipe(self.folder)
        except OSError as error:
            return Broken("box", f"the scratch folder cannot be removed: {error}")
        return None
