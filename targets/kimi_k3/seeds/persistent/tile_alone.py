"""Top-k of the tile kernel for a single token, by a warp of its own that nobody waits for but the producer."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import sigmoid
from targets.kimi_k3.seeds.persistent.device import at, field
from targets.kimi_k3.seeds.persistent.edges import ROUTE, counter
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles, within
from targets.kimi_k3.seeds.persistent.tile_rank import rank_alone
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
    # first in the order of this CTA's consumers: they and the producer have used the last routing
    cute.arch.mbarrier_wait(c.routed + 1, layer & 1)
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
    rank_alone(c, (rKey, rScore, top), mIds, op)
