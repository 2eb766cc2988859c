"""What a kernel takes of an SM and what its machine code is made of: occupancy, waves, instruction mix. No device.

Figures of compute capability 9.0 and 10.x; both have the same register file, warps and blocks of an SM.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

from sandbox.artifact import Artifact, Launch
from sandbox.assemble import AssemblyFailed, ToolchainMissing, assemble
from sandbox.sass import Code, early_arrivals, parse, text_of
from sandbox.verdict import KernelResources, short_name

REGISTERS, WARPS, BLOCKS = 65536, 64, 32
SMEM, SMEM_OF_SYSTEM = 233472, 1024
MIX = {
    "global memory": ("LDG", "STG", "RED", "ATOMG", "ATOM", "LD", "ST", "CCTL"),
    "bulk and async copies": ("UBLKCP", "UBLKPF", "LDGSTS", "LDGDEPBAR", "DEPBAR", "UTMALDG", "UTMASTG"),
    "shared memory": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "local memory": ("LDL", "STL"),
    "tensor cores": ("HMMA", "IMMA", "HGMMA", "QGMMA", "IGMMA", "DMMA", "UTCHMMA", "UTCQMMA"),
    "float": ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2", "FSEL", "FSETP", "FMNMX", "DADD", "DMUL", "DFMA"),
    "special functions": ("MUFU",),
    "conversions": ("F2F", "F2I", "I2F", "F2FP", "I2FP", "PRMT", "I2IP"),
    "synchronisation": ("BAR", "SYNCS", "MEMBAR", "ERRBAR", "WARPSYNC", "NANOSLEEP", "FENCE", "UCGABAR_ARV"),
    "shuffles and votes": ("SHFL", "VOTE", "VOTEU", "REDUX", "MATCH"),
    "control": ("BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET", "YIELD", "BREAK", "JMP", "BRX", "NOP"),
}  # fmt: skip
_CLASS = {opcode: name for name, opcodes in MIX.items() for opcode in opcodes}


def occupancy(launch: Launch, used: KernelResources | None, sms: int) -> dict[str, Any]:
    """Blocks and warps of an SM that fit, what limits them, and waves over `sms`."""
    threads = prod(launch.block)
    warps = -(-threads // 32)
    fits = {"warps": WARPS // warps, "blocks": BLOCKS}
    if used is not None:
        file = -(-used.registers * 32 // 256) * 256 * warps
        fits["registers"] = REGISTERS // max(1, file)
    smem = launch.smem + (used.smem_static if used else 0) + SMEM_OF_SYSTEM
    fits["shared memory"] = SMEM // smem
    limit = min(fits, key=lambda k: fits[k])
    blocks = max(1, fits[limit])
    return {
        "blocks_per_sm": blocks, "occupancy": round(min(1.0, blocks * warps / WARPS), 4), "limited_by": limit,
        "waves": round(prod(launch.grid) / (blocks * max(1, sms)), 3),
    }  # fmt: skip


def bytes_named(artifact: Artifact, launch: Launch) -> dict[str, int]:
    """Sizes of what a launch names: what memory holds, and what this step made itself, which L2 may hold."""
    out = {"memory": 0, "l2": 0}
    for name in {r.buffer for r in launch.relocations}:
        b = artifact.buffer(name)
        out["memory" if b.group in ("weights", "inputs", "states") else "l2"] += b.nbytes
    return out


class MachineCode:
    """SASS of a step's kernels. Disassembly, which takes half a second, begins at once and runs beside other work."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        pool = ThreadPoolExecutor(1)
        self._text = pool.submit(self._read)
        pool.shutdown(wait=False)

    def _read(self) -> str:
        """Waits for programs only, so that it takes no time from Python's other thread."""
        return text_of(assemble(self.artifact.step.ptx, self.artifact.arch).cubin)

    def table(self) -> dict[str, Any]:
        """Instructions by class and opcode; or why there are none."""
        try:
            codes = parse(self._text.result())
        except (AssemblyFailed, ToolchainMissing, OSError, subprocess.SubprocessError) as error:
            return {"unavailable": str(error)[:200]}
        wanted = {x.kernel for x in self.artifact.step.launches}
        return {
            short_name(c.kernel): {
                "bytes": c.bytes, "instructions": len(c.instructions), "mix": mix(c.histogram()),
                "opcodes": dict(c.histogram().most_common(24)), **_unordered(c),
            }
            for c in codes if c.kernel in wanted
        }  # fmt: skip


def _unordered(c: Code) -> dict[str, int]:
    """Arrivals that may give memory back to bulk copies before it has been read, where a kernel has such copies."""
    found = early_arrivals(c)
    copies = any(x in c.histogram() for x in ("UBLKCP", "UTMALDG"))
    return {"early_arrivals": len(found)} if found and copies else {}


def mix(histogram: Mapping[str, int]) -> dict[str, float]:
    """Shares by class, the largest first."""
    total = sum(histogram.values()) or 1
    sums: dict[str, int] = {}
    for opcode, n in histogram.items():
        name = _CLASS.get(opcode, "integer and moves")
        sums[name] = sums.get(name, 0) + n
    return {k: round(v / total, 4) for k, v in sorted(sums.items(), key=lambda x: -x[1])}


def by_kernel(resources: Iterable[KernelResources]) -> dict[str, KernelResources]:
    return {r.kernel: r for r in resources}
