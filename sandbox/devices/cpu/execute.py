"""One launch on the CPU: its record set up, the scheduler called, and its status made a value or Faulted.

Memory for blocks is kept between launches of one kernel. Not thread-safe: a Program holds a lock around
launches.
"""

from __future__ import annotations

import ctypes

import numpy as np

from sandbox.devices.base import Faulted, Refused
from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu import report
from sandbox.devices.cpu.fill import fill_record, place_slots
from sandbox.devices.cpu.record import Counts, Memory, Policy, Record, Region, Work
from sandbox.devices.cpu.translate import runtime
from sandbox.verdict import Failure, Status


class Running:
    """A launch under way. `memory` is its own until it has ended."""

    def __init__(self, work: Work, policy: Policy, memory: Memory) -> None:
        self.work, self.record = work, Record()
        kernel, launch = work.kernel, work.launch
        self._keep = fill_record(self.record, work, policy)
        place_slots(self.record, kernel, launch, policy, memory)
        self.record.put(L.C_ACTIVE, self.record.get(L.C_NCLUSTERS))

    @property
    def ended(self) -> bool:
        return self.record.get(L.C_ACTIVE) <= 0

    def finish(self) -> None:
        """Run to the end. Raises Faulted."""
        self._raise(self._call("rt_run"))

    def advance(self) -> bool:
        """Run every block as far as it goes; whether any went on. Raises Faulted."""
        moved = self._call("rt_pass")
        self._raise(self.record.get(L.C_STATUS))
        return bool(moved) or self.ended

    def stuck(self) -> bool:
        """Let every poll look once more although nothing can have changed; whether that shows that this launch can
        never end by itself. Raises Faulted for anything else that went wrong."""
        found = self._call("rt_force")
        if found and self.record.get(L.C_STATUS) >= L.H_DEADLOCK:
            self.explanation = self.failure()
            self.record.put(L.C_STATUS, 0)
            return True
        self._raise(self.record.get(L.C_STATUS))
        return False

    explanation: Failure | None = None

    def failure(self) -> Failure:
        return report.failure(self.record, self.work.kernel, self.work.launch, self.work.regions)

    def results(self) -> tuple[Counts, list[Failure]]:
        """Counts and findings of a launch that has ended. Raises Refused if it used more barriers and flags than the
        race check has room for: what it found is then worth nothing."""
        record, keep, w = self.record, self._keep, self.work
        if 4 * record.get(L.C_USED) > 3 * record.get(L.C_ROOM):
            what = f"over {record.get(L.C_ROOM)} barriers and flags in {w.launch.kernel[:80]}"
            raise Refused(
                Status.UNSUPPORTED, Failure("cpu-exact", f"the race check cannot follow {what}")
            )
        counts = Counts(
            keep["counters"], keep["sampled"], record.get(L.C_BULKBYTES), record.get(L.C_BULKWRITTEN),
            record.get(L.C_BARRIERS), record.get(L.C_CLUSTERPHASES), _site_regions(keep["sites"], w.regions),
        )  # fmt: skip
        return counts, report.findings(record, w.kernel, w.launch, w.regions, keep["found"])

    def _call(self, name: str) -> int:
        function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(runtime().address(name))
        return int(function(self.record.address))

    def _raise(self, status: int) -> None:
        if status:
            hang = status >= L.H_DEADLOCK
            raise Faulted(Status.HANG if hang else Status.FAULT, self.failure())


def run(work: Work, policy: Policy, memory: Memory) -> tuple[Counts, list[Failure]]:
    """Run a launch. Returns counts and findings. Raises Faulted."""
    running = Running(work, policy, memory)
    running.finish()
    return running.results()


def _site_regions(sites: np.ndarray, regions: list[Region]) -> dict[int, str]:
    """Which buffer each memory instruction hit last."""
    out = {}
    for i in np.nonzero(sites[1::2])[0]:
        at = int(sites[2 * i])
        for r in regions:
            if r.base <= at < r.base + r.size:
                out[int(i)] = r.name
                break
    return out
