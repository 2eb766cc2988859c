"""The few driver calls that the CUDA device needs, over cuda-bindings, with errors as exceptions that keep their name.

A thin layer: no policy, no validation. Importing it touches no driver; cuda.bindings is imported when a `CudaDriver` is
made, in a process whose context torch has already opened. `Driver` is the seam for a fake.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sandbox.artifact import Launch
from sandbox.devices.cuda_plan import PORTABLE_CLUSTER, KernelFacts, ParamBlock, Residency

ATTRIBUTES = (
    "MULTIPROCESSOR_COUNT", "L2_CACHE_SIZE", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "COOPERATIVE_LAUNCH",
    "CLUSTER_LAUNCH", "PAGEABLE_MEMORY_ACCESS", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH", "CLOCK_RATE",
    "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MAX_THREADS_PER_BLOCK",
    "MAX_GRID_DIM_X", "MAX_GRID_DIM_Y", "MAX_GRID_DIM_Z", "MAX_BLOCK_DIM_X", "MAX_BLOCK_DIM_Y", "MAX_BLOCK_DIM_Z",
)  # fmt: skip


class CudaError(Exception):
    """A driver call failed. `name` is CUDA's own, such as `CUDA_ERROR_ILLEGAL_ADDRESS`; `call` is the function."""

    def __init__(self, name: str, call: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name, self.call = name, call


@dataclass(frozen=True)
class Call:
    """One launch ready to go: driver configuration, kernel handle, and the block that holds its parameters."""

    config: Any
    kernel: Any
    params: ParamBlock


class Driver(Protocol):
    """Handles are opaque. Every method may raise CudaError."""

    def name(self) -> str: ...
    def uuid(self) -> str: ...
    def version(self) -> str: ...
    def memory_bytes(self) -> int: ...
    def attributes(self) -> dict[str, int]: ...
    def load(self, cubin: bytes) -> Any: ...
    def kernel(self, module: Any, name: str) -> Any | None: ...
    def facts(self, kernel: Any, name: str) -> KernelFacts: ...
    def allow(self, kernel: Any, smem: int, cluster: int) -> None: ...
    def residency(self, kernel: Any, launch: Launch, stream: int) -> Residency: ...
    def call(
        self, kernel: Any, launch: Launch, params: ParamBlock, stream: int, pdl: bool
    ) -> Call: ...
    def launch(self, calls: Sequence[Call]) -> None: ...
    def begin_capture(self, stream: int) -> None: ...
    def end_capture(self, stream: int) -> Any: ...
    def replay(self, graph: Any, stream: int) -> None: ...
    def idle(self, stream: int) -> bool: ...
    def reset_persisting_l2(self) -> None: ...


class CudaDriver:
    """Driver over cuda-bindings 13, for the context that is current in this thread."""

    def __init__(self, ordinal: int = 0) -> None:
        import cuda.bindings.driver as cu

        self._cu: Any = cu
        self._device = self._one(cu.cuDeviceGet(ordinal), "cuDeviceGet")

    def _check(self, result: tuple[Any, ...], call: str) -> tuple[Any, ...]:
        code = result[0]
        if code:
            raise CudaError(getattr(code, "name", str(code)), call)
        return result[1:]

    def _one(self, result: tuple[Any, ...], call: str) -> Any:
        return self._check(result, call)[0]

    def name(self) -> str:
        raw: bytes = self._one(self._cu.cuDeviceGetName(256, self._device), "cuDeviceGetName")
        return raw.split(b"\0", 1)[0].decode("ascii", "replace")

    def uuid(self) -> str:
        raw = bytes(self._one(self._cu.cuDeviceGetUuid(self._device), "cuDeviceGetUuid").bytes)
        h = raw.hex()
        return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"

    def version(self) -> str:
        number = int(self._one(self._cu.cuDriverGetVersion(), "cuDriverGetVersion"))
        return f"{number // 1000}.{number % 1000 // 10}"

    def memory_bytes(self) -> int:
        return int(self._one(self._cu.cuDeviceTotalMem(self._device), "cuDeviceTotalMem"))

    def attributes(self) -> dict[str, int]:
        kinds = self._cu.CUdevice_attribute
        return {
            a: int(
                self._one(
                    self._cu.cuDeviceGetAttribute(
                        getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{a}"), self._device
                    ),
                    a,
                )
            )
            for a in ATTRIBUTES
        }

    def load(self, cubin: bytes) -> Any:
        return self._one(self._cu.cuModuleLoadData(cubin), "cuModuleLoadData")

    def kernel(self, module: Any, name: str) -> Any | None:
        result = self._cu.cuModuleGetFunction(module, name.encode())
        if result[0] == self._cu.CUresult.CUDA_ERROR_NOT_FOUND:
            return None
        return self._one(result, "cuModuleGetFunction")

    def facts(self, kernel: Any, name: str) -> KernelFacts:
        get = self._function_attribute
        wanted = tuple(
            get(kernel, f"REQUIRED_CLUSTER_{axis}") for axis in ("WIDTH", "HEIGHT", "DEPTH")
        )
        return KernelFacts(
            name=name,
            params=self._params(kernel),
            registers=get(kernel, "NUM_REGS"),
            local_bytes=get(kernel, "LOCAL_SIZE_BYTES"),
            smem_static=get(kernel, "SHARED_SIZE_BYTES"),
            max_threads=get(kernel, "MAX_THREADS_PER_BLOCK"),
            required_cluster=(wanted[0], wanted[1], wanted[2]) if all(wanted) else None,
            must_set_cluster=bool(get(kernel, "CLUSTER_SIZE_MUST_BE_SET")),
        )

    def _function_attribute(self, kernel: Any, name: str) -> int:
        attribute = getattr(self._cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self._one(self._cu.cuFuncGetAttribute(attribute, kernel), name))

    def _params(self, kernel: Any) -> tuple[tuple[int, int], ...]:
        out: list[tuple[int, int]] = []
        while True:
            result = self._cu.cuFuncGetParamInfo(kernel, len(out))
            if result[0] == self._cu.CUresult.CUDA_ERROR_INVALID_VALUE:
                return tuple(out)
            offset, size = self._check(result, "cuFuncGetParamInfo")
            out.append((int(offset), int(size)))

    def allow(self, kernel: Any, smem: int, cluster: int) -> None:
        """Let the kernel have that much dynamic shared memory and clusters of that many blocks."""
        names = self._cu.CUfunction_attribute
        wanted = [(names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem)]
        if cluster > PORTABLE_CLUSTER:
            wanted.append((names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for attribute, value in wanted:
            self._check(self._cu.cuFuncSetAttribute(kernel, attribute, value), "cuFuncSetAttribute")

    def residency(self, kernel: Any, launch: Launch, stream: int) -> Residency:
        threads = math.prod(launch.block)
        blocks = self._one(
            self._cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, threads, launch.smem),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        )
        if not launch.cluster:
            return Residency(int(blocks))
        config = launch_config(self._cu, launch, stream, pdl=False)
        clusters = self._one(
            self._cu.cuOccupancyMaxActiveClusters(kernel, config), "cuOccupancyMaxActiveClusters"
        )
        return Residency(int(blocks), int(clusters))

    def call(self, kernel: Any, launch: Launch, params: ParamBlock, stream: int, pdl: bool) -> Call:
        return Call(launch_config(self._cu, launch, stream, pdl), kernel, params)

    def launch(self, calls: Sequence[Call]) -> None:
        enqueue = self._cu.cuLaunchKernelEx
        for i, c in enumerate(calls):
            (code,) = enqueue(c.config, c.kernel, c.params.address, 0)
            if code:
                raise CudaError(getattr(code, "name", str(code)), f"launch {i}")

    def begin_capture(self, stream: int) -> None:
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check(
            self._cu.cuStreamBeginCapture(self._cu.CUstream(stream), mode), "cuStreamBeginCapture"
        )

    def end_capture(self, stream: int) -> Any:
        return self.instantiate(self.captured(stream), stream)

    def captured(self, stream: int) -> Any:
        """End a capture: the graph, not yet to be replayed."""
        cu = self._cu
        return self._one(cu.cuStreamEndCapture(cu.CUstream(stream)), "cuStreamEndCapture")

    def instantiate(self, graph: Any, stream: int) -> Any:
        """Make it replayable. Not while this thread captures on another stream."""
        cu = self._cu
        try:
            ready = self._one(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        finally:
            self._check(cu.cuGraphDestroy(graph), "cuGraphDestroy")
        self._check(cu.cuGraphUpload(ready, cu.CUstream(stream)), "cuGraphUpload")
        return ready

    def replay(self, graph: Any, stream: int) -> None:
        (code,) = self._cu.cuGraphLaunch(graph, stream)
        if code:
            raise CudaError(getattr(code, "name", str(code)), "cuGraphLaunch")

    def idle(self, stream: int) -> bool:
        """Whether all work on the stream is done. Raises CudaError for what went wrong on the GPU."""
        (code,) = self._cu.cuStreamQuery(self._cu.CUstream(stream))
        if code == self._cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check((code,), "cuStreamQuery")
        return True

    def reset_persisting_l2(self) -> None:
        self._check(self._cu.cuCtxResetPersistingL2Cache(), "cuCtxResetPersistingL2Cache")


def launch_config(cu: Any, launch: Launch, stream: int, pdl: bool) -> Any:
    """The driver's configuration of a launch: sizes, stream, and no attributes but these three. Needs no driver."""
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes, config.hStream = launch.smem, cu.CUstream(stream)
    attributes = []
    if launch.cooperative:
        attributes.append(_attribute(cu, "COOPERATIVE"))
        attributes[-1].value.cooperative = 1
    if launch.cluster:
        attributes.append(_attribute(cu, "CLUSTER_DIMENSION"))
        dims = attributes[-1].value.clusterDim
        dims.x, dims.y, dims.z = launch.cluster
    if pdl:
        attributes.append(_attribute(cu, "PROGRAMMATIC_STREAM_SERIALIZATION"))
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _attribute(cu: Any, name: str) -> Any:
    attribute = cu.CUlaunchAttribute()
    attribute.id = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return attribute
