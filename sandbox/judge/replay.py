"""A small process that launches an artifact's plans, for tools that watch every access.

`python -m sandbox.judge.replay FOLDER MODE`, without torch: the only kernels that a tool sees are the candidate's and
one of ours. Each buffer is an allocation of its own of exactly its size, so that the tool knows where it ends. FOLDER
holds the artifact's path (`artifact`) and what buffers hold (`NAME.bin`). Modes: `plain` launches the plans alone;
`control` launches them, then a control kernel that is wrong in four known ways; `cut` gives buffers that a step writes
half their memory, and `unset` leaves inputs unwritten, so that a tool that looks at the candidate's kernels must
complain. It compares nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import artifact_store
from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, PlanName, Relocation
from sandbox.devices.base import Faulted, Refused
from sandbox.devices.cuda import CudaDevice
from sandbox.devices.cuda_driver import CudaDriver, CudaError

MODES = ("plain", "control", "cut", "unset")
STEPS = 2
WAIT_S = 55.0
CONTROL = "kernelgen_control"

_CONTROL_PTX = """\
.version 8.8
.target {arch}
.address_size 64
.visible .entry kernelgen_control(.param .u64 control_x, .param .u64 control_y)
.reqntid 64, 1, 1
{{
    .shared .align 4 .b8 control_s[256];
    .reg .pred %p<3>;
    .reg .b32 %r<10>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [control_x];
    ld.param.u64 %rd2, [control_y];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.u32 %r2, [%rd4];
    mov.u32 %r3, control_s;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r3, %r4;
    st.shared.u32 [%r5], %r2;
    xor.b32 %r6, %r4, 252;
    add.s32 %r7, %r3, %r6;
    ld.shared.u32 %r8, [%r7];
    setp.lt.u32 %p1, %r1, 8;
    @%p1 bra SKIP;
    bar.sync 0;
SKIP:
    add.s64 %rd5, %rd2, %rd3;
    st.global.u32 [%rd5], %r8;
    ret;
}}
"""
# Reads unwritten memory; two warps exchange words without a barrier; part of a warp skips one; y ends after 8 words.


@dataclass(frozen=True)
class Memory:
    """What the device layer asks of a tensor. `real`: bytes that there are, where that is less than it is told."""

    address: int
    size: int
    real: int

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


class Gpu:
    """The driver, a context, one stream, allocations of exact size."""

    def __init__(self) -> None:
        import cuda.bindings.driver as cu

        self.cu: Any = cu
        self._ok(cu.cuInit(0))
        device = self._ok(cu.cuDeviceGet(0))
        self._ok(cu.cuCtxSetCurrent(self._ok(cu.cuDevicePrimaryCtxRetain(device))))
        stream = self._ok(cu.cuStreamCreate(1))
        self.device = CudaDevice(CudaDriver(0), int(stream))
        self.device.hang_s = WAIT_S

    def _ok(self, result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise CudaError(getattr(result[0], "name", str(result[0])), "replay")
        return result[1] if len(result) > 1 else None

    def alloc(self, size: int) -> int:
        return int(self._ok(self.cu.cuMemAlloc(max(1, size))))

    def fill(self, address: int, source: Path, size: int) -> None:
        with (
            source.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data,
        ):
            view = (ctypes.c_char * len(data)).from_buffer(data)
            try:
                self._ok(
                    self.cu.cuMemcpyHtoD(address, ctypes.addressof(view), min(size, len(data)))
                )
            finally:
                del view

    def clear(self, address: int, size: int) -> None:
        self._ok(self.cu.cuMemsetD8(address, 0, size))

    def wait(self) -> None:
        self.device.synchronize()


def written(b: Buffer) -> bool:
    return b.group in ("outputs", "states", "workspace")


def memory_of(gpu: Gpu, artifact: Artifact, folder: Path, mode: str) -> dict[str, Memory]:
    """Allocations with contents. What the plan is told is the whole size; what there is may be less (`cut`)."""
    out = {}
    for b in artifact.buffers:
        real = max(1, b.nbytes // 2) if mode == "cut" and written(b) else b.nbytes
        address = gpu.alloc(real)
        source = folder / f"{b.name}.bin"
        if b.name in artifact.constants:
            source.write_bytes(artifact.constants[b.name])
        if source.exists() and not (mode == "unset" and b.group == "inputs"):
            gpu.fill(address, source, real)
        elif b.init == "zero":
            gpu.clear(address, real)
        out[b.name] = Memory(address, b.nbytes, real)
    return out


def launch(gpu: Gpu, artifact: Artifact, memory: Mapping[str, Memory]) -> int:
    """`prepare`, then STEPS steps. The number of launches. Raises Refused, Faulted."""
    program = gpu.device.load(artifact)
    done = 0
    plans: list[PlanName] = ["prepare"] if artifact.prepare else []
    tensors: Any = dict(memory)
    for name in [*plans, *(["step"] * STEPS)]:
        for b in artifact.buffers:
            if (b.init, b.lifetime) == ("zero", "step") and name == "step":
                gpu.clear(memory[b.name].address, memory[b.name].real)
        bound = program.bind(name, tensors)  # type: ignore[arg-type]
        bound.launch()
        gpu.wait()
        done += bound.launches
    return done


def control(gpu: Gpu, arch: str) -> None:
    """Our own wrong kernel. What it does to the context does not matter: it is the last."""
    one = Launch(
        CONTROL, (1, 1, 1), (64, 1, 1), bytes(16), (0, 8),
        (Relocation(0, "inputs.x"), Relocation(8, "outputs.y")),
    )  # fmt: skip
    words = Buffer("inputs.x", "i32", (64,)), Buffer("outputs.y", "i32", (64,))
    artifact = Artifact(
        "control",
        {},
        arch,
        words,
        LaunchPlan(_CONTROL_PTX.format(arch=arch), (one,)),
        source_sha256="0" * 64,
    )
    program = gpu.device.load(artifact)
    memory: Any = {
        "inputs.x": Memory(gpu.alloc(256), 256, 256),
        "outputs.y": Memory(gpu.alloc(32), 256, 32),
    }
    program.bind("step", memory).launch()
    gpu.wait()


def main(argv: list[str]) -> int:
    folder, mode = Path(argv[0]), argv[1]
    assert mode in MODES
    artifact = artifact_store.load(Path((folder / "artifact").read_text()))
    begin = time.monotonic()
    gpu = Gpu()
    try:
        count = launch(gpu, artifact, memory_of(gpu, artifact, folder, mode))
        print(f"replayed {count} launches in {time.monotonic() - begin:.1f} s", flush=True)
    except (Refused, Faulted) as error:
        print(f"ended: {error.failure.message}", flush=True)
        if mode == "control":
            return 3
    if mode == "control":
        try:
            control(gpu, artifact.arch)
        except (Refused, Faulted, CudaError) as error:
            print(f"control ended: {error}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
