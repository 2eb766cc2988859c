"""AttnRes whose sums are made by those who make the columns of its prefix (`dots`).

Scores need three kinds of sums over columns: a source's squares, its products with norm x projection, and, for the
square of the mix, which is the sum of a_i a_j v_i.v_j, products of two sources. Who posts columns of a half's result
knows the prefix there, so it posts these columns' parts beside them (box dots, eight f32 a warp), and all CTAs add up
some hundred entries instead of reading norm x projection and multiplying three rows with it. One barrier, not two.

Eight values: p.p, p.w, p.b0, p.b1, b0.w, b1.w, none, none; p the prefix, w norm x projection of the half that comes,
b0 and b1 rows of the bank, of which there are two at most here. Products of two rows of the bank are kept in shared
memory: a row was the prefix when it was written.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import high, low, pack_bf16
from targets.kimi_k3.seeds.persistent.boxes import LAYERS, box, insist, peek, turn_of
from targets.kimi_k3.seeds.persistent.columns import VALUES, eight_sums
from targets.kimi_k3.seeds.persistent.device import (
    Ctx,
    consumers,
    vector,
    within,
    words_at,
)
from targets.kimi_k3.seeds.persistent.mix import Banks, Early, bank_words
from targets.kimi_k3.seeds.persistent.stages import STRIDE
from targets.kimi_k3.seeds.persistent.sums import put, take

LOG2_E = 1.4426950408889634


@cute.jit
def red_at(c: Ctx, op: cutlass.Constexpr):
    """Where the eight sums of each warp are, behind the other reductions; behind them products of bank rows."""
    n = VALUES * op.warps + 4
    return cute.make_tensor(c.red.iterator + op.plain_reductions * STRIDE, cute.make_layout((n,)))


@cute.jit
def take_eight(c: Ctx, sRed: cute.Tensor, op: cutlass.Constexpr):
    """Six of the eight sums over all warps, in every lane; after a barrier."""
    x = Float32(0.0)
    for w in cutlass.range_constexpr(-(-op.warps // 4)):
        warp = c.lane // 8 + 4 * w
        if cutlass.const_expr(4 * w + 4 <= op.warps):
            x += sRed[warp * VALUES + c.lane % 8]
        else:
            other = sRed[within(warp, op.warps) * VALUES + c.lane % 8]
            x += other if warp < op.warps else Float32(0.0)
    x = x + cute.arch.shuffle_sync_bfly(x, offset=8)
    x = x + cute.arch.shuffle_sync_bfly(x, offset=16)
    r = cute.make_rmem_tensor(cute.make_layout((6,)), Float32)
    for k in cutlass.range_constexpr(6):
        r[k] = cute.arch.shuffle_sync(x, k)
    return r


def rows_pair(s, t):
    """Which product of two rows of the bank, s <= t < 2."""
    return s + t


@cute.jit
def open_dots(c: Ctx, banks: Banks, op: cutlass.Constexpr):
    """Products of the bank's rows of earlier layers; those of rows that do not exist yet are zero."""
    d, g = op.d, op.wide
    sRed = red_at(c, op)
    rA = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for s in cutlass.range_constexpr(2):
        for t in cutlass.range_constexpr(s, 2):
            total = Float32(0.0)
            if cutlass.const_expr(t < d.bank_old):
                x = Float32(0.0)
                for v in cutlass.range_constexpr(g.per):
                    if vector(c, v, g) < g.vecs:
                        words_at(banks.old, s * g.vecs + vector(c, v, g), rA)
                        words_at(banks.old, t * g.vecs + vector(c, v, g), rB)
                        for e in cutlass.range_constexpr(4):
                            x += low(rA[e]) * low(rB[e]) + high(rA[e]) * high(rB[e])
                put(c, 0, x)
                consumers(op)
                total = take(c, 0, g.width)
                consumers(op)
            if c.tid == 0:
                sRed[VALUES * op.warps + rows_pair(s, t)] = total
    if c.tid == 0:
        # read with the three before it, at once
        sRed[VALUES * op.warps + 3] = Float32(0.0)
    consumers(op)


