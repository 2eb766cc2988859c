"""A driver without a GPU: loads real cubins, keeps launches in order and runs them as Python on host memory.

It reads parameters as the driver does, through the array of pointers, so patching and packing are really exercised.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandbox.artifact import Launch
from sandbox.devices.cuda_driver import Call, CudaError
from sandbox.devices.cuda_plan import KernelFacts, ParamBlock, Residency

H200 = {
    "MULTIPROCESSOR_COUNT": 132, "L2_CACHE_SIZE": 60 << 20, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "COOPERATIVE_LAUNCH": 1, "CLUSTER_LAUNCH": 1, "PAGEABLE_MEMORY_ACCESS": 1, "MEMORY_CLOCK_RATE": 3201000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144, "CLOCK_RATE": 1980000, "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0, "MAX_THREADS_PER_BLOCK": 1024, "MAX_GRID_DIM_X": 2**31 - 1,
    "MAX_GRID_DIM_Y": 65535, "MAX_GRID_DIM_Z": 65535, "MAX_BLOCK_DIM_X": 1024, "MAX_BLOCK_DIM_Y": 1024,
    "MAX_BLOCK_DIM_Z": 64,
}  # fmt: skip

Run = Callable[[list[bytes]], None]


def canary_run(params: list[bytes]) -> None:
    """y = 2x + 1, as the canary's PTX does."""
    x, y, n = (int.from_bytes(p, "little") for p in params)
    floats(y, n)[:] = 2 * floats(x, n) + 1


def floats(address: int, n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer((ctypes.c_float * n).from_address(address), dtype=np.float32)


@dataclass(frozen=True)
class FakeKernel:
    """`params`: (offset, size) as the cubin would have them; `run` gets each parameter's bytes."""

    params: tuple[tuple[int, int], ...]
    run: Run
    registers: int = 12
    smem_static: int = 0
    max_threads: int = 1024
    required_cluster: tuple[int, int, int] | None = None


CANARY = FakeKernel(((0, 8), (8, 8), (16, 4)), canary_run, max_threads=256)


@dataclass
class FakeDriver:
    """`errors`: names of errors that the next calls of `idle` raise; `hung`: `idle` is never true."""

    kernels: dict[str, FakeKernel] = field(default_factory=lambda: {"canary": CANARY})
    attribute: dict[str, int] = field(default_factory=lambda: dict(H200))
    room: Residency = Residency(8)
    errors: list[str] = field(default_factory=list)
    launch_error: str = ""
    placement_error: str = ""
    hung: bool = False
    product: str = "NVIDIA H200"
    loaded: list[bytes] = field(default_factory=list)
    allowed: list[tuple[str, int, int]] = field(default_factory=list)
    launched: list[tuple[str, bool]] = field(default_factory=list)
    recording: list[Call] | None = None
    l2_resets: int = 0

    def name(self) -> str:
        return self.product

    def uuid(self) -> str:
        return "GPU-00000000-0000-0000-0000-000000000001"

    def version(self) -> str:
        return "13.0"

    def memory_bytes(self) -> int:
        return 140 << 30

    def attributes(self) -> dict[str, int]:
        return dict(self.attribute)

    def load(self, cubin: bytes) -> Any:
        assert cubin[:4] == b"\x7fELF", "only assembled code may be loaded"
        self.loaded.append(cubin)
        return cubin

    def kernel(self, module: Any, name: str) -> Any | None:
        return name if b".text." + name.encode() + b"\0" in module else None

    def facts(self, kernel: Any, name: str) -> KernelFacts:
        k = self.kernels[name]
        return KernelFacts(
            name, k.params, k.registers, 0, k.smem_static, k.max_threads, k.required_cluster
        )

    def allow(self, kernel: Any, smem: int, cluster: int) -> None:
        self.allowed.append((kernel, smem, cluster))

    def residency(self, kernel: Any, launch: Launch, stream: int) -> Residency:
        if self.placement_error:
            raise CudaError(self.placement_error, "cuOccupancyMaxActiveClusters")
        return self.room

    def call(self, kernel: Any, launch: Launch, params: ParamBlock, stream: int, pdl: bool) -> Call:
        return Call((launch, pdl), kernel, params)

    def launch(self, calls: Sequence[Call]) -> None:
        for i, c in enumerate(calls):
            if self.launch_error:
                raise CudaError(self.launch_error, f"launch {i}")
            if self.recording is not None:
                self.recording.append(c)
            else:
                self._run(c)

    def _run(self, call: Call) -> None:
        kernel = self.kernels[call.kernel]
        pointers = (ctypes.c_void_p * len(kernel.params)).from_address(call.params.address)
        kernel.run(
            [
                ctypes.string_at(p, size)
                for p, (_, size) in zip(pointers, kernel.params, strict=True)
            ]
        )
        self.launched.append((call.kernel, call.config[1]))

    def begin_capture(self, stream: int) -> None:
        self.recording = []

    def end_capture(self, stream: int) -> Any:
        graph, self.recording = tuple(self.recording or ()), None
        return graph

    def replay(self, graph: Any, stream: int) -> None:
        for call in graph:
            self._run(call)

    def idle(self, stream: int) -> bool:
        if self.errors:
            raise CudaError(self.errors.pop(0), "cuStreamQuery")
        return not self.hung

    def reset_persisting_l2(self) -> None:
        self.l2_resets += 1
