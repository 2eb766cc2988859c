"""AttnRes in every CTA: a thread has the same columns of the prefix, of the bank and of x.

Every instruction here is issued by all warps of all CTAs, which is what it costs: products of norm and projection are
made once (`weigh_vectors`), bank rows lie in shared memory where there is room, and two sums share their shuffles. What
does not depend on the edge (the bank's sums, vectors) comes before it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import high, low, pack_bf16
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, vector, words_at
from targets.kimi_k3.seeds.persistent.sums import put, put_two, take, take_two


class Early(NamedTuple):
    """weight f32 [8, per] = norm x proj; out words [4, per]; bank words [4, per, rows], where they are held so long."""

    weight: Any
    out: Any
    bank: Any


class Banks(NamedTuple):
    """Addresses of bank rows of earlier layers and of those written here; where these lie in shared memory, or None."""

    old: Any
    new: Any
    kept: Any


@cute.kernel
def vectors_kernel(norms: tuple, projs: tuple, mOut: cute.Tensor, n: cutlass.Constexpr):
    """mOut[half, column] = norm x proj, f32; grid (columns / 128, halves)."""
    tid, _, _ = cute.arch.thread_idx()
    block, step, _ = cute.arch.block_idx()
    i = block * 128 + tid
    if i < n:
        x = Float32(0.0)
        for k in cutlass.range_constexpr(len(norms)):
            if step == k:
                x = norms[k][i].to(Float32) * projs[k][i].to(Float32)
        mOut[step * n + i] = x


@cute.jit
def weigh_vectors(norms: tuple, projs: tuple, mOut: cute.Tensor, n: cutlass.Constexpr, stream):
    vectors_kernel(norms, projs, mOut, n).launch(
        grid=(-(-n // 128), len(norms), 1), block=(128, 1, 1), stream=stream
    )


@cute.jit
def kept_at(c: Ctx, sKept: cute.Tensor, row: Int32, v: cutlass.Constexpr, op: cutlass.Constexpr):
    """Where this thread keeps its v-th words of a row, for itself."""
    return cute.local_tile(sKept, (4,), ((row * op.wide.per + v) * op.threads + c.tid,))


@cute.jit
def bank_words(
    c: Ctx, banks: Banks, s: cutlass.Constexpr, v: cutlass.Constexpr, r: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """r[4] = this thread's v-th words of row s."""
    g, d = op.wide, op.d
    i = vector(c, v, g)
    if cutlass.const_expr(banks.kept is not None):
        cute.autovec_copy(kept_at(c, banks.kept, s, v, op), r)
    elif cutlass.const_expr(s < d.bank_old):
        words_at(banks.old, s * g.vecs + i, r)
    else:
        words_at(banks.new, (s - d.bank_old) * g.vecs + i, r)


@cute.jit
def row_words(
    c: Ctx, banks: Banks, rK: Any, s: cutlass.Constexpr, v: cutlass.Constexpr, op: cutlass.Constexpr
):
    """This thread's v-th words of row s: held, or read now."""
    r = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    if cutlass.const_expr(rK is not None):
        for e in cutlass.range_constexpr(4):
            r[e] = rK[e, v, s]
    else:
        r.fill(0)
        if vector(c, v, op.wide) < op.wide.vecs:
            bank_words(c, banks, s, v, r, op)
    return r


@cute.jit
def again(c: Ctx):
    """The same thread, its lane read again: addresses made of that are not kept over the loop in registers."""
    lane = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[c.lane]
    )
    return c._replace(lane=lane)


@cute.jit
def keep_old(c: Ctx, banks: Banks, op: cutlass.Constexpr):
    """Rows of earlier layers into shared memory; a thread reads what it wrote itself."""
    g, d = op.wide, op.d
    if cutlass.const_expr(banks.kept is not None):
        rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        for s in cutlass.range_constexpr(d.bank_old):
            for v in cutlass.range_constexpr(g.per):
                i = vector(c, v, g)
                if i < g.vecs:
                    words_at(banks.old, s * g.vecs + i, rB)
                    cute.autovec_copy(rB, kept_at(c, banks.kept, s, v, op))


@cute.jit
def sums(r: cute.Tensor, rW: cute.Tensor, v: cutlass.Constexpr, two: tuple):
    """(squares, weighted sum) + those of four words of a source."""
    square, total = two
    for e in cutlass.range_constexpr(4):
        a, b = low(r[e]), high(r[e])
        square += a * a + b * b
        total += a * rW[2 * e, v] + b * rW[2 * e + 1, v]
    return square, total


