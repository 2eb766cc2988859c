"""The whole of a kernel's lowering: its blocks and instructions in order, each by its handler, and the module around
them.

Bounds are checked inline against the buffer that the same instruction hit last (`access`). What an instruction becomes
is said in the `lower_*` modules.
"""

from __future__ import annotations

from collections.abc import Mapping

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.cfg import Block
from sandbox.devices.cpu.emit import Unsupported
from sandbox.devices.cpu.kernel import Kernel
from sandbox.devices.cpu.ptx_ast import Instr, Not
from sandbox.devices.cpu.registry import Handler
from sandbox.devices.cpu.runtime import runtime_declarations
from sandbox.devices.cpu.subset_ops import DECLARATIONS

FLOAT_DECLARATIONS = """
declare float @llvm.fma.f32(float, float, float)
declare float @llvm.fabs.f32(float)
declare float @llvm.sqrt.f32(float)
declare float @llvm.minnum.f32(float, float)
declare float @llvm.maxnum.f32(float, float)
declare float @llvm.copysign.f32(float, float)
declare double @llvm.minnum.f64(double, double)
declare double @llvm.maxnum.f64(double, double)
declare float @llvm.rint.f32(float)
declare float @llvm.trunc.f32(float)
declare float @llvm.floor.f32(float)
declare float @llvm.ceil.f32(float)
declare double @llvm.rint.f64(double)
declare double @llvm.trunc.f64(double)
declare double @llvm.floor.f64(double)
declare double @llvm.ceil.f64(double)
declare i32 @llvm.fshr.i32(i32, i32, i32)
declare i64 @llvm.fshr.i64(i64, i64, i64)
declare i32 @llvm.fshl.i32(i32, i32, i32)
declare i16 @llvm.bitreverse.i16(i16)
declare i32 @llvm.bitreverse.i32(i32)
declare i64 @llvm.bitreverse.i64(i64)
declare i32 @llvm.ctpop.i32(i32)
declare i32 @llvm.ctlz.i32(i32, i1)
declare i16 @llvm.smin.i16(i16, i16)
declare i16 @llvm.smax.i16(i16, i16)
declare i16 @llvm.umin.i16(i16, i16)
declare i16 @llvm.umax.i16(i16, i16)
declare i32 @llvm.smin.i32(i32, i32)
declare i32 @llvm.smax.i32(i32, i32)
declare i32 @llvm.umin.i32(i32, i32)
declare i32 @llvm.umax.i32(i32, i32)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
declare i32 @llvm.sadd.sat.i32(i32, i32)
declare i32 @llvm.ssub.sat.i32(i32, i32)
declare i32 @llvm.fptosi.sat.i32.f32(float)
declare i32 @llvm.fptoui.sat.i32.f32(float)
declare i64 @llvm.fptosi.sat.i64.f32(float)
declare i64 @llvm.fptoui.sat.i64.f32(float)
declare i16 @llvm.fptosi.sat.i16.f32(float)
declare i16 @llvm.fptoui.sat.i16.f32(float)
declare i8 @llvm.fptosi.sat.i8.f32(float)
declare i8 @llvm.fptoui.sat.i8.f32(float)
declare i32 @llvm.fptosi.sat.i32.f64(double)
declare i32 @llvm.fptoui.sat.i32.f64(double)
declare i64 @llvm.fptosi.sat.i64.f64(double)
declare i64 @llvm.fptoui.sat.i64.f64(double)
declare i16 @llvm.fptosi.sat.i16.f64(double)
declare i16 @llvm.fptoui.sat.i16.f64(double)
declare double @exp2(double)
declare double @log2(double)
declare double @sin(double)
declare double @cos(double)
declare double @tanh(double)
"""


def prologue() -> list[str]:
    """What every kernel keeps at hand: addresses of its records and the bounds of shared memory."""
    lines = [f"  %{n}i = ptrtoint ptr %{n} to i64" for n in "tbc"]
    fields = [
        ("pc", "t", L.T_PC, "i64"), ("smem", "b", L.B_SMEM, "ptr"), ("shadow", "b", L.B_SHADOW, "ptr"),
        ("lo", "b", L.B_LO, "i64"), ("smembytes", "c", L.C_SMEM, "i64"), ("params", "c", L.C_PARAMS, "ptr"),
        ("sites", "c", L.C_SITES, "ptr"), ("counters", "c", L.C_COUNTERS, "ptr"),
    ]  # fmt: skip
    for name, base, offset, kind in fields:
        lines.append(f"  %{name}.p = getelementptr i8, ptr %{base}, i64 {offset}")
        lines.append(f"  %{name} = load {kind}, ptr %{name}.p")
    lines += ["  %lo32 = trunc i64 %lo to i32", "  %bytes32 = trunc i64 %smembytes to i32"]
    lines += [f"  %count{k} = lshr i32 %bytes32, {k}" for k in range(5)]
    return [*lines, "  %fuel = alloca i32", f"  store i32 {L.SLICE}, ptr %fuel"]


