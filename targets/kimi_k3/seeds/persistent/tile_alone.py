"""Top-k of the tile kernel for a single token, by a warp of its own that nobody waits for but the producer."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, round_bf16, sigmoid
from targets.kimi_k3.seeds.persistent.device import ROUTE, at, counter, field
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles, within
from targets.kimi_k3.seeds.persistent.tile_route import load_logit, logit_of, sure_logit
from targets.kimi_k3.seeds.router import order_key


@cute.jit
def await_logits(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """Until every CTA hinted that its logits of instance `layer` are posted."""
    target = c.base[1] + (layer + 1) * op.ctas
    turns = Int32(0)
    seen = counter(c, ROUTE, False)
    while seen - target < 0 and (op.spin == 0 or turns < op.spin):
        seen = counter(c, ROUTE, False)
        turns += 1


@cute.jit
def push(c: Tiles, rKey: cute.Tensor, rScore: cute.Tensor, bound: Uint32, op: cutlass.Constexpr):
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
def bound_alone(c: Tiles, mine: Uint32, topk: cutlass.Constexpr):
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
def route_alone(c: Tiles, layer: Int32, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.share = the routing of a single token, by this warp; producer and consumers are told."""
    d = op.d
    each = -(-d.experts // 32)
    gBias = at(Float32, field(c, layer, T["router_bias"], COUNT_T), d.experts)
    rKey = cute.make_rmem_tensor(cute.make_layout((each,)), Uint32)
    rScore = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    rBias = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    rKey.fill(0)
    rScore.fill(0.0)
    rBias.fill(0.0)
    for j in cutlass.range_constexpr(each):
        rBias[j] = gBias[within(c.lane + 32 * j, d.experts)]
    await_logits(c, layer, op)
    for j in cutlass.range_constexpr(each):
        rScore[j] = load_logit(logit_of(c, layer, Int32(0), within(c.lane + 32 * j, d.experts), op))
    top = Uint32(0)
    for j in cutlass.range_constexpr(each):
        if c.lane + 32 * j < d.experts:
            x = sure_logit(logit_of(c, layer, Int32(0), c.lane + 32 * j, op), rScore[j], op)
            rScore[j] = sigmoid(x)
            rKey[j] = order_key(rScore[j] + rBias[j])
            top = rKey[j] if rKey[j] > top else top
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
