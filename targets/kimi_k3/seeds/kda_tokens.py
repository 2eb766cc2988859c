"""Part of KDA: the update of several tokens a request in order, and of models whose output gate has low rank.

One token of a model with a full gate takes `kda_update`, which loads the state ahead of the projection.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from targets.kimi_k3.seeds.common import begin, lanes_sum, round_bf16, sigmoid, silu, smem
from targets.kimi_k3.seeds.kda_update import K, KdaTensors, decay, delta_rule, head_scale


@cute.jit
def convolve_tokens(
    mY: cute.Tensor, w: KdaTensors, sAll: cute.Tensor, at: tuple, op: cutlass.Constexpr
):
    """sAll[token, q 128 | k 128 | v 128] of all tokens of request b. at = (head, b, conv page, accepted - 1): the page
    becomes the two taps before the new tokens, then these. A thread has whole channels, so it reads before it writes.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, b, page, kept = at
    safe = page if page > 0 else 0
    for c in cutlass.range(tid, 3 * K, op.threads, unroll=1):
        channel = c // K * op.width + h * K + c % K
        old = w.conv_taps[safe, kept, channel].to(Float32)
        middle = w.conv_taps[safe, kept + 1, channel]
        young = w.conv_taps[safe, kept + 2, channel]
        if page > 0:
            w.conv_taps[page, 0, channel] = middle
            w.conv_taps[page, 1, channel] = young
        middle, young = middle.to(Float32), young.to(Float32)
        for t in cutlass.range_constexpr(op.tokens):
            new = mY[b * op.tokens + t, channel]
            if page > 0:
                w.conv_taps[page, t + 2, channel] = new
            new = new.to(Float32)
            total = old * w.conv[channel, 0] + middle * w.conv[channel, 1]
            total += young * w.conv[channel, 2] + new * w.conv[channel, 3]
            sAll[t, c] = silu(total)
            old, middle, young = middle, young, new


@cute.jit
def gate_of(mY: cute.Tensor, mG: cute.Tensor, sGate: cute.Tensor, at: tuple, op: cutlass.Constexpr):
    """sGate[k] = sg(g) of a row and head: g = bf(g_a W_gb^T) with a low-rank gate (mG = W_gb), else in the row."""
    tid, _, _ = cute.arch.thread_idx()
    h, row = at
    if cutlass.const_expr(op.low_rank):
        lane = tid % 16
        gY = cute.logical_divide(mY, (None, 8))
        gG = cute.logical_divide(mG, (None, 8))
        rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
        rG = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
        cute.autovec_copy(gY[row, (None, (op.f_at + K) // 8 + lane)], rX)
        for k in cutlass.range(tid // 16, K, op.threads // 16, unroll=4):
            cute.autovec_copy(gG[h * K + k, (None, lane)], rG)
            product = rX.load().to(Float32) * rG.load().to(Float32)
            value = round_bf16(lanes_sum(product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0), 16))
            if lane == 0:
                sGate[k] = sigmoid(value)
    else:
        if tid < K:
            sGate[tid] = sigmoid(mY[row, 3 * op.width + h * K + tid].to(Float32))


@cute.kernel
def kda_tokens_kernel(
    mY: cute.Tensor, w: KdaTensors, more: tuple, mOut: cute.Tensor, op: cutlass.Constexpr
):
    """As kda_kernel for `op.tokens` tokens of a request in order, grid (H, B); more = (accepted i32 [B], g_b bf16 [D,
    128]), None where there is none. w.slots i32 [B, tokens]: the state after each token goes there unless the id is
    <= 0; the request starts from slot accepted - 1 of its row, a null one gets zeros and touches nothing.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, b, _ = cute.arch.block_idx()
    mAccepted, mG = more
    kept = mAccepted[b] - 1 if cutlass.const_expr(op.tokens > 1) else 0
    mSlots = cute.make_tensor(
        w.slots.iterator,
        cute.make_layout((mY.shape[0] // op.tokens, op.tokens), stride=(op.tokens, 1)),
    )
    start = mSlots[b, kept]
    page = mSlots[b, 0] if start > 0 else start
    rS = cute.make_rmem_tensor(cute.make_layout((4, 4, op.passes)), Float32)
    gS = cute.logical_divide(w.S[start if start > 0 else 0, h, None, None], (None, 4))
    for p in cutlass.range_constexpr(op.passes):
        for c in cutlass.range_constexpr(4):
            cute.autovec_copy(
                gS[p * (op.threads // 8) + tid // 8, (None, c * 8 + tid % 8)], rS[None, c, p]
            )
    begin(op.pdl)
    sAll = smem(Float32, (op.tokens, 3 * K), (3 * K, 1))
    sDecay, sGate = smem(Float32, (K,), (1,)), smem(Float32, (K,), (1,))
    sO = smem(Float32, (K,), (1,))
    convolve_tokens(mY, w, sAll, (h, b, page, kept), op)
    for t in cutlass.range(op.tokens, unroll=1):
        m = b * op.tokens + t
        decay(mY, w, sDecay, (h, m, start), op)
        gate_of(mY, mG, sGate, (h, m), op)
        cute.arch.sync_threads()
        strength = sigmoid(mY[m, op.beta_at + h].to(Float32))
        delta_rule(rS, sAll[t, None], sDecay, sO, strength, op)
        slot = mSlots[b, t] if start > 0 else start
        gTarget = cute.logical_divide(w.S[slot if slot > 0 else 0, h, None, None], (None, 4))
        if slot > 0:
            for p in cutlass.range_constexpr(op.passes):
                for c in cutlass.range_constexpr(4):
                    row = p * (op.threads // 8) + tid // 8
                    cute.autovec_copy(rS[None, c, p], gTarget[row, (None, c * 8 + tid % 8)])
        cute.arch.sync_threads()
        normed = head_scale(sO, op)
        if tid < K:
            out = sO[tid] * normed * w.o_norm[tid].to(Float32) * sGate[tid]
            mOut[m, h * K + tid] = (out if start > 0 else Float32(0.0)).to(BFloat16)
        cute.arch.sync_threads()
