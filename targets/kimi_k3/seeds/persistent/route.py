"""The choice of experts in the decode step: a warp of its own in every CTA, beside producer and consumers.

It waits for the logits of all CTAs, chooses, and tells its producer; consumers do not wait for it until they need the
weights, so that the choice costs them nothing.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, round_bf16, sigmoid
from targets.kimi_k3.seeds.persistent.device import ROUTE, Ctx, at, await_line, field, turn_of
from targets.kimi_k3.seeds.persistent.fields import COUNT, IS_DENSE, F
from targets.kimi_k3.seeds.persistent.moe_route import insist_word, logit_at, peek_word
from targets.kimi_k3.seeds.router import order_key


@cute.jit
def brief_sigmoid(x: Float32):
    """Four instructions, right to 2^-21, where a logit is right to 2^-9."""
    return cute.arch.inline_ptx(
        """{
        .reg .f32 e;
        mul.f32 e, {$r0}, 0fBFB8AA3B;
        ex2.approx.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.f32 {$w0}, e;
        }""",
        write_only_types=[Float32],
        read_only_args=[x],
    )


@cute.jit
def nth(mine: Uint32, n: cutlass.Constexpr):
    """The n-th largest of 32 lanes' keys, or a smaller one where keys are equal: those leave together."""
    top = Uint32(0)
    for _ in cutlass.range_constexpr(n):
        top = cute.arch.warp_redux_sync(mine, "max")
        mine = Uint32(0) if mine == top else mine
    return top


@cute.jit
def keys_of(c: Ctx, layer: Int32, turn: Int32, rBias: cute.Tensor, op: cutlass.Constexpr):
    """Keys of this lane's experts, lane + 32 j; 0 where there is none."""
    d = op.d
    slots = -(-d.experts // 32)
    rKey = cute.make_rmem_tensor(cute.make_layout((slots,)), Uint32)
    rLogit = cute.make_rmem_tensor(cute.make_layout((slots,)), Float32)
    for j in cutlass.range_constexpr(slots):
        rLogit[j] = Float32(0.0)
        if c.lane + 32 * j < d.experts:
            rLogit[j] = peek_word(logit_at(c, layer, c.lane + 32 * j, turn, op))
    for j in cutlass.range_constexpr(slots):
        rKey[j] = Uint32(0)
        if c.lane + 32 * j < d.experts:
            x = insist_word(logit_at(c, layer, c.lane + 32 * j, turn, op), rLogit[j], op)
            rKey[j] = order_key(brief_sigmoid(x) + rBias[j])
    return rKey


@cute.jit
def candidates(
    c: Ctx, rKey: cute.Tensor, sKey: cute.Tensor, sId: cute.Tensor, op: cutlass.Constexpr
):
    """Those that reach the topk-th best of the lanes' best, in sKey and sId; how many."""
    slots = -(-op.d.experts // 32)
    best = rKey[0]
    for j in cutlass.range_constexpr(1, slots):
        best = rKey[j] if rKey[j] > best else best
    bound = nth(best, op.d.topk)
    count = Int32(0)
    for j in cutlass.range_constexpr(slots):
        reaches = rKey[j] >= bound and rKey[j] > Uint32(0)
        found = cute.arch.vote_ballot_sync(reaches)
        if reaches:
            place = count + cute.arch.popc(found & ((Int32(1) << c.lane) - 1))
            sKey[place], sId[place] = rKey[j], c.lane + 32 * j
        count += cute.arch.popc(found)
    cute.arch.sync_warp()
    return count


@cute.jit
def choose_alone(
    c: Ctx, layer: Int32, turn: Int32, rBias: cute.Tensor, mIds: cute.Tensor, op: cutlass.Constexpr
):
    """c.ids, c.weights = the routing, and the producer is told; by one warp."""
    d = op.d
    keys = cute.make_tensor(
        cute.recast_ptr(c.keys.iterator, dtype=Uint32), cute.make_layout((d.experts,))
    )
    ids = cute.make_tensor(c.keys.iterator + d.experts, cute.make_layout((d.experts,)))
    count = candidates(c, keys_of(c, layer, turn, rBias, op), keys, ids, op)
    for i in cutlass.range(c.lane, count, 32, unroll=1):
        # a tensor over a recast pointer forgets that it is unsigned
        key, expert = Uint32(keys[i]), ids[i]
        rank = Int32(0)
        for k in cutlass.range(count, unroll=4):
            rival = Uint32(keys[k])
            ahead = rival > key or (rival == key and ids[k] < expert)
            rank += Int32(1) if ahead else Int32(0)
        if rank < d.topk:
            c.ids[rank] = expert
    cute.arch.sync_warp()
    s = Float32(0.0)
    e = Int32(0)
    if c.lane < d.topk:
        e = c.ids[c.lane]
        x = peek_word(logit_at(c, layer, e, turn, op))
        s = sigmoid(insist_word(logit_at(c, layer, e, turn, op), x, op))
        z = s + at(Float32, field(c, layer, F["router_bias"], COUNT), d.experts)[e]
        s = Float32(0.0) if z != z else s
    whole = lanes_sum(s, 32) + Float32(1e-20)
    if c.lane < d.topk:
        c.weights[c.lane] = round_bf16(s / whole)
        if c.cta == 0:
            mIds[c.lane] = e
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(c.routed)


@cute.jit
def route(c: Ctx, mIds: cute.Tensor, op: cutlass.Constexpr):
    """All of a launch; mIds [FFNs with experts, topk]."""
    d = op.d
    slots = -(-d.experts // 32)
    number = Int32(0)
    rBias = cute.make_rmem_tensor(cute.make_layout((slots,)), Float32)
    for layer in cutlass.range(d.layers, unroll=1):
        if Int32(field(c, layer, F["kind"], COUNT)) & IS_DENSE == 0:
            gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), d.experts)
            for j in cutlass.range_constexpr(slots):
                rBias[j] = Float32(0.0)
                if c.lane + 32 * j < d.experts:
                    rBias[j] = gBias[c.lane + 32 * j]
            if c.lane == 0:
                await_line(c, number + 1, op, ROUTE, False, op.missing)
            cute.arch.sync_warp()
            row = at(Int32, mIds.iterator.toint() + Int64(number * d.topk * 4), d.topk)
            choose_alone(c, layer, turn_of(c, number), rBias, row, op)
            number += 1
