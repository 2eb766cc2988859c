"""Modelled time of launches: what an H200 would roughly need for the work that was counted. Never a measurement.

Each basic block of a kernel is scheduled once on one warp: operations start when their operands are there, loads take
the latency of where their data lie, what ptxas may move moves. Times how often a warp ran the block, that is what the
slowest warp of a thread block needs; blocks that do not fit an SM at once follow one another. Against that stand what
all warps of the busiest SM issue, move through L1 and shared memory, and what the chip moves from L2 and memory. The
launch itself and the first fetch of its instructions come on top. It knows no bank conflicts, no sector waste and no
skew between SMs; docs/cpu-timing.md says how far it is from the hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from sandbox.artifact import Launch
from sandbox.devices.cpu.facts import Facts, Residency, facts_of
from sandbox.devices.cpu.timing_code import Code, Op

if TYPE_CHECKING:
    from sandbox.devices.cpu.record import Counts, Region
    from sandbox.devices.cpu.translate import Translated

LATENCY = {
    "alu": 4.5, "free": 1.0, "convert": 6.0, "special": 22.0, "divide": 100.0, "double": 16.0, "param": 30.0,
    "local": 30.0, "shared": 30.0, "store shared": 2.0, "atom shared": 60.0, "store": 2.0, "shuffle": 24.0,
    "warp": 6.0, "mma": 34.0, "ldmatrix": 34.0, "stmatrix": 10.0, "mbarrier": 40.0, "bulk": 10.0, "copy": 2.0,
}  # fmt: skip
"""Clocks until a result can be used, as published for this architecture."""
SLOTS = {"special": 2.0, "divide": 20.0, "double": 2.0, "convert": 2.0, "shuffle": 2.0, "mma": 2.0}
"""Issue slots that an operation takes, where it is more than one."""
PREDICATED = 20  # operations of a skipped body that ptxas turns into predicated ones


@dataclass(frozen=True)
class Machine:
    """The modelled GPU: bytes a second, hertz, seconds, clocks. Published figures of one H200; those named in `BOUNDS`
    are fitted. `far`, `near`: clocks of a load from memory and from L2; `sm_memory_rate`: what one SM takes of
    memory; `launch`, `launch_early`: from the end of one launch to the first work of the next, without and with
    programmatic dependence; `fetch`: clocks an operation of the text for bringing it into the instruction cache;
    `sharpness`: how little the demands on a launch delay one another; `least_room`: registers that loads in flight
    find in any case; `expansion`: machine instructions an operation."""

    sms: int = 132
    clock: float = 1.755e9
    threads_per_sm: int = 2048
    registers_per_sm: int = 65536
    smem_per_sm: int = 233472
    l2_rate: float = 8.0e12
    l1_bytes_per_clock: float = 64.0
    smem_bytes_per_clock: float = 128.0
    tensor_flops: float = 4096.0
    issue_per_clock: float = 4.0
    memory_rate: float = 4.32e12
    sm_memory_rate: float = 32.2e9
    far: float = 816.0
    near: float = 450.0
    barrier: float = 77.0
    cluster_barrier: float = 400.0
    fence: float = 600.0
    launch: float = 2.3e-6
    launch_early: float = 1.5e-6
    fetch: float = 1.3
    sharpness: float = 5.33
    expansion: float = 1.02
    spare_registers: int = 8
    least_room: float = 58.0


BOUNDS = {
    "memory_rate": (3.4e12, 4.7e12), "sm_memory_rate": (25e9, 110e9), "far": (500.0, 1200.0), "near": (200.0, 450.0),
    "barrier": (15.0, 90.0), "launch": (1.0e-6, 2.6e-6), "launch_early": (0.4e-6, 2.0e-6), "fetch": (0.1, 6.0),
    "sharpness": (1.5, 8.0), "least_room": (16.0, 160.0), "expansion": (1.0, 3.0),
}  # fmt: skip
"""Constants that were fitted to measurements, and what would be plausible for each (benchmarks/cpu_timing.py)."""

H200 = Machine()


def latency(op: Op, far: frozenset[int], g: Machine) -> float:
    if op.kind == "global":
        return g.far if op.site in far else g.near
    if op.kind in ("atom", "fence"):
        return g.near * 2 if op.kind == "atom" else g.fence
    if op.kind == "barrier":
        return g.barrier
    if op.kind == "cluster":
        return g.cluster_barrier
    return LATENCY.get(op.kind, 4.5) * g.expansion


@dataclass(frozen=True)
class Place:
    """Where code runs: sites whose data are far, and registers that loads in flight may take."""

    far: frozenset[int]
    room: float


def block_clocks(
    ops: Sequence[Op], ready: Mapping[int, float], at: Place, g: Machine
) -> tuple[float, dict[int, float]]:
    """Clocks of one warp alone in straight-line code until its last operation starts, and when registers will be ready
    after that. `ready`: the same for registers on entry."""
    have = {r: t for r, t in ready.items() if t > 0}
    floor, last, slots, copies = 0.0, 0.0, 0.0, 0.0
    flying: list[tuple[float, int]] = []
    words = 0
    for op in ops:
        start = floor
        for r in op.uses:
            t = have.get(r, 0.0)
            if t > start:
                start = t
        if op.order:
            # memory operations in program order: nothing later is moved before it, nor it before what is earlier
            start = max(start, last, slots)
        if op.kind == "bulk" and copies > start:
            start = copies
        if op.kind == "global":
            need = max(1, op.bytes // 4)
            while flying and words + need > at.room:
                free, size = heappop(flying)
                words -= size
                start = max(start, free)
            words += need
            heappush(flying, (start + latency(op, at.far, g), need))
        done = start + latency(op, at.far, g)
        if op.kind == "copy":
            copies = max(copies, start + (g.far if op.site in at.far else g.near))
        for r in op.defs:
            have[r] = done
        if op.order:
            floor = done if op.kind in ("barrier", "cluster", "fence") else start
        last = max(last, start)
        slots += SLOTS.get(op.kind, 1.0) * g.expansion
    clocks = max(last + 1.0, slots, floor)
    return clocks, {r: t - clocks for r, t in have.items() if t > clocks}


def regions(code: Code, total: np.ndarray) -> list[list[int]]:
    """Basic blocks that ptxas schedules together: straight runs in which short bodies are skipped by a branch ahead,
    which become predicated instructions. Each begins where control may enter from elsewhere."""
    n = len(code.blocks)
    entered: list[set[int]] = [set() for _ in range(n)]
    for p in range(n):
        if total[p]:
            for s in code.succs[p]:
                entered[s].add(p)
    out: list[list[int]] = []
    for b in range(n):
        if not total[b]:
            continue
        if out and _joins(code, out[-1], b, entered[b]):
            out[-1].append(b)
        else:
            out.append([b])
    return out


def _joins(code: Code, region: list[int], b: int, entered: set[int]) -> bool:
    inside = set(region)
    if not entered or not entered <= inside or any(s <= region[0] for s in code.succs[region[-1]]):
        return False
    if len(code.succs[region[-1]]) > 1 and code.succs[region[-1]] != (b,):
        # the block that is skipped must be short, and what follows must be where the branch leads
        return all(s >= b for s in code.succs[region[-1]]) and len(code.blocks[b]) <= PREDICATED
    return True


def costs(code: Code, total: np.ndarray, at: Place, g: Machine) -> np.ndarray:
    """Clocks of each basic block, as it runs most often: entered from where it is entered most. Those of a region are
    at its first block."""
    groups = regions(code, total)
    head = {b: i for i, group in enumerate(groups) for b in group}
    source = [-1] * len(groups)
    best = [0] * len(groups)
    for p in range(len(code.blocks)):
        for s in code.succs[p]:
            if total[p] and total[s] and groups[head[s]][0] == s:
                weight = min(int(total[p]), int(total[s]))
                if weight >= best[head[s]]:
                    best[head[s]], source[head[s]] = weight, head[p]
    out = np.zeros(len(code.blocks))
    left: list[dict[int, float]] = [{} for _ in groups]
    for _ in range(2):
        for i, group in enumerate(groups):
            entry = left[source[i]] if source[i] >= 0 else {}
            ops = [op for b in group for op in code.blocks[b]]
            out[group[0]], left[i] = block_clocks(ops, entry, at, g)
    return out


@dataclass(frozen=True)
class Load:
    """Sums over one thread block, from its warps: issue slots, bytes through L1 and shared memory, flops."""

    slots: float
    global_bytes: float
    shared_bytes: float
    flops: float


def load_of(f: Facts, g: Machine) -> Load:
    slots = np.zeros(len(f.code.blocks))
    wide, shared, flops = (np.zeros(len(f.code.blocks)) for _ in range(3))
    for b, ops in enumerate(f.code.blocks):
        for op in ops:
            slots[b] += SLOTS.get(op.kind, 1.0) * g.expansion
            if op.kind in ("global", "store", "atom", "copy"):
                wide[b] += op.bytes
            elif op.kind in ("shared", "store shared", "atom shared"):
                shared[b] += op.bytes
            flops[b] += op.flops
    per_block = f.warps.sum(axis=1).mean(axis=0)
    lanes = f.total / max(1, f.blocks)
    return Load(
        float(slots @ per_block), float(wide @ lanes), float(shared @ lanes), float(flops @ lanes)
    )


def resident(f: Facts, g: Machine) -> int:
    """Thread blocks that an SM holds at once. Registers are those alive in the text, and some."""
    threads = -(-f.threads // 32) * 32
    registers = min(255, f.code.pressure + g.spare_registers)
    by_registers = g.registers_per_sm // (threads * registers)
    return max(
        1, min(g.threads_per_sm // threads, g.smem_per_sm // (f.smem + 1024), by_registers, 32)
    )


def launch_seconds(f: Facts, g: Machine = H200) -> float:
    """Modelled seconds of one launch."""
    cap = min(255, g.registers_per_sm // (-(-f.threads // 32) * 32))
    at = Place(f.far, max(g.least_room, cap - f.code.pressure))
    clocks = costs(f.code, f.total, at, g)
    slowest = float((f.warps @ clocks).max(axis=1).mean()) if f.warps.size else 0.0
    used = min(g.sms, f.blocks)
    on_one = -(-f.blocks // g.sms)
    # a block starts as soon as another ends: there are no waves in step
    rounds = max(1.0, on_one / resident(f, g))
    work = load_of(f, g)
    busy = [
        rounds * slowest / g.clock,
        on_one * work.slots / (g.issue_per_clock * g.clock),
        on_one * work.global_bytes / (g.l1_bytes_per_clock * g.clock),
        on_one * work.shared_bytes / (g.smem_bytes_per_clock * g.clock),
        on_one * work.flops / (g.tensor_flops * g.clock),
        f.memory_bytes / g.memory_rate,
        f.memory_bytes * on_one / f.blocks / g.sm_memory_rate,
        f.l2_bytes / g.l2_rate,
        f.bulk_bytes / used / (g.l1_bytes_per_clock * g.clock),
    ]
    body = float(sum(t**g.sharpness for t in busy) ** (1 / g.sharpness))
    text = sum(len(ops) for b, ops in enumerate(f.code.blocks) if f.total[b])
    start = g.launch_early if f.pdl else g.launch
    return start + body + g.fetch * text / g.clock


def modelled_us(
    done: Sequence[tuple[Launch, Translated, Counts]], regions: Mapping[str, Region]
) -> float:
    """Modelled microseconds of launches one after another."""
    sizes, step = {name: r.size for name, r in regions.items()}, Residency()
    return 1e6 * sum(
        launch_seconds(facts_of(x, kernel.timing, counts, sizes, step, kernel.static_bytes))
        for x, kernel, counts in done
    )


__all__ = ["BOUNDS", "H200", "Machine", "launch_seconds", "modelled_us"]
