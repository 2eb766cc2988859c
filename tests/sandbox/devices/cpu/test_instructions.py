"""Single instructions against numpy and torch, on random and on awkward operands. All cases of a table share a
kernel."""

# ruff: noqa: E501  (PTX and tables read better with one thought a line)

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.sandbox.devices.cpu.harness import Shape, kernel, run

N = 512
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES32 = [
    0,
    1,
    2,
    31,
    32,
    33,
    255,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFF,
    0x12345678,
]
EDGE_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 3.5, -2.5, 1e-40, -1e-42, 1e38, -3e38, 65504.0, 65520.0, 448.0, 464.0, 470.0,
               6e-8, 1e-3, 127.5, 128.5, 2**31, -(2.0**31), 2**32, math.inf, -math.inf, math.nan]  # fmt: skip


def signed(v: int, bits: int = 32) -> int:
    v &= (1 << bits) - 1
    return v - (1 << bits) if v >> (bits - 1) else v


def words(seed: int, count: int = N) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    pick = rng.random(count) < 0.3
    out[pick] = rng.choice(np.array(EDGES32, np.uint32), int(pick.sum()))
    return out


def floats(seed: int, count: int = N) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = (rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)).astype(np.float32)
    out[: len(EDGE_FLOATS)] = rng.permutation(np.array(EDGE_FLOATS, np.float32))
    return out


