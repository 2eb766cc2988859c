"""The FFN in the persistent kernel: router and top-k in every CTA, shared expert, MXFP4 experts, up-projection."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32

from targets.kimi_k3.seeds.common import high, lanes_sum, low, pack_bf16, round_bf16, sigmoid, situ
from targets.kimi_k3.seeds.latent_moe import pair_up
from targets.kimi_k3.seeds.persistent.device import (
    ROUTE,
    Ctx,
    arrive,
    at,
    bulk,
    consumers,
    diagonal,
    diagonal_sum,
    drain,
    field,
    fill,
    fill_pairs,
    gathered,
    mma_rows,
    put,
    stage_done,
    stage_free,
    stage_full,
    take,
    vector,
    view,
    wait,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.plan import STRIDE, share
from targets.kimi_k3.seeds.router import order_key

CODE_SCALE = 2.0**62
"""Expanded codes are 2^-62 of their value."""


class Space(NamedTuple):
    """Activations between CTAs, global: proj, attn, latent, hs, h, z, delta bf16; o, logits f32."""

    proj: Any
    o: Any
    attn: Any
    logits: Any
    latent: Any
    hs: Any
    h: Any
    z: Any
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
    it = fill_front(c, layer, it, op)
    cute.arch.mbarrier_wait(c.routed, turn & 1)
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
    """bf(SiTU(bf(gate), bf(up))) of the pair whose gate row is `row`."""
    gate = round_bf16(gathered(c, row, width))
    up = round_bf16(gathered(c, row + 1, width))
    return situ(gate, up).to(BFloat16)


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
        ws.hs[first + i] = situ_pair(c, 2 * i, g.width)
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
def normalise(c: Ctx, rX: cute.Tensor, norm: Int64, g: cutlass.Constexpr, op: cutlass.Constexpr):
    """rX words [4, per] <- bf(RMS(x; norm)); a barrier inside."""
    rN = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rN.fill(0)
    square = Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            words_at(norm, i, rN[None, v])
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
def router(c: Ctx, layer: Int32, it: Int32, rX: cute.Tensor, ws: Space, op: cutlass.Constexpr):
    """This CTA's logits."""
    first, n = share(op.d.router_rows, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        ws.logits[first + i] = gathered(c, i, op.wide.width)
    return it


@cute.jit
def front(c: Ctx, layer: Int32, it: Int32, rX: cute.Tensor, ws: Space, op: cutlass.Constexpr):
    """Latent and the shared expert's hidden vector, this CTA's share. Starts behind an `arrive`, which is a barrier."""
    d, g = op.d, op.wide
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    it = drain(c, it, n_l, Int32(0), rX, g, op)
    it = drain(c, it, n_s, n_l, rX, op.rows(d.hidden, pair=True), op)
    consumers(op)
    for i in cutlass.range(c.tid, n_l + n_s, op.threads, unroll=1):
        if i < n_l:
            ws.latent[first_l + i] = gathered(c, i, g.width).to(BFloat16)
        else:
            j = i - n_l
            ws.hs[first_s + j] = situ_pair(c, n_l + 2 * j, g.width)
    return it


@cute.jit
def logit(c: Ctx, layer: Int32, e: Int32, ws: Space, op: cutlass.Constexpr):
    x = Float32(0.0)
    if cutlass.const_expr(op.d.router_sharded and op.d.ranks > 1):
        own = op.d.router_rows
        if e < own:
            x = ws.logits[e]
        else:
            x = at(Float32, field(c, layer, F["remote_logits"], COUNT), op.d.experts - own)[e - own]
    else:
        x = ws.logits[e]
    return x


@cute.jit
def choose(c: Ctx, layer: Int32, ws: Space, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.weights = the routing, made by every CTA: each warp sorts out its own best, then they are ranked."""
    d = op.d
    each = -(-d.experts // op.warps)
    slots = -(-each // 32)
    best_of = min(d.topk, each)
    gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), d.experts)
    first = c.warp * each + c.lane
    rKey = cute.make_rmem_tensor(cute.make_layout((slots,)), Uint32)
    for j in cutlass.range_constexpr(slots):
        e = first + 32 * j
        rKey[j] = Uint32(0)
        if c.lane + 32 * j < each and e < d.experts:
            rKey[j] = order_key(sigmoid(logit(c, layer, e, ws, op)) + gBias[e])
    candidates = op.warps * best_of
    padded = -(-candidates // 8) * 8
    sKey = view(c, Uint32, 0, padded)
    sId = view(c, Int32, 4 * padded, candidates)
    if c.tid < padded - candidates:
        sKey[candidates + c.tid] = Uint32(0)
    for rank in cutlass.range(best_of, unroll=1):
        mine = rKey[0]
        for j in cutlass.range_constexpr(1, slots):
            mine = rKey[j] if rKey[j] > mine else mine
        best = cute.arch.warp_redux_sync(mine, "max")
        found = Int32(0x7FFFFFFF)
        for j in cutlass.range_constexpr(slots - 1, -1, -1):
            found = first + 32 * j if rKey[j] == best else found
        expert = cute.arch.warp_redux_sync(found, "min")
        for j in cutlass.range_constexpr(slots):
            rKey[j] = Uint32(0) if first + 32 * j == expert else rKey[j]
        if c.lane == 0:
            sKey[c.warp * best_of + rank] = best
            sId[c.warp * best_of + rank] = expert
    consumers(op)
    # two threads rank a candidate against half of the others each; of equal keys the earlier one has the lower id
    rRival = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    half = c.tid % 2
    for start in cutlass.range(0, candidates, op.threads // 2, unroll=1):
        i = start + c.tid // 2
        safe = i if i < candidates else 0
        # a tensor over a recast pointer forgets that it is unsigned
        key = Uint32(sKey[safe])
        rank = Int32(0)
        for k in cutlass.range(padded // 8, unroll=7):
            at_ = half * (padded // 2) + 4 * k
            for e in cutlass.range_constexpr(4):
                rRival[e] = Uint32(sKey[at_ + e])
            for e in cutlass.range_constexpr(4):
                ahead = rRival[e] > key or (rRival[e] == key and at_ + e < i)
                rank += Int32(1) if ahead else Int32(0)
        rank += cute.arch.shuffle_sync_bfly(rank, offset=1)
        if half == 0 and i < candidates and rank < d.topk and key > Uint32(0):
            c.ids[rank] = sId[i]
    consumers(op)
    if c.tid == 0:
        cute.arch.mbarrier_arrive(c.routed)
    if c.warp == 0:
        s = Float32(0.0)
        e = Int32(0)
        if c.lane < d.topk:
            e = c.ids[c.lane]
            s = sigmoid(logit(c, layer, e, ws, op))
            z = s + gBias[e]
            s = Float32(0.0) if z != z else s
        total = lanes_sum(s, 32) + Float32(1e-20)
        if c.lane < d.topk:
            c.weights[c.lane] = round_bf16(s / total)
            if c.cta == 0:
                mIds[c.lane] = e


@cute.jit
def shared_down(c: Ctx, layer: Int32, it: Int32, ws: Space, op: cutlass.Constexpr):
    """c.own = bf(shared partial + the others') of the columns whose up-projection this CTA makes; the rest is sent.

    Ends with a barrier: the experts' sums go where these were.
    """
    d = op.d
    g = op.rows(d.shared_dim)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    load_x(c, ws.hs, rX, g)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first_s, n_s = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = drain(c, it, n_s, n, rX, g, op)
        consumers(op)
        gSend = at(BFloat16, field(c, layer, F["send"], COUNT), d.hidden - d.hidden_local)
        gRemote = at(Float32, field(c, layer, F["remote_shared"], COUNT), d.hidden_local)
        for i in cutlass.range(c.tid, n + n_s, op.threads, unroll=1):
            y = round_bf16(gathered(c, i, g.width))
            if i < n:
                c.own[i] = round_bf16(y + gRemote[first + i])
            else:
                gSend[first_s + i - n] = y.to(BFloat16)
    else:
        consumers(op)
        for i in cutlass.range(c.tid, n, op.threads, unroll=1):
            c.own[i] = round_bf16(gathered(c, i, g.width))
    consumers(op)
    return it


@cute.jit
def expand_codes(word: Uint32):
    """Eight codes -> four bf16 pairs, codes (j, j + 4) in pair j: value x 2^-62, exact.

    The three low bits of E2M1 land on bf16's lowest exponent bits and highest mantissa bit, value x 2^-126; the product
    with 2^64 makes normal numbers of them.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 m, s, k;
        mov.b32 k, 0x5F805F80;
        shl.b32 m, {$r0}, 6;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 12;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w0}, m, k;
        shl.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 8;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w1}, m, k;
        shr.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 4;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w2}, m, k;
        shr.b32 m, {$r0}, 6;  and.b32 m, m, 0x01C001C0;
        lop3.b32 m, {$r0}, 0x80008000, m, 0xEA;          mul.rn.bf16x2 {$w3}, m, k;
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word],
    )


