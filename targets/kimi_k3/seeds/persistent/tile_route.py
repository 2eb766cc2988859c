"""Top-k of the tile kernel for several tokens, by every CTA for itself, and the list of experts that they want."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, round_bf16, sigmoid
from targets.kimi_k3.seeds.persistent.device import at, consumers, field
from targets.kimi_k3.seeds.persistent.tile_boxes import place
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles, within
from targets.kimi_k3.seeds.router import order_key


@cute.jit
def logit_of(c: Tiles, layer: Int32, m: Int32, e: Int32, op: cutlass.Constexpr):
    """Where token m's logit of expert e is: in its box or, sharded, among those of other ranks."""
    own = op.d.router_rows
    found = place(c, "logits", layer, op) + Int64(m * own + e) * 4
    if cutlass.const_expr(op.d.router_sharded and op.d.ranks > 1):
        if e >= own:
            far = field(c, layer, T["remote_logits"], COUNT_T)
            found = far + Int64(m * (op.d.experts - own) + e - own) * 4
    return found


@cute.jit
def load_logit(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[address],
    )


@cute.jit
def sure_logit(address: Int64, x: Float32, op: cutlass.Constexpr):
    if cutlass.const_expr(not op.fenced):
        turns = Int32(0)
        while x.bitcast(Uint32) == Uint32(0xFFFFFFFF) and (op.spin == 0 or turns < op.spin):
            x = load_logit(address)
            turns += 1
    return x


@cute.jit
def keys_view(c: Tiles, op: cutlass.Constexpr):
    pointer = cute.recast_ptr(c.part.iterator, dtype=Uint32)
    return cute.make_tensor(pointer, cute.make_layout((op.tokens * op.d.experts,)))


