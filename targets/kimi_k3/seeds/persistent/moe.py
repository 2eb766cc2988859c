"""The FFN in the persistent kernel: router and top-k in every CTA, shared expert, MXFP4 experts, up-projection."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32

from targets.kimi_k3.seeds.common import high, lanes_sum, low, round_bf16, sigmoid, situ
from targets.kimi_k3.seeds.persistent.device import (
    Ctx,
    arrive,
    at,
    bulk,
    consumers,
    drain,
    field,
    fill,
    fill_pairs,
    gathered,
    put,
    stage_done,
    stage_free,
    stage_full,
    take,
    unpack,
    vector,
    view,
    wait,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.plan import STRIDE, share
from targets.kimi_k3.seeds.router import order_key

X_SCALE = 2.0**100
"""Codes are used as value x 2^-126; the latent carries this factor, and sums are multiplied by the rest."""
REST = 2.0**26


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
def fill_front(c: Ctx, l: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    for name, rows in (("router", d.router_rows), ("latent_down", d.latent_rows)):
        first, n = share(rows, c.cta, op.ctas)
        source = field(c, l, F[name], COUNT) + Int64(first) * op.wide.row_bytes
        it = fill(c, it, source, n, op.wide, op)
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.shared_dim, c.cta, op.ctas)
    source = field(c, l, F["shared_gate_up"], COUNT) + Int64(first) * g.row_bytes
    it = fill_pairs(c, it, source, Int64(d.shared_dim * g.row_bytes), n, g, op)
    g = op.rows(d.shared_dim)
    shared = field(c, l, F["shared_down"], COUNT)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = fill(c, it, shared + Int64(first) * g.row_bytes, n, g, op)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first, n = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = fill(c, it, shared + Int64(d.hidden_local + first) * g.row_bytes, n, g, op)
    return it


@cute.jit
def fill_up(c: Ctx, l: Int32, it: Int32, op: cutlass.Constexpr):
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
            codes = field(c, l, F[name], COUNT) + source * g.code_bytes
            scales = field(c, l, F[name + "_scale"], COUNT) + source * g.scale_bytes
            bulk(c, s, Int32(half * g.chunk * g.code_bytes), codes, n * g.code_bytes, op)
            at_scale = 2 * g.chunk * g.code_bytes + half * g.chunk * g.scale_bytes
            bulk(c, s, Int32(at_scale), scales, n * g.scale_bytes, op)
        it += 1
        at_row += n
    return it


@cute.jit
def fill_down(c: Ctx, l: Int32, it: Int32, op: cutlass.Constexpr):
    """This CTA's rows of w2 of every routed expert, `down_slots` experts a stage: [codes | scales] each."""
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    piece = op.down_rows * (g.code_bytes + g.scale_bytes)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        s = stage_free(c, it, op)
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + s, many * n * (g.code_bytes + g.scale_bytes))
        for k in cutlass.range(many, unroll=1):
            source = Int64(c.ids[start + k]) * d.latent + first
            codes = field(c, l, F["w2"], COUNT) + source * g.code_bytes
            scales = field(c, l, F["w2_scale"], COUNT) + source * g.scale_bytes
            bulk(c, s, k * piece, codes, n * g.code_bytes, op)
            bulk(c, s, k * piece + op.down_rows * g.code_bytes, scales, n * g.scale_bytes, op)
        it += 1
    return it


@cute.jit
def fill_moe(c: Ctx, l: Int32, it: Int32, turn: Int32, op: cutlass.Constexpr):
    """All of one FFN; waits for the routing, number `turn` of the launch, before the routed experts."""
    d = op.d
    it = fill_front(c, l, it, op)
    cute.arch.mbarrier_wait(c.routed, turn & 1)
    it = fill_up(c, l, it, op)
    it = fill_down(c, l, it, op)
    g = op.rows(d.latent)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    source = field(c, l, F["latent_up"], COUNT) + Int64(first) * g.row_bytes
    return fill(c, it, source, n, g, op)


