"""Part of the latent MoE: the kernels of the routed experts, up with SiTU and down with the sum over slots.

Routing, the shared expert and the projections to and from the latent are launches of their own.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import begin, round_bf16, situ, smem
from targets.kimi_k3.seeds.latent_moe_codes import (
    CODE_SCALE,
    Codes,
    accumulate,
    load_codes,
    pair_up,
)


@cute.jit
def stage_latent(mL: cute.Tensor, mRemote: Any, sX: cute.Tensor, m: Int32, op: cutlass.Constexpr):
    """sX[4 words, k / 8] = row m of the latent, own columns, then the gathered ones; pairs as `expand` has them."""
    tid, _, _ = cute.arch.thread_idx()
    gL = cute.logical_divide(cute.recast_tensor(mL, Uint32), (None, 4))
    own = mL.shape[1] // 8
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(tid, op.groups * 4, op.warps * 32, unroll=1):
        if cutlass.const_expr(mRemote is None):
            cute.autovec_copy(gL[m, (None, i)], rX)
        elif i < own:
            cute.autovec_copy(gL[m, (None, i)], rX)
        else:
            gRemote = cute.logical_divide(cute.recast_tensor(mRemote, Uint32), (None, 4))
            cute.autovec_copy(gRemote[m, (None, i - own)], rX)
        pair_up(rX)
        cute.autovec_copy(rX, sX[None, i])
    cute.arch.sync_threads()


@cute.jit
def load_round(w: tuple, row: tuple, turn: Int32, into: tuple, op: cutlass.Constexpr):
    """Codes and scales of w1 and w3 of row = (expert, row) for this warp's next `unroll` steps."""
    tid, _, _ = cute.arch.thread_idx()
    rCode, rScale = into
    for u in cutlass.range(op.unroll, unroll_full=True):
        group = (turn + u * op.warps + tid // 32) * 4 + tid % 4
        for half in cutlass.range_constexpr(2):
            load_codes(
                w[half], (*row, group), rCode[None, half, u], rScale[None, half, u], op.groups
            )


@cute.kernel
def expert_up_kernel(
    mL: cute.Tensor,
    mRemote: Any,
    w: tuple,
    mIds: cute.Tensor,
    mH: cute.Tensor,
    op: cutlass.Constexpr,
):
    """mL bf16 [M, own], mRemote bf16 [M, latent - own] or None, w = (w1, w3), mIds i32 [M, topk].

    Grid (rows / 8, topk, M). mH bf16 [M, topk, rows] = bf(SiTU(w1 l, w3 l)), products and SiTU in f32. The warps share
    k; their sums are added in warp order. Codes are loaded a round ahead, the first before the latent is staged.
    """
    tid, _, _ = cute.arch.thread_idx()
    tile, slot, m = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    begin(op.pdl)
    row = (mIds[m, slot], tile * 8 + lane // 4)
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    rC.fill(0.0)
    rCode = cute.make_rmem_tensor(cute.make_layout((4, 2, op.unroll)), Uint32)
    rScale = cute.make_rmem_tensor(cute.make_layout((1, 2, op.unroll)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    rScale.fill(0)
    load_round(w, row, Int32(0), (rCode, rScale), op)
    sX = smem(Uint32, (4, op.groups * 4), (1, 4))
    stage_latent(mL, mRemote, sX, m, op)
    for turn in cutlass.range(0, op.steps, op.warps * op.unroll, unroll=1):
        for u in cutlass.range(op.unroll, unroll_full=True):
            group = (turn + u * op.warps + warp) * 4 + lane % 4
            if lane < 4 and group < op.groups:
                for i in cutlass.range(4, unroll_full=True):
                    cute.autovec_copy(sX[None, group * 4 + i], rX[None, i])
            for half in cutlass.range_constexpr(2):
                accumulate(rC[None, half], rX, rCode[None, half, u], rScale[None, half, u], op.nv)
        if turn + op.warps * op.unroll < op.steps:
            load_round(w, row, turn + op.warps * op.unroll, (rCode, rScale), op)
    sC = smem(Float32, (16, op.warps), (1, 16))
    if lane < 4:
        for i in cutlass.range_constexpr(4):
            sC[i // 2 * 8 + lane * 2 + i % 2, warp] = rC[i % 2, i // 2]
    cute.arch.sync_threads()
    if tid < 8:
        gate, up = Float32(0.0), Float32(0.0)
        for part in cutlass.range(op.warps, unroll_full=True):
            gate += sC[tid, part]
            up += sC[tid + 8, part]
        if cutlass.const_expr(op.nv):
            gate *= w[0].factor[row[0]]
            up *= w[1].factor[row[0]]
        mH[m, slot, tile * 8 + tid] = situ(gate * CODE_SCALE, up * CODE_SCALE).to(BFloat16)


@cute.kernel
def expert_down_kernel(
    mH: cute.Tensor, w: Codes, route: tuple, mRemote: Any, mZ: cute.Tensor, op: cutlass.Constexpr
):
    """mH bf16 [M, topk, k], w = w2, route = (ids i32, weights bf16) [M, topk]; grid (rows / 8, M).

    mZ bf16 [M, rows] = bf(bf(sum over slots, in order, of w_e bf(w2_e h)) + remote), fused multiply-adds in f32. A warp
    has whole slots, so that a product is complete before it is rounded.
    """
    tid, _, _ = cute.arch.thread_idx()
    tile, m, _ = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    mIds, mWeights = route
    begin(op.pdl)
    slots = -(-op.topk // op.warps)
    gH = cute.logical_divide(cute.recast_tensor(mH, Uint32), (None, None, 4))
    rCode = cute.make_rmem_tensor(cute.make_layout((4, op.steps, slots)), Uint32)
    rScale = cute.make_rmem_tensor(cute.make_layout((1, op.steps, slots)), Uint32)
    rScale.fill(0)
    for s in cutlass.range(slots, unroll_full=True):
        slot = warp + s * op.warps
        if slot < op.topk:
            for u in cutlass.range(op.steps, unroll_full=True):
                at = (mIds[m, slot], tile * 8 + lane // 4, u * 4 + lane % 4)
                load_codes(w, at, rCode[None, u, s], rScale[None, u, s], op.groups)
    sF = smem(Float32, (8, op.topk), (1, 8))
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for s in cutlass.range(slots, unroll_full=True):
        slot = warp + s * op.warps
        if slot < op.topk:
            rC.fill(0.0)
            for u in cutlass.range(op.steps, unroll_full=True):
                group = u * 4 + lane % 4
                if lane < 4 and group < op.groups:
                    for i in cutlass.range(4, unroll_full=True):
                        cute.autovec_copy(gH[m, slot, (None, group * 4 + i)], rX[None, i])
                        pair_up(rX[None, i])
                accumulate(rC, rX, rCode[None, u, s], rScale[None, u, s], op.nv)
            if cutlass.const_expr(op.nv):
                rC.store(rC.load() * w.factor[mIds[m, slot]])
            if lane < 4:
                sF[lane * 2, slot] = round_bf16(rC[0] * CODE_SCALE)
                sF[lane * 2 + 1, slot] = round_bf16(rC[1] * CODE_SCALE)
    cute.arch.sync_threads()
    if tid < 8:
        total = Float32(0.0)
        for slot in cutlass.range(op.topk, unroll_full=True):
            total += mWeights[m, slot].to(Float32) * sF[tid, slot]
        if cutlass.const_expr(mRemote is not None):
            total = round_bf16(total) + mRemote[m, tile * 8 + tid]
        mZ[m, tile * 8 + tid] = total.to(BFloat16)
