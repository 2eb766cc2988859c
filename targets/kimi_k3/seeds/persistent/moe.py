"""The FFN in the persistent kernel: router and top-k in every CTA, shared expert, MXFP4 experts, up-projection."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import high, lanes_sum, low, pack_bf16, round_bf16, sigmoid, situ
from targets.kimi_k3.seeds.latent_moe import expand, pair_up, scale_word
from targets.kimi_k3.seeds.persistent.device import (
    ROUTE,
    Ctx,
    ahead,
    arrive,
    at,
    box,
    bulk,
    consumers,
    diagonal,
    diagonal_sum,
    drain,
    field,
    fill,
    fill_pairs,
    gathered,
    hint,
    insist,
    mma_rows,
    peek,
    post,
    put,
    stage_done,
    stage_free,
    stage_full,
    take,
    turn_of,
    vector,
    view,
    wait,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.plan import STRIDE, most, share
from targets.kimi_k3.seeds.router import order_key

CODE_SCALE = 2.0**62
"""Expanded codes are 2^-62 of their value."""


class Space(NamedTuple):
    """Plain buffers between CTAs, bf16, global: proj of MLA, hs and delta of dense FFNs; mla: MlaSpace."""

    proj: Any
    hs: Any
    delta: Any
    mla: Any


# ---- producer


@cute.jit
def fill_front(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    for name, rows in (("router", d.router_rows), ("latent_down", d.latent_rows)):
        first, n = share(rows, c.cta, op.ctas)
        source = field(c, layer, F[name], COUNT) + Int64(first) * op.wide.row_bytes
        it = fill(c, it, source, n, op.wide, op)
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.shared_dim, c.cta, op.ctas)
    source = field(c, layer, F["shared_gate_up"], COUNT) + Int64(first) * g.row_bytes
    it = fill_pairs(c, it, source, Int64(d.shared_dim * g.row_bytes), n, g, op)
    g = op.rows(d.shared_dim)
    shared = field(c, layer, F["shared_down"], COUNT)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = fill(c, it, shared + Int64(first) * g.row_bytes, n, g, op)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first, n = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = fill(c, it, shared + Int64(d.hidden_local + first) * g.row_bytes, n, g, op)
    return it


@cute.jit
def fill_up(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """w1 and w3 rows of the routed experts: stages [w1 codes | w3 codes | w1 scales | w3 scales]."""
    d, g = op.d, op.up
    first, n = share(d.topk * d.expert_dim, c.cta, op.ctas, g.unit)
    at_row, end = first, first + n
    while at_row < end:
        slot = at_row // d.expert_dim
        row = at_row % d.expert_dim
        n = end - at_row if end - at_row < g.chunk else Int32(g.chunk)
        n = n if n < d.expert_dim - row else d.expert_dim - row
        source = Int64(c.ids[slot]) * d.expert_dim + row
        s = stage_free(c, it, op)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + s, 2 * n * (g.code_bytes + g.scale_bytes))
        for half in cutlass.range_constexpr(2):
            name = "w3" if half else "w1"
            codes = field(c, layer, F[name], COUNT) + source * g.code_bytes
            scales = field(c, layer, F[name + "_scale"], COUNT) + source * g.scale_bytes
            bulk(c, s, Int32(half * g.chunk * g.code_bytes), codes, n * g.code_bytes, op)
            at_scale = 2 * g.chunk * g.code_bytes + half * g.chunk * g.scale_bytes
            bulk(c, s, Int32(at_scale), scales, n * g.scale_bytes, op)
        it += 1
        at_row += n
    return it


@cute.jit
def fill_down(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """This CTA's rows of w2 of every routed expert, `down_slots` experts a stage: [codes | scales] each."""
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    piece = op.down_rows * (g.code_bytes + g.scale_bytes)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        s = stage_free(c, it, op)
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        cute.arch.mbarrier_arrive_and_expect_tx(
            c.full + s, many * n * (g.code_bytes + g.scale_bytes)
        )
        for k in cutlass.range(many, unroll=1):
            source = Int64(c.ids[start + k]) * d.latent + first
            codes = field(c, layer, F["w2"], COUNT) + source * g.code_bytes
            scales = field(c, layer, F["w2_scale"], COUNT) + source * g.scale_bytes
            bulk(c, s, k * piece, codes, n * g.code_bytes, op)
            bulk(c, s, k * piece + op.down_rows * g.code_bytes, scales, n * g.scale_bytes, op)
        it += 1
    return it


