"""Lowering of arithmetic, by the type of the instruction: f32 and f64 here, integers and halves by their own modules.

Exact operations are rounded once, as PTX says; approximate ones as `float_ops` says. ptxas may fuse an unrounded mul
and add; that is not imitated.
"""

from __future__ import annotations

from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.float_ops import MODES, clamp, directed, flush, pick, transcendental
from sandbox.devices.cpu.kernel import FLOATS, Kernel
from sandbox.devices.cpu.lower_half import HALVES, half_binary, half_fma, half_unary
from sandbox.devices.cpu.lower_int import arithmetic, divide, extremum, multiply
from sandbox.devices.cpu.ptx_ast import Instr
from sandbox.devices.cpu.registry import lowers


def _finish(k: Kernel, instr: Instr, kind: str, value: str, ftz: bool, sat: bool) -> None:
    if ftz:
        value = flush(k, kind, value)
    if sat:
        value = clamp(k, kind, value)
    k.write_real(instr.operands[0], kind, value, instr)


def _inputs(k: Kernel, instr: Instr, kind: str, ftz: bool, n: int) -> list[str]:
    values = [k.real(o, kind, instr) for o in instr.operands[1 : n + 1]]
    return [flush(k, kind, v) for v in values] if ftz else values


def _real_binary(k: Kernel, instr: Instr, m: Mods, code: str) -> None:
    kind = m.kind()
    if kind in HALVES:
        half_binary(k, instr, m, kind, code)
    else:
        _rounded(k, instr, m, kind, code)


def _rounded(k: Kernel, instr: Instr, m: Mods, kind: str, code: str) -> None:
    """fadd, fsub, fmul or fma of f32 or f64, rounded as the modifiers say."""
    if kind not in FLOATS:
        raise Unsupported(instr, f"type .{kind}")
    mode = MODES[m.one("rn", "rz", "rm", "rp")]
    ftz, sat = m.take("ftz"), m.take("sat")
    m.end()
    args = _inputs(k, instr, kind, ftz, 3 if code == "fma" else 2)
    t = FLOATS[kind]
    if mode:
        if kind != "f32":
            raise Unsupported(instr, "directed rounding of f64")
        value = directed(k, code, args, mode)
    elif code == "fma":
        value = k.let(f"call {t} @llvm.fma.{kind}({', '.join(f'{t} {a}' for a in args)})")
    else:
        value = k.let(f"{code} {t} {args[0]}, {args[1]}")
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
    else:
        _rounded(k, instr, m, kind, "fma")


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
