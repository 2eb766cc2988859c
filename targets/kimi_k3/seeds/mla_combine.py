"""Part of MLA: joins the splits of the context, applies W_UV and the output gate.

The output projection is a plain product, launched after.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from targets.kimi_k3.seeds.common import begin, lanes_max, lanes_sum, round_bf16, sigmoid, smem


@cute.jit
def split_weights(
    mStat: cute.Tensor, sWeight: cute.Tensor, mScale: cute.Tensor, op: cutlass.Constexpr
):
    """sWeight[split] = exp(max_split - max) / total, of e4m3 times mScale, by the first warp; zero without tokens."""
    lane, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    top = -Float32.inf
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        top = cute.arch.fmax(top, mStat[m, s, h, 0])
    top = lanes_max(top)
    total = Float32(0.0)
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        if mStat[m, s, h, 1] > 0.0:
            total += cute.math.exp(mStat[m, s, h, 0] - top) * mStat[m, s, h, 1]
    total = lanes_sum(total, 32)
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        weight = Float32(0.0)
        if mStat[m, s, h, 1] > 0.0:
            weight = cute.math.exp(mStat[m, s, h, 0] - top) / total
            if cutlass.const_expr(op.fp8):
                weight *= mScale[0]
        sWeight[s] = weight


@cute.jit
def join_splits(mSum: cute.Tensor, sWeight: cute.Tensor, sLat: cute.Tensor, op: cutlass.Constexpr):
    """sLat = bf(sum over splits of weight * sum): threads share columns in vectors of four, then the splits."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    vectors = op.lora // 4
    groups = 256 // vectors
    group, vector = tid // vectors, tid % vectors
    gSum = cute.logical_divide(mSum, (None, None, None, 4))
    sPart = smem(Float32, (4, vectors, groups), (1, 4, op.lora))
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rSum = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rSum.fill(0.0)
    for s in cutlass.range(group, op.splits, groups, unroll=16):
        cute.autovec_copy(gSum[m, s, h, (None, vector)], rX)
        rSum.store(rSum.load() + rX.load() * sWeight[s])
    cute.autovec_copy(rSum, sPart[None, vector, group])
    cute.arch.sync_threads()
    for c in cutlass.range(tid, op.lora, 256, unroll=1):
        total = Float32(0.0)
        for g in cutlass.range(groups, unroll_full=True):
            total += sPart[c % 4, c // 4, g]
        sLat[c] = total.to(BFloat16)
    cute.arch.sync_threads()


@cute.kernel
def combine_kernel(
    mSum: cute.Tensor, mStat: cute.Tensor, mA: cute.Tensor, mUv: cute.Tensor, mLengths: cute.Tensor, mOut: cute.Tensor,
    mScale: cute.Tensor, op: cutlass.Constexpr,
):  # fmt: skip
    """Joins the splits: lat = bf(sum p c); y = bf(bf(lat W_UV[h]) * sg(gate)), mOut bf16 [M, H v]; grid (H, M).

    mA holds the gate in its last H v columns, mUv bf16 [H, v, lora]; length 0 gives zeros. 256 threads.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    lane = tid % 32
    begin(op.pdl)
    sWeight = smem(Float32, (op.splits,), (1,))
    sLat = smem(BFloat16, (op.lora,), (1,))
    if tid < 32:
        split_weights(mStat, sWeight, mScale, op)
    cute.arch.sync_threads()
    join_splits(mSum, sWeight, sLat, op)
    gUv = cute.logical_divide(mUv, (None, None, 8))
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    for j in cutlass.range(tid // 32, op.v, 8, unroll=8):
        dot = Float32(0.0)
        for i in cutlass.range(lane, op.lora // 8, 32, unroll=2):
            cute.autovec_copy(gUv[h, j, (None, i)], rW)
            cute.autovec_copy(cute.local_tile(sLat, (8,), (i,)), rX)
            product = rX.load().to(Float32) * rW.load().to(Float32)
            dot += product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        dot = lanes_sum(dot, 32)
        if lane == 0:
            gate = sigmoid(mA[m, op.q_lora + op.width + h * op.v + j].to(Float32))
            y = round_bf16(dot) * gate
            mOut[m, h * op.v + j] = (y if mLengths[m] > 0 else Float32(0.0)).to(BFloat16)
