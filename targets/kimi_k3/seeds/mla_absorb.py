"""Part of MLA: the query with W_UK absorbed, the new token's row of the cache, and how many tokens each row sees.

The product that makes the query is a plain one, launched before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8

from targets.kimi_k3.seeds.common import begin, block_sum, smem
from targets.kimi_k3.seeds.mla_layout import to_e4m3


@cute.jit
def insert(
    mA: cute.Tensor,
    mNorm: cute.Tensor,
    mSlots: cute.Tensor,
    mKv: cute.Tensor,
    mScale: cute.Tensor,
    op: cutlass.Constexpr,
):
    """Cache row of this row's new token: [bf(RMS(kv_c; norm)) | k_pe], as E4M3 over mScale with `fp8`; a negative slot
    inserts nothing."""
    tid, _, _ = cute.arch.thread_idx()
    _, m, _ = cute.arch.block_idx()
    square = Float32(0.0)
    for i in cutlass.range(tid, op.lora, 256, unroll=1):
        x = mA[m, op.q_lora + i].to(Float32)
        square += x * x
    scale = cute.math.rsqrt(block_sum(square, 8) / op.lora + op.eps)
    slot = mSlots[m]
    if slot >= 0:
        where = mKv.iterator
        if cutlass.const_expr(op.fp8):
            where = cute.recast_ptr(where, dtype=Uint8)
        flat = cute.make_tensor(where + slot * op.width, cute.make_layout((op.width,)))
        for i in cutlass.range(tid, op.width, 256, unroll=1):
            x = mA[m, op.q_lora + i]
            if i < op.lora:
                x = (x.to(Float32) * scale * mNorm[i].to(Float32)).to(BFloat16)
            if cutlass.const_expr(op.fp8):
                x = to_e4m3(x.to(Float32) / mScale[0]).to(Uint8)
            flat[i] = x


@cute.jit
def absorb(mQ: cute.Tensor, mUk: cute.Tensor, mQuery: cute.Tensor, op: cutlass.Constexpr):
    """query[:lora] = bf(Q_nope W_UK[h]); query[lora:] = Q_pe. The CTA's threads share columns, then rows of W_UK."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    columns = op.lora // 8
    parts = 256 // columns
    part, column = tid // columns, tid % columns
    gUk = cute.logical_divide(mUk[h, None, None], (None, 8))
    sPart = smem(Float32, (8, columns, parts), (1, 8, op.lora))
    first = h * (op.nope + op.rope)
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rSum = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rSum.fill(0.0)
    for i in cutlass.range(op.nope // parts, unroll=8):
        row = i * parts + part
        cute.autovec_copy(gUk[row, (None, column)], rW)
        rSum.store(rSum.load() + rW.load().to(Float32) * mQ[m, first + row].to(Float32))
    cute.autovec_copy(rSum, sPart[None, column, part])
    cute.arch.sync_threads()
    for c in cutlass.range(tid, op.lora, 256, unroll=1):
        total = Float32(0.0)
        for p in cutlass.range(parts, unroll_full=True):
            total += sPart[c % 8, c // 8, p]
        mQuery[m, h, c] = total.to(BFloat16)
    if tid < op.rope:
        mQuery[m, h, op.lora + tid] = mQ[m, first + op.nope + tid]


@cute.jit
def spread_lengths(mLengths: cute.Tensor, mSeen: cute.Tensor, op: cutlass.Constexpr):
    """mSeen[m]: how many tokens row m sees, its own the last of them; mLengths i32 [B] counts all of its request."""
    tid, _, _ = cute.arch.thread_idx()
    _, m, _ = cute.arch.block_idx()
    if tid == 0:
        total = mLengths[m // op.tokens]
        mSeen[m] = total - (op.tokens - 1) + m % op.tokens if total > 0 else Int32(0)


@cute.kernel
def absorb_kernel(
    mA: cute.Tensor, mQ: cute.Tensor, w: tuple, mSlots: cute.Tensor, mKv: cute.Tensor, lengths: tuple,
    mQuery: cute.Tensor, op: cutlass.Constexpr,
):  # fmt: skip
    """mA bf16 [M, q_c | kv_c | k_pe | gate], mQ bf16 [M, H x (nope | rope)], w = (w_uk, kv_a_norm, k_scale or None);
    grid (H + 1, M).

    mQuery bf16 [M, H, lora + rope]; the last CTA of a row inserts the new token into the cache, and with several tokens
    a request writes how many the row sees: lengths = (of the requests, of the rows). 256 threads.
    """
    h, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    if h < op.heads:
        absorb(mQ, w[0], mQuery, op)
    else:
        insert(mA, w[1], mSlots, mKv, w[2], op)
        if cutlass.const_expr(op.tokens > 1):
            spread_lengths(lengths[0], lengths[1], op)
