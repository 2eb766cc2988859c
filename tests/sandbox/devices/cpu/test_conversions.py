"""Single conversions against numpy and torch: to and from integers, to small floats, in pairs."""

# ruff: noqa: E501  (PTX and tables read better with one thought a line)

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from tests.sandbox.devices.cpu.operands import M32, M64, compute, floats, words


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
