"""Part of the product of a few rows: y = x W^T on tensor cores, with what a layer adds before it and after it.

How its tunables fit a product, and its launches, are in `gemv`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import (
    add_bf16x2,
    begin,
    high,
    lanes_sum,
    low,
    mma_k32,
    pack_bf16,
    round_bf16,
    situ,
    smem,
)


class Extra(NamedTuple):
    """What some projections read or write beside x, W and y.

    plus    x is bf(x + plus)
    norm    x is bf(RMS(x; norm)), recomputed by every CTA
    remote  f32, y = bf(bf(product) + remote): the sum of the other ranks' partials
    send    columns from `remote`'s width on go here instead, without a sum
    addend  bf16, y = bf(bf(product) + addend)
    tail    bf16, columns of y beyond the product are copies of it
    """

    plus: Any = None
    norm: Any = None
    remote: Any = None
    send: Any = None
    addend: Any = None
    tail: Any = None


@dataclass(frozen=True)
class Gemv:
    """Compile-time shape of one product: y has `n` columns, `k` columns of x are used.

    `situ`: W holds n gate rows, then n up rows, and y = bf(SiTU(bf(gate), bf(up))). A CTA of `warps` makes `tile` x 8
    columns; the warps share K in blocks of 32 columns and load `unroll` blocks before they use the first.
    """

    n: int
    k: int
    warps: int
    tile: int
    unroll: int
    situ: bool
    eps: float
    pdl: bool

    @property
    def blocks(self):
        return self.k // 32

    @property
    def exact(self):
        return self.blocks % (self.warps * self.unroll) == 0

    @property
    def rounds(self):
        return -(-self.blocks // (self.warps * self.unroll))

    @property
    def parts(self):
        """Rows of W, in units of eight, that a CTA reads."""
        return self.tile * (2 if self.situ else 1)


@cute.jit
def load_weights(gW: cute.Tensor, rW: cute.Tensor, tile: Int32, step: Int32, op: cutlass.Constexpr):
    """One round of this warp's blocks: rW[4 words, part, unroll]; a lane has 16 bytes of row g, columns 8 q of 32."""
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    stream = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), Uint32, num_bits_per_copy=128,
        load_cache_mode=cute.nvgpu.LoadCacheMode.STREAMING,
    )  # fmt: skip
    for u in cutlass.range(op.unroll, unroll_full=True):
        block = (step * op.unroll + u) * op.warps + tid // 32
        for j in cutlass.range_constexpr(op.parts):
            row = (tile * op.tile + j % op.tile) * 8 + lane // 4 + (j // op.tile) * op.n
            if cutlass.const_expr(op.exact):
                cute.copy(stream, gW[row, (None, block * 4 + lane % 4)], rW[None, j, u])
            elif block < op.blocks:
                cute.copy(stream, gW[row, (None, block * 4 + lane % 4)], rW[None, j, u])
            else:
                rW[None, j, u].fill(0)


@cute.jit
def load_rows(
    gX: cute.Tensor,
    plus: Any,
    rX: cute.Tensor,
    span: tuple,
    step: Int32,
    op: cutlass.Constexpr,
):
    """The same blocks of rows span = (first, end) of x, up to eight: rX[4 words, unroll] of row g.

    Absent rows keep the zeros that rX starts with.
    """
    first, end = span
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    m = first + lane // 4
    rPlus = cute.make_rmem_tensor(cute.make_layout((4, op.unroll)), Uint32)
    if cutlass.const_expr(plus is not None and not op.exact):
        rPlus.fill(0)  # beyond the last block x stays 0, and what happens to be in a register may be NaN
    for u in cutlass.range(op.unroll, unroll_full=True):
        block = (step * op.unroll + u) * op.warps + tid // 32
        if m < end and block < op.blocks:
            cute.autovec_copy(gX[m, (None, block * 4 + lane % 4)], rX[None, u])
            if cutlass.const_expr(plus is not None):
                cute.autovec_copy(plus[m, (None, block * 4 + lane % 4)], rPlus[None, u])
    if cutlass.const_expr(plus is not None):
        if m < end:
            for i in cutlass.range_constexpr(4 * op.unroll):
                rX[i] = add_bf16x2(rX[i], rPlus[i])


