"""Warm workers: boxes that have imported the DSL and wait for one job each, by architecture.

The DSL reads its architecture when it is imported, so workers are not interchangeable between architectures. A worker
is taken, used for one source and killed; replacements start in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from sandbox import box

WORKER = Path(__file__).parent / "jail" / "worker.py"
READY_DEADLINE_S = 120.0

Start = Callable[[str], box.Boxed | box.Broken]


def spec(arch: str, deadline_s: float) -> box.Spec:
    """The compile worker's box for one architecture."""
    return box.Spec(
        worker=WORKER,
        binds=(WORKER.parent,),
        env={
            "CUTE_DSL_ARCH": arch,
            "CUTE_DSL_KEEP": "ptx",
            "CUTE_DSL_DISABLE_FILE_CACHING": "1",
            "CUTE_DSL_DUMP_DIR": ".",  # relative: it must exist and be writable, else no PTX is kept, silently
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
        },
        limits=box.Limits(cpu_s=int(deadline_s) + 10),  # imports and warm-up included
    )


def starter(choice: box.Choice, deadline_s: float) -> Start:
    """How the pool makes one READY, verified worker."""

    def start(arch: str) -> box.Boxed | box.Broken:
        boxed = box.start(spec(arch, deadline_s), choice)
        if isinstance(boxed, box.Broken):
            return boxed
        ready = boxed.wait_ready(READY_DEADLINE_S)
        broken = ready if isinstance(ready, box.Broken) else boxed.verify()
        if broken is None:
            return boxed
        boxed.kill()
        return broken

    return start


@dataclass
class _Slot:
    """Workers of one architecture."""

    ready: list[box.Boxed] = field(default_factory=list)
    starting: int = 0
    waiting: int = 0


class Pool:
    """Keeps up to `idle` workers of each architecture that was asked for. Thread-safe."""

    def __init__(self, start: Start, idle: int) -> None:
        self._start, self._idle = start, idle
        self._slots: dict[str, _Slot] = {}
        self._changed = threading.Condition()
        self._closed = False

    def take(self, arch: str) -> box.Boxed | box.Broken:
        """A READY worker, the caller's to kill. Waits for one that is starting, else starts one."""
        with self._changed:
            slot = self._slots.setdefault(arch, _Slot())
            if not slot.ready and slot.starting > slot.waiting:
                slot.waiting += 1
                self._changed.wait_for(
                    lambda: self._closed or slot.ready or not slot.starting, READY_DEADLINE_S
                )
                slot.waiting -= 1
            if self._closed:
                return box.Broken("box", "the compile server is closing")
            if slot.ready:
                return slot.ready.pop(0)
        return self._start(arch)

    def refill(self, arch: str) -> None:
        """Start what is missing, in the background."""
        with self._changed:
            slot = self._slots.setdefault(arch, _Slot())
            missing = self._idle - len(slot.ready) - slot.starting
            if self._closed or missing <= 0:
                return
            slot.starting += missing
        for _ in range(missing):
            threading.Thread(target=self._start_one, args=(slot, arch), daemon=True).start()

    def close(self) -> None:
        """Kill the idle workers; those in use belong to their users."""
        with self._changed:
            self._closed = True
            idle = [boxed for slot in self._slots.values() for boxed in slot.ready]
            for slot in self._slots.values():
                slot.ready = []
            self._changed.notify_all()
        for boxed in idle:
            boxed.kill()

    def _start_one(self, slot: _Slot, arch: str) -> None:
        boxed = self._start(arch)
        with self._changed:
            slot.starting -= 1
            kept = not self._closed and not isinstance(boxed, box.Broken)
            if kept:
                slot.ready.append(cast(box.Boxed, boxed))
            self._changed.notify_all()
        if not kept and isinstance(boxed, box.Boxed):
            boxed.kill()
