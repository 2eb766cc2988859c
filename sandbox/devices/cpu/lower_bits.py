"""Lowering of bit instructions: logic, shifts, fields, permutations of bytes, counts.

Shift amounts and positions beyond the width give what PTX says, so nothing here is undefined in LLVM.
"""

from __future__ import annotations

from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import BITS, Kernel
from sandbox.devices.cpu.lower_int import int_kind
from sandbox.devices.cpu.ptx_ast import Imm, Instr
from sandbox.devices.cpu.registry import lowers


@lowers("and", "and.{pred,b16,b32,b64}")
@lowers("or", "or.{pred,b16,b32,b64}")
@lowers("xor", "xor.{pred,b16,b32,b64}")
def logic(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    m.end()
    if kind == "pred":
        a, b = (k.flag(o, instr) for o in instr.operands[1:3])
        bits = 1
    else:
        bits = BITS[kind]
        a, b = (k.word(o, bits, instr) for o in instr.operands[1:3])
    k.write(instr.operands[0], bits, k.let(f"{instr.parts[0]} i{bits} {a}, {b}"), instr)


@lowers("not", "not.{pred,b16,b32,b64}")
@lowers("cnot", "cnot.{b16,b32,b64}")
def invert(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    m.end()
    bits = BITS[kind]
    a = (
        k.flag(instr.operands[1], instr)
        if kind == "pred"
        else k.word(instr.operands[1], bits, instr)
    )
    if instr.parts[0] == "cnot":
        value = k.resize(k.let(f"icmp eq i{bits} {a}, 0"), 1, bits)
    else:
        value = k.let(f"xor i{bits} {a}, -1")
    k.write(instr.operands[0], bits, value, instr)


@lowers("shl", "shl.{b16,b32,b64}")
@lowers("shr", "shr.{b,u,s}{16,32,64}")
def shift(k: Kernel, instr: Instr) -> None:
    """Amounts of the width or more give zero, or the sign."""
    m = Mods(instr)
    kind, bits = int_kind(instr, m)
    m.end()
    a, n = k.word(instr.operands[1], bits, instr), k.word(instr.operands[2], 32, instr)
    arithmetic_shift = instr.parts[0] == "shr" and kind[0] == "s"
    code = "shl" if instr.parts[0] == "shl" else "ashr" if arithmetic_shift else "lshr"
    fixed = isinstance(instr.operands[2], Imm) and 0 <= instr.operands[2].value < bits
    if fixed:
        k.write(instr.operands[0], bits, k.let(f"{code} i{bits} {a}, {n}"), instr)
        return
    over = k.let(f"icmp uge i32 {n}, {bits}")
    safe = k.resize(k.let(f"select i1 {over}, i32 {bits - 1}, i32 {n}"), 32, bits)
    value = k.let(f"{code} i{bits} {a}, {safe}")
    if not arithmetic_shift:
        value = k.let(f"select i1 {over}, i{bits} 0, i{bits} {value}")
    k.write(instr.operands[0], bits, value, instr)


@lowers("shf", "shf.{l,r}.{clamp,wrap}.b32")
def funnel(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    side, mode = m.need("l", "r"), m.need("clamp", "wrap")
    m.end()
    if kind != "b32":
        raise Unsupported(instr, "type")
    a, b, n = (k.word(o, 32, instr) for o in instr.operands[1:4])
    if mode == "wrap":
        n = k.let(f"and i32 {n}, 31")
    else:
        n = k.let(f"call i32 @llvm.umin.i32(i32 {n}, i32 32)")
    high = k.let(f"shl i64 {k.resize(b, 32, 64)}, 32")
    both = k.let(f"or i64 {high}, {k.resize(a, 32, 64)}")
    amount = k.resize(n, 32, 64)
    if side == "l":
        value = k.let(f"lshr i64 {k.let(f'shl i64 {both}, {amount}')}, 32")
    else:
        value = k.let(f"lshr i64 {both}, {amount}")
    k.write(instr.operands[0], 32, k.resize(value, 64, 32), instr)


@lowers("lop3", "lop3{.or,.and}.b32")
def lop3(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    combine = m.one("or", "and")
    m.end()
    if (
        kind != "b32"
        or combine
        or len(instr.operands) != 5
        or not isinstance(instr.operands[4], Imm)
    ):
        raise Unsupported(instr, "form")
    a, b, c = (k.word(o, 32, instr) for o in instr.operands[1:4])
    table = instr.operands[4].value & 255
    value = "0"
    flips = {v: k.let(f"xor i32 {v}, -1") for v in dict.fromkeys((a, b, c))}
    for row in range(8):
        if (table >> row) & 1:
            terms = [v if (row >> s) & 1 else flips[v] for v, s in ((a, 2), (b, 1), (c, 0))]
            product = k.let(f"and i32 {k.let(f'and i32 {terms[0]}, {terms[1]}')}, {terms[2]}")
            value = k.let(f"or i32 {value}, {product}")
    k.write(instr.operands[0], 32, value, instr)


@lowers("prmt", "prmt{.f4e,.b4e,.rc8,.ecl,.ecr,.rc16}.b32")
def prmt(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.kind()
    m.end()
    a, b, c = (k.word(o, 32, instr) for o in instr.operands[1:4])
    both = k.let(f"or i64 {k.let(f'shl i64 {k.resize(b, 32, 64)}, 32')}, {k.resize(a, 32, 64)}")
    selector = instr.operands[3]
    value = ""
    for i in range(4):
        if isinstance(selector, Imm):
            s = (selector.value >> 4 * i) & 15
            byte = k.let(f"lshr i64 {both}, {8 * (s & 7)}")
            sign: str = "true" if s & 8 else "false"
        else:
            s4 = k.let(f"lshr i32 {c}, {4 * i}") if i else c
            place = k.let(f"shl i32 {k.let(f'and i32 {s4}, 7')}, 3")
            byte = k.let(f"lshr i64 {both}, {k.resize(place, 32, 64)}")
            sign = k.let(f"icmp ne i32 {k.let(f'and i32 {s4}, 8')}, 0")
        low = k.resize(byte, 64, 8)
        if sign != "false":
            low = k.let(f"select i1 {sign}, i8 {k.let(f'ashr i8 {low}, 7')}, i8 {low}")
        piece = k.resize(low, 8, 32)
        if i:
            piece = k.let(f"shl i32 {piece}, {8 * i}")
        value = k.let(f"or i32 {value}, {piece}") if value else piece
    k.write(instr.operands[0], 32, value, instr)


@lowers("bfe", "bfe.{u32,u64,s32,s64}")
def bfe(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind, bits = int_kind(instr, m)
    m.end()
    a = k.word(instr.operands[1], bits, instr)
    pos, length = (k.let(f"and i32 {k.word(o, 32, instr)}, 255") for o in instr.operands[2:4])
    width = 2 * bits
    wide = k.resize(a, bits, width, kind[0] == "s")
    # positions beyond the value read zeros, or the sign; 255 + 255 bits exceed the doubled width, so clamp
    pos = k.let(f"call i32 @llvm.umin.i32(i32 {pos}, i32 {bits})")
    moved = k.let(
        f"{'ashr' if kind[0] == 's' else 'lshr'} i{width} {wide}, {k.resize(pos, 32, width)}"
    )
    length = k.let(f"call i32 @llvm.umin.i32(i32 {length}, i32 {bits})")
    spare = k.resize(k.let(f"sub i32 {width}, {length}"), 32, width)
    empty = k.let(f"icmp eq i32 {length}, 0")
    spare = k.let(f"select i1 {empty}, i{width} 0, i{width} {spare}")
    up = k.let(f"shl i{width} {moved}, {spare}")
    value = k.let(f"{'ashr' if kind[0] == 's' else 'lshr'} i{width} {up}, {spare}")
    value = k.let(f"select i1 {empty}, i{width} 0, i{width} {value}")
    k.write(instr.operands[0], bits, k.resize(value, width, bits), instr)


@lowers("bfi", "bfi.{b32,b64}")
def bfi(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    _, bits = int_kind(instr, m)
    m.end()
    a, b = (k.word(o, bits, instr) for o in instr.operands[1:3])
    pos, length = (k.let(f"and i32 {k.word(o, 32, instr)}, 255") for o in instr.operands[3:5])
    width = 2 * bits
    pos = k.resize(k.let(f"call i32 @llvm.umin.i32(i32 {pos}, i32 {bits})"), 32, width)
    length = k.resize(k.let(f"call i32 @llvm.umin.i32(i32 {length}, i32 {bits})"), 32, width)
    ones = k.let(f"sub i{width} {k.let(f'shl i{width} 1, {length}')}, 1")
    mask = k.resize(k.let(f"shl i{width} {ones}, {pos}"), width, bits)
    moved = k.resize(k.let(f"shl i{width} {k.resize(a, bits, width)}, {pos}"), width, bits)
    kept = k.let(f"and i{bits} {b}, {k.let(f'xor i{bits} {mask}, -1')}")
    k.write(
        instr.operands[0],
        bits,
        k.let(f"or i{bits} {kept}, {k.let(f'and i{bits} {moved}, {mask}')}"),
        instr,
    )


@lowers("popc", "popc.{b32,b64}")
@lowers("clz", "clz.{b32,b64}")
@lowers("brev", "brev.{b32,b64}")
@lowers("bfind", "bfind{.shiftamt}.{u32,u64,s32,s64}")
def counts(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind, bits = int_kind(instr, m)
    amount = m.take("shiftamt")
    m.end()
    a = k.word(instr.operands[1], bits, instr)
    op = instr.parts[0]
    if op == "brev":
        k.write(
            instr.operands[0],
            bits,
            k.let(f"call i{bits} @llvm.bitreverse.i{bits}(i{bits} {a})"),
            instr,
        )
        return
    if op == "popc":
        value = k.let(f"call i{bits} @llvm.ctpop.i{bits}(i{bits} {a})")
    else:
        if op == "bfind" and kind[0] == "s":
            a = k.let(f"xor i{bits} {a}, {k.let(f'ashr i{bits} {a}, {bits - 1}')}")
        value = k.let(f"call i{bits} @llvm.ctlz.i{bits}(i{bits} {a}, i1 false)")
        if op == "bfind":
            none = k.let(f"icmp eq i{bits} {a}, 0")
            if not amount:
                value = k.let(f"sub i{bits} {bits - 1}, {value}")
            value = k.let(f"select i1 {none}, i{bits} -1, i{bits} {value}")
    k.write(instr.operands[0], 32, k.resize(value, bits, 32), instr)
