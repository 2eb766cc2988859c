"""Lowering of floating-point arithmetic: f32, f64, f16, bf16 and pairs of halves.

Exact operations are rounded once, as PTX says. Approximate ones (ex2, lg2, sin, cos, tanh, rcp, rsqrt, sqrt,
div) are computed in f64 and rounded, so they lie within the hardware's documented error. ptxas may fuse an
unrounded mul and add; that is not imitated.
"""

from __future__ import annotations

from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import FLOATS, Kernel
from sandbox.devices.cpu.lower_half import half_binary, half_compare, half_fma, half_unary
from sandbox.devices.cpu.lower_int import arithmetic, divide, extremum, multiply
from sandbox.devices.cpu.ptx_ast import Imm, Instr, Operand, Pair
from sandbox.devices.cpu.registry import lowers

HALVES = {"f16", "bf16", "f16x2", "bf16x2"}
MODES = {"": 0, "rn": 0, "rz": 1, "rm": 2, "rp": 3}
COMPARISONS = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "equ": "ueq", "neu": "une",
    "ltu": "ult",
    "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno",
}  # fmt: skip
INT_COMPARISONS = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "lo": "lt", "ls": "le",
                   "hi": "gt", "hs": "ge"}  # fmt: skip


def flush(k: Kernel, kind: str, value: str) -> str:
    """A subnormal f32 becomes zero of its sign."""
    if kind != "f32":
        return value
    mag = k.let(f"call float @llvm.fabs.f32(float {value})")
    small = k.let(f"fcmp olt float {mag}, 0x3810000000000000")
    zero = k.let(f"call float @llvm.copysign.f32(float 0.0, float {value})")
    return k.let(f"select i1 {small}, float {zero}, float {value}")


def _clamp(k: Kernel, kind: str, value: str) -> str:
    """.sat: to [0, 1], NaN to zero."""
    t = FLOATS[kind]
    low = k.let(f"call {t} @llvm.maxnum.{kind}({t} {value}, {t} 0.0)")
    return k.let(f"call {t} @llvm.minnum.{kind}({t} {low}, {t} 1.0)")


def _finish(k: Kernel, instr: Instr, kind: str, value: str, ftz: bool, sat: bool) -> None:
    if ftz:
        value = flush(k, kind, value)
    if sat:
        value = _clamp(k, kind, value)
    k.write_real(instr.operands[0], kind, value, instr)


def _inputs(k: Kernel, instr: Instr, kind: str, ftz: bool, n: int) -> list[str]:
    values = [k.real(o, kind, instr) for o in instr.operands[1 : n + 1]]
    return [flush(k, kind, v) for v in values] if ftz else values


def _directed(k: Kernel, code: str, args: list[str], mode: int) -> str:
    """f32 arithmetic rounded toward zero, down or up, by way of f64 rounded to odd."""
    wide = [k.let(f"fpext float {a} to double") for a in args]
    if code == "fdiv" or len(wide) == 1:
        raise KeyError(code)
    if code in ("fadd", "fsub"):
        second = k.let(f"fneg double {wide[1]}") if code == "fsub" else wide[1]
        exact = k.let(f"call double @rt_odd_sum(double {wide[0]}, double {second})")
    elif code == "fmul":
        exact = k.let(f"fmul double {wide[0]}, {wide[1]}")
    else:
        exact = k.let(
            f"call double @rt_fma_small(double {wide[0]}, double {wide[1]}, double {wide[2]})"
        )
    bits = k.let(f"call i64 @rt_round32(double {exact}, i64 {mode})")
    return k.let(f"bitcast i32 {k.resize(bits, 64, 32)} to float")


def _real_binary(k: Kernel, instr: Instr, m: Mods, code: str) -> None:
    kind = m.kind()
    if kind in HALVES:
        half_binary(k, instr, m, kind, code)
        return
    if kind not in FLOATS:
        raise Unsupported(instr, f"type .{kind}")
    mode = MODES[m.one("rn", "rz", "rm", "rp")]
    ftz, sat = m.take("ftz"), m.take("sat")
    m.end()
    args = _inputs(k, instr, kind, ftz, 2)
    if mode:
        if kind != "f32":
            raise Unsupported(instr, "directed rounding of f64")
        value = _directed(k, code, args, mode)
    else:
        value = k.let(f"{code} {FLOATS[kind]} {args[0]}, {args[1]}")
    _finish(k, instr, kind, value, ftz, sat)


