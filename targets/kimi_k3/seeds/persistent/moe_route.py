"""Top-k in the persistent kernel, by every CTA for itself, from the logits in their box."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, round_bf16, sigmoid
from targets.kimi_k3.seeds.persistent.boxes import box
from targets.kimi_k3.seeds.persistent.device import Ctx, at, consumers, field, view
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.router import order_key


@cute.jit
def logit_at(c: Ctx, layer: Int32, e: Int32, turn: Int32, op: cutlass.Constexpr):
    """Where the logit of expert e is: in its box or, sharded, among those of other ranks."""
    found = box(c, "logits", turn, op) + Int64(e) * 4
    if cutlass.const_expr(op.d.router_sharded and op.d.ranks > 1):
        own = op.d.router_rows
        if e >= own:
            found = field(c, layer, F["remote_logits"], COUNT) + Int64(e - own) * 4
    return found


@cute.jit
def peek_word(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[address],
    )


@cute.jit
def insist_word(address: Int64, x: Float32, op: cutlass.Constexpr):
    turns = Int32(0)
    while x.bitcast(Uint32) == Uint32(0xFFFFFFFF) and (op.spin == 0 or turns < op.spin):
        x = peek_word(address)
        turns += 1
    return x


@cute.jit
def topk_th(c: Ctx, sBest: cute.Tensor, n: cutlass.Constexpr, topk: cutlass.Constexpr):
    """The topk-th largest of n <= 32 keys, 0 if fewer are not; by every warp for itself."""
    mine = Uint32(0)
    if c.lane < n:
        mine = Uint32(sBest[c.lane])
    ahead = Int32(0)
    for k in cutlass.range_constexpr(n):
        rival = cute.arch.shuffle_sync(mine, k)
        ahead += Int32(1) if rival > mine or (rival == mine and k < c.lane) else Int32(0)
    found = mine if ahead == topk - 1 and c.lane < n else Uint32(0)
    return cute.arch.warp_redux_sync(found, "max")


@cute.jit
def load_bias(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """The biases of this thread's experts."""
    each = -(-op.d.experts // op.warps)
    slots = -(-each // 32)
    gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), op.d.experts)
    rBias = cute.make_rmem_tensor(cute.make_layout((slots,)), Float32)
    rBias.fill(0.0)
    for j in cutlass.range_constexpr(slots):
        e = c.warp * each + c.lane + 32 * j
        if c.lane + 32 * j < each and e < op.d.experts:
            rBias[j] = gBias[e]
    return rBias


@cute.jit
def choose(
    c: Ctx, layer: Int32, turn: Int32, rBias: cute.Tensor, mIds: cute.Tensor, op: cutlass.Constexpr
):
    """c.ids, c.weights = the routing, made by every CTA for itself."""
    d = op.d
    each = -(-d.experts // op.warps)
    slots = -(-each // 32)
    gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), d.experts)
    first = c.warp * each + c.lane
    rKey = cute.make_rmem_tensor(cute.make_layout((slots,)), Uint32)
    rLogit = cute.make_rmem_tensor(cute.make_layout((slots,)), Float32)
    rLogit.fill(0.0)
    for j in cutlass.range_constexpr(slots):
        e = first + 32 * j
        if c.lane + 32 * j < each and e < d.experts:
            rLogit[j] = peek_word(logit_at(c, layer, e, turn, op))
    for j in cutlass.range_constexpr(slots):
        e = first + 32 * j
        rKey[j] = Uint32(0)
        if c.lane + 32 * j < each and e < d.experts:
            x = insist_word(logit_at(c, layer, e, turn, op), rLogit[j], op)
            rKey[j] = order_key(sigmoid(x) + rBias[j])
    # of the best few of every warp the topk-th is a bound; what reaches it are few, and these are ranked
    few = -(-d.topk // op.warps)
    sBest = view(c, Uint32, 0, op.warps * few)
    sCount = view(c, Int32, 4 * 32, 1)
    sKey = view(c, Uint32, 4 * 36, d.experts)
    sId = view(c, Int32, 4 * 36 + 4 * d.experts, d.experts)
    if c.tid == 0:
        sCount[0] = Int32(0)
    mine = cute.make_rmem_tensor(cute.make_layout((slots,)), Uint32)
    for j in cutlass.range_constexpr(slots):
        mine[j] = rKey[j]
    for rank in cutlass.range_constexpr(few):
        best = mine[0]
        for j in cutlass.range_constexpr(1, slots):
            best = mine[j] if mine[j] > best else best
        top = cute.arch.warp_redux_sync(best, "max")
        # equal keys leave together: the bound only gets lower
        for j in cutlass.range_constexpr(slots):
            mine[j] = Uint32(0) if mine[j] == top else mine[j]
        if c.lane == 0:
            sBest[c.warp * few + rank] = top
    consumers(op)
    bound = topk_th(c, sBest, op.warps * few, d.topk)
    for j in cutlass.range_constexpr(slots):
        if rKey[j] >= bound and rKey[j] > Uint32(0):
            place = cute.arch.inline_ptx(
                "atom.shared.add.u32 {$w0}, [{$r0}], 1;",
                write_only_types=[Int32], read_only_args=[Int32(sCount.iterator.toint())],
            )  # fmt: skip
            sKey[place], sId[place] = rKey[j], first + 32 * j
    consumers(op)
    count = sCount[0]
    for i in cutlass.range(c.tid, count, op.threads, unroll=1):
        # a tensor over a recast pointer forgets that it is unsigned
        key, expert = Uint32(sKey[i]), sId[i]
        rank = Int32(0)
        for k in cutlass.range(count, unroll=4):
            rival = Uint32(sKey[k])
            ahead = rival > key or (rival == key and sId[k] < expert)
            rank += Int32(1) if ahead else Int32(0)
        if rank < d.topk:
            c.ids[rank] = expert
    consumers(op)
    if c.tid == 0:
        cute.arch.mbarrier_arrive(c.routed)
    if c.warp == 0:
        s = Float32(0.0)
        e = Int32(0)
        if c.lane < d.topk:
            e = c.ids[c.lane]
            x = peek_word(logit_at(c, layer, e, turn, op))
            s = sigmoid(insist_word(logit_at(c, layer, e, turn, op), x, op))
            z = s + gBias[e]
            s = Float32(0.0) if z != z else s
        total = lanes_sum(s, 32) + Float32(1e-20)
        if c.lane < d.topk:
            c.weights[c.lane] = round_bf16(s / total)
            if c.cta == 0:
                mIds[c.lane] = e
