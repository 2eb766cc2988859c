"""Lowering of cvt: integers, floats and small floats, one by one and in pairs, with rounding and saturation."""

from __future__ import annotations

from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.float_ops import MODES, flush
from sandbox.devices.cpu.kernel import BITS, FLOATS, Kernel
from sandbox.devices.cpu.lower_half import narrow, widen
from sandbox.devices.cpu.ptx_ast import Instr, Operand
from sandbox.devices.cpu.registry import lowers

INTS = {"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64"}
ROUND_INT = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
SMALL = {"e4m3x2": "rt_e4m3", "e5m2x2": "rt_e5m2"}


@lowers("cvt", "cvt{.rounding}{.ftz}{.sat}{.relu}{.satfinite}.to.from for u/s 8-64, f16, bf16, f32, f64, tf32, "
               "f16x2/bf16x2 from two f32, e4m3x2/e5m2x2 from and to f16x2 or f32")  # fmt: skip
def cvt(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    source, dest = m.kind(), m.kind()
    if dest in SMALL or source in SMALL:
        _small(k, instr, m, dest, source)
    elif dest in ("f16x2", "bf16x2"):
        _pair(k, instr, m, dest, source)
    elif dest in INTS and source in INTS:
        _int_to_int(k, instr, m, dest, source)
    elif dest in INTS:
        _to_int(k, instr, m, dest, source)
    elif source in INTS:
        _from_int(k, instr, m, dest, source)
    else:
        _float_to_float(k, instr, m, dest, source)


def _load(k: Kernel, instr: Instr, op: Operand, kind: str) -> str:
    """Any float operand as float, f64 as double."""
    if kind in ("f16", "bf16"):
        return widen(k, kind, k.word(op, 16, instr))
    if kind in FLOATS:
        return k.real(op, kind, instr)
    raise Unsupported(instr, f"type .{kind}")


def _int_to_int(k: Kernel, instr: Instr, m: Mods, dest: str, source: str) -> None:
    saturate = m.take("sat")
    m.end()
    have, want = BITS[source], BITS[dest]
    value = k.word(instr.operands[1], have, instr)
    signed = source[0] == "s"
    if saturate:
        value = k.resize(value, have, 128, signed)
        low = -(1 << (want - 1)) if dest[0] == "s" else 0
        high = (1 << (want - (dest[0] == "s"))) - 1
        under, over = (
            k.let(f"icmp slt i128 {value}, {low}"),
            k.let(f"icmp sgt i128 {value}, {high}"),
        )
        value = k.let(f"select i1 {under}, i128 {low}, i128 {value}")
        value = k.resize(k.let(f"select i1 {over}, i128 {high}, i128 {value}"), 128, want)
    else:
        value = k.resize(value, have, want, signed)
    k.write(instr.operands[0], want, value, instr, signed=dest[0] == "s")


def _to_int(k: Kernel, instr: Instr, m: Mods, dest: str, source: str) -> None:
    mode = ROUND_INT[m.need(*ROUND_INT)]
    ftz = m.take("ftz")
    m.drop("sat")
    m.end()
    value = _load(k, instr, instr.operands[1], source)
    kind = "f64" if source == "f64" else "f32"
    if ftz:
        value = flush(k, kind, value)
    t, bits = FLOATS[kind], BITS[dest]
    whole = k.let(f"call {t} @llvm.{mode}.{kind}({t} {value})")
    name = f"llvm.fpto{'s' if dest[0] == 's' else 'u'}i.sat.i{bits}.{kind}"
    result = k.let(f"call i{bits} @{name}({t} {whole})")
    if source == "f64" or bits == 64:
        nan = k.let(f"fcmp uno {t} {value}, {value}")
        result = k.let(f"select i1 {nan}, i{bits} {-(1 << (bits - 1))}, i{bits} {result}")
    k.write(instr.operands[0], bits, result, instr, signed=dest[0] == "s")


def _from_int(k: Kernel, instr: Instr, m: Mods, dest: str, source: str) -> None:
    mode = MODES[m.one("rn", "rz", "rm", "rp")]
    m.end()
    bits = BITS[source]
    value = k.word(instr.operands[1], bits, instr)
    code = f"{'s' if source[0] == 's' else 'u'}itofp i{bits} {value} to "
    if dest in ("f32", "f64") and mode == 0:
        k.write_real(instr.operands[0], dest, k.let(code + FLOATS[dest]), instr)
        return
    if bits == 64:
        raise Unsupported(instr, "64-bit integers with this rounding or type")
    exact = k.let(code + "double")
    if dest == "f32":
        out = k.let(f"call i64 @rt_round32(double {exact}, i64 {mode})")
        k.write(instr.operands[0], 32, k.resize(out, 64, 32), instr)
    elif dest in ("f16", "bf16") and mode == 0:
        odd = k.let(f"call i64 @rt_odd32(double {exact})")
        real = k.let(f"bitcast i32 {k.resize(odd, 64, 32)} to float")
        k.write(instr.operands[0], 16, narrow(k, dest, real), instr)
    else:
        raise Unsupported(instr, "rounding")


def _float_to_float(k: Kernel, instr: Instr, m: Mods, dest: str, source: str) -> None:
    whole = m.one(*ROUND_INT)
    rounding = m.one("rn", "rz", "rm", "rp", "rna")
    ftz, sat, relu, satfinite = m.take("ftz"), m.take("sat"), m.take("relu"), m.take("satfinite")
    m.end()
    if satfinite:
        raise Unsupported(instr, "satfinite")
    value = _load(k, instr, instr.operands[1], source)
    kind = "f64" if source == "f64" else "f32"
    if ftz and kind == "f32":
        value = flush(k, kind, value)
    t = FLOATS[kind]
    if whole:
        value = k.let(f"call {t} @llvm.{ROUND_INT[whole]}.{kind}({t} {value})")
    if relu:
        value = _relu(k, t, value)
    if sat:
        low = k.let(f"call {t} @llvm.maxnum.{kind}({t} {value}, {t} 0.0)")
        value = k.let(f"call {t} @llvm.minnum.{kind}({t} {low}, {t} 1.0)")
    if dest == "tf32":
        _tf32(k, instr, value, rounding)
    elif dest == "f64":
        k.write_real(
            instr.operands[0],
            "f64",
            value if kind == "f64" else k.let(f"fpext float {value} to double"),
            instr,
        )
    elif dest == "f32":
        _write_f32(k, instr, value, kind, MODES[rounding] if rounding in MODES else 0, ftz)
    elif dest in ("f16", "bf16"):
        k.write(instr.operands[0], 16, _to_half(k, instr, dest, value, kind, rounding), instr)
    else:
        raise Unsupported(instr, f"type .{dest}")


def _relu(k: Kernel, t: str, value: str) -> str:
    # as the hardware does: -0 becomes +0, NaN stays
    below = k.let(f"fcmp ole {t} {value}, 0.0")
    return k.let(f"select i1 {below}, {t} 0.0, {t} {value}")


def _write_f32(k: Kernel, instr: Instr, value: str, kind: str, mode: int, ftz: bool) -> None:
    if kind == "f64":
        bits = k.let(f"call i64 @rt_round32(double {value}, i64 {mode})")
        value = k.let(f"bitcast i32 {k.resize(bits, 64, 32)} to float")
        if ftz:
            value = flush(k, "f32", value)
    k.write_real(instr.operands[0], "f32", value, instr)


def _to_half(k: Kernel, instr: Instr, dest: str, value: str, kind: str, rounding: str) -> str:
    if kind == "f64":
        odd = k.let(f"call i64 @rt_odd32(double {value})")
        value = k.let(f"bitcast i32 {k.resize(odd, 64, 32)} to float")
    if rounding in ("", "rn"):
        return narrow(k, dest, value)
    if rounding != "rz":
        raise Unsupported(instr, "rounding")
    bits = k.let(f"bitcast float {value} to i32")
    if dest == "bf16":
        nan = k.let(f"fcmp uno float {value}, {value}")
        return k.resize(
            k.let(f"lshr i32 {k.let(f'select i1 {nan}, i32 2147418112, i32 {bits}')}, 16"), 32, 16
        )
    return k.resize(k.helper("rt_half_down", k.resize(bits, 32, 64)), 64, 16)


def _tf32(k: Kernel, instr: Instr, value: str, rounding: str) -> None:
    bits = k.let(f"bitcast float {value} to i32")
    if rounding == "rna":
        moved = k.let(f"add i32 {bits}, 4096")
    elif rounding == "rn":
        odd = k.let(f"and i32 {k.let(f'lshr i32 {bits}, 13')}, 1")
        moved = k.let(f"add i32 {k.let(f'add i32 {bits}, 4095')}, {odd}")
    else:
        moved = bits
    special = k.let(f"icmp eq i32 {k.let(f'and i32 {bits}, 2139095040')}, 2139095040")
    kept = k.let(f"and i32 {moved}, -8192")
    k.write(instr.operands[0], 32, k.let(f"select i1 {special}, i32 {bits}, i32 {kept}"), instr)


def _pair(k: Kernel, instr: Instr, m: Mods, dest: str, source: str) -> None:
    """Two f32: the first becomes the upper half."""
    rounding = m.need("rn", "rz")
    relu = m.take("relu")
    m.end()
    if source != "f32":
        raise Unsupported(instr, f"from .{source}")
    parts = []
    for op in instr.operands[1:3]:
        value = k.real(op, "f32", instr)
        value = _relu(k, "float", value) if relu else value
        parts.append(k.resize(_to_half(k, instr, dest[:-2], value, "f32", rounding), 16, 32))
    k.write(
        instr.operands[0],
        32,
        k.let(f"or i32 {k.let(f'shl i32 {parts[0]}, 16')}, {parts[1]}"),
        instr,
    )


def _small(k: Kernel, instr: Instr, m: Mods, dest: str, source: str) -> None:
    """Pairs of 8-bit floats. From two f32 the first becomes the upper byte."""
    m.need("rn")
    saturate, relu = m.take("satfinite"), m.take("relu")
    m.end()
    if source in SMALL:
        if dest != "f16x2":
            raise Unsupported(instr, f"to .{dest}")
        pair = k.word(instr.operands[1], 16, instr)
        out = []
        for i in range(2):
            byte = k.resize(k.let(f"and i16 {k.let(f'lshr i16 {pair}, {8 * i}')}, 255"), 16, 64)
            bits = k.helper(SMALL[source] + "_value", byte)
            real = k.let(f"bitcast i32 {k.resize(bits, 64, 32)} to float")
            real = _relu(k, "float", real) if relu else real
            out.append(k.resize(narrow(k, "f16", real), 16, 32))
        k.write(
            instr.operands[0],
            32,
            k.let(f"or i32 {k.let(f'shl i32 {out[1]}, 16')}, {out[0]}"),
            instr,
        )
        return
    if not saturate:
        raise Unsupported(instr, "without .satfinite")
    if source == "f32":
        reals = [k.real(instr.operands[2], "f32", instr), k.real(instr.operands[1], "f32", instr)]
    elif source == "f16x2":
        both = k.word(instr.operands[1], 32, instr)
        reals = [
            widen(k, "f16", k.resize(k.let(f"lshr i32 {both}, {16 * i}"), 32, 16)) for i in range(2)
        ]
    else:
        raise Unsupported(instr, f"from .{source}")
    parts = []
    for real in reals:
        real = _relu(k, "float", real) if relu else real
        bits = k.resize(k.let(f"bitcast float {real} to i32"), 32, 64)
        parts.append(k.resize(k.helper(SMALL[dest] + "_bits", bits), 64, 16))
    k.write(
        instr.operands[0], 16, k.let(f"or i16 {k.let(f'shl i16 {parts[1]}, 8')}, {parts[0]}"), instr
    )
