"""Matrix-vector products y = x W^T for a few rows, weights streamed once per eight rows, on bf16 tensor cores.

One kernel; what differs between the projections of a layer is how x is made (plain, a sum, a norm) and the epilogue.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from targets.kimi_k3.seeds.common import begin, block_sum, divisor_below, divisor_near, pick
from targets.kimi_k3.seeds.gemv_kernel import Extra, Gemv, gemv_kernel

TUNABLES = {
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "fuse_add": (True, False),
    "pdl": (False, True),
}


def gemv_shape(n, k, cfg, situ):
    """Fit the tunables to a product: whole tiles, rounds that divide k, and enough bytes in flight for a small n."""
    warps, unroll = cfg.gemv_warps, cfg.gemv_unroll
    tile = divisor_below(n // 8, cfg.gemv_tile)
    if n // (8 * tile) < 2 * cfg.sms:
        tile = 1
    if n // 8 < cfg.sms and k >= 2048:
        warps, unroll = (
            16,
            7,
        )  # at most one CTA per SM: each must keep all the loads in flight itself
    blocks = k // 32
    if blocks % warps == 0:
        unroll = divisor_near(blocks // warps, unroll)
    else:
        unroll = min(unroll, -(-blocks // warps))
    return Gemv(n, k, warps, tile, unroll, situ, cfg.dims.eps, cfg.pdl)


@cute.jit
def gemv(
    mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, ex: Extra, cfg: cutlass.Constexpr, stream
):
    """y = x W^T with the extras of `ex`; n and k are W's."""
    op = gemv_shape(mW.shape[0], mW.shape[1], cfg, False)
    launch_gemv(mX, mW, mY, ex, op, stream)


@cute.jit
def gemv_situ(mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, cfg: cutlass.Constexpr, stream):
    """y = bf(SiTU(bf(x Wg^T), bf(x Wu^T))), W = [Wg; Wu]."""
    op = gemv_shape(mW.shape[0] // 2, mW.shape[1], cfg, True)
    launch_gemv(mX, mW, mY, Extra(), op, stream)


@cute.jit
def launch_gemv(
    mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, ex: Extra, op: cutlass.Constexpr, stream
):
    gemv_kernel(mX, mW, mY, ex, op).launch(
        grid=(op.n // (8 * op.tile), cute.ceil_div(mX.shape[0], 8), 1),
        block=(op.warps * 32, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


@cute.kernel
def rmsnorm_kernel(
    mX: cute.Tensor, mNorm: cute.Tensor, mOut: cute.Tensor, shape: cutlass.Constexpr
):
    """out[:, :k] = bf(RMS(x[:, :k]; norm)), f32 inside; shape = (k, eps, pdl); grid (M), 256 threads."""
    k, eps, pdl = shape
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    begin(pdl)
    square = Float32(0.0)
    for i in cutlass.range(tid, k, 256, unroll=4):
        x = mX[m, i].to(Float32)
        square += x * x
    scale = cute.math.rsqrt(block_sum(square, 8) / k + eps)
    for i in cutlass.range(tid, k, 256, unroll=4):
        mOut[m, i] = (mX[m, i].to(Float32) * scale * mNorm[i].to(Float32)).to(BFloat16)


@cute.jit
def gemv_normed(
    mX: cute.Tensor,
    mW: cute.Tensor,
    mY: cute.Tensor,
    ex: Extra,
    space: Any,
    cfg: cutlass.Constexpr,
    stream,
):
    """y = bf(RMS(x; ex.norm)) W^T: the norm made by every CTA or, unfused, by a launch of its own into space.normed."""
    if cutlass.const_expr(cfg.fuse_norm):
        gemv(mX, mW, mY, ex, cfg, stream)
    else:
        rmsnorm_kernel(mX, ex.norm, space.normed, (mW.shape[1], cfg.dims.eps, cfg.pdl)).launch(
            grid=(mX.shape[0], 1, 1), block=(256, 1, 1), stream=stream, use_pdl=cfg.pdl
        )
        gemv(space.normed, mW, mY, ex._replace(norm=None), cfg, stream)


@cute.kernel
def add_kernel(mX: cute.Tensor, mY: cute.Tensor, mOut: cute.Tensor, pdl: cutlass.Constexpr):
    """out = bf(x + y), bf16 [M, columns]; grid (columns / 256, M)."""
    tid, _, _ = cute.arch.thread_idx()
    bid, m, _ = cute.arch.block_idx()
    begin(pdl)
    i = bid * 256 + tid
    if i < mX.shape[1]:
        mOut[m, i] = (mX[m, i].to(Float32) + mY[m, i].to(Float32)).to(BFloat16)


@cute.jit
def add(mX: cute.Tensor, mY: cute.Tensor, mOut: cute.Tensor, cfg: cutlass.Constexpr, stream):
    add_kernel(mX, mY, mOut, cfg.pdl).launch(
        grid=(cute.ceil_div(mX.shape[1], 256), mX.shape[0], 1),
        block=(256, 1, 1),
        stream=stream,
        use_pdl=cfg.pdl,
    )


@cute.jit
def gemv_of_sum(
    mX: cute.Tensor,
    mPlus: cute.Tensor,
    mSum: Any,
    mW: cute.Tensor,
    mY: cute.Tensor,
    cfg: cutlass.Constexpr,
    stream,
):
    """y = bf(x + plus) W^T, the sum made while x is loaded or, unfused, by a launch of its own into mSum."""
    if cutlass.const_expr(cfg.fuse_add):
        gemv(mX, mW, mY, Extra(plus=mPlus), cfg, stream)
    else:
        add(mX, mPlus, mSum, cfg, stream)
        gemv(mSum, mW, mY, Extra(), cfg, stream)


def workspace(dims, cfg):
    if cfg.fuse_add:
        return {}
    return {"sum": ("bf16", (dims.rows, dims.hidden), "undefined", "step")}


@cute.jit
def step(t, cfg, stream):
    """y_i = bf(x_i W_i^T), x_i = bf(inputs.x[i] + y_{i-1})."""
    x, y = t.inputs.x, t.outputs.y
    w = [layer.w for layer in t.weights.layers]
    mSum = None if cfg.fuse_add else t.workspace.sum
    gemv(x[0], w[0], y[0], Extra(), cfg, stream)
    for i in cutlass.range(1, len(w), unroll=1):
        gemv_of_sum(pick(x, i), pick(y, i - 1), mSum, pick(w, i), pick(y, i), cfg, stream)
