"""The canary: a kernel with a known result, run as candidates run, to tell a broken device from a broken kernel.

y = 2x + 1 over a million floats, as PTX text of our own, assembled and launched like any artifact. It proves that the
path from PTX to result works at this moment; it says nothing about memory it does not touch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.devices.base import Device, Faulted, Refused

ELEMENTS = 1 << 20
BLOCK = 256
REPEATS = 20
SLOWEST_US = 20_000.0  # 8 MB take 5 us on an idle GPU; a thousand times slower is not well

_PTX = """\
.version 8.8
.target {arch}
.address_size 64

.visible .entry canary(
    .param .u64 canary_x,
    .param .u64 canary_y,
    .param .u32 canary_n
)
.reqntid 256, 1, 1
{{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<8>;

    ld.param.u64 %rd1, [canary_x];
    ld.param.u64 %rd2, [canary_y];
    ld.param.u32 %r1, [canary_n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r2, 256, %r3;
    setp.ge.u32 %p1, %r4, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r4, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.f32 %f1, [%rd6];
    fma.rn.f32 %f2, %f1, 0f40000000, 0f3F800000;
    st.global.f32 [%rd7], %f2;
DONE:
    ret;
}}
"""


@dataclass(frozen=True)
class CanaryResult:
    """`us`: fastest single launch in microseconds by the host's clock, launch cost included; None if not run."""

    ok: bool
    message: str
    us: float | None = None


def artifact(arch: str, elements: int = ELEMENTS) -> Artifact:
    """The canary as an artifact for `arch`."""
    params = bytes(16) + elements.to_bytes(4, "little")
    launch = Launch(
        kernel="canary",
        grid=(-(-elements // BLOCK), 1, 1),
        block=(BLOCK, 1, 1),
        params=params,
        param_offsets=(0, 8, 16),
        relocations=(Relocation(0, "inputs.x"), Relocation(8, "outputs.y")),
    )
    return Artifact(
        target="canary",
        workload={"elements": elements},
        arch=arch,
        buffers=(
            Buffer("inputs.x", "f32", (elements,), align=16),
            Buffer("outputs.y", "f32", (elements,), align=16),
        ),
        step=LaunchPlan(_PTX.format(arch=arch), (launch,)),
        source_sha256="0" * 64,
    )


def run(device: Device, elements: int = ELEMENTS) -> CanaryResult:
    """Load, launch, compare every element and time it. Faults and refusals become a result that is not ok."""
    import torch

    try:
        facts = device.facts()
        arch = facts.arch if facts.kind == "cuda" else "sm_90a"
        program = device.load(artifact(arch, elements))
        x = torch.arange(elements, dtype=torch.float32, device=device.torch_device) % 4096
        y = torch.full_like(x, float("nan"))
        bound = program.bind("step", {"inputs.x": x, "outputs.y": y})
        bound.launch()
        device.synchronize()
        wrong = int((y != 2 * x + 1).sum())
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            bound.launch()
            device.synchronize()
            times.append((time.perf_counter() - begin) * 1e6)
    except (Refused, Faulted) as error:
        return CanaryResult(False, f"{error.status}: {error.failure.message}")
    us = min(times)
    if wrong:
        return CanaryResult(False, f"{wrong} of {elements} elements are wrong", us)
    if facts.kind == "cuda" and us > SLOWEST_US:
        return CanaryResult(
            False, f"a launch took {us:.0f} us, at most {SLOWEST_US:.0f} are expected", us
        )
    return CanaryResult(True, "ok", us)
