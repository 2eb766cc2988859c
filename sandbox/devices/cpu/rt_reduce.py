"""Native runtime: the arithmetic of reducing bulk copies. Written in the language of `subset`."""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.rt_float import rt_half_bits, rt_half_value
from sandbox.devices.cpu.words import *

R_ADD, R_MIN, R_MAX, R_AND, R_OR, R_XOR, R_INC, R_DEC = range(8)
Y_U32, Y_S32, Y_U64, Y_S64, Y_F16, Y_BF16, Y_F32, Y_F64 = range(8)


def rt_reduce_int(a: i64, b: i64, op: i64, unsigned: i64) -> i64:
    less = ult(a, b) if unsigned else a < b
    if op == R_ADD:
        return a + b
    if op == R_MIN:
        return a if less else b
    if op == R_MAX:
        return b if less else a
    if op == R_AND:
        return a & b
    if op == R_OR:
        return a | b
    if op == R_XOR:
        return a ^ b
    if op == R_INC:
        return a + 1 if ult(a, b) else 0
    if a == 0 or ult(b, a):
        return b
    return a - 1


def rt_reduce_f32(a: i64, b: i64, op: i64) -> i64:
    """On f32 bits; a sum of two small floats is exact enough here to be rounded again."""
    x = wide(f32_of(a))
    y = wide(f32_of(b))
    if op == R_ADD:
        return bits32(narrow(x + y))
    if x != x:
        return b
    if y != y:
        return a
    if op == R_MIN:
        return a if x < y else b
    return b if x < y else a


def rt_bf16_bits(v: i64) -> i64:
    """bf16 of f32 bits, to nearest even."""
    if (v & 0x7FFFFFFF) > 0x7F800000:
        return 0x7FFF
    return ((v + 0x7FFF + ((v >> 16) & 1)) >> 16) & 0xFFFF


def rt_bulk_reduce(d: i64, s: i64, size: i64, variant: i64) -> i64:
    """d op= s over `size` bytes; variant: type | op << 4."""
    kind = variant & 15
    op = variant >> 4
    i = 0
    while i < size:
        p = d + i
        q = s + i
        if kind == Y_U32:
            st32(p, rt_reduce_int(ld32(p), ld32(q), op, 1))
            i = i + 4
        elif kind == Y_S32:
            st32(p, rt_reduce_int(sext32(ld32(p)), sext32(ld32(q)), op, 0))
            i = i + 4
        elif kind == Y_U64 or kind == Y_S64:
            st64(p, rt_reduce_int(ld64(p), ld64(q), op, kind == Y_U64))
            i = i + 8
        elif kind == Y_F32:
            st32(p, rt_reduce_f32(ld32(p), ld32(q), op))
            i = i + 4
        elif kind == Y_F64:
            stf64(p, ldf64(p) + ldf64(q))
            i = i + 8
        elif kind == Y_F16:
            st16(p, rt_half_bits(rt_reduce_f32(rt_half_value(ld16(p)), rt_half_value(ld16(q)), op)))
            i = i + 2
        else:
            st16(p, rt_bf16_bits(rt_reduce_f32(ld16(p) << 16, ld16(q) << 16, op)))
            i = i + 2
    return 0