@cute.jit
def codes_times(c: Ctx, words: tuple, scales: tuple, rX: cute.Tensor):
    """This lane's part of (row a, row b) times x, scaled: eight codes a lane, so that four lanes have one group."""
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC.fill(0.0)
    mma_rows(rC, expand_codes(words[0]), expand_codes(words[1]), rX)
    a, b = diagonal(c, rC)
    return a * group_scale(scales[0]), b * group_scale(scales[1])


@cute.jit
def group_scale(byte: Uint8):
    """2^(byte - 127) for bytes 1 to 254."""
    return ((Uint32(byte) & Uint32(0xFF)) << 23).bitcast(Float32)


@cute.jit
def pair_of_codes(c: Ctx, slot: Int32, r: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """Pair r of the stage times this warp's columns: w1's row in lane 0, w3's in lane 1, times 2^-62."""
    g = op.up
    x = op.rows(op.d.latent)
    place = slot * op.stage + r * g.code_bytes
    scale = slot * op.stage + 2 * g.chunk * g.code_bytes + r * g.scale_bytes
    bytes_ = cute.recast_tensor(c.ring, Uint8)
    a, b = Float32(0.0), Float32(0.0)
    for v in cutlass.range_constexpr(x.per):
        j = vector(c, v, x)
        j = j if j < x.vecs else 0
        words = (c.ring[place // 4 + j], c.ring[(place + g.chunk * g.code_bytes) // 4 + j])
        scales = (bytes_[scale + j // 4], bytes_[scale + g.chunk * g.scale_bytes + j // 4])
        more_a, more_b = codes_times(c, words, scales, rX[None, v])
        a += more_a
        b += more_b
    return diagonal_sum(a, b)


@cute.jit
def experts_up(c: Ctx, layer: Int32, it: Int32, ws: Space, op: cutlass.Constexpr):
    """ws.h [slot, row] = bf(SiTU(w1 layer, w3 layer)) of this CTA's pairs of rows."""
    d, g = op.d, op.up
    x = op.rows(d.latent)
    rX = cute.make_rmem_tensor(cute.make_layout((4, x.per)), Uint32)
    load_latent(c, layer, ws, rX, x, op)
    first, n = share(d.topk * d.expert_dim, c.cta, op.ctas, g.unit)
    at_row, end = first, first + n
    while at_row < end:
        row = at_row % d.expert_dim
        many = end - at_row if end - at_row < g.chunk else Int32(g.chunk)
        many = many if many < d.expert_dim - row else d.expert_dim - row
        slot = stage_full(c, it, op)
        if c.warp < x.width * x.passes:
            for r0 in cutlass.range(c.warp // x.width, many, x.passes * op.pairs, unroll=1):
                rows = [r0 + u * x.passes for u in range(op.pairs)]
                sums = [pair_of_codes(c, slot, r if r < many else r0, rX, op) for r in rows]
                for u in cutlass.range_constexpr(op.pairs):
                    if c.lane < 2 and rows[u] < many:
                        place = 2 * (at_row - first + rows[u]) + c.lane
                        c.part[place * STRIDE + c.warp % x.width] = sums[u]
        stage_done(c, slot)
        it += 1
        at_row += many
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        gate, up = (
            gathered(c, 2 * i, x.width) * CODE_SCALE,
            gathered(c, 2 * i + 1, x.width) * CODE_SCALE,
        )
        ws.h[first + i] = situ(gate, up).to(BFloat16)
    return it


@cute.jit
def load_latent(
    c: Ctx, layer: Int32, ws: Space, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """This thread's columns of the gathered latent, pairs in the order of `expand`; zero beyond the last."""
    d = op.d
    for v in cutlass.range_constexpr(g.per):
        rX[None, v].fill(0)
        i = vector(c, v, g)
        own = d.latent_rows // 8
        if i < own:
            words_at(ws.latent.iterator.toint(), i, rX[None, v])
        elif i < g.vecs:
            if cutlass.const_expr(d.latent_rows < d.latent):
                words_at(field(c, layer, F["remote_latent"], COUNT), i - own, rX[None, v])
        pair_up(rX[None, v])


@cute.jit
def experts_down(c: Ctx, layer: Int32, it: Int32, ws: Space, op: cutlass.Constexpr):
    """ws.z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has four rows of one expert at a time.
    """
    d, g = op.d, op.down
    words = d.expert_dim // 8
    per = -(-words // 32)
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    hidden = d.topk * d.expert_dim
    sH = view(c, Uint32, 0, hidden // 2)
    sF = view(c, Float32, 2 * hidden, d.topk * op.down_rows)
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    sHb = cute.recast_tensor(sH, BFloat16)
    for i in cutlass.range(c.tid, hidden // 8, op.threads, unroll=1):
        cute.autovec_copy(cute.local_tile(ws.h, (8,), (i,)), rW)
        cute.autovec_copy(rW, cute.local_tile(sHb, (8,), (i,)))
    consumers(op)
    bytes_ = cute.recast_tensor(c.ring, Uint8)
    piece = op.down_rows * (g.code_bytes + g.scale_bytes)
    groups = -(-op.down_rows // 4)
    rX = cute.make_rmem_tensor(cute.make_layout((4, per)), Uint32)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        for unit in cutlass.range(c.warp, many * groups, op.warps, unroll=1):
            k, r0 = unit // groups, unit % groups * 4
            if r0 < n:
                for v in cutlass.range_constexpr(per):
                    j = c.lane + 32 * v
                    rX[None, v].fill(0)
                    if j < words:
                        cute.autovec_copy(
                            cute.local_tile(sH, (4,), ((start + k) * words + j,)), rX[None, v]
                        )
                        pair_up(rX[None, v])
                for r in cutlass.range_constexpr(0, 4, 2):
                    first_r = r0 + r if r0 + r < n else n - 1
                    next_r = r0 + r + 1 if r0 + r + 1 < n else n - 1
                    at_code = (slot * op.stage + k * piece) // 4
                    at_scale = slot * op.stage + k * piece + op.down_rows * g.code_bytes
                    a, b = Float32(0.0), Float32(0.0)
                    for v in cutlass.range_constexpr(per):
                        j = c.lane + 32 * v
                        j = j if j < words else 0
                        codes = (
                            c.ring[at_code + first_r * words + j],
                            c.ring[at_code + next_r * words + j],
                        )
                        scales = (
                            bytes_[at_scale + first_r * g.scale_bytes + j // 4],
                            bytes_[at_scale + next_r * g.scale_bytes + j // 4],
                        )
                        more_a, more_b = codes_times(c, codes, scales, rX[None, v])
                        a += more_a
                        b += more_b
                    sum = diagonal_sum(a, b)
                    if c.lane < 2 and r0 + r + c.lane < n:
                        sF[(start + k) * op.down_rows + r0 + r + c.lane] = round_bf16(
                            sum * CODE_SCALE
                        )
        stage_done(c, slot)
        it += 1
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        total = Float32(0.0)
        for k in cutlass.range(d.topk, unroll_full=True):
            total += c.weights[k] * sF[k * op.down_rows + i]
        if cutlass.const_expr(d.ranks > 1):
            total = (
                round_bf16(total)
                + at(Float32, field(c, layer, F["remote_moe"], COUNT), d.latent)[first + i]
            )
        ws.z[first + i] = total.to(BFloat16)
    return it


@cute.jit
def up_projection(c: Ctx, layer: Int32, it: Int32, ws: Space, op: cutlass.Constexpr):
    """ws.delta = bf(bf(bf(RMS(z; latent_norm)) W_up^T) + shared) of this CTA's columns."""
    d = op.d
    g = op.rows(d.latent)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    load_x(c, ws.z, rX, g)
    normalise(c, rX, field(c, layer, F["latent_norm"], COUNT), g, op)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        u = round_bf16(gathered(c, i, g.width))
        ws.delta[first + i] = (u + c.own[i]).to(BFloat16)
    return it


@cute.jit
def moe(
    c: Ctx,
    layer: Int32,
    turn: Int32,
    at_: tuple,
    rX: cute.Tensor,
    ws: Space,
    mIds: cute.Tensor,
    op: cutlass.Constexpr,
):
    """The FFN of a layer with experts, number `turn` of the launch; ws.delta is complete at the next edge.

    The router goes first and has an edge of its own: its logits travel while the rest of the front is drained.
    """
    it, edge = at_
    it = router(c, layer, it, rX, ws, op)
    arrive(c, op, ROUTE)
    it = front(c, layer, it, rX, ws, op)
    arrive(c, op)
    wait(c, turn + 1, op, ROUTE)
    choose(c, layer, ws, mIds, op)
    edge += 1
    wait(c, edge, op)
    it = shared_down(c, layer, it, ws, op)
    it = experts_up(c, layer, it, ws, op)
    arrive(c, op)
    edge += 1
    wait(c, edge, op)
    it = experts_down(c, layer, it, ws, op)
    arrive(c, op)
    edge += 1
    wait(c, edge, op)
    it = up_projection(c, layer, it, ws, op)
    return it, edge
