"""Native runtime: mma.sync. Operands are decoded to f64, summed there with the accumulator and rounded once.

The sum over k is exact for integers and, for floats, more exact than tensor cores, whose order and truncation are not
specified. Fragment layouts follow the PTX manual: one rule covers all shapes. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_float import (
    rt_e4m3_value,
    rt_e5m2_value,
    rt_half_bits,
    rt_half_value,
    rt_int_value,
)
from sandbox.devices.cpu.words import *

# element kinds; the variant packs m, n, k (8 bits each), a, b, c, d kinds (4 bits each) and satfinite
E_F16, E_BF16, E_TF32, E_F64, E_E4M3, E_E5M2, E_S8, E_U8, E_S4, E_U4, E_F32, E_S32 = range(12)


def rt_element(p: i64, j: i64, kind: i64) -> f64:
    """Element j of a register as f64."""
    if kind == E_F16:
        return wide(f32_of(rt_half_value(ld16(p + j * 2))))
    if kind == E_BF16:
        return wide(f32_of(ld16(p + j * 2) << 16))
    if kind == E_TF32:
        return wide(f32_of(ld32(p) & ~0x1FFF))
    if kind == E_F64:
        return ldf64(p)
    if kind == E_E4M3:
        return wide(f32_of(rt_e4m3_value(ld8(p + j))))
    if kind == E_E5M2:
        return wide(f32_of(rt_e5m2_value(ld8(p + j))))
    if kind == E_S8:
        return float_of(sext8(ld8(p + j)))
    if kind == E_U8:
        return float_of(ld8(p + j))
    if kind == E_F32:
        return wide(ldf32(p))
    if kind == E_S32:
        return float_of(sext32(ld32(p)))
    v = (ld8(p + (j >> 1)) >> ((j & 1) * 4)) & 15
    if kind == E_S4 and v > 7:
        v = v - 16
    return float_of(v)


def rt_per_register(kind: i64) -> i64:
    if kind == E_F16 or kind == E_BF16:
        return 2
    if kind == E_TF32 or kind == E_F64:
        return 1
    if kind == E_S4 or kind == E_U4:
        return 8
    return 4


def rt_spread(p: i64, to: i64, step: i64, count: i64, kind: i64) -> i64:
    """All elements of a register as f64, `step` bytes apart. The common pairs of halves have a short way."""
    if kind == E_BF16:
        v = ld32(p)
        stf64(to, wide(f32_of(v << 16)))
        stf64(to + step, wide(f32_of(v & 0xFFFF0000)))
        return 0
    for j in range(count):
        stf64(to + j * step, rt_element(p, j, kind))
    return 0


def rt_mma(ctx: i64, w: i64, variant: i64) -> i64:
    """Slots: 0-7 A, 8-11 B, 12-19 C, 20-27 D."""
    m = variant & 255
    k = (variant >> 16) & 255
    ka = (variant >> 24) & 15
    kb = (variant >> 28) & 15
    kc = (variant >> 32) & 15
    kd = (variant >> 36) & 15
    stride = ld64(ctx + C_TSTRIDE)
    scratch = ld64(ctx + C_SCRATCH)
    amat = scratch
    bmat = scratch + 8192
    cmat = scratch + 16384
    ea = rt_per_register(ka)
    eb = rt_per_register(kb)
    tall = m == 16
    na = (m * k) // (32 * ea)
    nb = (8 * k) // (32 * eb)
    for lane in range(32):
        x = w + lane * stride + T_X
        g = lane >> 2
        q = lane & 3
        for i in range(na):
            row = g + 8 * (i & 1) if tall else g
            block = i >> 1 if tall else i
            rt_spread(x + i * 8, amat + (row * k + ea * (q + 4 * block)) * 8, 8, ea, ka)
        for i in range(nb):
            rt_spread(x + 64 + i * 8, bmat + (eb * (q + 4 * i) * 8 + g) * 8, 64, eb, kb)
        for i in range(m // 4):
            row = g + 8 * (i >> 1)
            col = 2 * q + (i & 1)
            if kc == E_F32:
                stf64(cmat + (row * 8 + col) * 8, wide(ldf32(x + 96 + i * 8)))
            elif kc == E_F16:
                stf64(cmat + (row * 8 + col) * 8, rt_element(x + 96 + (i >> 1) * 8, i & 1, E_F16))
            else:
                stf64(cmat + (row * 8 + col) * 8, rt_element(x + 96 + i * 8, 0, kc))
    rt_dot(amat, bmat, cmat, m, k)
    for lane in range(32):
        x = w + lane * stride + T_X
        g = lane >> 2
        q = lane & 3
        for i in range(m // 4):
            row = g + 8 * (i >> 1)
            v = ldf64(cmat + (row * 8 + 2 * q + (i & 1)) * 8)
            if kd == E_F16:
                st16(x + 160 + (i >> 1) * 8 + (i & 1) * 2, rt_half_bits(bits32(narrow(v))))
            elif kd == E_F32:
                stf32(x + 160 + i * 8, narrow(v))
            elif kd == E_F64:
                stf64(x + 160 + i * 8, v)
            else:
                st32(x + 160 + i * 8, rt_int_value(v, (variant >> 40) & 1))
    return 0


def rt_dot(a: i64, b: i64, c: i64, m: i64, k: i64) -> i64:
    """C += A B for eight columns of f64: the meaning of `dot_ir`."""
    for i in range(m):
        for col in range(8):
            acc = ldf64(c + (i * 8 + col) * 8)
            for x in range(k):
                acc = fma64(ldf64(a + (i * k + x) * 8), ldf64(b + (x * 8 + col) * 8), acc)
            stf64(c + (i * 8 + col) * 8, acc)
    return 0


def dot_ir() -> str:
    """rt_dot in vectors of eight and four rows at a time, so that the sums of a row need not wait for one another."""
    rows = range(4)
    text = [
        "define i64 @rt_dot(i64 %a, i64 %b, i64 %c, i64 %m, i64 %k) nounwind {",
        "entry:",
        *(f"  %{n}p = inttoptr i64 %{n} to ptr" for n in "abc"),
        "  br label %row",
        "row:",
        "  %i = phi i64 [ 0, %entry ], [ %i.next, %end ]",
    ]
    for r in rows:
        text += [
            f"  %i{r} = add i64 %i, {r}",
            f"  %ci{r} = shl i64 %i{r}, 3",
            f"  %crow{r} = getelementptr double, ptr %cp, i64 %ci{r}",
            f"  %start{r} = load <8 x double>, ptr %crow{r}, align 8",
            f"  %ai{r} = mul i64 %i{r}, %k",
            f"  %arow{r} = getelementptr double, ptr %ap, i64 %ai{r}",
        ]
    text += ["  br label %step", "step:", "  %x = phi i64 [ 0, %row ], [ %x.next, %step ]"]
    text += [f"  %acc{r} = phi <8 x double> [ %start{r}, %row ], [ %sum{r}, %step ]" for r in rows]
    text += [
        "  %bi = shl i64 %x, 3",
        "  %brow = getelementptr double, ptr %bp, i64 %bi",
        "  %bv = load <8 x double>, ptr %brow, align 8",
    ]
    vector = "<8 x double>"
    for r in rows:
        text += [
            f"  %ax{r} = getelementptr double, ptr %arow{r}, i64 %x",
            f"  %av{r} = load double, ptr %ax{r}, align 8",
            f"  %one{r} = insertelement {vector} poison, double %av{r}, i32 0",
            f"  %all{r} = shufflevector {vector} %one{r}, {vector} poison, <8 x i32> zeroinitializer",
            f"  %sum{r} = call {vector} @llvm.fma.v8f64({vector} %all{r}, {vector} %bv, {vector} %acc{r})",
        ]
    text += [
        "  %x.next = add i64 %x, 1",
        "  %more = icmp slt i64 %x.next, %k",
        "  br i1 %more, label %step, label %end",
        "end:",
        *(f"  store {vector} %sum{r}, ptr %crow{r}, align 8" for r in rows),
        "  %i.next = add i64 %i, 4",
        "  %again = icmp slt i64 %i.next, %m",
        "  br i1 %again, label %row, label %out",
        "out:",
        "  ret i64 0",
        "}",
        f"declare {vector} @llvm.fma.v8f64({vector}, {vector}, {vector})",
        "",
    ]
    return "\n".join(text)