def _fall(k: Kernel, block: Block) -> None:
    """Fall into the next block, or end the thread at the end of the text."""
    last = block.instrs[-1] if block.instrs else None
    if last is not None and last.parts[0] in ("bra", "brx"):
        return
    if last is not None and last.parts[0] in ("ret", "exit", "trap") and last.guard is None:
        return
    if block.next is None:
        k.finish()
    else:
        k.go(f"bb{block.next}")


def lower(k: Kernel, handlers: Mapping[str, Handler]) -> str:
    """The module's text."""
    for block in k.graph.blocks:
        k.block = block
        k.dirty = k.graph.dirty_in[block.index]
        k.away = 0
        k.place(f"bb{block.index}")
        _count_block(k, block)
        after = _live_afters(k, block)
        for i, instr in enumerate(block.instrs):
            k.live_after = after[i]
            if i == len(block.instrs) - 1 and instr.parts[0] in (
                "bra",
                "brx",
                "ret",
                "exit",
                "trap",
            ):
                k.fetch(after[i])
            k.fetch(k.graph.uses[id(instr)])
            _instr(k, instr, handlers)
        k.fetch(k.graph.live_out[block.index])
        _fall(k, block)
    return _module(k)


def _count_block(k: Kernel, block: Block) -> None:
    p = k.at("%counters", 8 * block.index)
    old = k.let(f"load i64, ptr {p}")
    k.do(f"store i64 {k.let(f'add i64 {old}, 1')}, ptr {p}")


def _live_afters(k: Kernel, block: Block) -> list[int]:
    live = k.graph.live_out[block.index]
    out = []
    for instr in reversed(block.instrs):
        out.append(live)
        live = k.graph.before(instr, live)
    return out[::-1]


def _instr(k: Kernel, instr: Instr, handlers: Mapping[str, Handler]) -> None:
    k.current = instr
    handler = handlers.get(instr.parts[0])
    if handler is None:
        raise Unsupported(instr)
    if instr.guard is None or instr.parts[0] in ("bra", "brx"):
        handler(k, instr)
        return
    guard = k.flag(Not(instr.guard) if instr.negated else instr.guard, instr)
    yes, no = k.fresh("do"), k.fresh("skip")
    k.split(guard, yes, no)
    k.place(yes)
    handler(k, instr)
    k.go(no)
    k.place(no)


def _begin(k: Kernel) -> list[str]:
    """Where a thread starts: what may be read before anything writes it holds noise, all else zero."""
    lines = ["begin:"]
    for name in k.graph.unset():
        n, bits, alloca = k.graph.number[name], k.bits_of(name), k.alloca[name]
        call = f"call i64 @rt_unset(i64 %ci, i64 %bi, i64 %ti, i64 {n})"
        value = f"%u{n}"
        lines += [f"  {value} = {call}"]
        if bits != 64:
            how = "trunc" if bits < 64 else "sext"
            value = f"%w{n}"
            lines += [f"  {value} = {how} i64 %u{n} to i{bits}"]
        lines += [f"  store i{bits} {value}, ptr {alloca}"]
    return [*lines, "  br label %bb0"]


def _module(k: Kernel) -> str:
    cases = "\n".join(f"    i64 {i + 1}, label %{r}" for i, r in enumerate(k.resumes))
    allocas = []
    for name, alloca in k.alloca.items():
        bits = k.bits_of(name)
        allocas += [f"  {alloca} = alloca i{bits}", f"  store i{bits} 0, ptr {alloca}"]
    head = "define void @kernel(ptr noalias %t, ptr noalias %b, ptr noalias %c) nounwind {"
    return "\n".join([
        DECLARATIONS, FLOAT_DECLARATIONS, runtime_declarations(), head, "entry:", *allocas, *prologue(),
        f"  %local = getelementptr i8, ptr %t, i64 {L.T_FRAME + k.frame_size}",
        f"  switch i64 %pc, label %begin [\n{cases}\n  ]", *_begin(k), *k.lines, "fault:", "  ret void", "}",
        '!0 = !{!"branch_weights", i32 1000, i32 1}', "",
    ])  # fmt: skip
