"""The last part of a top-k by one warp: from keys and scores in its registers to ids and weights, in shared memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, round_bf16


@cute.jit
def push(c: Any, rKey: cute.Tensor, rScore: cute.Tensor, bound: Uint32, op: cutlass.Constexpr):
    """Experts whose key reaches the bound into c.key, c.found and c.score: how many. Each lane's lie together."""
    each = -(-op.d.experts // 32)
    mine = Int32(0)
    for j in cutlass.range_constexpr(each):
        mine += Int32(1) if rKey[j] >= bound and rKey[j] > Uint32(0) else Int32(0)
    end = mine
    for k in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync(end, (c.lane - (1 << k)) & 31)
        end += below if c.lane >= (1 << k) else Int32(0)
    at_ = end - mine
    for j in cutlass.range_constexpr(each):
        if rKey[j] >= bound and rKey[j] > Uint32(0):
            c.key[at_], c.found[at_], c.score[at_] = rKey[j], Uint16(c.lane + 32 * j), rScore[j]
            at_ += 1
    cute.arch.sync_warp()
    return cute.arch.shuffle_sync(end, 31)


@cute.jit
def bound_alone(c: Any, mine: Uint32, topk: cutlass.Constexpr):
    """As `bound_of`, through shared memory: a warp alone would wait for every shuffle."""
    c.best[c.lane] = mine
    cute.arch.sync_warp()
    rBest = cute.make_rmem_tensor(cute.make_layout((4, 8)), Uint32)
    for k in cutlass.range_constexpr(8):
        cute.autovec_copy(cute.local_tile(c.best, (4,), (k,)), rBest[None, k])
    ahead_ = Int32(0)
    for k in cutlass.range_constexpr(32):
        rival = rBest[k % 4, k // 4]
        ahead_ += Int32(1) if rival > mine or (rival == mine and k < c.lane) else Int32(0)
    return cute.arch.warp_redux_sync(mine if ahead_ == topk - 1 else Uint32(0), "max")


@cute.jit
def rank_alone(c: Any, given: tuple, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.share = the routing of a single token, by this warp; producer and consumers are told.

    given = keys, scores, the largest key of this lane's experts; c has lane, cta, key, found, score, best, ids, share
    and the mbarrier routed.
    """
    rKey, rScore, top = given
    d = op.d
    count = push(c, rKey, rScore, bound_alone(c, top, d.topk), op)
    for i in cutlass.range(c.lane, count, 32, unroll=1):
        # a tensor over a recast pointer forgets that it is unsigned
        key, e, s = Uint32(c.key[i]), Int32(c.found[i]), c.score[i]
        rank = Int32(0)
        for k in cutlass.range(count, unroll=8):
            rival, other = Uint32(c.key[k]), Int32(c.found[k])
            rank += Int32(1) if rival > key or (rival == key and other < e) else Int32(0)
        if rank < d.topk:
            c.ids[rank] = e
            # of a score that is no number the key is 1, below all others
            c.share[rank] = Float32(0.0) if key == Uint32(1) else s
    cute.arch.sync_warp()
    s = Float32(0.0)
    if c.lane < d.topk:
        s = c.share[c.lane]
    total = lanes_sum(s, 32) + Float32(1e-20)
    if c.lane < d.topk:
        c.share[c.lane] = round_bf16(s / total)
        if c.cta == 0:
            mIds[c.lane] = c.ids[c.lane]
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(c.routed)
