"""o_proj with all of a CTA's weights in shared memory before its row is known: the launches before exchange and mix
while they are loaded.

As `oproj_kernel`, of up to eight rows: the same mailboxes, the same order of launches. A CTA has whole groups of eight
columns, one CTA an SM, and leaves shared memory for the receiving launch beside it. Where the columns do not fit, it is
not used.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2, begin, divisor_below, mma_k32, smem
from targets.kimi_k3.seeds.exchange import Link, new_flag
from targets.kimi_k3.seeds.gemv_kernel import Gemv
from targets.kimi_k3.seeds.send_sums import sum_and_send

EVICT_FIRST = 0x12F0000000000000
"""L2 policy of what is read once in a step."""
ROOM = 212 << 10
"""Bytes of shared memory that a CTA may take: what is left of the SM is for a CTA of the receiving launch."""


def pitch_of(k):
    """Bytes of a row of weights in shared memory: 64 more than it has, so that rows lie in other banks."""
    return 2 * k + 64


def ahead_shape(n, k, cfg):
    """Whole groups of columns on at most one CTA an SM, whole blocks of k on each warp; None if they do not fit."""
    groups, blocks = n // 8, k // 32
    least = -(-groups // cfg.sms)
    tile = min(d for d in range(least, groups + 1) if groups % d == 0)
    warps = divisor_below(blocks, cfg.ahead_warps)
    taken = tile * 8 * (pitch_of(k) + 32 * warps) + 8 * tile
    if taken > ROOM:
        return None
    return Gemv(n, k, warps, tile, blocks // warps, False, cfg.dims.eps, cfg.pdl)


@cute.jit
def bring(mW: cute.Tensor, weights: cute.Tensor, bars: Any, first: Int32, op: cutlass.Constexpr):
    """The first warp: every row of this CTA's weights into its place, a barrier for each group of eight."""
    tid, _, _ = cute.arch.thread_idx()
    size = 2 * op.k
    if tid == 0:
        for g in cutlass.range_constexpr(op.tile):
            cute.arch.mbarrier_init(bars + g, 1)
        cute.arch.mbarrier_init_fence()
        for g in cutlass.range_constexpr(op.tile):
            cute.arch.mbarrier_arrive_and_expect_tx(bars + g, 8 * size)
    cute.arch.sync_warp()
    source = mW.iterator.toint() + Int64(first) * (8 * size)
    target = Int32(weights.iterator.toint())
    for row in cutlass.range(tid, 8 * op.tile, 32, unroll=1):
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
            read_only_args=[
                target + row * pitch_of(op.k), source + Int64(row) * size, Int32(size),
                Int32((bars + row // 8).toint()), Int64(EVICT_FIRST),
            ],
        )  # fmt: skip


@cute.jit
def bring_next(mNext: cute.Tensor, more: Int32, first: Int32, op: cutlass.Constexpr):
    """The first warp: the same rows of the next product's weights into L2, where they wait for room; more: 1 or, where
    there is none, 0."""
    tid, _, _ = cute.arch.thread_idx()
    size = 2 * op.k
    source = mNext.iterator.toint() + Int64(first) * (8 * size)
    for row in cutlass.range(tid, 8 * op.tile * more, 32, unroll=1):
        cute.arch.inline_ptx(
            "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
            read_only_args=[source + Int64(row) * size, Int32(size)],
        )


@cute.jit
def own_rows(mX: cute.Tensor, r: cute.Tensor, op: cutlass.Constexpr):
    """r[4 words, unroll] = this lane's columns of row lane // 4 of mX, where there is one."""
    tid, _, _ = cute.arch.thread_idx()
    gX = cute.logical_divide(cute.recast_tensor(mX, Uint32), (None, 4))
    m = tid % 32 // 4
    if m < mX.shape[0]:
        for u in cutlass.range_constexpr(op.unroll):
            block = u * op.warps + tid // 32
            cute.autovec_copy(gX[m, (None, block * 4 + tid % 4)], r[None, u])


@cute.kernel
def ahead_kernel(
    mX: cute.Tensor, plus: Any, mW: cute.Tensor, then: Any, link: Link, ops: cutlass.Constexpr
):
    """Partial of bf(x + plus) W^T into the mailboxes: mX bf16 [M <= 8, k], plus [M, >= k] or None, mW bf16 [n, k].
    then: None or (the next product's W, 1 or 0: whether there is one); grid (n / 8 tile)."""
    op, wire = ops
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    pitch = pitch_of(op.k)
    words = cutlass.memory.SmemAllocator().allocate_tensor(
        Uint32, cute.make_layout((op.tile * 8 * pitch // 4,)), byte_alignment=128
    )
    bars = smem(Int64, (op.tile,), (1,)).iterator
    if tid < 32:
        bring(mW, words, bars, cta * op.tile, op)
        if cutlass.const_expr(then is not None):
            bring_next(then[0], then[1], cta * op.tile, op)
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.unroll)), Uint32)
    rX.fill(0)
    own_rows(mX, rX, op)
    begin(op.pdl)
    flag = new_flag(link, Int32(0))
    if cutlass.const_expr(plus is not None):
        rPlus = cute.make_rmem_tensor(cute.make_layout((4, op.unroll)), Uint32)
        rPlus.fill(0)
        own_rows(plus, rPlus, op)
        for i in cutlass.range_constexpr(4 * op.unroll):
            rX[i] = add_bf16x2(rX[i], rPlus[i])
    cute.arch.sync_threads()
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.tile)), Float32)
    rC.fill(0.0)
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for g in cutlass.range_constexpr(op.tile):
        cute.arch.mbarrier_wait(bars + g, 0)
        for u in cutlass.range_constexpr(op.unroll):
            place = (u * op.warps + tid // 32) * 4 + tid % 4
            at = (g * 8 + tid % 32 // 4) * (pitch // 16) + place
            cute.autovec_copy(cute.local_tile(words, (4,), (at,)), rW)
            mma_k32(rC[None, g], rX[None, u], tuple(rW[e] for e in range(4)))
    sum_and_send(rC, (cta, Int32(0)), flag, link, (op, wire))


@cute.jit
def launch_ahead(operands: tuple, link: Link, ops: cutlass.Constexpr, stream):
    """operands = (mX, plus, mW, then), as in `ahead_kernel`; ops = (product, wire)."""
    op, _ = ops
    ahead_kernel(*operands, link, ops).launch(
        grid=(op.n // (8 * op.tile), 1, 1), block=(op.warps * 32, 1, 1), stream=stream,
        use_pdl=op.pdl, min_blocks_per_mp=1,
    )  # fmt: skip
