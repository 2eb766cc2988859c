"""What a launch on the CPU is made of: buffers, policy, memory, the record that the native runtime reads, its counts.

Data alone: `fill` fills the record, `execute` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sandbox.artifact import Launch
from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.translate import Translated

Words = np.ndarray[tuple[int], np.dtype[np.int64]]


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