@cute.jit
def normed_rows(
    mX: cute.Tensor, mNorm: cute.Tensor, sX: cute.Tensor, m0: Int32, op: cutlass.Constexpr
):
    """sX[8 rows, k / 2 words] = bf(RMS(x; norm)) of the rows from m0, f32 inside, one rounding. Ends with a barrier.

    The warps share the rows, several to a row when there are few; rows beyond the last are not written.
    """
    tid, _, _ = cute.arch.thread_idx()
    words = op.k // 2
    per = max(1, op.warps // min(8, mX.shape[0]))
    row, part, lane = tid // 32 // per, tid // 32 % per, tid % 32
    gX = cute.recast_tensor(mX, Uint32)
    gNorm = cute.recast_tensor(mNorm, Uint32)
    sSquare = smem(Float32, (8, per), (per, 1))
    for r in cutlass.range(row, 8, op.warps // per, unroll=1):
        if m0 + r < mX.shape[0]:
            square = Float32(0.0)
            for i in cutlass.range(part * 32 + lane, words, 32 * per, unroll=8):
                x = gX[m0 + r, i]
                square += low(x) * low(x) + high(x) * high(x)
            square = lanes_sum(square, 32)
            if lane == 0:
                sSquare[r, part] = square
    cute.arch.sync_threads()
    for r in cutlass.range(row, 8, op.warps // per, unroll=1):
        if m0 + r < mX.shape[0]:
            square = Float32(0.0)
            for p in cutlass.range(per, unroll_full=True):
                square += sSquare[r, p]
            scale = cute.math.rsqrt(square / op.k + op.eps)
            for i in cutlass.range(part * 32 + lane, words, 32 * per, unroll=8):
                x, w = gX[m0 + r, i], gNorm[i]
                sX[r, i] = pack_bf16(low(x) * scale * low(w), high(x) * scale * high(w))
    cute.arch.sync_threads()


@cute.jit
def finish(acc: Float32, up: Float32, at: tuple, mY: cute.Tensor, ex: Extra, op: cutlass.Constexpr):
    """Epilogue of element at = (m, n): the roundings of the specification, then the store."""
    m, n = at
    if cutlass.const_expr(op.situ):
        mY[m, n] = situ(round_bf16(acc), round_bf16(up)).to(mY.element_type)
    elif cutlass.const_expr(ex.send is not None):
        own = ex.remote.shape[1]
        if n < own:
            mY[m, n] = (round_bf16(acc) + ex.remote[m, n]).to(mY.element_type)
        else:
            ex.send[m, n - own] = acc.to(ex.send.element_type)
    elif cutlass.const_expr(ex.remote is not None):
        mY[m, n] = (round_bf16(acc) + ex.remote[m, n]).to(mY.element_type)
    elif cutlass.const_expr(ex.addend is not None):
        mY[m, n] = (round_bf16(acc) + ex.addend[m, n].to(Float32)).to(mY.element_type)
    else:
        mY[m, n] = acc.to(mY.element_type)


@cute.kernel
def gemv_kernel(
    mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, ex: Extra, op: cutlass.Constexpr
):
    """mX bf16 [M, >= k], mW bf16 [n or 2n, k], mY bf16 or f32 [M, >= n]; grid (n / 8 tile, M / 8).

    The weights are the B operand (n = 8 rows), x is A (16 rows, the upper 8 zero). Each lane takes 16 contiguous
    bytes of a row, so k is permuted alike in A and B. f32 sums, warps added in order, rounded as `Extra` says.
    """
    tid, _, _ = cute.arch.thread_idx()
    tile, group, _ = cute.arch.block_idx()
    m0 = group * 8
    gW = cute.logical_divide(cute.recast_tensor(mW, Uint32), (None, 4))
    rW = cute.make_rmem_tensor(cute.make_layout((4, op.parts, op.unroll)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.unroll)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.parts)), Float32)
    rX.fill(0)
    rC.fill(0.0)
    load_weights(gW, rW, tile, Int32(0), op)
    begin(op.pdl)
    plus = None
    if cutlass.const_expr(ex.norm is not None):
        # 16 bytes of padding keep the eight rows of a fragment in different banks
        sX = smem(Uint32, (8, op.k // 2), (op.k // 2 + 4, 1))
        normed_rows(mX, ex.norm, sX, m0, op)
        gX = cute.logical_divide(sX, (None, 4))
        span = (Int32(0), mX.shape[0] - m0)
    else:
        gX = cute.logical_divide(cute.recast_tensor(mX, Uint32), (None, 4))
        span = (m0, Int32(mX.shape[0]))
        if cutlass.const_expr(ex.plus is not None):
            plus = cute.logical_divide(cute.recast_tensor(ex.plus, Uint32), (None, 4))
    for step in cutlass.range(op.rounds, unroll=1):
        load_rows(gX, plus, rX, span, step, op)
        for u in cutlass.range(op.unroll, unroll_full=True):
            for j in cutlass.range_constexpr(op.parts):
                mma_k32(rC[None, j], rX[None, u], tuple(rW[i, j, u] for i in range(4)))
        if step + 1 < op.rounds:
            load_weights(gW, rW, tile, step + 1, op)
    sum_and_store(rC, mY, ex, op)


@cute.jit
def sum_and_store(rC: cute.Tensor, mY: cute.Tensor, ex: Extra, op: cutlass.Constexpr):
    """Add the warps' shares of K in warp order and finish each element."""
    tid, _, _ = cute.arch.thread_idx()
    tile, group, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    lane = tid % 32
    width = op.tile * 8
    sC = smem(Float32, (8, op.parts * 8, op.warps), (1, 8, op.parts * 64))
    for j in cutlass.range_constexpr(op.parts):
        for i in cutlass.range_constexpr(2):
            sC[lane // 4, j * 8 + lane % 4 * 2 + i, tid // 32] = rC[i, j]
    cute.arch.sync_threads()
    for item in cutlass.range(tid, 8 * width, op.warps * 32, unroll=1):
        r, c = item // width, item % width
        m = group * 8 + r
        if m < mY.shape[0]:
            acc = Float32(0.0)
            up = Float32(0.0)
            for w in cutlass.range(op.warps, unroll_full=True):
                acc += sC[r, c, w]
                if cutlass.const_expr(op.situ):
                    up += sC[r, width + c, w]
            finish(acc, up, (m, tile * width + c), mY, ex, op)
    if cutlass.const_expr(ex.tail is not None):
        threads = op.warps * 32
        for i in cutlass.range(tile * threads + tid, ex.tail.shape[1], tiles * threads, unroll=1):
            for r in cutlass.range_constexpr(8):
                if group * 8 + r < mY.shape[0]:
                    mY[group * 8 + r, op.n + i] = ex.tail[group * 8 + r, i]
