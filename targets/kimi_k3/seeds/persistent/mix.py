"""AttnRes in every CTA: a thread has the same columns of the prefix, of the bank and of x, all in registers.

What does not depend on the edge (bank rows, their statistics, vectors) is loaded and reduced before it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import high, low, pack_bf16
from targets.kimi_k3.seeds.persistent.device import (
    Ctx,
    consumers,
    put,
    take,
    vector,
    words_at,
)


class Early(NamedTuple):
    """bank [4 words, per, rows]; weight f32 [8, per] = norm x proj; out [4 words, per]."""

    bank: Any
    weight: Any
    out: Any


class Banks(NamedTuple):
    """Addresses of bank rows of earlier layers and of those written here."""

    old: Any
    new: Any


@cute.jit
def early(
    c: Ctx,
    banks: Banks,
    sources: Int32,
    norm: Int64,
    proj: Int64,
    out: Int64,
    op: cutlass.Constexpr,
):
    g, d = op.wide, op.d
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per, d.bank_rows)), Uint32)
    rW = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    rN = cute.make_rmem_tensor(cute.make_layout((4, 2, g.per)), Uint32)
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB.fill(0)
    rN.fill(0)
    rO.fill(0)
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            words_at(norm, i, rN[None, 0, v])
            words_at(proj, i, rN[None, 1, v])
            words_at(out, i, rO[None, v])
            for s in cutlass.range_constexpr(d.bank_rows):
                if s < sources:
                    if cutlass.const_expr(s < d.bank_old):
                        words_at(banks.old, s * g.vecs + i, rB[None, v, s])
                    else:
                        words_at(banks.new, (s - d.bank_old) * g.vecs + i, rB[None, v, s])
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            rW[2 * e, v] = low(rN[e, 0, v]) * low(rN[e, 1, v])
            rW[2 * e + 1, v] = high(rN[e, 0, v]) * high(rN[e, 1, v])
    for s in cutlass.range_constexpr(d.bank_rows):
        if s < sources:
            statistics(c, s, rB[None, None, s], rW, op)
    return Early(rB, rW, rO)


@cute.jit
def statistics(
    c: Ctx, s: cutlass.Constexpr, r: cute.Tensor, rW: cute.Tensor, op: cutlass.Constexpr
):
    """Squares and weighted sum of a source, this warp's parts."""
    square, total = Float32(0.0), Float32(0.0)
    for v in cutlass.range_constexpr(op.wide.per):
        for e in cutlass.range_constexpr(4):
            a, b = low(r[e, v]), high(r[e, v])
            square += a * a + b * b
            total += a * rW[2 * e, v] + b * rW[2 * e + 1, v]
    put(c, 2 * s, square)
    put(c, 2 * s + 1, total)


@cute.jit
def late(
    c: Ctx, rP: cute.Tensor, e: Early, sources: Int32, closing: cutlass.Constexpr, rX: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """rX words [4, per] = bf(RMS(m; out)), m the mix of the bank and the prefix rP."""
    g, d = op.wide, op.d
    rM = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    last = d.bank_rows
    statistics(c, last, rP, e.weight, op)
    consumers(op)
    rS = cute.make_rmem_tensor(cute.make_layout((last + 1,)), Float32)
    top = -Float32.inf
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = -Float32.inf
        if s < sources or s == last:
            square, total = take(c, 2 * s, g.width), take(c, 2 * s + 1, g.width)
            rS[s] = cute.math.rsqrt(square / d.hidden + d.eps) * total
        top = cute.arch.fmax(top, rS[s])
    total = Float32(0.0)
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = cute.math.exp(rS[s] - top)
        total += rS[s]
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = rS[s] / total
    square = Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a, b = low(rP[w, v]) * rS[last], high(rP[w, v]) * rS[last]
            for s in cutlass.range_constexpr(last):
                a += low(e.bank[w, v, s]) * rS[s]
                b += high(e.bank[w, v, s]) * rS[s]
            if cutlass.const_expr(closing):
                pair = pack_bf16(a, b)
                a, b = low(pair), high(pair)
            rM[2 * w, v], rM[2 * w + 1, v] = a, b
            square += a * a + b * b
    put(c, 2 * last + 2, square)
    consumers(op)
    scale = cute.math.rsqrt(take(c, 2 * last + 2, g.width) / d.hidden + d.eps)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a = rM[2 * w, v] * scale * low(e.out[w, v])
            b = rM[2 * w + 1, v] * scale * high(e.out[w, v])
            rX[w, v] = pack_bf16(a, b)
