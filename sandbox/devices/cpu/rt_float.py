"""Native runtime: conversions between f32 bits and the small floats. Written in the language of `subset`.

Values are f32 bit patterns in the low half of a word, so that NaNs and signs pass unchanged.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.words import *


def rt_half_value(h: i64) -> i64:
    """f32 bits of an f16: its bits moved into place are the value times 2^-112, subnormals included."""
    bits = bits32(f32_of((h & 0x7FFF) << 13) * f32_of(0x77800000))
    if h & 0x7C00 == 0x7C00:
        bits = 0x7F800000 | ((h & 0x3FF) << 13)
    return bits | ((h & 0x8000) << 16)


def rt_small_bits(v: i64, ebits: i64, mbits: i64, sticky: i64) -> i64:
    """f32 bits rounded to nearest even in a format with inf at the top exponent; overflow gives the inf pattern.

    `sticky` 1 says that the true value lies a little off v, in a direction its last bit already tells (odd rounding).
    """
    sign = (v >> 31) & 1
    top = (1 << ebits) - 1
    bias = (1 << (ebits - 1)) - 1
    e = (v >> 23) & 255
    f = v & 0x7FFFFF
    out = sign << (ebits + mbits)
    if e == 255:
        if f:
            return out | (top << mbits) | (1 << (mbits - 1)) | (f >> (23 - mbits))
        return out | (top << mbits)
    if e == 0:
        return out
    f = f | 0x800000
    exponent = e - 127 + bias
    drop = 23 - mbits
    if exponent <= 0:
        drop = drop + 1 - exponent
        exponent = 0
    if drop > 25:
        return out
    half = 1 << (drop - 1)
    low = f & ((1 << drop) - 1)
    kept = f >> drop
    if low > half or low == half and kept & 1:
        kept = kept + 1
    if exponent == 0:
        packed = kept
    else:
        packed = ((exponent - 1) << mbits) + kept
    if packed >= top << mbits:
        packed = top << mbits
    return out | packed


def rt_half_bits(v: i64) -> i64:
    """f16 of f32 bits, to nearest even."""
    if (v & 0x7FFFFFFF) > 0x7F800000:
        return 0x7FFF
    return rt_small_bits(v, 5, 10, 0)


def rt_half_down(v: i64) -> i64:
    """f16 of f32 bits, toward zero."""
    if (v & 0x7FFFFFFF) > 0x7F800000:
        return 0x7FFF
    h = rt_small_bits(v, 5, 10, 0)
    back = rt_half_value(h)
    if (v & 0x7FFFFFFF) < 0x7F800000 and (back & 0x7FFFFFFF) > (v & 0x7FFFFFFF):
        return h - 1
    return h


def rt_e5m2_value(b: i64) -> i64:
    return rt_half_value(b << 8)


def rt_e4m3_value(b: i64) -> i64:
    """f32 bits of an e4m3, the same way; its only NaN is all ones."""
    bits = bits32(f32_of((b & 0x7F) << 20) * f32_of(0x7B800000))
    if b & 0x7F == 0x7F:
        bits = 0x7FC00000
    return bits | ((b & 0x80) << 24)


def rt_e4m3_bits(v: i64) -> i64:
    """e4m3 of f32 bits: nearest even, saturating at 448, NaN 0x7f."""
    sign = (v >> 24) & 0x80
    mag = v & 0x7FFFFFFF
    if mag > 0x7F800000:
        return 0x7F
    if mag >= 0x43E00000:
        return sign | 0x7E
    out = rt_small_bits(mag, 5, 3, 0)
    if mag < 0x3C800000:
        scaled = f32_of(mag) * f32_of(0x44000000)
        whole = rt_round_even(wide(scaled))
        return sign | whole
    return sign | (out - (8 << 3))


def rt_round_even(x: f64) -> i64:
    """A small non-negative value to the nearest integer, ties to even."""
    magic = f64_of(0x4330000000000000)
    return bits64(x + magic) & 0xFFFFFFFF


def rt_e5m2_bits(v: i64) -> i64:
    """e5m2 of f32 bits: nearest even, saturating at 57344, NaN 0x7f."""
    sign = (v >> 24) & 0x80
    mag = v & 0x7FFFFFFF
    if mag > 0x7F800000:
        return 0x7F
    out = rt_small_bits(mag, 5, 2, 0)
    if out >= 0x7C:
        return sign | 0x7B
    return sign | out


def rt_int_value(x: f64, saturate: i64) -> i64:
    """A whole f64 below 2^53 as 32 bits: clamped or wrapped."""
    big = f64_of(0x4338000000000000)
    if saturate:
        if x > f64_of(0x41DFFFFFFFC00000):
            return 0x7FFFFFFF
        if x < f64_of(-0x3E20000000000000):
            return 0x80000000
    return bits64(x + big) & 0xFFFFFFFF


def rt_odd_sum(p: f64, c: f64) -> f64:
    """p + c rounded to odd: rounding it again to a format of at most 51 bits gives the once-rounded sum."""
    s = p + c
    if bits64(s) & 0x7FF0000000000000 == 0x7FF0000000000000:
        return s
    bb = s - p
    err = (p - (s - bb)) + (c - bb)
    if err != 0.0 and bits64(s) & 1 == 0:
        toward = (bits64(err) < 0) == (bits64(s) < 0)
        return f64_of(bits64(s) + (1 if toward else -1))
    return s


def rt_round32(x: f64, mode: i64) -> i64:
    """f32 bits of x, rounded: 0 nearest, 1 toward zero, 2 down, 3 up. `x` may be rounded to odd."""
    y = narrow(x)
    bits = bits32(y)
    back = wide(y)
    if mode == 0 or back == x or x != x:
        return bits
    above = back > x
    magnitude = bits & 0x7FFFFFFF
    negative = bits64(x) < 0
    fewer = above != negative
    if (
        mode == 1
        and fewer
        or mode == 2
        and above
        and negative == 0
        or mode == 3
        and above == 0
        and negative
    ):
        return bits - 1
    if mode == 2 and above and negative or mode == 3 and above == 0 and negative == 0:
        return bits + 1
    return bits | (magnitude & 0)


def rt_fma_small(a: f64, b: f64, c: f64) -> f64:
    """a b + c rounded to odd, for factors whose product is exact in f64."""
    return rt_odd_sum(a * b, c)


def rt_fma_odd32(a: f64, b: f64, c: f64) -> i64:
    """f32 bits of a b + c rounded to odd, to be rounded once more to a half."""
    return rt_odd32(rt_odd_sum(a * b, c))


def rt_odd32(x: f64) -> i64:
    """f32 bits of x rounded to odd."""
    bits = rt_round32(x, 1)
    if x == x and wide(f32_of(bits)) != x:
        return bits | 1
    return bits