@cute.jit
def fill_dense(c: Ctx, l: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    source = field(c, l, F["dense_gate_up"], COUNT) + Int64(first) * g.row_bytes
    it = fill_pairs(c, it, source, Int64(d.dense_dim * g.row_bytes), n, g, op)
    g = op.rows(d.dense_dim)
    first, n = share(d.hidden, c.cta, op.ctas)
    source = field(c, l, F["dense_down"], COUNT) + Int64(first) * g.row_bytes
    return fill(c, it, source, n, g, op)


# ---- consumers


@cute.jit
def situ_pair(c: Ctx, row: Int32, width: cutlass.Constexpr):
    """bf(SiTU(bf(gate), bf(up))) of the pair whose gate row is `row`."""
    gate = round_bf16(gathered(c, row, width))
    up = round_bf16(gathered(c, row + 1, width))
    return situ(gate, up).to(BFloat16)


@cute.jit
def dense(c: Ctx, l: Int32, it: Int32, edge: Int32, rX: cute.Tensor, ws: Space, op: cutlass.Constexpr):
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
    rH = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    load_x(c, ws.hs, rH, g)
    first, n = share(d.hidden, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rH, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        y = gathered(c, i, g.width)
        if cutlass.const_expr(d.ranks > 1):
            y = round_bf16(y) + at(Float32, field(c, l, F["remote_dense"], COUNT), d.hidden)[first + i]
        ws.delta[first + i] = y.to(BFloat16)
    return it, edge


@cute.jit
def load_x(c: Ctx, mX: cute.Tensor, rX: cute.Tensor, g: cutlass.Constexpr):
    """rX f32 [8, per]: this thread's columns of a bf16 vector."""
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    for v in cutlass.range_constexpr(g.per):
        rW.fill(0.0)
        i = vector(c, v, g)
        if i < g.vecs:
            cute.autovec_copy(cute.local_tile(mX, (8,), (i,)), rW)
        for e in cutlass.range_constexpr(8):
            rX[e, v] = rW[e].to(Float32)


@cute.jit
def front(c: Ctx, l: Int32, it: Int32, rX: cute.Tensor, ws: Space, op: cutlass.Constexpr):
    """Logits, latent and the shared expert's hidden vector, this CTA's share."""
    d, g = op.d, op.wide
    first_r, n_r = share(d.router_rows, c.cta, op.ctas)
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    it = drain(c, it, n_r, Int32(0), rX, g, op)
    it = drain(c, it, n_l, n_r, rX, g, op)
    it = drain(c, it, n_s, n_r + n_l, rX, op.rows(d.hidden, pair=True), op)
    consumers(op)
    for i in cutlass.range(c.tid, n_r + n_l + n_s, op.threads, unroll=1):
        if i < n_r:
            ws.logits[first_r + i] = gathered(c, i, g.width)
        elif i < n_r + n_l:
            ws.latent[first_l + i - n_r] = gathered(c, i, g.width).to(BFloat16)
        else:
            j = i - n_r - n_l
            ws.hs[first_s + j] = situ_pair(c, n_r + n_l + 2 * j, g.width)
    return it


@cute.jit
def logit(c: Ctx, l: Int32, e: Int32, ws: Space, op: cutlass.Constexpr):
    x = Float32(0.0)
    if cutlass.const_expr(op.d.router_sharded and op.d.ranks > 1):
        own = op.d.router_rows
        if e < own:
            x = ws.logits[e]
        else:
            x = at(Float32, field(c, l, F["remote_logits"], COUNT), op.d.experts - own)[e - own]
    else:
        x = ws.logits[e]
    return x


@cute.jit
def choose(c: Ctx, l: Int32, ws: Space, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.weights = the routing, in every CTA for itself: each warp sorts out its own best, then they are ranked."""
    d = op.d
    each = -(-d.experts // op.warps)
    slots = -(-each // 32)
    best_of = min(d.topk, each)
    gBias = at(Float32, field(c, l, F["router_bias"], COUNT), d.experts)
    first = c.warp * each + c.lane
    rKey = cute.make_rmem_tensor(cute.make_layout((slots,)), Uint32)
    for j in cutlass.range_constexpr(slots):
        e = first + 32 * j
        rKey[j] = Uint32(0)
        if c.lane + 32 * j < each and e < d.experts:
            rKey[j] = order_key(sigmoid(logit(c, l, e, ws, op)) + gBias[e])
    candidates = op.warps * best_of
    sKey = view(c, Uint32, 0, candidates)
    sId = view(c, Int32, 4 * candidates, candidates)
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
    for i in cutlass.range(c.tid, candidates, op.threads, unroll=1):
        # a tensor over a recast pointer forgets that it is unsigned
        key, expert = Uint32(sKey[i]), sId[i]
        rank = Int32(0)
        for other in cutlass.range(candidates, unroll=8):
            rival = Uint32(sKey[other])
            ahead = rival > key or (rival == key and sId[other] < expert)
            rank += Int32(1) if ahead else Int32(0)
        if rank < d.topk and key > Uint32(0):
            c.ids[rank] = expert
    consumers(op)
    if c.tid == 0:
        cute.arch.mbarrier_arrive(c.routed)
    if c.warp == 0:
        s = Float32(0.0)
        e = Int32(0)
        if c.lane < d.topk:
            e = c.ids[c.lane]
            s = sigmoid(logit(c, l, e, ws, op))
            z = s + gBias[e]
            s = Float32(0.0) if z != z else s
        total = lanes_sum(s, 32) + Float32(1e-20)
        if c.lane < d.topk:
            c.weights[c.lane] = round_bf16(s / total)
            if c.cta == 0:
                mIds[c.lane] = e


@cute.jit
def shared_down(c: Ctx, l: Int32, it: Int32, ws: Space, op: cutlass.Constexpr):
    """c.own = bf(shared partial + the others') of the columns whose up-projection this CTA makes; the rest is sent."""
    d = op.d
    g = op.rows(d.shared_dim)
    rX = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    load_x(c, ws.hs, rX, g)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first_s, n_s = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = drain(c, it, n_s, n, rX, g, op)
        consumers(op)
        gSend = at(BFloat16, field(c, l, F["send"], COUNT), d.hidden - d.hidden_local)
        gRemote = at(Float32, field(c, l, F["remote_shared"], COUNT), d.hidden_local)
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
    return it


@cute.jit
def codes_dot(word: Uint32, rX: cute.Tensor):
    """Eight codes times x, both 2^-26 of the value together (x carries X_SCALE)."""
    pairs = cute.arch.inline_ptx(
        """{
        .reg .b32 m, s;
        shl.b32 m, {$r0}, 6;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 12;
        lop3.b32 {$w0}, s, 0x80008000, m, 0xEA;
        shl.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 8;
        lop3.b32 {$w1}, s, 0x80008000, m, 0xEA;
        shr.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 4;
        lop3.b32 {$w2}, s, 0x80008000, m, 0xEA;
        shr.b32 m, {$r0}, 6;  and.b32 m, m, 0x01C001C0;
        lop3.b32 {$w3}, {$r0}, 0x80008000, m, 0xEA;
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word],
    )
    a, b = Float32(0.0), Float32(0.0)
    for j in cutlass.range_constexpr(4):
        a += low(pairs[j]) * rX[j]
        b += high(pairs[j]) * rX[j + 4]
    return a + b


@cute.jit
def group_scale(byte: Uint8):
    """2^(byte - 127) for bytes 1 to 254."""
    return ((Uint32(byte) & Uint32(0xFF)) << 23).bitcast(Float32)


@cute.jit
def experts_up(c: Ctx, l: Int32, it: Int32, ws: Space, op: cutlass.Constexpr):
    """ws.h [slot, row] = bf(SiTU(w1 l, w3 l)) of this CTA's pairs of rows."""
    d, g = op.d, op.up
    x = op.rows(d.latent)
    rX = cute.make_rmem_tensor(cute.make_layout((8, x.per)), Float32)
    load_latent(c, l, ws, rX, x, op)
    first, n = share(d.topk * d.expert_dim, c.cta, op.ctas, g.unit)
    at_row, end = first, first + n
    bytes_ = cute.recast_tensor(c.ring, Uint8)
    while at_row < end:
        row = at_row % d.expert_dim
        many = end - at_row if end - at_row < g.chunk else Int32(g.chunk)
        many = many if many < d.expert_dim - row else d.expert_dim - row
        slot = stage_full(c, it, op)
        if c.warp < x.width * x.passes:
            for i in cutlass.range(c.warp // x.width, 2 * many, x.passes, unroll=2):
                r, half = i // 2, i % 2
                place = slot * op.stage + (half * g.chunk + r) * g.code_bytes
                scale = slot * op.stage + 2 * g.chunk * g.code_bytes + (half * g.chunk + r) * g.scale_bytes
                sum = Float32(0.0)
                for v in cutlass.range_constexpr(x.per):
                    j = vector(c, v, x)
                    if j < x.vecs:
                        word = c.ring[place // 4 + j]
                        sum += codes_dot(word, rX[None, v]) * group_scale(bytes_[scale + j // 4])
                sum = lanes_sum(sum, 32)
                if c.lane == 0:
                    c.part[(2 * (at_row - first) + i) * STRIDE + c.warp % x.width] = sum
        stage_done(c, slot)
        it += 1
        at_row += many
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        gate, up = gathered(c, 2 * i, x.width) * REST, gathered(c, 2 * i + 1, x.width) * REST
        ws.h[first + i] = situ(gate, up).to(BFloat16)
    return it


@cute.jit
def load_latent(c: Ctx, l: Int32, ws: Space, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr):
    """This thread's columns of the gathered latent, times X_SCALE."""
    d = op.d
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    for v in cutlass.range_constexpr(g.per):
        rW.fill(0.0)
        i = vector(c, v, g)
        if cutlass.const_expr(d.latent_rows == d.latent):
            if i < g.vecs:
                cute.autovec_copy(cute.local_tile(ws.latent, (8,), (i,)), rW)
        else:
            own = d.latent_rows // 8
            gRemote = at(BFloat16, field(c, l, F["remote_latent"], COUNT), d.latent - d.latent_rows)
            if i < own:
                cute.autovec_copy(cute.local_tile(ws.latent, (8,), (i,)), rW)
            elif i < g.vecs:
                cute.autovec_copy(cute.local_tile(gRemote, (8,), (i - own,)), rW)
        for e in cutlass.range_constexpr(8):
            rX[e, v] = rW[e].to(Float32) * X_SCALE


@cute.jit
def experts_down(c: Ctx, l: Int32, it: Int32, ws: Space, op: cutlass.Constexpr):
    """ws.z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows; sixteen lanes have a row."""
    d, g = op.d, op.down
    words = d.expert_dim // 8
    per = -(-words // 16)
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
    groups = op.down_rows // g.unit
    rX = cute.make_rmem_tensor(cute.make_layout((8, per)), Float32)
    rP = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rX.fill(0.0)
    lane = c.lane % 16
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        for unit in cutlass.range(c.warp, many * groups, op.warps, unroll=1):
            k, r0 = unit // groups, unit % groups * g.unit
            if r0 < n:
                for v in cutlass.range_constexpr(per):
                    j = lane + 16 * v
                    if j < words:
                        cute.autovec_copy(
                            cute.local_tile(sH, (4,), ((start + k) * words + j,)), rP
                        )
                        for e in cutlass.range_constexpr(4):
                            rX[2 * e, v] = low(rP[e]) * X_SCALE
                            rX[2 * e + 1, v] = high(rP[e]) * X_SCALE
                for r in cutlass.range_constexpr(0, max(g.unit, 2), 2):
                    row = r0 + r + c.lane // 16
                    row = row if row < n else n - 1
                    place = slot * op.stage + k * piece + row * g.code_bytes
                    scale = slot * op.stage + k * piece + op.down_rows * g.code_bytes + row * g.scale_bytes
                    sum = Float32(0.0)
                    for v in cutlass.range_constexpr(per):
                        j = lane + 16 * v
                        if j < words:
                            word = c.ring[place // 4 + j]
                            sum += codes_dot(word, rX[None, v]) * group_scale(bytes_[scale + j // 4])
                    sum = lanes_sum(sum, 16)
                    if lane == 0:
                        sF[(start + k) * op.down_rows + row] = round_bf16(sum * REST)
        stage_done(c, slot)
        it += 1
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        total = Float32(0.0)
        for k in cutlass.range(d.topk, unroll_full=True):
            total += c.weights[k] * sF[k * op.down_rows + i]
        if cutlass.const_expr(d.ranks > 1):
            total = round_bf16(total) + at(Float32, field(c, l, F["remote_moe"], COUNT), d.latent)[first + i]
        ws.z[first + i] = total.to(BFloat16)
    return it


@cute.jit
def up_projection(c: Ctx, l: Int32, it: Int32, ws: Space, op: cutlass.Constexpr):
    """ws.delta = bf(bf(bf(RMS(z; latent_norm)) W_up^T) + shared) of this CTA's columns."""
    d = op.d
    g = op.rows(d.latent)
    rX = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    load_x(c, ws.z, rX, g)
    square = Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(8):
            square += rX[e, v] * rX[e, v]
    put(c, 0, square)
    consumers(op)
    scale = cute.math.rsqrt(take(c, 0, g.width) / d.latent + d.eps)
    norm = field(c, l, F["latent_norm"], COUNT)
    rN = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rNf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rN.fill(0)
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            words_at(norm, i, rN)
        unpack(rN, rNf)
        for e in cutlass.range_constexpr(8):
            rX[e, v] = round_bf16(rX[e, v] * scale * rNf[e])
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        u = round_bf16(gathered(c, i, g.width))
        ws.delta[first + i] = (u + c.own[i]).to(BFloat16)
    return it


@cute.jit
def moe(
    c: Ctx, l: Int32, it: Int32, edge: Int32, rX: cute.Tensor, ws: Space, mIds: cute.Tensor, op: cutlass.Constexpr
):
    """The FFN of a layer with experts; ws.delta is complete at the next edge."""
    it = front(c, l, it, rX, ws, op)
    arrive(c, op)
    edge += 1
    wait(c, edge, op)
    choose(c, l, ws, mIds, op)
    it = shared_down(c, l, it, ws, op)
    it = experts_up(c, l, it, ws, op)
    arrive(c, op)
    edge += 1
    wait(c, edge, op)
    it = experts_down(c, l, it, ws, op)
    arrive(c, op)
    edge += 1
    wait(c, edge, op)
    it = up_projection(c, l, it, ws, op)
    return it, edge