# ---- all CTAs
@cute.jit
def entry_at(c: Ctx, h: Any, k: cutlass.Constexpr, op: cutlass.Constexpr):
    """Address of this thread's k-th entry of the sums for a half, or of any where it has none."""
    layer = h.layer if h.second else h.layer - 1
    first = Int32(0) if h.second else Int32(op.dot_entries)
    entry = first + within(c.tid + k * op.threads, op.dot_entries)
    return box(c, "dots", turn_of(c, layer, LAYERS), op) + Int64(entry) * (4 * VALUES)


@cute.jit
def ask_dots(c: Ctx, h: Any, op: cutlass.Constexpr):
    """This thread's entries, words [4, 2, turns], there or not; nobody looks at those of the first half."""
    turns = -(-op.dot_entries // op.threads)
    rE = cute.make_rmem_tensor(cute.make_layout((4, 2, turns)), Uint32)
    for k in cutlass.range_constexpr(turns):
        for j in cutlass.range_constexpr(2):
            peek(entry_at(c, h, k, op) + 16 * j, rE[None, j, k])
    return rE


@cute.jit
def own_sums(
    c: Ctx, weight: Int64, rP: cute.Tensor, rK: cute.Tensor, rV: cute.Tensor, op: cutlass.Constexpr
):
    """rV[8] of this thread's columns, for the first half of a launch, before which nobody posts."""
    g = op.wide
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs and c.warp < g.width:
            for k in cutlass.range_constexpr(2):
                pointer = cute.make_ptr(
                    Float32,
                    weight + Int64(2 * i + k) * 16,
                    cute.AddressSpace.gmem,
                    assumed_align=16,
                )
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout((4,))), rW)
                for e in cutlass.range_constexpr(4):
                    w, word = rW[e], 2 * k + e // 2
                    p = high(rP[word, v]) if e % 2 else low(rP[word, v])
                    rV[0] = rV[0] + p * p
                    rV[1] = rV[1] + p * w
                    for s in cutlass.range_constexpr(op.d.bank_rows):
                        b = high(rK[word, v, s]) if e % 2 else low(rK[word, v, s])
                        rV[2 + s] = rV[2 + s] + p * b
                        rV[4 + s] = rV[4 + s] + b * w


@cute.jit
def early_dots(c: Ctx, banks: Banks, h: Any, op: cutlass.Constexpr):
    """What the mix takes that no edge brings: the vector behind it and the bank's rows, zero where there is none."""
    g, d = op.wide, op.d
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rK = cute.make_rmem_tensor(cute.make_layout((4, g.per, d.bank_rows)), Uint32)
    rK.fill(0)
    if cutlass.const_expr(not g.exact):
        rO.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(h.out, vector(c, v, g), rO[None, v])
    for s in cutlass.range_constexpr(d.bank_rows):
        if s < h.sources:
            for v in cutlass.range_constexpr(g.per):
                if vector(c, v, g) < g.vecs:
                    bank_words(c, banks, s, v, rK[None, v, s], op)
    return Early(None, rO, rK)


