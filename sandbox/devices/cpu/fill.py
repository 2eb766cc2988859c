"""A launch record filled in: tables of buffers and counters, blocks' slots, the race check's cells. Raises Refused.

The arrays behind it must live until the launch ends; `execute` keeps them.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np

from sandbox.artifact import Launch
from sandbox.devices.base import Refused
from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.record import Memory, Policy, Record, Region, Work
from sandbox.devices.cpu.translate import Translated
from sandbox.verdict import Failure, Status

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


def fill_record(record: Record, work: Work, policy: Policy) -> dict[str, np.ndarray]:
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


def place_slots(
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