def compute(cases: list[str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Results [case, element] as uint64. A case reads %ra %rb %rc, or %rda %rdb (64 bits), and writes %ro or %rdo."""
    code = []
    for i, case in enumerate(cases):
        wide = "%rdo" in case
        tail = (
            "st.global.b64 [%rd50], %rdo;"
            if wide
            else "cvt.u64.u32 %rdo, %ro; st.global.b64 [%rd50], %rdo;"
        )
        code.append(f"{{ .reg .b32 x<8>; .reg .b64 y<8>; .reg .b16 h<8>; .reg .pred q<8>; {case} }}\n"
                    f"mad.lo.s32 %r51, {i}, {len(a)}, %r50; mul.wide.u32 %rd51, %r51, 8; add.s64 %rd50, %rd103, %rd51; {tail}")  # fmt: skip
    body = f"""
    mov.u32 %r1, %ctaid.x; mad.lo.s32 %r50, %r1, 32, %r99; mul.wide.u32 %rd1, %r50, 4;
    add.s64 %rd2, %rd100, %rd1; ld.global.b32 %ra, [%rd2]; add.s64 %rd3, %rd101, %rd1; ld.global.b32 %rb, [%rd3];
    add.s64 %rd4, %rd102, %rd1; ld.global.b32 %rc, [%rd4]; mov.b64 %rda, {{%ra, %rb}}; mov.b64 %rdb, {{%rb, %rc}};
    {chr(10).join(code)}
    ret;
    """
    text = kernel(body, "pppp", ".reg .b32 %ra, %rb, %rc, %ro; .reg .b64 %rda, %rdb, %rdo;")
    out = torch.zeros(len(cases) * len(a), dtype=torch.int64)
    tensors = [torch.from_numpy(v.view(np.int32).copy()) for v in (a, b, c)]
    run(text, [*tensors, out], Shape(grid=(len(a) // 32, 1, 1)), labels=cases)
    return out.numpy().view(np.uint64).reshape(len(cases), len(a))


Int = Callable[[int, int, int], int]


def prmt(a: int, b: int, c: int) -> int:
    both, out = b << 32 | a, 0
    for i in range(4):
        s = c >> 4 * i & 15
        byte = both >> 8 * (s & 7) & 255
        out |= (255 if byte & 128 else 0) << 8 * i if s & 8 else byte << 8 * i
    return out


def bfe(v: int, p: int, n: int, sign: bool, bits: int = 32) -> int:
    p, n = p & 255, n & 255
    value = signed(v, bits) if sign else v
    field = value >> p
    if n == 0:
        return 0
    if n >= bits:
        return field
    field &= (1 << n) - 1
    if sign and value >> min(p + n - 1, bits - 1) & 1:
        field -= 1 << n
    return field


def bfi(a: int, b: int, p: int, n: int) -> int:
    p, n = p & 255, n & 255
    mask = ((1 << n) - 1) << p & M32
    return b & ~mask | a << p & mask


def dp4a(a: int, b: int, c: int, sa: bool, sb: bool) -> int:
    total = c
    for i in range(4):
        x, y = a >> 8 * i & 255, b >> 8 * i & 255
        total += (signed(x, 8) if sa else x) * (signed(y, 8) if sb else y)
    return total


def divide(a: int, b: int) -> int:
    return -1 if b == 0 else int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def shift(a: int, n: int, how: str) -> int:
    n = min(n, 64)
    return (
        {"l": a << n, "r": a >> n, "s": signed(a) >> n}[how]
        if n < 64
        else (-1 if how == "s" and signed(a) < 0 else 0)
    )


INTEGER: dict[str, Int] = {
    "add.s32 %ro, %ra, %rb;": lambda a, b, c: a + b,
    "sub.s32 %ro, %ra, %rb;": lambda a, b, c: a - b,
    "add.sat.s32 %ro, %ra, %rb;": lambda a, b, c: max(-(1 << 31), min((1 << 31) - 1, signed(a) + signed(b))),
    "mul.lo.s32 %ro, %ra, %rb;": lambda a, b, c: a * b,
    "mul.hi.s32 %ro, %ra, %rb;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.hi.u32 %ro, %ra, %rb;": lambda a, b, c: a * b >> 32,
    "mad.lo.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: a * b + c,
    "mad.hi.u32 %ro, %ra, %rb, %rc;": lambda a, b, c: (a * b >> 32) + c,
    "div.u32 %ro, %ra, %rb;": lambda a, b, c: a // b if b else M32,
    "div.s32 %ro, %ra, %rb;": lambda a, b, c: divide(signed(a), signed(b)),
    "rem.u32 %ro, %ra, %rb;": lambda a, b, c: a % b if b else M32,
    "rem.s32 %ro, %ra, %rb;": lambda a, b, c: signed(a) - divide(signed(a), signed(b)) * signed(b) if b else M32,
    "min.s32 %ro, %ra, %rb;": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %ro, %ra, %rb;": lambda a, b, c: max(a, b),
    "abs.s32 %ro, %ra;": lambda a, b, c: abs(signed(a)),
    "neg.s32 %ro, %ra;": lambda a, b, c: -a,
    "and.b32 %ro, %ra, %rb;": lambda a, b, c: a & b,
    "or.b32 %ro, %ra, %rb;": lambda a, b, c: a | b,
    "xor.b32 %ro, %ra, %rb;": lambda a, b, c: a ^ b,
    "not.b32 %ro, %ra;": lambda a, b, c: ~a,
    "cnot.b32 %ro, %ra;": lambda a, b, c: int(a == 0),
    "shl.b32 %ro, %ra, %rb;": lambda a, b, c: shift(a, b, "l"),
    "shr.u32 %ro, %ra, %rb;": lambda a, b, c: shift(a, b, "r"),
    "shr.s32 %ro, %ra, %rb;": lambda a, b, c: shift(a, b, "s"),
    "shl.b32 %ro, %ra, 7;": lambda a, b, c: a << 7,
    "shf.l.wrap.b32 %ro, %ra, %rb, %rc;": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.wrap.b32 %ro, %ra, %rb, %rc;": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.l.clamp.b32 %ro, %ra, %rb, %rc;": lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32,
    "shf.r.clamp.b32 %ro, %ra, %rb, %rc;": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "lop3.b32 %ro, %ra, %rb, %rc, 0xEA;": lambda a, b, c: a & b | c,
    "lop3.b32 %ro, %ra, %rb, %rc, 0x96;": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 %ro, %ra, %rb, %rc, 0xCA;": lambda a, b, c: a & b | ~a & c,
    "prmt.b32 %ro, %ra, %rb, %rc;": prmt,
    "prmt.b32 %ro, %ra, %rb, 0x5410;": lambda a, b, c: prmt(a, b, 0x5410),
    "prmt.b32 %ro, %ra, %rb, 0x9BE3;": lambda a, b, c: prmt(a, b, 0x9BE3),
    "bfe.u32 %ro, %ra, %rb, %rc;": lambda a, b, c: bfe(a, b, c, False),
    "bfe.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: bfe(a, b, c, True),
    "bfi.b32 %ro, %ra, %rb, %rc, %ra;": lambda a, b, c: bfi(a, b, c, a),
    "bfi.b32 %ro, %ra, %rb, 5, 9;": lambda a, b, c: bfi(a, b, 5, 9),
    "popc.b32 %ro, %ra;": lambda a, b, c: a.bit_count(),
    "clz.b32 %ro, %ra;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %ro, %ra;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %ro, %ra;": lambda a, b, c: a.bit_length() - 1,
    "bfind.s32 %ro, %ra;": lambda a, b, c: (a if signed(a) >= 0 else ~a & M32).bit_length() - 1,
    "dp4a.u32.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: dp4a(a, b, c, False, True),
    "dp4a.s32.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: dp4a(a, b, c, True, True),
    "sad.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: abs(signed(a) - signed(b)) + c,
    "setp.lt.s32 q0, %ra, %rb; selp.b32 %ro, %rc, 5, q0;": lambda a, b, c: c if signed(a) < signed(b) else 5,
    "setp.hi.u32 q0, %ra, %rb; selp.b32 %ro, 1, 0, q0;": lambda a, b, c: int(a > b),
    "setp.ge.u32 q0, %ra, %rb; setp.lt.and.s32 q1, %ra, %rc, q0; selp.b32 %ro, 1, 0, q1;":
        lambda a, b, c: int(a >= b and signed(a) < signed(c)),
    "setp.eq.s32 q0|q1, %ra, %rb; selp.b32 %ro, 1, 0, q1;": lambda a, b, c: int(a != b),
    "set.gt.u32.s32 %ro, %ra, %rb;": lambda a, b, c: M32 if signed(a) > signed(b) else 0,
    "slct.s32.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: a if signed(c) >= 0 else b,
    "mov.b32 {h0, h1}, %ra; mov.b32 %ro, {h1, h0};": lambda a, b, c: a >> 16 | a << 16,
    "cvt.u32.u8 %ro, %ra;": lambda a, b, c: a & 255,
    "cvt.s32.s8 %ro, %ra;": lambda a, b, c: signed(a, 8),
    "cvt.s32.s16 %ro, %ra;": lambda a, b, c: signed(a, 16),
    "cvt.sat.u8.s32 x0, %ra; cvt.u32.u8 %ro, x0;": lambda a, b, c: max(0, min(255, signed(a))),
    "mul.wide.s32 %rdo, %ra, %rb;": lambda a, b, c: signed(a) * signed(b),
    "mul.wide.u32 %rdo, %ra, %rb;": lambda a, b, c: a * b,
    "mad.wide.u32 %rdo, %ra, %rb, %rda;": lambda a, b, c: a * b + (b << 32 | a),
    "add.s64 %rdo, %rda, %rdb;": lambda a, b, c: (b << 32 | a) + (c << 32 | b),
    "mul.hi.u64 %rdo, %rda, %rdb;": lambda a, b, c: (b << 32 | a) * (c << 32 | b) >> 64,
    "mul.lo.s64 %rdo, %rda, %rdb;": lambda a, b, c: (b << 32 | a) * (c << 32 | b),
    "shr.s64 %rdo, %rda, 13;": lambda a, b, c: signed(b << 32 | a, 64) >> 13,
    "shl.b64 %rdo, %rda, %rc;": lambda a, b, c: (b << 32 | a) << c if c < 64 else 0,
    "cvt.s64.s32 %rdo, %ra;": lambda a, b, c: signed(a),
    "popc.b64 %ro, %rda;": lambda a, b, c: (b << 32 | a).bit_count(),
    "bfe.u64 %rdo, %rda, 17, 30;": lambda a, b, c: (b << 32 | a) >> 17 & (1 << 30) - 1,
    "max.s64 %rdo, %rda, %rdb;": lambda a, b, c: max(signed(b << 32 | a, 64), signed(c << 32 | b, 64)),
    "rem.u64 %rdo, %rda, %rdb;": lambda a, b, c: (b << 32 | a) % (c << 32 | b) if c << 32 | b else M64,
}  # fmt: skip


def test_integer_and_bit_instructions() -> None:
    a, b, c = words(1), words(2), words(3)
    b[::3], c[::3], c[1::3] = b[::3] % 40, c[::3] % 40, c[1::3] % 32
    got = compute(list(INTEGER), a, b, c)
    for row, (text, f) in zip(got, INTEGER.items(), strict=True):
        mask = M64 if "%rdo" in text else M32
        want = np.array(
            [f(int(x), int(y), int(z)) & mask for x, y, z in zip(a, b, c, strict=True)], np.uint64
        )
        bad = np.nonzero(row != want)[0]
        assert bad.size == 0, (
            text,
            [hex(int(v[bad[0]])) for v in (a, b, c)],
            hex(int(row[bad[0]])),
            hex(int(want[bad[0]])),
        )


def f32(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(np.float32)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c rounded once, by exact rationals."""
    from fractions import Fraction

    out = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        if not all(map(math.isfinite, (x, y, z))):
            with np.errstate(all="ignore"):
                out.append(np.float64(x) * np.float64(y) + np.float64(z))
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = (
            np.float32(float(exact))
            if abs(exact) < 2**128 - 2**103
            else np.float32(math.copysign(math.inf, exact))
        )
        # float() rounds to f64 first: step to the neighbour if that was a tie broken the wrong way
        options = [
            near,
            np.nextafter(near, np.float32(np.inf)),
            np.nextafter(near, np.float32(-np.inf)),
        ]
        finite = [o for o in options if math.isfinite(float(o))]
        if abs(exact) < 2**128 - 2**103 and finite and exact != 0:
            near = min(
                finite,
                key=lambda o: (
                    abs(Fraction(float(o)) - exact),
                    int(np.float32(o).view(np.uint32)) & 1,
                ),
            )
        elif exact == 0:
            near = np.float32(np.float32(x) * np.float32(y) + np.float32(z))
        out.append(near)
    return f32(np.array(out))


def ftz(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = np.fmin(a, b)
    both = (a == 0) & (b == 0)
    return np.where(both & (np.signbit(a) | np.signbit(b)), np.float32(-0.0), out).astype(
        np.float32
    )


FLOAT: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "add.f32 %ro, %ra, %rb;": lambda a, b, c: f32(a + b),
    "sub.rn.f32 %ro, %ra, %rb;": lambda a, b, c: f32(a - b),
    "mul.f32 %ro, %ra, %rb;": lambda a, b, c: f32(a * b),
    "mul.ftz.f32 %ro, %ra, %rb;": lambda a, b, c: ftz(f32(ftz(a) * ftz(b))),
    "fma.rn.f32 %ro, %ra, %rb, %rc;": fused,
    "div.rn.f32 %ro, %ra, %rb;": lambda a, b, c: f32(a / b),
    "sqrt.rn.f32 %ro, %ra;": lambda a, b, c: f32(np.sqrt(a)),
    "rcp.rn.f32 %ro, %ra;": lambda a, b, c: f32(np.float32(1) / a),
    "min.f32 %ro, %ra, %rb;": lambda a, b, c: minimum(a, b),
    "max.f32 %ro, %ra, %rb;": lambda a, b, c: -minimum(-a, -b),
    "abs.f32 %ro, %ra;": lambda a, b, c: np.abs(a),
    "neg.f32 %ro, %ra;": lambda a, b, c: -a,
    "add.sat.f32 %ro, %ra, %rb;": lambda a, b, c: np.where(np.isnan(f32(a + b)), 0, np.clip(f32(a + b), 0, 1)).astype(np.float32),
    "cvt.rni.f32.f32 %ro, %ra;": lambda a, b, c: np.rint(a),
    "cvt.rmi.f32.f32 %ro, %ra;": lambda a, b, c: np.floor(a),
    "cvt.rzi.f32.f32 %ro, %ra;": lambda a, b, c: np.trunc(a),
    "cvt.f64.f32 y0, %ra; cvt.f64.f32 y1, %rb; add.f64 y2, y0, y1; cvt.rn.f32.f64 %ro, y2;":
        lambda a, b, c: f32(a.astype(np.float64) + b.astype(np.float64)),
    "cvt.f64.f32 y0, %ra; cvt.f64.f32 y1, %rb; div.rn.f64 y2, y0, y1; sqrt.rn.f64 y3, y2; cvt.rn.f32.f64 %ro, y3;":
        lambda a, b, c: f32(np.sqrt(a.astype(np.float64) / b.astype(np.float64))),
    "cvt.rn.f16.f32 h0, %ra; cvt.f32.f16 %ro, h0;": lambda a, b, c: f32(a.astype(np.float16)),
    "cvt.rn.bf16.f32 h0, %ra; cvt.f32.bf16 %ro, h0;":
        lambda a, b, c: torch.from_numpy(a.copy()).bfloat16().float().numpy(),
    "cvt.rn.f16.f32 h0, %ra; cvt.rn.f16.f32 h1, %rb; mul.rn.f16 h2, h0, h1; cvt.f32.f16 %ro, h2;":
        lambda a, b, c: f32((f32(a.astype(np.float16)) * f32(b.astype(np.float16))).astype(np.float16)),
    "cvt.rn.bf16.f32 h0, %ra; cvt.rn.bf16.f32 h1, %rb; add.rn.bf16 h2, h0, h1; cvt.f32.bf16 %ro, h2;":
        lambda a, b, c: (torch.from_numpy(a.copy()).bfloat16() + torch.from_numpy(b.copy()).bfloat16()).float().numpy(),
    "copysign.f32 %ro, %rb, %ra;": lambda a, b, c: np.copysign(a, b),
}  # fmt: skip


@np.errstate(all="ignore")
def test_floating_point_instructions() -> None:
    a, b, c = floats(1), floats(2), floats(3)
    got = compute(list(FLOAT), a.view(np.uint32), b.view(np.uint32), c.view(np.uint32))
    for row, (text, f) in zip(got, FLOAT.items(), strict=True):
        value, want = row.astype(np.uint32).view(np.float32), f(a, b, c).astype(np.float32)
        same = (value.view(np.uint32) == want.view(np.uint32)) | (np.isnan(value) & np.isnan(want))
        bad = np.nonzero(~same)[0]
        assert bad.size == 0, (
            text,
            [float(v[bad[0]]) for v in (a, b, c)],
            float(value[bad[0]]),
            float(want[bad[0]]),
        )


APPROXIMATE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    # documented errors: ex2 2 ulp, lg2 absolute 2^-22 near one, rcp 1 ulp, rsqrt 2^-22.9 relative, tanh 2^-11
    "ex2.approx.f32 %ro, %ra;": (np.exp2, 2.0**-22),
    "ex2.approx.ftz.f32 %ro, %ra;": (np.exp2, 2.0**-22),
    "lg2.approx.f32 %ro, %ra;": (np.log2, 2.0**-21),
    "rcp.approx.ftz.f32 %ro, %ra;": (lambda x: 1 / x, 2.0**-23),
    "rsqrt.approx.f32 %ro, %ra;": (lambda x: 1 / np.sqrt(x), 2.0**-22),
    "sqrt.approx.f32 %ro, %ra;": (np.sqrt, 2.0**-22),
    "sin.approx.f32 %ro, %ra;": (np.sin, 2.0**-20),
    "cos.approx.f32 %ro, %ra;": (np.cos, 2.0**-20),
    "tanh.approx.f32 %ro, %ra;": (np.tanh, 2.0**-10),
}


def test_approximate_functions_stay_within_the_documented_error() -> None:
    x = (np.random.default_rng(5).random(N) * 3 + 0.05).astype(np.float32)
    got = compute(list(APPROXIMATE), x.view(np.uint32), x.view(np.uint32), x.view(np.uint32))
    for row, (text, (f, bound)) in zip(got, APPROXIMATE.items(), strict=True):
        value, want = (
            row.astype(np.uint32).view(np.float32).astype(np.float64),
            f(x.astype(np.float64)),
        )
        assert np.max(np.abs(value - want) / np.maximum(np.abs(want), 1e-3)) <= bound, text


def clamp_round(x: float, low: int, high: int, how: Callable[[float], float], nan: int) -> int:
    if math.isnan(x):
        return nan
    if math.isinf(x):
        return high if x > 0 else low
    return max(low, min(high, int(how(x))))


def test_conversions_to_integers() -> None:
    a = floats(7)
    cases = {
        "cvt.rni.s32.f32 %ro, %ra;": (-(1 << 31), (1 << 31) - 1, lambda x: float(np.rint(x)), 0),
        "cvt.rzi.s32.f32 %ro, %ra;": (-(1 << 31), (1 << 31) - 1, math.trunc, 0),
        "cvt.rmi.s32.f32 %ro, %ra;": (-(1 << 31), (1 << 31) - 1, math.floor, 0),
        "cvt.rpi.u32.f32 %ro, %ra;": (0, (1 << 32) - 1, math.ceil, 0),
        "cvt.rzi.u32.f32 %ro, %ra;": (0, (1 << 32) - 1, math.trunc, 0),
        "cvt.rzi.s64.f32 %rdo, %ra;": (-(1 << 63), (1 << 63) - 1, math.trunc, 1 << 63),
    }
    got = compute(list(cases), a.view(np.uint32), a.view(np.uint32), a.view(np.uint32))
    for row, (text, (low, high, how, nan)) in zip(got, cases.items(), strict=True):
        mask = M64 if "%rdo" in text else M32
        want = [clamp_round(float(x), low, high, how, nan) & mask for x in a]
        assert row.tolist() == want, text


def test_conversions_from_integers_and_directed_rounding() -> None:
    from fractions import Fraction

    a = words(9)
    got = compute(["cvt.rn.f32.s32 %ro, %ra;", "cvt.rn.f32.u32 %ro, %ra;", "cvt.rz.f32.u32 %ro, %ra;",
                   "cvt.rp.f32.s32 %ro, %ra;", "cvt.rn.bf16.s32 h0, %ra; cvt.f32.bf16 %ro, h0;"], a, a, a)  # fmt: skip
    s = a.view(np.int32)
    assert np.array_equal(got[0].astype(np.uint32).view(np.float32), s.astype(np.float32))
    assert np.array_equal(got[1].astype(np.uint32).view(np.float32), a.astype(np.float32))
    down, up = (got[i].astype(np.uint32).view(np.float32) for i in (2, 3))
    for x, y in zip(a.tolist(), down.tolist(), strict=True):
        assert Fraction(y) <= x < Fraction(float(np.nextafter(np.float32(y), np.float32(np.inf))))
    for x, y in zip(s.tolist(), up.tolist(), strict=True):
        assert Fraction(float(np.nextafter(np.float32(y), np.float32(-np.inf)))) < x <= Fraction(y)
    bf16 = got[4].astype(np.uint32)
    assert not (bf16 & 0xFFFF).any()
    wide = bf16.view(np.float32).astype(np.float64)
    assert np.all(np.abs(wide - s) <= np.maximum(np.abs(s.astype(np.float64)) * 2.0**-8, 0))


@pytest.mark.parametrize("mode,direction", [("rz", 0), ("rm", -1), ("rp", 1)])
def test_directed_sums_and_products(mode: str, direction: int) -> None:
    from fractions import Fraction

    rng = np.random.default_rng(11)
    a, b, c = (rng.standard_normal(N).astype(np.float32) * np.float32(10) ** rng.integers(-3, 3, N).astype(np.float32)
               for _ in range(3))  # fmt: skip
    got = compute([f"add.{mode}.f32 %ro, %ra, %rb;", f"mul.{mode}.f32 %ro, %ra, %rb;", f"fma.{mode}.f32 %ro, %ra, %rb, %rc;"],
                  a.view(np.uint32), b.view(np.uint32), c.view(np.uint32))  # fmt: skip
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        X, Y, Z = Fraction(x), Fraction(y), Fraction(z)
        for row, exact in zip(got, (X + Y, X * Y, X * Y + Z), strict=True):
            value = np.uint32(row[i]).view(np.float32)
            way = direction or (-1 if exact > 0 else 1)
            beyond = np.nextafter(value, np.float32(-way * np.inf))
            low, high = (Fraction(float(value)), Fraction(float(beyond)))
            assert (low <= exact < high) if way < 0 else (high < exact <= low)


def test_packed_halves_and_small_floats() -> None:
    a, b, c = floats(21), floats(22), floats(23)
    cases = ["cvt.rn.bf16x2.f32 %ro, %ra, %rb;", "cvt.rn.f16x2.f32 %ro, %ra, %rb;", "cvt.rn.relu.bf16x2.f32 %ro, %ra, %rb;",
             "cvt.rn.satfinite.e4m3x2.f32 h0, %ra, %rb; mov.b32 %ro, {h0, 0};",
             "cvt.rn.satfinite.e5m2x2.f32 h0, %ra, %rb; mov.b32 %ro, {h0, 0};",
             "mov.b32 {h0, h1}, %ra; cvt.rn.f16x2.e4m3x2 %ro, h0;",
             "mov.b32 {h0, h1}, %ra; cvt.rn.f16x2.e5m2x2 %ro, h1;"]  # fmt: skip
    got = compute(cases, a.view(np.uint32), b.view(np.uint32), c.view(np.uint32))
    ta, tb = torch.from_numpy(a.copy()), torch.from_numpy(b.copy())
    ok = ~(np.isnan(a) | np.isnan(b))

    def pair(x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
        return (x.view(torch.int16).numpy().astype(np.uint16).astype(np.uint64) << 16
                | y.view(torch.int16).numpy().astype(np.uint16))  # fmt: skip

    assert np.array_equal(got[0][ok], pair(ta.bfloat16(), tb.bfloat16())[ok])
    assert np.array_equal(got[1][ok], pair(ta.half(), tb.half())[ok])
    relu = pair(torch.where(ta <= 0, 0.0, ta).bfloat16(), torch.where(tb <= 0, 0.0, tb).bfloat16())
    assert np.array_equal(got[2][ok], relu[ok])
    for index, kind, top in ((3, torch.float8_e4m3fn, 448.0), (4, torch.float8_e5m2, 57344.0)):
        x, y = (
            t.clamp(-top, top).to(kind).view(torch.uint8).numpy().astype(np.uint64)
            for t in (ta, tb)
        )
        assert np.array_equal(got[index][ok], (x << 8 | y)[ok])
    raw = a.view(np.uint32)
    for index, kind, shift_ in ((5, torch.float8_e4m3fn, 0), (6, torch.float8_e5m2, 16)):
        low, high = (
            torch.from_numpy((raw >> (shift_ + 8 * i)).astype(np.uint8)).view(kind).half()
            for i in (0, 1)
        )
        value = got[index].astype(np.uint32).view(np.float16).reshape(-1, 2)
        want = np.stack([low.numpy(), high.numpy()], 1)
        same = (value == want) | (np.isnan(value) & np.isnan(want))
        assert same.all(), cases[index]


def test_packed_fma_rounds_once() -> None:
    rng = np.random.default_rng(31)
    halves = [rng.standard_normal((N, 2)).astype(np.float16) for _ in range(3)]
    a, b, c = (np.ascontiguousarray(h).view(np.uint32).reshape(-1) for h in halves)
    row = compute(["fma.rn.f16x2 %ro, %ra, %rb, %rc;"], a, b, c)[0]
    x, y, z = (h.astype(np.float64) for h in halves)
    want = (x * y + z).astype(np.float16)  # exact in f64, so this rounds once
    assert np.array_equal(row.astype(np.uint32).view(np.float16).reshape(-1, 2), want)


def test_constants_of_floats_keep_their_bits() -> None:
    row = compute(["mov.f32 %ro, 0f7FC00001;"], words(1), words(2), words(3))[0]
    assert set(row.tolist()) == {struct.unpack("<I", bytes.fromhex("0100c07f"))[0]}
