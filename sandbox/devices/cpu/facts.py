"""What a launch did, as the model wants it: counts per warp, and which memory each of its accesses goes to.

The first touch of a buffer in a step comes from memory, later ones from L2 as long as little else went through it in
between; scratch and outputs are written before they are read and stay in L2. It runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sandbox.artifact import Launch
from sandbox.devices.cpu.timing_code import Code

if TYPE_CHECKING:
    from sandbox.devices.cpu.record import Counts

L2_KEEPS = 40 << 20  # bytes that may pass before a touched buffer counts as gone from L2
COLD = ("weights", "inputs", "states", "constants")


@dataclass(frozen=True)
class Facts:
    """One launch. `total`: executions per basic block, all threads; `warps`: of the sampled blocks, [sample, warp,
    basic block]. `far`: sites whose data come from memory. Bytes are of the launch."""

    kernel: str
    code: Code
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    cluster: int
    pdl: bool
    total: np.ndarray
    warps: np.ndarray
    far: frozenset[int]
    memory_bytes: int
    l2_bytes: int
    barriers: int
    cluster_phases: int
    bulk_bytes: int = 0

    @property
    def blocks(self) -> int:
        return math.prod(self.grid)

    @property
    def threads(self) -> int:
        return math.prod(self.block)


@dataclass
class Residency:
    """What a step has touched so far: buffer -> traffic when it was last touched."""

    passed: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def far(self, name: str) -> bool:
        """Whether a buffer's data must come from memory now."""
        if name in self.seen:
            return self.passed - self.seen[name] > L2_KEEPS
        return name.startswith(COLD)

    def touch(self, name: str, moved: int) -> None:
        self.passed += moved
        self.seen[name] = self.passed


def facts_of(
    launch: Launch,
    code: Code,
    counts: Counts,
    sizes: Mapping[str, int],
    step: Residency,
    static: int = 0,
) -> Facts:
    """`sizes`: bytes by buffer name. Advances `step` by this launch."""
    moved: dict[str, int] = {}
    near = 0
    where: dict[str, list[int]] = {}
    for index, ops in enumerate(code.blocks):
        times = int(counts.blocks[index])
        if not times:
            continue
        for op in ops:
            if not op.bytes or op.kind in (
                "shared",
                "store shared",
                "atom shared",
                "param",
                "local",
            ):
                continue
            near += op.bytes * times
            name = counts.site_regions.get(op.site)
            if name is not None:
                moved[name] = moved.get(name, 0) + op.bytes * times
                where.setdefault(name, []).append(op.site)
    bulk = counts.bulk_read + counts.bulk_written
    memory, far = bulk, set()
    for name, size in moved.items():
        once = min(size, sizes.get(name, size))
        if step.far(name):
            memory += once
            far |= set(where[name])
        step.touch(name, once)
    step.passed += bulk
    return Facts(
        launch.kernel, code, launch.grid, launch.block, launch.smem + static, math.prod(launch.cluster or (1, 1, 1)),
        launch.pdl, counts.blocks, counts.warps, frozenset(far), memory, near + bulk, counts.barriers,
        counts.cluster_phases, bulk,
    )  # fmt: skip