@cute.jit
def early(c: Ctx, banks: Banks, sources: Int32, weight: Int64, out: Int64, op: cutlass.Constexpr):
    g, d = op.wide, op.d
    rW = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    if cutlass.const_expr(not g.exact):
        rW.fill(0.0)
        rO.fill(0)
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            pointer = cute.make_ptr(
                Float32, weight + Int64(i) * 32, cute.AddressSpace.gmem, assumed_align=16
            )
            gW = cute.make_tensor(pointer, cute.make_layout((4, 2)))
            for k in cutlass.range_constexpr(2):
                cute.autovec_copy(gW[None, k], cute.local_tile(rW[None, v], (4,), (k,)))
            words_at(out, i, rO[None, v])
    rK = None
    if cutlass.const_expr(op.bank_held):
        rK = cute.make_rmem_tensor(cute.make_layout((4, g.per, d.bank_rows)), Uint32)
        rK.fill(0)
        here = again(c)
        for s in cutlass.range_constexpr(d.bank_rows):
            if s < sources:
                for v in cutlass.range_constexpr(g.per):
                    if vector(here, v, g) < g.vecs:
                        bank_words(here, banks, s, v, rK[None, v, s], op)
    for s in cutlass.range_constexpr(d.bank_rows):
        if s < sources:
            two = (Float32(0.0), Float32(0.0))
            for v in cutlass.range_constexpr(g.per):
                two = sums(row_words(c, banks, rK, s, v, op), rW, v, two)
            put_two(c, 2 * s, two[0], two[1])
    return Early(rW, rO, rK)


@cute.jit
def late(
    c: Ctx, banks: Banks, rP: cute.Tensor, e: Early, sources: Int32, closing: Boolean, rX: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """rX words [4, per] = bf(RMS(m; out)), m the mix of the bank and the prefix rP, in bf16 where it closes the run."""
    g, d = op.wide, op.d
    last = d.bank_rows
    two = (Float32(0.0), Float32(0.0))
    for v in cutlass.range_constexpr(g.per):
        two = sums(rP[None, v], e.weight, v, two)
    put_two(c, 2 * last, two[0], two[1])
    consumers(op)
    rS = cute.make_rmem_tensor(cute.make_layout((last + 1,)), Float32)
    top = -Float32.inf
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = -Float32.inf
        if s < sources or s == last:
            square, total = take_two(c, 2 * s, g.width)
            rS[s] = cute.math.rsqrt(square * (1.0 / d.hidden) + d.eps) * total
        top = cute.arch.fmax(top, rS[s])
    total = Float32(0.0)
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = cute.math.exp(rS[s] - top)
        total += rS[s]
    # products instead of quotients, which take eight instructions and a branch each, in every warp
    share = 1.0 / total
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = rS[s] * share
    rM = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            rM[2 * w, v], rM[2 * w + 1, v] = low(rP[w, v]) * rS[last], high(rP[w, v]) * rS[last]
    for s in cutlass.range_constexpr(last):
        if s < sources:
            for v in cutlass.range_constexpr(g.per):
                rB = row_words(c, banks, e.bank, s, v, op)
                for w in cutlass.range_constexpr(4):
                    rM[2 * w, v] = rM[2 * w, v] + low(rB[w]) * rS[s]
                    rM[2 * w + 1, v] = rM[2 * w + 1, v] + high(rB[w]) * rS[s]
    if closing:
        for v in cutlass.range_constexpr(g.per):
            for w in cutlass.range_constexpr(4):
                pair = pack_bf16(rM[2 * w, v], rM[2 * w + 1, v])
                rM[2 * w, v], rM[2 * w + 1, v] = low(pair), high(pair)
    square = Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(8):
            square += rM[w, v] * rM[w, v]
    put(c, 2 * last + 2, square)
    consumers(op)
    scale = cute.math.rsqrt(take(c, 2 * last + 2, g.width) * (1.0 / d.hidden) + d.eps)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a = rM[2 * w, v] * scale * low(e.out[w, v])
            b = rM[2 * w + 1, v] * scale * high(e.out[w, v])
            rX[w, v] = pack_bf16(a, b)
