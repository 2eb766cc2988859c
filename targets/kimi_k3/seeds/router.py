"""The router: f32 logits, sigmoid scores, top-k by score plus bias, weights from the scores alone.

The logits are a plain product; one CTA per row selects. Ties go to the lower expert id, NaN ranks last with weight 0.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import begin, lanes_sum, pick, sigmoid, smem
from targets.kimi_k3.seeds.gemv import gemv
from targets.kimi_k3.seeds.gemv_kernel import Extra

TUNABLES = {
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "topk_warps": (8, 4, 16),
    "pdl": (False, True),
}
LAST = 0x7FFFFFFF


@dataclass(frozen=True)
class TopK:
    """`warps` share the experts, `each` per warp, up to `slots` per lane."""

    experts: int
    topk: int
    warps: int
    pdl: bool

    @property
    def each(self):
        return -(-self.experts // self.warps)

    @property
    def slots(self):
        return -(-self.each // 32)


@cute.jit
def logit(mLogits: cute.Tensor, mRemote: Any, m: Int32, e: Int32):
    x = Float32(0.0)
    if cutlass.const_expr(mRemote is None):
        x = mLogits[m, e]
    else:
        own = mLogits.shape[1]
        if e < own:
            x = mLogits[m, e]
        else:
            x = mRemote[m, e - own]
    return x


@cute.jit
def order_key(z: Float32):
    """Unsigned key in the order of z as a real number (-0 = +0); NaN 1, below every number; 0 stays free for absent."""
    bits = (z + Float32(0.0)).bitcast(Uint32)
    key = ~bits if bits >= Uint32(0x80000000) else bits | Uint32(0x80000000)
    return Uint32(1) if z != z else key


@cute.jit
def warp_best(
    rKey: cute.Tensor, first: Int32, sKey: cute.Tensor, sId: cute.Tensor, op: cutlass.Constexpr
):
    """The warp's topk experts by descending key, equal keys by ascending id, into sKey, sId [warp * topk + rank]."""
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid // 32, tid % 32
    for rank in cutlass.range(op.topk, unroll=1):
        mine = rKey[0]
        for j in cutlass.range_constexpr(1, op.slots):
            mine = rKey[j] if rKey[j] > mine else mine
        best = cute.arch.warp_redux_sync(mine, "max")
        found = Int32(LAST)
        for j in cutlass.range_constexpr(op.slots - 1, -1, -1):
            found = first + 32 * j if rKey[j] == best else found
        expert = cute.arch.warp_redux_sync(found, "min")
        for j in cutlass.range_constexpr(op.slots):
            rKey[j] = Uint32(0) if first + 32 * j == expert else rKey[j]
        if lane == 0:
            sKey[warp * op.topk + rank] = best
            sId[warp * op.topk + rank] = expert


@cute.kernel
def topk_kernel(
    mLogits: cute.Tensor, mRemote: Any, mBias: cute.Tensor, mIds: cute.Tensor, mWeights: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """mLogits f32 [M, rows], mRemote f32 [M, experts - rows] or None, mBias f32 [experts]; grid (M).

    mIds i32 [M, topk] by descending sg(logit) + bias; mWeights bf16 [M, topk] = bf(s / (sum of the chosen s + 1e-20)).
    Every warp sorts out its own topk; the candidates then find their rank by counting the better ones.
    """
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    first = tid // 32 * op.each + tid % 32
    rKey = cute.make_rmem_tensor(cute.make_layout((op.slots,)), Uint32)
    for j in cutlass.range_constexpr(op.slots):
        e = first + 32 * j
        rKey[j] = Uint32(0)
        if tid % 32 + 32 * j < op.each and e < op.experts:
            rKey[j] = order_key(sigmoid(logit(mLogits, mRemote, m, e)) + mBias[e])
    candidates = op.warps * op.topk
    sKey = smem(Uint32, (candidates,), (1,))
    sId = smem(Int32, (candidates,), (1,))
    sChosen = smem(Int32, (op.topk,), (1,))
    warp_best(rKey, first, sKey, sId, op)
    cute.arch.sync_threads()
    for c in cutlass.range(tid, candidates, op.warps * 32, unroll=1):
        key, expert = sKey[c], sId[c]
        rank = Int32(0)
        for other in cutlass.range(candidates, unroll=8):
            ahead = sKey[other] > key or (sKey[other] == key and sId[other] < expert)
            rank += Int32(1) if ahead else Int32(0)
        if rank < op.topk and key > Uint32(0):
            sChosen[rank] = expert
    cute.arch.sync_threads()
    if tid < 32:
        s = Float32(0.0)
        e = Int32(0)
        if tid < op.topk:
            e = sChosen[tid]
            s = sigmoid(logit(mLogits, mRemote, m, e))
            z = s + mBias[e]
            s = Float32(0.0) if z != z else s
        total = lanes_sum(s, 32) + Float32(1e-20)
        if tid < op.topk:
            mIds[m, tid] = e
            mWeights[m, tid] = (s / total).to(BFloat16)


def topk_shape(cfg):
    d = cfg.dims
    if d.topk > min(32, d.experts):
        raise ValueError(f"top {d.topk} of {d.experts}: the weights of a row are made by one warp")
    return TopK(d.experts, d.topk, cfg.topk_warps, cfg.pdl)


@cute.jit
def route(
    mX: cute.Tensor, weights: Any, mLogits: cute.Tensor, mRemote: Any, mIds: cute.Tensor, mWeights: cute.Tensor,
    cfg: cutlass.Constexpr, stream,
):  # fmt: skip
    """Logits and selection, two launches. weights = (router, router_bias)."""
    mRouter, mBias = weights
    gemv(mX, mRouter, mLogits, Extra(), cfg, stream)
    op = topk_shape(cfg)
    topk_kernel(mLogits, mRemote, mBias, mIds, mWeights, op).launch(
        grid=(mX.shape[0], 1, 1),
        block=(op.warps * 32, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


def workspace(dims, cfg):
    return {"logits": ("f32", (dims.rows, dims.router_rows), "undefined", "step")}


@cute.jit
def step(t, cfg, stream):
    """Independent instances: outputs.ids[i], outputs.weights[i] of the router on inputs.x[i]."""
    router = [layer.router for layer in t.weights.layers]
    bias = [layer.router_bias for layer in t.weights.layers]
    for i in cutlass.range(len(router), unroll=1):
        route(
            pick(t.inputs.x, i), (pick(router, i), pick(bias, i)), t.workspace.logits, None,
            t.outputs.ids[i, None, None], t.outputs.weights[i, None, None], cfg, stream,
        )  # fmt: skip