@cute.jit
def inverse_root(x: Float32):
    return cute.arch.inline_ptx(
        "rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


@cute.jit
def shares(h: Any, rD: cute.Tensor, rG: cute.Tensor, op: cutlass.Constexpr):
    """Weights rS of the bank's rows and of the prefix in the mix, of which `total` is the sum, and what makes the
    weighted rows the mix under its norm; of sums and products of rows.

    With s_i the weighted rows' sum, the mix is s / total, and 1 / RMS of that is total / sqrt(s.s / n + total^2 eps).
    Where rows nearly cancel each other, s.s has the rounding of the products it is made of, not its own.
    """
    d = op.d
    last = d.bank_rows
    rS = cute.make_rmem_tensor(cute.make_layout((last + 1,)), Float32)
    # a power of two instead of one of e; all arguments of the root are eps or more
    rS[last] = inverse_root(rD[0] * (1.0 / d.hidden) + d.eps) * (rD[1] * LOG2_E)
    top = rS[last]
    for s in cutlass.range_constexpr(last):
        score = inverse_root(rG[rows_pair(s, s)] * (1.0 / d.hidden) + d.eps) * (rD[4 + s] * LOG2_E)
        rS[s] = score if s < h.sources else -Float32.inf
        top = cute.arch.fmax(top, rS[s])
    total = Float32(0.0)
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = cute.arch.inline_ptx(
            "ex2.approx.ftz.f32 {$w0}, {$r0};",
            write_only_types=[Float32],
            read_only_args=[rS[s] - top],
        )
        total += rS[s]
    square = rS[last] * rS[last] * rD[0]
    for s in cutlass.range_constexpr(last):
        square += 2.0 * rS[last] * rS[s] * rD[2 + s]
        for t in cutlass.range_constexpr(s, last):
            twice = 1.0 if s == t else 2.0
            square += twice * rS[s] * rS[t] * rG[rows_pair(s, t)]
    square = cute.arch.fmax(square, Float32(0.0))
    return rS, total, inverse_root(square * (1.0 / d.hidden) + total * total * d.eps)


@cute.jit
def late_dots(
    c: Ctx, h: Any, rE: cute.Tensor, rP: cute.Tensor, e: Early, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """As `mix.late`, of the entries of box dots."""
    g, d = op.wide, op.d
    last = d.bank_rows
    sRed = red_at(c, op)
    rV = cute.make_rmem_tensor(cute.make_layout((VALUES,)), Float32)
    rG = cute.make_rmem_tensor(cute.make_layout((3,)), Float32)
    rV.fill(0.0)
    for k in cutlass.range_constexpr(3):
        rG[k] = sRed[VALUES * op.warps + k]
    if h.step == 0:
        own_sums(c, h.weight, rP, e.bank, rV, op)
    else:
        for k in cutlass.range_constexpr(-(-op.dot_entries // op.threads)):
            if c.tid + k * op.threads < op.dot_entries:
                for j in cutlass.range_constexpr(2):
                    insist(entry_at(c, h, k, op) + 16 * j, rE[None, j, k], 4, op)
                    for w in cutlass.range_constexpr(4):
                        rV[4 * j + w] = rV[4 * j + w] + rE[w, j, k].bitcast(Float32)
    x = eight_sums(c, rV)
    if c.lane % 4 == 0:
        sRed[c.warp * VALUES + c.lane // 4] = x
    consumers(op)
    rD = take_eight(c, sRed, op)
    if h.opens and not h.second and c.tid == 0:
        # the prefix is a row of the bank from here on
        number = (h.layer + d.first) // d.block
        for t in cutlass.range_constexpr(last):
            if number == t:
                for s in cutlass.range_constexpr(t):
                    sRed[VALUES * op.warps + rows_pair(s, t)] = rD[2 + s]
                sRed[VALUES * op.warps + rows_pair(t, t)] = rD[0]
    rS, total, scale = shares(h, rD, rG, op)
    # a run's last mix is rounded before its norm
    before = cute.arch.rcp_approx(total) if h.closing else scale
    scale = scale * total
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = rS[s] * before
    rM = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a, b = low(rP[w, v]) * rS[last], high(rP[w, v]) * rS[last]
            for s in cutlass.range_constexpr(last):
                a += low(e.bank[w, v, s]) * rS[s]
                b += high(e.bank[w, v, s]) * rS[s]
            rM[2 * w, v], rM[2 * w + 1, v] = a, b
    if h.closing:
        for v in cutlass.range_constexpr(g.per):
            for w in cutlass.range_constexpr(4):
                pair = pack_bf16(rM[2 * w, v], rM[2 * w + 1, v])
                rM[2 * w, v], rM[2 * w + 1, v] = low(pair) * scale, high(pair) * scale
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a, b = rM[2 * w, v] * low(e.out[w, v]), rM[2 * w + 1, v] * high(e.out[w, v])
            rX[w, v] = pack_bf16(a, b)
