"""Lowering of comparisons and of what chooses by them: setp, set, testp, selp, slct.

Comparisons of halves are in `lower_half`; min and max beside the arithmetic of their type.
"""

from __future__ import annotations

from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.float_ops import COMPARISONS, flush
from sandbox.devices.cpu.kernel import BITS, FLOATS, Kernel
from sandbox.devices.cpu.lower_half import HALVES, half_compare
from sandbox.devices.cpu.ptx_ast import Instr, Operand, Pair
from sandbox.devices.cpu.registry import lowers

INT_COMPARISONS = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "lo": "lt", "ls": "le",
                   "hi": "gt", "hs": "ge"}  # fmt: skip


@lowers("setp", "setp.comparison{.and,.or,.xor}{.ftz}.type")
@lowers("set", "set.comparison{.bool}{.ftz}.{u32,s32,f32}.type")
def setp(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    out = m.kind() if instr.parts[0] == "set" else "pred"
    combine = m.one("and", "or", "xor")
    ftz = m.take("ftz")
    a, b = instr.operands[1], instr.operands[2]
    if kind in HALVES:
        result = half_compare(k, instr, m, kind, (a, b))
    else:
        result = compare(k, instr, m, kind, (a, b), ftz)
    m.end()
    extra = k.flag(instr.operands[3], instr) if combine else ""
    dest = instr.operands[0]
    if isinstance(dest, Pair):
        other = k.let(f"xor i1 {result}, true")
        k.write(
            dest.second, 1, k.let(f"{combine} i1 {other}, {extra}") if combine else other, instr
        )
        dest = dest.first
    value = k.let(f"{combine} i1 {result}, {extra}") if combine else result
    if out == "pred":
        k.write(dest, 1, value, instr)
    elif out == "f32":
        k.write_real(dest, "f32", k.let(f"select i1 {value}, float 1.0, float 0.0"), instr)
    else:
        k.write(dest, 32, k.resize(value, 1, 32, signed=True), instr)


def compare(
    k: Kernel, instr: Instr, m: Mods, kind: str, ops: tuple[Operand, Operand], ftz: bool
) -> str:
    """An i1. Integers by their signedness, floats ordered or not as the name says."""
    if kind in FLOATS:
        a, b = (k.real(o, kind, instr) for o in ops)
        if ftz:
            a, b = flush(k, kind, a), flush(k, kind, b)
        return k.let(f"fcmp {COMPARISONS[m.need(*COMPARISONS)]} {FLOATS[kind]} {a}, {b}")
    if kind[0] not in "usb" or not kind[1:].isdigit():
        raise Unsupported(instr, f"type .{kind}")
    bits = int(kind[1:])
    name = m.need(*INT_COMPARISONS)
    code = INT_COMPARISONS[name]
    if code not in ("eq", "ne"):
        unsigned = kind[0] != "s" or name in ("lo", "ls", "hi", "hs")
        code = ("u" if unsigned else "s") + code
    a, b = (k.word(o, bits, instr) for o in ops)
    return k.let(f"icmp {code} i{bits} {a}, {b}")


@lowers("slct", "slct{.ftz}.type.{s32,f32}")
def slct(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    by, kind = m.kind(), m.kind()
    m.drop("ftz")
    m.end()
    bits = BITS[kind]
    a, b = (k.word(o, bits, instr) for o in instr.operands[1:3])
    if by == "s32":
        test = k.let(f"icmp sge i32 {k.word(instr.operands[3], 32, instr)}, 0")
    else:
        test = k.let(f"fcmp oge float {k.real(instr.operands[3], 'f32', instr)}, 0.0")
    k.write(instr.operands[0], bits, k.let(f"select i1 {test}, i{bits} {a}, i{bits} {b}"), instr)


@lowers("testp", "testp.{finite,infinite,number,notanumber,normal,subnormal}.{f32,f64}")
def testp(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    what = m.need("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    m.end()
    bits, mant = (32, 23) if kind == "f32" else (64, 52)
    mag = k.let(f"and i{bits} {k.word(instr.operands[1], bits, instr)}, {(1 << (bits - 1)) - 1}")
    inf, least = ((1 << (bits - 1 - mant)) - 1) << mant, 1 << mant
    code = {"finite": f"icmp ult i{bits} {mag}, {inf}", "infinite": f"icmp eq i{bits} {mag}, {inf}",
            "number": f"icmp ule i{bits} {mag}, {inf}", "notanumber": f"icmp ugt i{bits} {mag}, {inf}"}  # fmt: skip
    if what in code:
        value = k.let(code[what])
    elif what == "normal":
        value = k.let(f"icmp ult i{bits} {k.let(f'sub i{bits} {mag}, {least}')}, {inf - least}")
    else:
        value = k.let(f"icmp ult i{bits} {k.let(f'sub i{bits} {mag}, 1')}, {least - 1}")
    k.write(instr.operands[0], 1, value, instr)


@lowers("selp", "selp.type")
def selp(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    bits = BITS[m.kind()]
    m.end()
    a, b = (k.word(o, bits, instr) for o in instr.operands[1:3])
    p = k.flag(instr.operands[3], instr)
    k.write(instr.operands[0], bits, k.let(f"select i1 {p}, i{bits} {a}, i{bits} {b}"), instr)
