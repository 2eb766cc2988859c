"""Lowering of integer arithmetic: sums, products, quotients, min and max, dot products.

Where PTX leaves a result open (division by zero) the machine's all-ones is used, so that nothing here is
undefined in LLVM. Bits are `lower_bits`' affair, comparisons `lower_compare`'s.
"""

from __future__ import annotations

from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import BITS, Kernel
from sandbox.devices.cpu.ptx_ast import Instr
from sandbox.devices.cpu.registry import lowers

INTS = {"u16", "u32", "u64", "s16", "s32", "s64", "b16", "b32", "b64", "u8", "s8", "b8", "b128"}


def int_kind(instr: Instr, m: Mods) -> tuple[str, int]:
    kind = m.kind()
    if kind not in INTS:
        raise Unsupported(instr, f"type .{kind}")
    return kind, BITS[kind]


def arithmetic(k: Kernel, instr: Instr, m: Mods) -> None:
    """add and sub of integers."""
    kind, bits = int_kind(instr, m)
    saturate = m.take("sat")
    carry_out, op = m.take("cc"), instr.parts[0]
    m.end()
    if carry_out:
        raise Unsupported(instr, "carry")
    a, b = (k.word(o, bits, instr) for o in instr.operands[1:3])
    if saturate:
        if kind != "s32":
            raise Unsupported(instr, "saturation")
        value = k.let(f"call i32 @llvm.s{op}.sat.i32(i32 {a}, i32 {b})")
    else:
        value = k.let(f"{op} i{bits} {a}, {b}")
    k.write(instr.operands[0], bits, value, instr)


def multiply(k: Kernel, instr: Instr, m: Mods, addend: bool) -> None:
    """mul and mad of integers: lo, hi, wide."""
    kind, bits = int_kind(instr, m)
    half = m.need("lo", "hi", "wide")
    saturate = m.take("sat")
    if saturate or m.take("cc"):
        raise Unsupported(instr, "saturation or carry")
    m.end()
    signed = kind[0] == "s"
    a, b = (k.word(o, bits, instr) for o in instr.operands[1:3])
    out = bits
    if half == "lo":
        value = k.let(f"mul i{bits} {a}, {b}")
    else:
        double = 2 * bits
        x, y = k.resize(a, bits, double, signed), k.resize(b, bits, double, signed)
        value = k.let(f"mul i{double} {x}, {y}")
        if half == "wide":
            out = double
        else:
            value = k.resize(k.let(f"lshr i{double} {value}, {bits}"), double, bits)
    if addend:
        value = k.let(f"add i{out} {value}, {k.word(instr.operands[3], out, instr)}")
    k.write(instr.operands[0], out, value, instr)


def divide(k: Kernel, instr: Instr, m: Mods) -> None:
    """div and rem of integers."""
    kind, bits = int_kind(instr, m)
    m.end()
    signed = kind[0] == "s"
    a, b = (k.word(o, bits, instr) for o in instr.operands[1:3])
    zero = k.let(f"icmp eq i{bits} {b}, 0")
    bad = zero
    if signed:
        minus = k.let(f"icmp eq i{bits} {b}, -1")
        bad = k.let(f"or i1 {zero}, {minus}")
    safe = k.let(f"select i1 {bad}, i{bits} 1, i{bits} {b}")
    code = {"div": "div", "rem": "rem"}[instr.parts[0]]
    value = k.let(f"{'s' if signed else 'u'}{code} i{bits} {a}, {safe}")
    if signed:
        by_minus = k.let(f"sub i{bits} 0, {a}") if code == "div" else "0"
        value = k.let(f"select i1 {minus}, i{bits} {by_minus}, i{bits} {value}")
    # PTX leaves division by zero open; this is what an H200 gives, for quotient and remainder
    result = k.let(f"select i1 {zero}, i{bits} -1, i{bits} {value}")
    k.write(instr.operands[0], bits, result, instr)


def extremum(k: Kernel, instr: Instr, m: Mods) -> None:
    """min and max of integers."""
    kind, bits = int_kind(instr, m)
    relu = m.take("relu")
    m.end()
    a, b = (k.word(o, bits, instr) for o in instr.operands[1:3])
    sign = "s" if kind[0] == "s" else "u"
    value = k.let(f"call i{bits} @llvm.{sign}{instr.parts[0]}.i{bits}(i{bits} {a}, i{bits} {b})")
    if relu:
        value = k.let(f"call i{bits} @llvm.smax.i{bits}(i{bits} {value}, i{bits} 0)")
    k.write(instr.operands[0], bits, value, instr)


@lowers("dp4a", "dp4a.{u32,s32}.{u32,s32}")
@lowers("dp2a", "dp2a.{lo,hi}.{u32,s32}.{u32,s32}")
def dot(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kb, ka = m.kind(), m.kind()
    half = m.need("lo", "hi") if instr.parts[0] == "dp2a" else ""
    m.end()
    a, b, c = (k.word(o, 32, instr) for o in instr.operands[1:4])
    steps = 2 if half else 4
    width = 32 // steps
    for i in range(steps):
        x = _lane(k, a, i, width, ka)
        y = _lane(k, b, i + (2 if half == "hi" else 0), 8, kb)
        c = k.let(f"add i32 {c}, {k.let(f'mul i32 {x}, {y}')}")
    k.write(instr.operands[0], 32, c, instr)


def _lane(k: Kernel, value: str, i: int, width: int, kind: str) -> str:
    piece = k.resize(k.let(f"lshr i32 {value}, {i * width}") if i else value, 32, width)
    return k.resize(piece, width, 32, kind[0] == "s")


@lowers("sad", "sad.{u16,u32,u64,s16,s32,s64}")
def sad(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind, bits = int_kind(instr, m)
    m.end()
    a, b, c = (k.word(o, bits, instr) for o in instr.operands[1:4])
    s = "s" if kind[0] == "s" else "u"
    high = k.let(f"call i{bits} @llvm.{s}max.i{bits}(i{bits} {a}, i{bits} {b})")
    low = k.let(f"call i{bits} @llvm.{s}min.i{bits}(i{bits} {a}, i{bits} {b})")
    k.write(
        instr.operands[0],
        bits,
        k.let(f"add i{bits} {c}, {k.let(f'sub i{bits} {high}, {low}')}"),
        instr,
    )
