"""Single floating-point instructions against numpy and exact fractions, on random and on awkward operands. All cases
of a table share a kernel."""

# ruff: noqa: E501  (PTX and tables read better with one thought a line)

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.sandbox.devices.cpu.operands import N, compute, floats, words


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
