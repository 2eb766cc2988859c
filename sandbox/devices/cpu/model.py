"""Modelled time of launches: what an H200 would roughly need for the work that was counted. Never a measurement.

A launch costs its start, plus the largest of four demands (bytes from memory, bytes from L2, issue slots,
tensor cores) and of the time one warp needs for its own instructions, plus what cannot overlap: barriers of a
block and edges between blocks. Bytes from memory are each buffer's touched bytes, once; all traffic counts
for L2. Deterministic: equal counts, equal time. It knows no bank conflicts, no sector waste, no skew between
SMs; docs/cpu-coverage.md says how far it is from the hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandbox.artifact import Launch
from sandbox.devices.cpu.kernel import BITS
from sandbox.devices.cpu.ptx_ast import Instr

if TYPE_CHECKING:
    from sandbox.devices.cpu.execute import Counts, Region
    from sandbox.devices.cpu.translate import Translated


@dataclass(frozen=True)
class Machine:
    """Rates of the modelled GPU: bytes a second, hertz, seconds. Figures of one H200, measured or published."""

    sms: int = 132
    clock: float = 1.755e9
    memory_rate: float = 4.39e12
    l2_rate: float = 8.0e12
    sm_memory_rate: float = 60e9
    smem_bytes_per_clock: int = 128
    issue_per_clock: int = 4
    dependent_clocks: float = 6.0
    tensor_flops: float = 4096.0  # bf16 multiply-adds, counted as two, of one SM in a clock
    special_per_clock: int = 16
    launch: float = 2.4e-6
    block_barrier: float = 25e-9
    cluster_barrier: float = 0.25e-6
    edge: float = 1.0e-6


H200 = Machine()
SPECIAL = {"ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"}


@dataclass
class Work:
    """Totals over all threads of a launch."""

    instructions: int = 0
    special: int = 0
    tensor: float = 0.0
    shared: int = 0
    moved: int = 0
    releases: int = 0


def access_bytes(instr: Instr) -> int:
    """Bytes that one thread moves in an ld, st, atom or red."""
    count = next((int(p[1:]) for p in instr.parts if p in ("v2", "v4", "v8")), 1)
    return BITS.get(instr.parts[-1], 32) // 8 * count


def _mma_flops(instr: Instr) -> float:
    for part in instr.parts:
        if part[0] == "m" and "n" in part and "k" in part and part[1:2].isdigit():
            m, rest = part[1:].split("n")
            n, k = rest.split("k")
            return 2.0 * int(m) * int(n) * int(k) / 32  # of one thread
    return 0.0


def count(kernel: Translated, counts: Counts) -> Work:
    """Static instructions times how often their blocks ran."""
    work = Work()
    for index, instrs in enumerate(kernel.blocks):
        times = int(counts.blocks[index])
        if times == 0:
            continue
        work.instructions += times * len(instrs)
        for i in instrs:
            op = i.parts[0]
            if op in ("ld", "st", "atom", "red"):
                size = access_bytes(i) * times
                if any(p.startswith("shared") for p in i.parts):
                    work.shared += size
                elif "param" not in i.parts and "local" not in i.parts:
                    work.moved += size
                if op in ("atom", "red") and ("release" in i.parts or "acq_rel" in i.parts):
                    work.releases += times
            elif op in SPECIAL:
                work.special += times
            elif op == "mma":
                work.tensor += _mma_flops(i) * times
    return work


def touched(kernel: Translated, counts: Counts, regions: Mapping[str, Region]) -> int:
    """Bytes that must come from or go to memory: per buffer what instructions moved, at most its size."""
    per: dict[str, int] = {}
    times = {id(i): int(counts.blocks[b]) for b, instrs in enumerate(kernel.blocks) for i in instrs}
    for site, name in counts.site_regions.items():
        instr = kernel.sites[site]
        if instr is not None and instr.parts[0] in ("ld", "st", "atom", "red"):
            per[name] = per.get(name, 0) + access_bytes(instr) * times.get(id(instr), 0)
    total = sum(min(size, regions[name].size) for name, size in per.items() if name in regions)
    return total + counts.bulk_read + counts.bulk_written


@dataclass(frozen=True)
class Modelled:
    """One launch: seconds of its parts, what it moved in bytes, what it executed. `bound`: the largest demand."""

    launch: float
    demands: Mapping[str, float]
    barriers: float
    edges: float
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int
    instructions: int

    @property
    def bound(self) -> str:
        return max(self.demands, key=lambda k: self.demands[k])

    @property
    def seconds(self) -> float:
        return self.launch + self.demands[self.bound] + self.barriers + self.edges


def launch_seconds(
    launch: Launch, kernel: Translated, counts: Counts, regions: Mapping[str, Region]
) -> float:
    """Modelled seconds of one launch."""
    return launch_model(launch, kernel, counts, regions).seconds


def launch_model(
    launch: Launch, kernel: Translated, counts: Counts, regions: Mapping[str, Region]
) -> Modelled:
    """What one launch would roughly cost, part by part."""
    g = H200
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    busy = min(g.sms, blocks)
    work = count(kernel, counts)
    size, through_l2 = (
        touched(kernel, counts, regions),
        work.moved + counts.bulk_read + counts.bulk_written,
    )
    memory = size / min(g.memory_rate, busy * g.sm_memory_rate)
    l2 = through_l2 / g.l2_rate
    warps = work.instructions / 32
    issue = warps / (g.issue_per_clock * busy * g.clock)
    special = work.special / (g.special_per_clock * busy * g.clock)
    shared = work.shared / (g.smem_bytes_per_clock * busy * g.clock)
    tensor = work.tensor / (g.tensor_flops * busy * g.clock)
    waves = max(1.0, blocks / (busy * max(1, 2048 // max(32, threads))))
    chain = work.instructions / max(1, blocks * threads) * waves * g.dependent_clocks / g.clock
    waits = counts.barriers / blocks * waves * g.block_barrier
    waits += counts.cluster_phases / max(1, blocks) * g.cluster_barrier
    edges = work.releases / blocks * g.edge
    demands = {
        "memory": memory, "l2": l2, "issue": issue, "special functions": special, "shared memory": shared,
        "tensor cores": tensor, "dependent instructions": chain,
    }  # fmt: skip
    return Modelled(
        g.launch, demands, waits, edges, size, through_l2, work.shared, work.instructions
    )


def opcodes(kernel: Translated, counts: Counts) -> dict[str, int]:
    """Executed PTX instructions of all threads by opcode."""
    out: dict[str, int] = {}
    for index, instrs in enumerate(kernel.blocks):
        for i in instrs:
            out[i.parts[0]] = out.get(i.parts[0], 0) + int(counts.blocks[index])
    return {k: v for k, v in out.items() if v}


def modelled_us(
    done: Sequence[tuple[Launch, Translated, Counts]], regions: Mapping[str, Region]
) -> float:
    """Modelled microseconds of launches one after another."""
    return 1e6 * sum(
        launch_seconds(launch, kernel, counts, regions) for launch, kernel, counts in done
    )
