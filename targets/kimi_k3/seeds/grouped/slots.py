"""What the experts of a token come to: the sum over its slots, in their order, and the norm of it."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

from targets.kimi_k3.seeds.common import begin, block_sum, high, low, round_bf16


@dataclass(frozen=True)
class Slots:
    """Compile-time sizes: slots of a token, columns, eight to a thread."""

    topk: int
    columns: int
    eps: float
    pdl: bool

    @property
    def threads(self):
        return -(-self.columns // 256) * 32


@cute.jit
def sum_slots(
    gY: cute.Tensor, mWeights: cute.Tensor, mRemote: Any, rZ: cute.Tensor, op: cutlass.Constexpr
):
    """rZ f32 [8] = bf(bf(sum over slots, in order, of w y) + remote) of this thread's columns."""
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    rY = cute.make_rmem_tensor(cute.make_layout((4, op.topk)), Uint32)
    for slot in cutlass.range_constexpr(op.topk):
        cute.autovec_copy(gY[m * op.topk + slot, (None, tid)], rY[None, slot])
    for slot in cutlass.range_constexpr(op.topk):
        weight = mWeights[m, slot].to(Float32)
        for i in cutlass.range_constexpr(4):
            rZ[2 * i] += weight * low(rY[i, slot])
            rZ[2 * i + 1] += weight * high(rY[i, slot])
    for i in cutlass.range_constexpr(8):
        z = round_bf16(rZ[i])
        if cutlass.const_expr(mRemote is not None):
            z = round_bf16(z + mRemote[m, tid * 8 + i])
        rZ[i] = z


@cute.kernel
def slots_kernel(
    mY: cute.Tensor, mWeights: cute.Tensor, mRemote: Any, mNorm: cute.Tensor, mZ: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """mY bf16 [M topk, columns], mWeights bf16 [M, topk], mRemote f32 [M, columns] or None, mNorm bf16; grid (M).

    mZ bf16 [M, columns] = bf(RMS(bf(bf(sum over slots, in order, of w y) + remote); norm)), fused multiply-adds and
    the norm in f32.
    """
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    gY = cute.logical_divide(cute.recast_tensor(mY, Uint32), (None, 4))
    rZ = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rZ.fill(0.0)
    if tid < op.columns // 8:
        sum_slots(gY, mWeights, mRemote, rZ, op)
    square = Float32(0.0)
    for i in cutlass.range_constexpr(8):
        square += rZ[i] * rZ[i]
    scale = cute.math.rsqrt(block_sum(square, op.threads // 32) / op.columns + op.eps)
    if tid < op.columns // 8:
        rOut = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
        for i in cutlass.range_constexpr(8):
            rOut[i] = (rZ[i] * scale * mNorm[tid * 8 + i].to(Float32)).to(BFloat16)
        cute.autovec_copy(rOut, cute.logical_divide(mZ, (None, 8))[m, (None, tid)])