@cute.jit
def bias_of(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """The biases of this thread's logits."""
    d = op.d
    many = -(-op.tokens * d.experts // op.threads)
    gBias = at(Float32, field(c, layer, T["router_bias"], COUNT_T), d.experts)
    rBias = cute.make_rmem_tensor(cute.make_layout((many,)), Float32)
    rBias.fill(0.0)
    for k in cutlass.range_constexpr(many):
        rBias[k] = gBias[(c.tid + k * op.threads) % d.experts]
    return rBias


@cute.jit
def make_keys(c: Tiles, layer: Int32, rBias: cute.Tensor, op: cutlass.Constexpr):
    """Order keys of all logits into shared memory; the lists are emptied. Ends with a barrier."""
    d = op.d
    total = op.tokens * d.experts
    many = -(-total // op.threads)
    sKey = keys_view(c, op)
    rX = cute.make_rmem_tensor(cute.make_layout((many,)), Float32)
    rX.fill(0.0)
    for k in cutlass.range_constexpr(many):
        i = within(c.tid + k * op.threads, total)
        rX[k] = load_logit(logit_of(c, layer, i // d.experts, i % d.experts, op))
    if cutlass.const_expr(op.tokens > 1):
        for i in cutlass.range(c.tid, -(-d.experts // 32), op.threads, unroll=1):
            c.bits[i] = Uint32(0)
        for i in cutlass.range(c.tid, op.touched * op.tokens, op.threads, unroll=1):
            c.pair[i], c.share[i] = Int32(-1), Float32(0.0)
        for i in cutlass.range(c.tid, op.touched, op.threads, unroll=1):
            c.mask[i] = Int32(0)
    for k in cutlass.range_constexpr(many):
        i = c.tid + k * op.threads
        if i < total:
            x = sure_logit(logit_of(c, layer, i // d.experts, i % d.experts, op), rX[k], op)
            sKey[i] = order_key(sigmoid(x) + rBias[k])
    consumers(op)


@cute.jit
def bound_of(c: Tiles, mine: Uint32, topk: cutlass.Constexpr):
    """The topk-th largest of the lanes' numbers, 0 if fewer are not."""
    ahead_ = Int32(0)
    for k in cutlass.range_constexpr(32):
        rival = cute.arch.shuffle_sync(mine, k)
        ahead_ += Int32(1) if rival > mine or (rival == mine and k < c.lane) else Int32(0)
    found = mine if ahead_ == topk - 1 else Uint32(0)
    return cute.arch.warp_redux_sync(found, "max")


@cute.jit
def candidates(c: Tiles, m: Int32, op: cutlass.Constexpr):
    """Experts of token m, by this warp, whose key reaches a bound that topk keys reach: how many, into c.found.

    The bound is the topk-th of the lanes' largest.
    """
    d = op.d
    each = -(-d.experts // 32)
    sKey = keys_view(c, op)
    rKey = cute.make_rmem_tensor(cute.make_layout((each,)), Uint32)
    rKey.fill(0)
    for j in cutlass.range_constexpr(each):
        if c.lane + 32 * j < d.experts:
            rKey[j] = Uint32(sKey[m * d.experts + c.lane + 32 * j])
    top = rKey[0]
    for j in cutlass.range_constexpr(1, each):
        top = rKey[j] if rKey[j] > top else top
    bound = bound_of(c, top, d.topk)
    count = Int32(0)
    below = (Int32(1) << c.lane) - 1
    for j in cutlass.range_constexpr(each):
        good = rKey[j] >= bound and rKey[j] > Uint32(0)
        ballot = Int32(cute.arch.vote_ballot_sync(good))
        if good:
            place_ = count + cute.arch.popc(ballot & below)
            c.found[m * d.experts + place_] = Uint16(c.lane + 32 * j)
        count += cute.arch.popc(ballot)
    cute.arch.sync_warp()
    return count


@cute.jit
def rank_token(
    c: Tiles, layer: Int32, m: Int32, chosen: tuple, mIds: cute.Tensor, op: cutlass.Constexpr
):
    """chosen = (ids, weights) [token, rank] of token m: best first, the lower id first among equals; by this warp."""
    d = op.d
    sId, sWeight = chosen
    count = candidates(c, m, op)
    sKey = keys_view(c, op)
    gBias = at(Float32, field(c, layer, T["router_bias"], COUNT_T), d.experts)
    for i in cutlass.range(c.lane, count, 32, unroll=1):
        # a tensor over a recast pointer forgets that it is unsigned
        e = Int32(c.found[m * d.experts + i])
        key = Uint32(sKey[m * d.experts + e])
        x = load_logit(logit_of(c, layer, m, e, op))
        bias = gBias[e]
        rank = Int32(0)
        for k in cutlass.range(count, unroll=4):
            other = Int32(c.found[m * d.experts + k])
            rival = Uint32(sKey[m * d.experts + other])
            ahead_ = rival > key or (rival == key and other < e)
            rank += Int32(1) if ahead_ else Int32(0)
        if rank < d.topk:
            s = sigmoid(x)
            z = s + bias
            sId[m * d.topk + rank] = e
            sWeight[m * d.topk + rank] = Float32(0.0) if z != z else s
    cute.arch.sync_warp()
    s = Float32(0.0)
    if c.lane < d.topk:
        s = sWeight[m * d.topk + c.lane]
    total = lanes_sum(s, 32) + Float32(1e-20)
    if c.lane < d.topk:
        e = sId[m * d.topk + c.lane]
        sWeight[m * d.topk + c.lane] = round_bf16(s / total)
        if c.cta == 0:
            mIds[m * d.topk + c.lane] = e
        if cutlass.const_expr(op.tokens > 1):
            set_bits((c.bits.iterator + e // 32).toint(), Int32(1) << (e % 32))


@cute.jit
def set_bits(address: Int32, bits: Int32):
    """What was there before."""
    return cute.arch.inline_ptx(
        "atom.shared.or.b32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(address), bits],
    )


@cute.jit
def gather_experts(c: Tiles, chosen: tuple, op: cutlass.Constexpr):
    """The lists of the context: experts in the order of their numbers, once each. Between barriers."""
    d = op.d
    words = -(-d.experts // 32)
    sId, sWeight = chosen
    for p in cutlass.range(c.tid, op.pairs, op.threads, unroll=1):
        e, m = sId[p], p // d.topk
        i = cute.arch.popc(Int32(c.bits[e // 32]) & ((Int32(1) << (e % 32)) - 1))
        for w in cutlass.range_constexpr(words):
            i += cute.arch.popc(Int32(c.bits[w])) if w < e // 32 else Int32(0)
        c.pair[i * op.tokens + m], c.share[i * op.tokens + m] = p, sWeight[p]
        if set_bits((c.mask.iterator + i).toint(), Int32(1) << m) == 0:
            # whoever comes first, for all tokens that want it
            c.ids[i] = e
    if c.tid == op.threads - 1:
        total = Int32(0)
        for w in cutlass.range_constexpr(words):
            total += cute.arch.popc(Int32(c.bits[w]))
        c.count[0] = total


@cute.jit
def choose_experts(
    c: Tiles,
    layer: Int32,
    rBias: cute.Tensor,
    chosen: tuple,
    mIds: cute.Tensor,
    op: cutlass.Constexpr,
):
    """The routing of several tokens: lists of the context, outputs by CTA 0; the producer is told."""
    make_keys(c, layer, rBias, op)
    if c.warp < op.tokens:
        rank_token(c, layer, c.warp, chosen, mIds, op)
    consumers(op)
    gather_experts(c, chosen, op)
    consumers(op)
    if c.tid == 0:
        cute.arch.mbarrier_arrive(c.routed)
