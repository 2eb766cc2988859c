"""From a PTX entry to what a launch needs: machine code, sizes of records, tables of sites and blocks.

Entries that differ in their names only share one translation. Refuses with `unsupported`, naming instruction and line.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import llvmlite.binding as llvm

from sandbox.devices.base import Refused
from sandbox.devices.cpu import (
    jit,
    lower_async,
    lower_atomic,
    lower_bits,
    lower_compare,
    lower_cvt,
    lower_float,
    lower_flow,
    lower_int,
    lower_memory,
    lower_mma,
    lower_move,
    lower_warp,
)  # fmt: skip
from sandbox.devices.cpu import (
    layout as L,
)
from sandbox.devices.cpu.cfg import Graph
from sandbox.devices.cpu.emit import Unsupported
from sandbox.devices.cpu.kernel import Kernel, Options, Placed
from sandbox.devices.cpu.lowering import lower
from sandbox.devices.cpu.ptx_ast import Entry, Instr, Module, PtxError, Variable
from sandbox.devices.cpu.registry import HANDLERS
from sandbox.devices.cpu.runtime import functions, runtime_ir
from sandbox.devices.cpu.timing_code import Code, code_of
from sandbox.verdict import Failure, Status

LOWERINGS = (
    lower_async,
    lower_atomic,
    lower_bits,
    lower_compare,
    lower_cvt,
    lower_float,
    lower_flow,
    lower_int,
    lower_memory,
    lower_mma,
    lower_move,
    lower_warp,
)
MAX_INSTRUCTIONS = 1 << 18


@dataclass(frozen=True)
class Translated:
    """One kernel, ready to run. `sites[i]` is the instruction that reports as site i."""

    entry: Entry
    code: jit.Code
    address: int
    sites: tuple[Instr | None, ...]
    effects: tuple[bool, ...]
    blocks: tuple[tuple[Instr, ...], ...]
    frame_bytes: int
    local_bytes: int
    static_bytes: int
    copies: bool
    graph: Graph

    @cached_property
    def timing(self) -> Code:
        """For the model."""
        return code_of(self.graph, self.sites)


@dataclass(frozen=True)
class ModuleData:
    """Module-scope variables of .global and .const, in one allocation that lives as long as this."""

    buffer: ctypes.Array[ctypes.c_char]
    ranges: Mapping[str, tuple[int, int]]


@cache
def runtime() -> jit.Code:
    """The native runtime, its functions bound for kernels to call."""
    code = jit.Code([jit.compile_ir(runtime_ir(), 2)])
    for f in functions():
        llvm.add_symbol(f.__name__, code.address(f.__name__))
    return code


def module_data(module: Module) -> ModuleData:
    variables = [v for v in module.variables if v.space in ("global", "const")]
    size, ranges, places = 0, {}, []
    for v in variables:
        align = max(v.align, 16)
        size = -(-size // align) * align
        places.append((v, size))
        size += v.size
    raw = ctypes.create_string_buffer(size + 256)
    base = -(-ctypes.addressof(raw) // 256) * 256
    for v, offset in places:
        if v.data:
            ctypes.memmove(base + offset, v.data, len(v.data))
        ranges[v.name] = (base + offset, v.size)
    return ModuleData(raw, ranges)


def place(entry: Entry, module: Module, data: ModuleData) -> Placed:
    """Addresses of variables: static shared memory first, then dynamic; local memory from zero."""
    shared: dict[str, int] = {}
    local: dict[str, int] = {}
    end, local_end = 0, 0
    dynamic: list[Variable] = []
    for v in (*module.variables, *entry.variables):
        if v.space == "shared" and v.extern:
            dynamic.append(v)
        elif v.space == "shared":
            end = -(-end // v.align) * v.align
            shared[v.name] = L.SMEM_START + end
            end += v.size
        elif v.space == "local":
            local_end = -(-local_end // v.align) * v.align
            local[v.name] = local_end
            local_end += v.size
    align = max((v.align for v in dynamic), default=1)
    end = -(-end // align) * align
    for v in dynamic:
        shared[v.name] = L.SMEM_START + end
    globals_ = {name: base for name, (base, _) in data.ranges.items()}
    return Placed(shared, end, local, -(-local_end // 16) * 16, globals_)


def translate(entry: Entry, module: Module, data: ModuleData, exact: bool) -> Translated:
    """Raises Refused."""
    if sum(isinstance(i, Instr) for i in entry.body) > MAX_INSTRUCTIONS:
        raise Refused(Status.UNSUPPORTED, Failure("cpu-unsupported", "the kernel is too long"))
    try:
        placed = place(entry, module, data)
        kernel = Kernel(entry, placed, Options(exact, jit.has_feature("f16c")))
    except PtxError as error:
        failure = Failure("cpu-unsupported", str(error), {"ptx_line": error.line})
        raise Refused(Status.UNSUPPORTED, failure) from error
    text = _lower(kernel)
    runtime()
    try:
        code = jit.Code([jit.compile_ir(text, 1)])
    except RuntimeError as error:
        # LLVM refuses text that a malformed instruction led to; its verifier comes before any pass
        why = f"kernel {entry.name[:80]} does not translate: {str(error).strip()[:200]}"
        raise Refused(Status.UNSUPPORTED, Failure("cpu-unsupported", why)) from error
    return Translated(
        entry, code, code.address("kernel"), tuple(kernel.sites), tuple(kernel.effects),
        tuple(tuple(b.instrs) for b in kernel.graph.blocks), kernel.frame_size, placed.local_bytes, placed.static_bytes,
        any(i.parts[:2] == ("cp", "async") and "bulk" not in i.parts for b in kernel.graph.blocks for i in b.instrs),
        kernel.graph,
    )  # fmt: skip


def _lower(kernel: Kernel) -> str:
    """The kernel's IR. What a handler trips over is an instruction of a form that it does not expect."""
    try:
        return lower(kernel, HANDLERS)
    except Unsupported as error:
        raise refusal(error.instr, str(error)) from error
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        if kernel.current is None:
            raise
        raise refusal(kernel.current, f"{kernel.current.opcode}: form") from error


def refusal(instr: Instr, what: str) -> Refused:
    where: dict[str, object] = {"ptx_line": instr.line}
    text = f"the cpu device does not run `{what}` (PTX line {instr.line}"
    if instr.source is not None:
        where |= {"file": instr.source[0], "line": instr.source[1]}
        text += f", {instr.source[0]}:{instr.source[1]}"
    return Refused(Status.UNSUPPORTED, Failure("cpu-unsupported", text + ")", where))