def _is_int(instr: Instr) -> bool:
    return instr.parts[-1][0] in "usb" and instr.parts[-1] not in ("bf16", "bf16x2")


@lowers("add", "add{.sat}.int, add{.rounding}{.ftz}{.sat}.{f32,f64,f16,bf16,f16x2,bf16x2}")
@lowers("sub", "sub, as add")
def add(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    if _is_int(instr):
        arithmetic(k, instr, m)
    else:
        _real_binary(k, instr, m, "f" + instr.parts[0])


@lowers("mul", "mul.{lo,hi,wide}.int, mul, as add")
def mul(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    if _is_int(instr):
        multiply(k, instr, m, addend=False)
    else:
        _real_binary(k, instr, m, "fmul")


@lowers("fma", "fma.rounding{.ftz}{.sat}{.relu}.{f32,f64,f16,bf16,f16x2,bf16x2}")
@lowers("mad", "mad.{lo,hi,wide}.int, mad.f32 (fused)")
def fma(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    if _is_int(instr):
        multiply(k, instr, m, addend=True)
        return
    kind = m.kind()
    if kind in HALVES:
        half_fma(k, instr, m, kind)
        return
    if kind not in FLOATS:
        raise Unsupported(instr, f"type .{kind}")
    mode = MODES[m.one("rn", "rz", "rm", "rp")]
    ftz, sat = m.take("ftz"), m.take("sat")
    m.end()
    args = _inputs(k, instr, kind, ftz, 3)
    if mode:
        if kind != "f32":
            raise Unsupported(instr, "directed rounding of f64")
        value = _directed(k, "fma", args, mode)
    else:
        t = FLOATS[kind]
        value = k.let(f"call {t} @llvm.fma.{kind}({', '.join(f'{t} {a}' for a in args)})")
    _finish(k, instr, kind, value, ftz, sat)


@lowers("div", "div.int, div.{rn,approx,full}{.ftz}.f32, div.rn.f64")
def div(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    if _is_int(instr):
        divide(k, instr, m)
        return
    kind = m.kind()
    if kind not in FLOATS:
        raise Unsupported(instr, f"type .{kind}")
    m.need("rn", "approx", "full")
    ftz = m.take("ftz")
    m.end()
    a, b = _inputs(k, instr, kind, ftz, 2)
    _finish(k, instr, kind, k.let(f"fdiv {FLOATS[kind]} {a}, {b}"), ftz, False)


@lowers("rem", "rem.int")
def rem(k: Kernel, instr: Instr) -> None:
    divide(k, instr, Mods(instr))


@lowers("min", "min.int, min{.ftz}{.NaN}{.xorsign.abs}.{f32,f64,f16,bf16,f16x2,bf16x2}")
@lowers("max", "max, as min")
def minmax(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    if _is_int(instr):
        extremum(k, instr, m)
        return
    kind = m.kind()
    if kind in HALVES:
        half_binary(k, instr, m, kind, instr.parts[0])
        return
    ftz, nan = m.take("ftz"), m.take("NaN")
    m.end()
    args = _inputs(k, instr, kind, ftz, len(instr.operands) - 1)
    value = args[0]
    for other in args[1:]:
        value = pick(k, kind, instr.parts[0], value, other, nan)
    _finish(k, instr, kind, value, ftz, False)


def pick(k: Kernel, kind: str, op: str, a: str, b: str, nan: bool) -> str:
    """min or max: a number beats a NaN unless `nan`; -0 is below +0."""
    t, bits = FLOATS[kind], {"f32": 32, "f64": 64}[kind]
    code = "olt" if op == "min" else "ogt"
    first = k.let(f"fcmp {code} {t} {a}, {b}")
    value = k.let(f"select i1 {first}, {t} {a}, {t} {b}")
    same = k.let(f"fcmp oeq {t} {a}, {b}")
    ia, ib = (k.let(f"bitcast {t} {v} to i{bits}") for v in (a, b))
    both = k.let(f"{'or' if op == 'min' else 'and'} i{bits} {ia}, {ib}")
    value = k.let(f"select i1 {same}, {t} {k.let(f'bitcast i{bits} {both} to {t}')}, {t} {value}")
    a_nan, b_nan = (k.let(f"fcmp uno {t} {v}, {v}") for v in (a, b))
    canonical = "0x7FFFFFFFE0000000" if kind == "f32" else "0x7FFFFFFFFFFFFFFF"
    if nan:
        either = k.let(f"or i1 {a_nan}, {b_nan}")
        return k.let(f"select i1 {either}, {t} {canonical}, {t} {value}")
    value = k.let(f"select i1 {b_nan}, {t} {a}, {t} {value}")
    value = k.let(f"select i1 {a_nan}, {t} {b}, {t} {value}")
    both_nan = k.let(f"and i1 {a_nan}, {b_nan}")
    return k.let(f"select i1 {both_nan}, {t} {canonical}, {t} {value}")


@lowers("neg", "neg.{s16,s32,s64,f32,f64,f16,bf16,f16x2,bf16x2}")
@lowers("abs", "abs, as neg")
def sign(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind, op = m.kind(), instr.parts[0]
    ftz = m.take("ftz")
    m.end()
    if kind in HALVES:
        half_unary(k, instr, kind, op)
        return
    if kind in FLOATS:
        bits = {"f32": 32, "f64": 64}[kind]
        value = k.word(instr.operands[1], bits, instr)
        top = 1 << (bits - 1)
        code = f"xor i{bits} {value}, {top}" if op == "neg" else f"and i{bits} {value}, {top - 1}"
        real = k.let(f"bitcast i{bits} {k.let(code)} to {FLOATS[kind]}")
        _finish(k, instr, kind, real, ftz, False)
        return
    bits = int(kind[1:])
    a = k.word(instr.operands[1], bits, instr)
    minus = k.let(f"sub i{bits} 0, {a}")
    if op == "abs":
        minus = k.let(
            f"select i1 {k.let(f'icmp slt i{bits} {a}, 0')}, i{bits} {minus}, i{bits} {a}"
        )
    k.write(instr.operands[0], bits, minus, instr)


@lowers("copysign", "copysign.{f32,f64}")
def copysign(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    m.end()
    bits = {"f32": 32, "f64": 64}[kind]
    s, v = (k.word(o, bits, instr) for o in instr.operands[1:3])
    top = 1 << (bits - 1)
    value = k.let(
        f"or i{bits} {k.let(f'and i{bits} {v}, {top - 1}')}, {k.let(f'and i{bits} {s}, {-top}')}"
    )
    k.write(instr.operands[0], bits, value, instr)


@lowers("rcp", "rcp.{approx,rn}{.ftz}.{f32,f64}")
@lowers("sqrt", "sqrt.{approx,rn}{.ftz}.{f32,f64}")
@lowers("rsqrt", "rsqrt.approx{.ftz}.{f32,f64}")
@lowers("ex2", "ex2.approx{.ftz}.f32")
@lowers("lg2", "lg2.approx{.ftz}.f32")
@lowers("sin", "sin.approx{.ftz}.f32")
@lowers("cos", "cos.approx{.ftz}.f32")
@lowers("tanh", "tanh.approx.{f32,f16,bf16,f16x2,bf16x2}")
def unary(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind, op = m.kind(), instr.parts[0]
    m.need("approx", "rn")
    ftz = m.take("ftz")
    m.end()
    if kind in HALVES and op in ("tanh", "ex2"):
        half_unary(k, instr, kind, op)
        return
    if kind not in FLOATS:
        raise Unsupported(instr, f"type .{kind}")
    a = _inputs(k, instr, kind, ftz, 1)[0]
    wide = k.let(f"fpext float {a} to double") if kind == "f32" else a
    value = transcendental(k, op, wide)
    if kind == "f32":
        value = k.let(f"fptrunc double {value} to float")
    _finish(k, instr, kind, value, ftz, False)


def transcendental(k: Kernel, op: str, x: str) -> str:
    """In f64; one more rounding to f32 leaves at most a hair over half an ulp."""
    if op == "rcp":
        return k.let(f"fdiv double 1.0, {x}")
    if op == "sqrt":
        return k.let(f"call double @llvm.sqrt.f64(double {x})")
    if op == "rsqrt":
        return k.let(f"fdiv double 1.0, {k.let(f'call double @llvm.sqrt.f64(double {x})')}")
    name = {"ex2": "exp2", "lg2": "log2"}.get(op, op)
    return k.let(f"call double @{name}(double {x})")


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
    from sandbox.devices.cpu.kernel import BITS

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


__all__ = ["Imm"]
