"""The intrinsics of the runtime's language in Python: the meaning that `sandbox.devices.cpu.subset` compiles.

They make runtime functions ordinary, typed Python, which tests may run as it stands and compare with the compiled code.
Addresses are those of this process; nothing is checked here.
"""

from __future__ import annotations

import ctypes
import math
import struct

i64 = int
f32 = float
f64 = float

_MASK = (1 << 64) - 1


def _signed(value: int, bits: int = 64) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _read(p: int, n: int) -> int:
    return int.from_bytes(ctypes.string_at(p, n), "little")


def _write(p: int, v: int, n: int) -> int:
    ctypes.memmove(p, (v & ((1 << 8 * n) - 1)).to_bytes(n, "little"), n)
    return 0


def ld8(p: i64) -> i64:
    return _read(p, 1)


def ld16(p: i64) -> i64:
    return _read(p, 2)


def ld32(p: i64) -> i64:
    return _read(p, 4)


def ld64(p: i64) -> i64:
    return _signed(_read(p, 8))


def st8(p: i64, v: i64) -> i64:
    return _write(p, v, 1)


def st16(p: i64, v: i64) -> i64:
    return _write(p, v, 2)


def st32(p: i64, v: i64) -> i64:
    return _write(p, v, 4)


def st64(p: i64, v: i64) -> i64:
    return _write(p, v, 8)


def f32_of(v: i64) -> f32:
    return float(struct.unpack("<f", struct.pack("<I", v & 0xFFFFFFFF))[0])


def f64_of(v: i64) -> f64:
    return float(struct.unpack("<d", struct.pack("<Q", v & _MASK))[0])


def bits32(x: f32) -> i64:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def bits64(x: f64) -> i64:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def ldf32(p: i64) -> f32:
    return f32_of(ld32(p))


def ldf64(p: i64) -> f64:
    return f64_of(ld64(p))


def stf32(p: i64, x: f32) -> i64:
    return st32(p, bits32(x))


def stf64(p: i64, x: f64) -> i64:
    return st64(p, bits64(x))


def ult(a: i64, b: i64) -> i64:
    return int(a & _MASK < b & _MASK)


def ule(a: i64, b: i64) -> i64:
    return int(a & _MASK <= b & _MASK)


def udiv(a: i64, b: i64) -> i64:
    return _signed((a & _MASK) // (b & _MASK))


def urem(a: i64, b: i64) -> i64:
    return _signed((a & _MASK) % (b & _MASK))


def lshr(a: i64, n: i64) -> i64:
    return _signed((a & _MASK) >> n)


def sext8(a: i64) -> i64:
    return _signed(a, 8)


def sext16(a: i64) -> i64:
    return _signed(a, 16)


def sext32(a: i64) -> i64:
    return _signed(a, 32)


def popcount(a: i64) -> i64:
    return (a & _MASK).bit_count()


def low_bit(a: i64) -> i64:
    return ((a & _MASK) & -(a & _MASK)).bit_length() - 1 if a & _MASK else 64


def leading_zeros(a: i64) -> i64:
    return 64 - (a & _MASK).bit_length()


def wide(x: f32) -> f64:
    return x


def narrow(x: f64) -> f32:
    try:
        return f32_of(bits32(x))
    except OverflowError:
        return math.copysign(math.inf, x)


def float_of(a: i64) -> f64:
    return float(a)


def fma64(a: f64, b: f64, c: f64) -> f64:
    """Exact for finite operands, rounded once; a test oracle."""
    from fractions import Fraction

    return float(Fraction(a) * Fraction(b) + Fraction(c))


def abs64(x: f64) -> f64:
    return abs(x)


def sqrt64(x: f64) -> f64:
    return math.sqrt(x)


def copy(d: i64, s: i64, n: i64) -> i64:
    ctypes.memmove(d, s, n)
    return 0


def fill(p: i64, v: i64, n: i64) -> i64:
    ctypes.memset(p, v & 0xFF, n)
    return 0


def enter(f: i64, t: i64, b: i64, c: i64) -> i64:
    """Run thread `t` of block `b` in kernel `f` until it suspends."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(f)(t, b, c)
    return 0
