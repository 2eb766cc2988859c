"""Lowering of f16 and bf16 arithmetic, alone and in pairs, and the conversions from and to f32 that all of it needs.

Sums and products are formed in f32, whose 24 bits make the second rounding harmless; fma goes through rounding to odd.
"""

from __future__ import annotations

from collections.abc import Callable

from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.float_ops import COMPARISONS, pick, transcendental
from sandbox.devices.cpu.kernel import Kernel
from sandbox.devices.cpu.ptx_ast import Instr, Operand

HALVES = {"f16", "bf16", "f16x2", "bf16x2"}


def widen(k: Kernel, kind: str, value: str) -> str:
    """i16 to float, exactly."""
    if kind.startswith("bf16"):
        return k.let(f"bitcast i32 {k.let(f'shl i32 {k.resize(value, 16, 32)}, 16')} to float")
    if k.options.f16c:
        return k.let(f"fpext half {k.let(f'bitcast i16 {value} to half')} to float")
    bits = k.helper("rt_half_value", k.resize(value, 16, 64))
    return k.let(f"bitcast i32 {k.resize(bits, 64, 32)} to float")


def narrow(k: Kernel, kind: str, value: str) -> str:
    """float to i16, to nearest even."""
    if not kind.startswith("bf16"):
        if k.options.f16c:
            half = k.let(f"bitcast half {k.let(f'fptrunc float {value} to half')} to i16")
            nan = k.let(f"fcmp uno float {value}, {value}")
            return k.let(f"select i1 {nan}, i16 32767, i16 {half}")
        bits = k.resize(k.let(f"bitcast float {value} to i32"), 32, 64)
        return k.resize(k.helper("rt_half_bits", bits), 64, 16)
    bits = k.let(f"bitcast float {value} to i32")
    odd = k.let(f"and i32 {k.let(f'lshr i32 {bits}, 16')}, 1")
    rounded = k.let(f"add i32 {k.let(f'add i32 {bits}, 32767')}, {odd}")
    nan = k.let(f"fcmp uno float {value}, {value}")
    return k.resize(
        k.let(f"lshr i32 {k.let(f'select i1 {nan}, i32 2147418112, i32 {rounded}')}, 16"), 32, 16
    )


def halves(k: Kernel, op: Operand, kind: str, instr: Instr) -> list[str]:
    """The one or two i16 of an operand."""
    if not kind.endswith("x2"):
        return [k.word(op, 16, instr)]
    value = k.word(op, 32, instr)
    return [k.resize(value, 32, 16), k.resize(k.let(f"lshr i32 {value}, 16"), 32, 16)]


def write_halves(k: Kernel, instr: Instr, values: list[str]) -> None:
    if len(values) == 1:
        k.write(instr.operands[0], 16, values[0], instr)
        return
    high = k.let(f"shl i32 {k.resize(values[1], 16, 32)}, 16")
    k.write(instr.operands[0], 32, k.let(f"or i32 {high}, {k.resize(values[0], 16, 32)}"), instr)


def _clean(k: Kernel, kind: str, value: str, ftz: bool) -> str:
    """A subnormal f16 becomes zero."""
    if not ftz or kind.startswith("bf16"):
        return value
    empty = k.let(f"icmp eq i16 {k.let(f'and i16 {value}, 31744')}, 0")
    return k.let(f"select i1 {empty}, i16 {k.let(f'and i16 {value}, -32768')}, i16 {value}")


def _each(k: Kernel, instr: Instr, kind: str, count: int, f: Callable[[list[str]], str]) -> None:
    columns = [halves(k, o, kind, instr) for o in instr.operands[1 : count + 1]]
    write_halves(k, instr, [f(list(row)) for row in zip(*columns, strict=True)])


def half_binary(k: Kernel, instr: Instr, m: Mods, kind: str, code: str) -> None:
    """fadd, fsub, fmul, min or max."""
    m.drop("rn")
    ftz, sat, nan = m.take("ftz"), m.take("sat"), m.take("NaN")
    m.end()

    def one(row: list[str]) -> str:
        a, b = (widen(k, kind, _clean(k, kind, v, ftz)) for v in row)
        if code in ("min", "max"):
            value = pick(k, "f32", code, a, b, nan)
        else:
            value = k.let(f"{code} float {a}, {b}")
        if sat:
            value = _saturate(k, value)
        return _clean(k, kind, narrow(k, kind, value), ftz)

    _each(k, instr, kind, 2, one)


def _saturate(k: Kernel, value: str) -> str:
    low = k.let(f"call float @llvm.maxnum.f32(float {value}, float 0.0)")
    return k.let(f"call float @llvm.minnum.f32(float {low}, float 1.0)")


def half_fma(k: Kernel, instr: Instr, m: Mods, kind: str) -> None:
    m.drop("rn")
    ftz, sat, relu = m.take("ftz"), m.take("sat"), m.take("relu")
    m.end()

    def one(row: list[str]) -> str:
        args = [widen(k, kind, _clean(k, kind, v, ftz)) for v in row]
        wide = ", ".join(f"double {k.let(f'fpext float {a} to double')}" for a in args)
        bits = k.let(f"call i64 @rt_fma_odd32({wide})")
        value = k.let(f"bitcast i32 {k.resize(bits, 64, 32)} to float")
        if relu:
            positive = k.let(f"fcmp ult float {value}, 0.0")
            value = k.let(f"select i1 {positive}, float 0.0, float {value}")
        if sat:
            value = _saturate(k, value)
        return _clean(k, kind, narrow(k, kind, value), ftz)

    _each(k, instr, kind, 3, one)


def half_unary(k: Kernel, instr: Instr, kind: str, op: str) -> None:
    """neg, abs, tanh, ex2."""

    def one(row: list[str]) -> str:
        if op == "neg":
            return k.let(f"xor i16 {row[0]}, -32768")
        if op == "abs":
            return k.let(f"and i16 {row[0]}, 32767")
        wide = k.let(f"fpext float {widen(k, kind, row[0])} to double")
        value = transcendental(k, op, wide)
        return narrow(k, kind, k.let(f"fptrunc double {value} to float"))

    _each(k, instr, kind, 1, one)


def half_compare(k: Kernel, instr: Instr, m: Mods, kind: str, ops: tuple[Operand, Operand]) -> str:
    """An i1 for scalars; pairs of predicates are refused."""
    if kind.endswith("x2"):
        raise Unsupported(instr, "pairs of results")
    a, b = (widen(k, kind, halves(k, o, kind, instr)[0]) for o in ops)
    return k.let(f"fcmp {COMPARISONS[m.need(*COMPARISONS)]} float {a}, {b}")
