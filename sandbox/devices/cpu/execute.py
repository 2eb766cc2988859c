"""One launch on the CPU: the records of `layout` filled in, the scheduler called, and its status made a value
or Faulted.

Memory for blocks is kept between launches of one kernel. Not thread-safe: a Program holds a lock around
launches.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sandbox.artifact import Launch
from sandbox.devices.base import Faulted, Refused
from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu import report
from sandbox.devices.cpu.translate import Translated, runtime
from sandbox.verdict import Failure, Status

Words = np.ndarray[tuple[int], np.dtype[np.int64]]
SMS = 132
MAX_SAMPLE = 64 << 20  # bytes of counters of sampled threads
SMEM_PER_SM = 233472
MAX_FINDINGS = 64
MAX_AGENTS = 4096
MAX_CLUSTERS = 1 << 24
MAX_MEMORY = 6 << 30
MAX_CELL_BYTES = 4 << 30
MOST_OBJECTS = 1 << 17
MAX_OBJECT_BYTES = 1 << 30


@dataclass(frozen=True)
class Region:
    """A buffer that this launch may touch. `shadow`: a byte per byte, or None. `written`: stores to it are expected."""

    name: str
    base: int
    size: int
    shadow: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
    written: bool = True


@dataclass(frozen=True)
class Policy:
    """How launches run. `lazy`: copies complete as late as allowed. `budget`: work before a hang is assumed.
    `sampled`: blocks whose threads are counted one by one, for the model."""

    seed: int = 0
    exact: bool = False
    lazy: bool = True
    budget: int = 40_000_000_000
    max_forced: int = 1_000_000
    sampled: int = 2


@dataclass
class Counts:
    """What a launch did. `common`: executions per basic block of all threads but those of sampled blocks; `threads`:
    theirs, [sample, thread, basic block]."""

    common: Words
    threads: np.ndarray[tuple[int, int, int], np.dtype[np.int64]]
    bulk_read: int = 0
    bulk_written: int = 0
    barriers: int = 0
    cluster_phases: int = 0
    site_regions: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> Words:
        """Executions per basic block, of all threads."""
        return np.asarray(self.common + self.threads.sum(axis=(0, 1)))

    @cached_property
    def warps(self) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
        """Executions per warp, [sample, warp, basic block]: what its busiest lane did."""
        samples, threads, blocks = self.threads.shape
        full = np.zeros((samples, -(-threads // 32) * 32, blocks), np.int64)
        full[:, :threads] = self.threads
        return np.asarray(full.reshape(samples, -1, 32, blocks).max(axis=2))


class Memory:
    """Aligned zeroed bytes, kept by size."""

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        self._held: np.ndarray | None = None

    def hold(self, array: np.ndarray) -> None:
        """Keep an array until the next launch asks for this."""
        self._held = array

    def take(self, name: str, size: int) -> int:
        """Address of at least `size` bytes, 1024-aligned; contents are of earlier launches."""
        have = self._kept.get(name)
        if have is None or have.size < size + 1024:
            have = np.zeros(size + 1024, np.uint8)
            self._kept[name] = have
        return -(-int(have.ctypes.data) // 1024) * 1024


class Record:
    """The launch record."""

    def __init__(self) -> None:
        self.words = np.zeros(L.C_BYTES // 8, np.int64)

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def put(self, offset: int, *values: int) -> None:
        for i, value in enumerate(values):
            self.words[offset // 8 + i] = value

    def get(self, offset: int) -> int:
        return int(self.words[offset // 8])


@dataclass(frozen=True)
class Work:
    """A launch ready to run: its kernel, its parameters with addresses, and the buffers that it may touch. `unset`:
    secret of what it finds in registers, shared and local memory that it has not written."""

    kernel: Translated
    launch: Launch
    params: bytes
    regions: list[Region]
    unset: int = 0


class Running:
    """A launch under way. `memory` is its own until it has ended."""

    def __init__(self, work: Work, policy: Policy, memory: Memory) -> None:
        self.work, self.record = work, Record()
        kernel, launch = work.kernel, work.launch
        self._keep = _fill(self.record, work, policy)
        _slots(self.record, kernel, launch, policy, memory)
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


def _fill(record: Record, work: Work, policy: Policy) -> dict[str, np.ndarray]:
    """All but the slots. The arrays must live until the launch ends."""
    kernel, launch, params = work.kernel, work.launch, work.params
    ordered = sorted(work.regions, key=lambda r: r.base)
    table = np.zeros((max(1, len(ordered)), 4), np.int64)
    for i, r in enumerate(ordered):
        shadow = 0 if r.shadow is None else int(r.shadow.ctypes.data)
        table[i] = (r.base, r.base + r.size, shadow, 0)
    cluster = launch.cluster or (1, 1, 1)
    clusters = math.prod(launch.grid) // math.prod(cluster)
    if clusters > MAX_CLUSTERS:
        raise Refused(
            Status.UNSUPPORTED, Failure("cpu-grid", f"{clusters} blocks or clusters in one launch")
        )
    order = np.arange(clusters, dtype=np.uint32)
    if policy.seed:
        order = np.random.default_rng(policy.seed).permutation(order)
    keep: dict[str, np.ndarray] = {
        "table": table, "order": order.copy(), "params": np.frombuffer(params.ljust(16, b"\0"), np.uint8).copy(),
        "sites": np.zeros(2 * max(1, len(kernel.sites)), np.int64),
        "counters": np.zeros(max(1, len(kernel.effects)), np.int64),
        "effects": np.array(kernel.effects or (False,), np.uint8), "found": np.zeros((MAX_FINDINGS, 8), np.int64),
        "scratch": np.zeros(4096, np.int64),
    }  # fmt: skip
    pointers = {
        L.C_TABLE: "table", L.C_ORDER: "order", L.C_PARAMS: "params", L.C_SITES: "sites", L.C_COUNTERS: "counters",
        L.C_EFFECTS: "effects", L.C_FOUND: "found", L.C_SCRATCH: "scratch",
    }  # fmt: skip
    for offset, name in pointers.items():
        record.put(offset, int(keep[name].ctypes.data))
    record.put(L.C_NBUF, len(ordered))
    record.put(L.C_GRID, *launch.grid)
    record.put(L.C_NTID, *launch.block)
    record.put(L.C_CLUSTER, *cluster)
    record.put(L.C_CLUSTERSIZE, math.prod(cluster))
    record.put(L.C_NCLUSTERS, clusters)
    record.put(L.C_THREADS, math.prod(launch.block))
    record.put(L.C_SMEM, kernel.static_bytes + launch.smem)
    record.put(L.C_KERNEL, kernel.address)
    record.put(L.C_BUDGET, policy.budget)
    record.put(L.C_SEED, policy.seed)
    record.put(L.C_UNSET, work.unset)
    record.put(L.C_MAXFOUND, MAX_FINDINGS)
    record.put(L.C_NBB, len(kernel.effects))
    record.put(L.C_MAXFORCED, policy.max_forced)
    record.put(L.C_EXACT, int(policy.exact))
    record.put(L.C_LAZY, int(policy.lazy))
    record.put(L.C_FRAMEBYTES, kernel.frame_bytes)
    record.put(L.C_LOCAL, kernel.local_bytes)
    record.put(L.C_STATIC, kernel.entry.param_bytes)
    keep |= _sample(record, launch, policy.sampled)
    if policy.exact:
        keep |= _race(record, launch, table, ordered)
    return keep


def _sample(record: Record, launch: Launch, wanted: int) -> dict[str, np.ndarray]:
    """Counters for the threads of a few blocks, spread evenly over the grid."""
    blocks, threads, size = math.prod(launch.grid), record.get(L.C_THREADS), record.get(L.C_NBB)
    count = min(wanted, blocks, MAX_SAMPLE // (8 * threads * max(1, size)))
    sampled = np.zeros((count, threads, max(1, size)), np.int64)
    rows = np.zeros(blocks, np.int64)
    for i in range(count):
        rows[(2 * i + 1) * blocks // (2 * count)] = int(sampled[i].ctypes.data)
    record.put(L.C_PROFILE, int(rows.ctypes.data) if count else 0)
    return {"sampled": sampled, "sample rows": rows}


def _race(
    record: Record, launch: Launch, table: np.ndarray, ordered: list[Region]
) -> dict[str, np.ndarray]:
    """Tables of the race check; zeroed pages that the system hands out as they are touched. Raises Refused."""
    warps = -(-record.get(L.C_THREADS) // 32)
    agents = warps * math.prod(launch.grid)
    tracked = sum(r.size for r in ordered if r.written)
    if agents > MAX_AGENTS or tracked * L.CELL > MAX_CELL_BYTES:
        what = f"{agents} warps and {tracked} bytes of writable buffers"
        raise Refused(
            Status.UNSUPPORTED,
            Failure("cpu-exact", f"the race check cannot follow {what} of {launch.kernel[:80]}"),
        )
    out = {}
    for i, r in enumerate(ordered):
        if r.written:
            out[f"cells {i}"] = np.zeros(r.size * L.CELL, np.uint8)
            table[i, 3] = int(out[f"cells {i}"].ctypes.data)
    room = L.OBJECTS
    while room < MOST_OBJECTS and 2 * room * agents * 4 <= MAX_OBJECT_BYTES:
        room *= 2
    record.put(L.C_ROOM, room)
    sizes = {
        L.C_VC: agents * agents, L.C_FENCEVC: agents * agents, L.C_READVC: agents * agents,
        L.C_OBJECTVC: room * agents, L.C_OBJECTS: 2 * room, L.C_LANESYNC: agents,
    }  # fmt: skip
    for offset, count in sizes.items():
        out[f"race {offset}"] = np.zeros(count, np.uint32)
        record.put(offset, int(out[f"race {offset}"].ctypes.data))
    record.put(L.C_AGENTS, agents)
    record.put(L.C_WARPS, warps)
    return out


def resident(threads: int, smem: int, blocks: int, cluster: int) -> int:
    """Blocks that an H200 holds at once, in whole clusters; registers are not counted."""
    per_sm = max(1, min(2048 // (-(-threads // 32) * 32), SMEM_PER_SM // (smem + 1024), 32))
    return max(cluster, min(blocks, per_sm * SMS) // cluster * cluster)


def _slots(
    record: Record, kernel: Translated, launch: Launch, policy: Policy, memory: Memory
) -> None:
    """Blocks' records, shared memory, shadows, threads and copy queues."""
    threads = math.prod(launch.block)
    cluster = record.get(L.C_CLUSTERSIZE)
    smem = kernel.static_bytes + launch.smem
    slots = resident(threads, smem, math.prod(launch.grid), cluster)
    room = -(-max(smem, 16) // 1024) * 1024
    stride = L.T_FRAME + kernel.frame_bytes + kernel.local_bytes
    stride += L.COPY_BYTES * L.COPY_CAPACITY if kernel.copies else 0
    stride = (
        -(-stride // 64) * 64 + 64
    )  # an odd number of lines, so that lanes do not share cache sets
    queue = L.BULK_BYTES * L.BULK_CAPACITY
    per_block = 2 * room + -(-(threads * stride + queue) // 1024) * 1024
    fit = MAX_MEMORY // per_block // cluster * cluster
    if fit < (slots if launch.cooperative else cluster):
        what = f"{slots} blocks of {launch.kernel[:80]} need {slots * per_block >> 20} MiB at once"
        raise Refused(Status.UNSUPPORTED, Failure("cpu-memory", what))
    slots = min(slots, fit)
    base = memory.take("blocks", slots * per_block)
    heads = memory.take("heads", slots * L.B_BYTES)
    ctypes.memset(heads, 0, slots * L.B_BYTES)
    words = np.ctypeslib.as_array(
        ctypes.cast(heads, ctypes.POINTER(ctypes.c_int64)), (slots, L.B_BYTES // 8)
    )
    starts = base + np.arange(slots, dtype=np.int64) * per_block
    words[:, L.B_SMEM // 8] = starts
    words[:, L.B_SHADOW // 8] = starts + room
    words[:, L.B_THREADS // 8] = starts + 2 * room
    words[:, L.B_BULK // 8] = starts + 2 * room + threads * stride
    words[:, L.B_SMID // 8] = np.arange(slots) % SMS
    if policy.exact:
        cells = np.zeros(slots * max(smem, 16) * L.CELL, np.uint8)
        words[:, L.B_CELLS // 8] = (
            int(cells.ctypes.data) + np.arange(slots) * max(smem, 16) * L.CELL
        )
        memory.hold(cells)
    record.put(L.C_SLOTS, heads)
    record.put(L.C_NSLOTS, slots)
    record.put(L.C_TSTRIDE, stride)
    record.put(L.C_BSTRIDE, L.B_BYTES)


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
