"""Running PTX text on the cpu device in tests: an artifact around one launch, its parameters packed by kind."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.devices.cpu.device import CpuDevice
from sandbox.devices.cpu.program import CpuBound, CpuProgram

DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.uint16: "u16",
    torch.uint32: "u32", torch.uint64: "u64",
}  # fmt: skip
HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"


@dataclass(frozen=True)
class Shape:
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] | None = None
    smem: int = 0
    cooperative: bool = False


@dataclass(frozen=True)
class Ran:
    program: CpuProgram
    bound: CpuBound
    tensors: Sequence[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Recorded:
    """A launch that ended well: what it began with and what it left. `labels` name equal parts of the last tensor."""

    artifact: Artifact
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    labels: Sequence[str] = ()


_RECORD: list[list[Recorded]] = []


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Launches through `run` meanwhile; those that fault or report findings are left out."""
    made: list[Recorded] = []
    _RECORD.append(made)
    try:
        yield made
    finally:
        _RECORD.remove(made)


def artifact(
    ptx: str, args: Sequence[torch.Tensor | int], shape: Shape, kernel: str = "k"
) -> Artifact:
    """Arguments: tensors become 8-byte pointers b0, b1, ...; integers become 4 bytes."""
    params, offsets, relocations, buffers = b"", [], [], []
    for arg in args:
        if isinstance(arg, int):
            offsets.append(len(params))
            params += struct.pack("<I", arg & 0xFFFFFFFF)
            continue
        params = params.ljust(-(-len(params) // 8) * 8, b"\0")
        name = f"workspace.b{len(buffers)}"
        buffers.append(Buffer(name, DTYPES[arg.dtype], tuple(arg.shape), 16, "zero", "step"))
        relocations.append(Relocation(len(params), name))
        offsets.append(len(params))
        params += bytes(8)
    launch = Launch(kernel, shape.grid, shape.block, params, tuple(offsets), tuple(relocations), shape.smem,
                    shape.cluster, shape.cooperative)  # fmt: skip
    return Artifact("test", {}, "sm_90a", tuple(buffers), LaunchPlan(ptx, (launch,)))


def run(
    ptx: str, args: Sequence[torch.Tensor | int], shape: Shape | None = None, *, kernel: str = "k",
    device: CpuDevice | None = None, undefined: Sequence[int] = (), labels: Sequence[str] = (),
) -> Ran:  # fmt: skip
    """Load, bind and launch. Raises Refused or Faulted."""
    a = artifact(ptx, args, shape or Shape(), kernel)
    program = (device or CpuDevice()).load(a)
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    bound = program.bind(
        "step", {f"workspace.b{i}": t for i, t in enumerate(tensors)},
        frozenset(f"workspace.b{i}" for i in undefined),
    )  # fmt: skip
    before = [t.clone() for t in tensors] if _RECORD else []
    bound.launch()
    if not program.findings():
        for made in _RECORD:
            made.append(Recorded(a, before, [t.clone() for t in tensors], labels))
    return Ran(program, bound, tensors)


def rules(ran: Ran) -> set[str]:
    """Of what the device found."""
    return {f.rule for f in ran.program.findings()}


def kernel(body: str, params: str = "p", regs: str = "", extra: str = "") -> str:
    """A kernel `k`. `params`: one letter each, p pointer, i integer; they are loaded to %rdN and %rN (N from 100)."""
    declared, loads = [], []
    for i, kind in enumerate(params):
        wide = kind == "p"
        declared.append(f".param .{'u64' if wide else 'u32'} a{i}")
        loads.append(f"ld.param.b{64 if wide else 32} %{'rd' if wide else 'r'}{100 + i}, [a{i}];")
    joined = ",\n".join(declared)
    return f"""{HEADER}{extra}
.visible .entry k({joined}) {{
.reg .pred %p<16>; .reg .b16 %rs<64>; .reg .b32 %r<128>; .reg .b64 %rd<128>; {regs}
{chr(10).join(loads)}
mov.u32 %r99, %tid.x;
{body}
}}
"""