@cute.jit
def fill_moe(c: Ctx, layer: Int32, it: Int32, turn: Int32, op: cutlass.Constexpr):
    """All of one FFN; waits for the routing, number `turn` of the launch, before the routed experts."""
    d = op.d
    timeline.mark(c.brought, "bring front", layer)
    it = fill_front(c, layer, it, op)
    timeline.mark(c.brought, "routing", layer, kind="wait")
    cute.arch.mbarrier_wait(c.routed, turn & 1)
    timeline.mark(c.brought, "bring experts", layer)
    it = fill_up(c, layer, it, op)
    it = fill_down(c, layer, it, op)
    g = op.rows(d.latent)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    source = field(c, layer, F["latent_up"], COUNT) + Int64(first) * g.row_bytes
    return fill(c, it, source, n, g, op)


@cute.jit
def fill_dense(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    source = field(c, layer, F["dense_gate_up"], COUNT) + Int64(first) * g.row_bytes
    it = fill_pairs(c, it, source, Int64(d.dense_dim * g.row_bytes), n, g, op)
    g = op.rows(d.dense_dim)
    first, n = share(d.hidden, c.cta, op.ctas)
    source = field(c, layer, F["dense_down"], COUNT) + Int64(first) * g.row_bytes
    return fill(c, it, source, n, g, op)


# ---- consumers


@cute.jit
def situ_pair(c: Ctx, row: Int32, width: cutlass.Constexpr):
    """SiTU(bf(gate), bf(up)) of the pair whose gate row is `row`."""
    gate = round_bf16(gathered(c, row, width))
    up = round_bf16(gathered(c, row + 1, width))
    return situ(gate, up)


@cute.jit
def dense(
    c: Ctx, layer: Int32, it: Int32, edge: Int32, rX: cute.Tensor, ws: Space, op: cutlass.Constexpr
):
    """The FFN of a layer without experts; ws.delta is complete at the next edge."""
    d = op.d
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        ws.hs[first + i] = situ_pair(c, 2 * i, g.width).to(BFloat16)
    arrive(c, op)
    edge += 1
    wait(c, edge, op)
    g = op.rows(d.dense_dim)
    rH = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    load_x(c, ws.hs, rH, g)
    first, n = share(d.hidden, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rH, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        y = gathered(c, i, g.width)
        if cutlass.const_expr(d.ranks > 1):
            y = (
                round_bf16(y)
                + at(Float32, field(c, layer, F["remote_dense"], COUNT), d.hidden)[first + i]
            )
        ws.delta[first + i] = y.to(BFloat16)
    return it, edge


@cute.jit
def load_x(c: Ctx, mX: cute.Tensor, rX: cute.Tensor, g: cutlass.Constexpr):
    """rX words [4, per]: this thread's columns of a bf16 vector."""
    for v in cutlass.range_constexpr(g.per):
        rX[None, v].fill(0)
        i = vector(c, v, g)
        if i < g.vecs:
            words_at(mX.iterator.toint(), i, rX[None, v])


@cute.jit
def load_box(
    c: Ctx, name: cutlass.Constexpr, turn: Int32, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """As `load_x` from a box: all loads before the first look at one."""
    start = box(c, name, turn, op)
    for v in cutlass.range_constexpr(g.per):
        rX[None, v].fill(0)
        i = vector(c, v, g)
        if i < g.vecs:
            peek(start + Int64(i) * 16, rX[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            insist(start + Int64(i) * 16, rX[None, v], 2, op)


@cute.jit
def load_norm(c: Ctx, norm: Int64, g: cutlass.Constexpr):
    """This thread's words [4, per] of a norm's weights."""
    rN = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rN.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(norm, vector(c, v, g), rN[None, v])
    return rN


@cute.jit
def normalise(
    c: Ctx, rX: cute.Tensor, rN: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """rX words [4, per] <- bf(RMS(x; norm)); a barrier inside."""
    square = Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            a, b = low(rX[e, v]), high(rX[e, v])
            square += a * a + b * b
    put(c, 0, square)
    consumers(op)
    scale = cute.math.rsqrt(take(c, 0, g.width) / g.k + op.d.eps)
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            a = low(rX[e, v]) * scale * low(rN[e, v])
            rX[e, v] = pack_bf16(a, high(rX[e, v]) * scale * high(rN[e, v]))


@cute.jit
def router(c: Ctx, turn: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """This CTA's logits."""
    first, n = share(op.d.router_rows, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "logits", turn, first + i, gathered(c, i, op.wide.width), op)
    return it


@cute.jit
def front(c: Ctx, turn: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """Latent and the shared expert's hidden vector, this CTA's share. Starts behind a `hint`, which is a barrier."""
    d, g = op.d, op.wide
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    it = drain(c, it, n_l, Int32(0), rX, g, op)
    it = drain(c, it, n_s, n_l, rX, op.rows(d.hidden, pair=True), op)
    consumers(op)
    for i in cutlass.range(c.tid, n_l + n_s, op.threads, unroll=1):
        if i < n_l:
            post(c, "latent", turn, first_l + i, gathered(c, i, g.width), op)
        else:
            j = i - n_l
            post(c, "hs", turn, first_s + j, situ_pair(c, n_l + 2 * j, g.width), op)
    return it


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


@cute.jit
def shared_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """c.own = bf(shared partial + the others') of the columns whose up-projection this CTA makes; the rest is sent.

    Ends with a barrier: the experts' sums go where these were.
    """
    d = op.d
    g = op.rows(d.shared_dim)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        remote = field(c, layer, F["remote_shared"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, most(d.hidden_local, op.ctas), op)
    load_box(c, "hs", turn, rX, g, op)
    it = drain(c, it, n, Int32(0), rX, g, op)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first_s, n_s = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = drain(c, it, n_s, n, rX, g, op)
        consumers(op)
        gSend = at(BFloat16, field(c, layer, F["send"], COUNT), d.hidden - d.hidden_local)
        for k in cutlass.range_constexpr(-(-most(d.hidden_local, op.ctas) // op.threads)):
            i = c.tid + k * op.threads
            if i < n:
                c.own[i] = round_bf16(round_bf16(gathered(c, i, g.width)) + rRemote[k])
        for i in cutlass.range(c.tid, n_s, op.threads, unroll=1):
            gSend[first_s + i] = gathered(c, n + i, g.width).to(BFloat16)
    else:
        consumers(op)
        for i in cutlass.range(c.tid, n, op.threads, unroll=1):
            c.own[i] = round_bf16(gathered(c, i, g.width))
    consumers(op)
    return it


@cute.jit
def group(c: Ctx, at_code: Int32, at_scale: Int32):
    """(codes, scale) of one group of 32: four words from the ring, 16 bytes times `at_code` in, and their factor."""
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    cute.autovec_copy(cute.local_tile(c.ring, (4,), (at_code,)), rW)
    byte = cute.recast_tensor(c.ring, Uint8)[at_scale]
    return rW, scale_word(Uint32(byte) & Uint32(0xFF))


@cute.jit
def groups_times(rC: cute.Tensor, a: tuple, b: tuple, rX: cute.Tensor):
    """rC += a group of row a and one of row b times the same 32 columns of x, rX words [4, 4]; times 2^-62."""
    for i in cutlass.range_constexpr(4):
        mma_rows(rC, expand(a[0][i], a[1]), expand(b[0][i], b[1]), rX[None, i])


@cute.jit
def experts_up(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """h [slot, row] = bf(SiTU(w1 layer, w3 layer)) of this CTA's pairs of rows. A warp has a pair, a lane whole groups.

    Pairs are dealt to warps in turn without regard to stages, so that those without a pair in one stage are at work in
    the next.
    """
    d, g = op.d, op.up
    groups = d.latent // 32
    turns = -(-groups // 32)
    sX = view(c, Uint32, 0, d.latent // 2)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    stage_latent(c, layer, turn, sX, op)
    first, n = share(d.topk * d.expert_dim, c.cta, op.ctas, g.unit)
    at_row, end = first, first + n
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    while at_row < end:
        row = at_row % d.expert_dim
        many = end - at_row if end - at_row < g.chunk else Int32(g.chunk)
        many = many if many < d.expert_dim - row else d.expert_dim - row
        slot = stage_full(c, it, op)
        start = (c.warp + op.warps - (at_row - first) % op.warps) % op.warps
        for r in cutlass.range(start, many, op.warps, unroll=1):
            code = (slot * op.stage + r * g.code_bytes) // 16
            scale = slot * op.stage + 2 * g.chunk * g.code_bytes + r * g.scale_bytes
            rC.fill(0.0)
            for v in cutlass.range_constexpr(turns):
                j = c.lane + 32 * v
                load_group(sX, j, groups, rX)
                j = j if j < groups else groups - 1
                groups_times(
                    rC,
                    group(c, code + j, scale + j),
                    group(c, code + g.chunk * g.code_bytes // 16 + j, scale + g.chunk * g.scale_bytes + j),
                    rX,
                )  # fmt: skip
            x, y = diagonal(c, rC)
            sum = diagonal_sum(x, y)
            if c.lane < 2:
                c.part[(2 * (at_row - first + r) + c.lane) * STRIDE] = sum
        stage_done(c, slot)
        it += 1
        at_row += many
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        gate, up = c.part[2 * i * STRIDE] * CODE_SCALE, c.part[(2 * i + 1) * STRIDE] * CODE_SCALE
        post(c, "h", turn, first + i, situ(gate, up), op)
    return it


@cute.jit
def load_group(sX: cute.Tensor, j: Int32, groups: cutlass.Constexpr, rX: cute.Tensor):
    """rX words [4, 4] = group j of x, zero beyond the last; sX as `group_place` has it."""
    for i in cutlass.range_constexpr(4):
        if cutlass.const_expr(groups % 32 != 0):
            rX[None, i].fill(0)
        if j < groups:
            cute.autovec_copy(cute.local_tile(sX, (4,), (i * groups + j,)), rX[None, i])


@cute.jit
def group_place(i: Int32, groups: cutlass.Constexpr):
    """Where the i-th 16 bytes of x lie: first those of all groups, then the seconds; neighbours do not clash."""
    return i % 4 * groups + i // 4


@cute.jit
def stage_latent(c: Ctx, layer: Int32, turn: Int32, sX: cute.Tensor, op: cutlass.Constexpr):
    """sX = the latent, own and gathered, pairs in the order of `expand`: every warp needs all of it."""
    d = op.d
    vecs, own = d.latent // 8, d.latent_rows // 8
    per = -(-vecs // op.threads)
    start = box(c, "latent", turn, op)
    rL = cute.make_rmem_tensor(cute.make_layout((4, per)), Uint32)
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < own:
            peek(start + Int64(i) * 16, rL[None, v])
        elif i < vecs:
            if cutlass.const_expr(d.latent_rows < d.latent):
                words_at(field(c, layer, F["remote_latent"], COUNT), i - own, rL[None, v])
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < own:
            insist(start + Int64(i) * 16, rL[None, v], 2, op)
        if i < vecs:
            pair_up(rL[None, v])
            place = group_place(i, d.latent // 32)
            cute.autovec_copy(rL[None, v], cute.local_tile(sX, (4,), (place,)))
    consumers(op)


@cute.jit
def stage_hidden(c: Ctx, turn: Int32, sH: cute.Tensor, op: cutlass.Constexpr):
    """sH words = h of each expert as `group_place` has it, pairs in the order of `expand`."""
    vecs = op.d.topk * op.d.expert_dim // 8
    per = -(-vecs // op.threads)
    start = box(c, "h", turn, op)
    rH = cute.make_rmem_tensor(cute.make_layout((4, per)), Uint32)
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < vecs:
            peek(start + Int64(i) * 16, rH[None, v])
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < vecs:
            insist(start + Int64(i) * 16, rH[None, v], 2, op)
            pair_up(rH[None, v])
            each = op.d.expert_dim // 8
            place = i // each * each + group_place(i % each, each // 4)
            cute.autovec_copy(rH[None, v], cute.local_tile(sH, (4,), (place,)))


@cute.jit
def sixteen_rows(
    c: Ctx, place: Int32, k: Int32, r0: Int32, n: Int32, given: tuple, op: cutlass.Constexpr
):
    """sF[slot k, row] = bf(w2 h) of the rows r0 .. r0 + 15 of `n` whose piece starts at byte `place` of the ring."""
    sH, sF = given
    d, g = op.d, op.down
    groups = d.expert_dim // 32
    octet, quarter = c.lane // 4, c.lane % 4
    a = r0 + octet if r0 + octet < n else n - 1
    b = r0 + octet + 8 if r0 + octet + 8 < n else n - 1
    scales = place + op.down_rows * g.code_bytes
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC.fill(0.0)
    for v in cutlass.range_constexpr(-(-groups // 4)):
        j = 4 * v + quarter
        load_group(cute.local_tile(sH, (16 * groups,), (k,)), j, groups, rX)
        j = j if j < groups else groups - 1
        groups_times(
            rC,
            group(c, (place + a * g.code_bytes) // 16 + j, scales + a * g.scale_bytes + j),
            group(c, (place + b * g.code_bytes) // 16 + j, scales + b * g.scale_bytes + j),
            rX,
        )
    x, y = diagonal(c, rC)
    if quarter == octet // 2:
        if r0 + octet < n:
            sF[k * op.down_rows + r0 + octet] = round_bf16(x * CODE_SCALE)
        if r0 + octet + 8 < n:
            sF[k * op.down_rows + r0 + octet + 8] = round_bf16(y * CODE_SCALE)


@cute.jit
def experts_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has sixteen rows of one expert, four lanes a pair of rows (eight apart) and a lane whole groups of both, so
    that a row's sum is one element of the diagonal. Pieces are dealt to warps without regard to stages.
    """
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    sH = view(c, Uint32, 0, d.topk * d.expert_dim // 2)
    sF = view(c, Float32, 2 * d.topk * d.expert_dim, d.topk * op.down_rows)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_moe"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, op.down_rows, op)
    stage_hidden(c, turn, sH, op)
    consumers(op)
    piece = op.down_rows * (g.code_bytes + g.scale_bytes)
    units = -(-op.down_rows // 16)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        mine = (c.warp + op.warps - start * units % op.warps) % op.warps
        for unit in cutlass.range(mine, many * units, op.warps, unroll=1):
            k = unit // units
            sixteen_rows(
                c, slot * op.stage + k * piece, start + k, unit % units * 16, n, (sH, sF), op
            )
        stage_done(c, slot)
        it += 1
    consumers(op)
    for turn_ in cutlass.range_constexpr(-(-op.down_rows // op.threads)):
        i = c.tid + turn_ * op.threads
        if i < n:
            total = Float32(0.0)
            for k in cutlass.range(d.topk, unroll_full=True):
                total += c.weights[k] * sF[k * op.down_rows + i]
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[turn_]
            post(c, "z", turn, first + i, total, op)
    return it


@cute.jit
def up_projection(c: Ctx, rN: cute.Tensor, turn: Int32, it: Int32, y: Any, op: cutlass.Constexpr):
    """delta (and y, where given) = bf(bf(bf(RMS(z; latent_norm)) W_up^T) + shared) of this CTA's columns."""
    d = op.d
    g = op.rows(d.latent)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    load_box(c, "z", turn, rX, g, op)
    normalise(c, rX, rN, g, op)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        u = round_bf16(gathered(c, i, g.width))
        post(c, "delta", turn, first + i, u + c.own[i], op)
        if cutlass.const_expr(y is not None):
            y[first + i] = (u + c.own[i]).to(BFloat16)
    return it


@cute.jit
def moe(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    out: tuple,
    op: cutlass.Constexpr,
):
    """The FFN of a layer with experts, number `number` of the launch; delta is posted when its edge is hinted at.

    out = (ids, y or None). The router goes first and has an edge of its own: its logits travel while the rest of the
    front is drained.
    """
    it, edge = at_
    mIds, y = out
    turn = turn_of(c, number)
    timeline.mark(c.track, "router", layer)
    it = router(c, turn, it, rX, op)
    hint(c, op, ROUTE)
    timeline.mark(c.track, "front", layer)
    it = front(c, turn, it, rX, op)
    hint(c, op)
    timeline.mark(c.track, "edge logits", layer, kind="edge")
    rBias = load_bias(c, layer, op)
    wait(c, number + 1, op, ROUTE, False)
    timeline.mark(c.track, "choose", layer)
    choose(c, layer, turn, rBias, mIds, op)
    edge += 1
    timeline.mark(c.track, "edge front", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "shared down", layer)
    it = shared_down(c, layer, turn, it, op)
    timeline.mark(c.track, "experts up", layer)
    it = experts_up(c, layer, turn, it, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "experts down", layer)
    it = experts_down(c, layer, turn, it, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge z", layer, kind="edge")
    rN = load_norm(c, field(c, layer, F["latent_norm"], COUNT), op.rows(op.d.latent))
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "up projection", layer)
    it = up_projection(c, rN, turn, it, y, op)
    return it, edge
