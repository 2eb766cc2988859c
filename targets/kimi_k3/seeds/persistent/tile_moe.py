"""One FFN of the tile kernel: what the producer brings, and the phases of the consumers."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import (
    add_bf16x2,
    high,
    lanes_sum,
    low,
    pack_bf16,
    round_bf16,
    situ,
)
from targets.kimi_k3.seeds.persistent.device import (
    ROUTE,
    at,
    consumers,
    field,
    gathered,
    peek,
    words_at,
)
from targets.kimi_k3.seeds.persistent.plan import STRIDE, share
from targets.kimi_k3.seeds.persistent.tile_device import (
    COUNT_T,
    T,
    Tiles,
    clear,
    columns_of,
    drain_tiles,
    fill_tiles,
    from_vec,
    meet,
    place,
    send,
    store16,
    sure,
    take_box,
    tell,
    to_vec,
    within,
)
from targets.kimi_k3.seeds.persistent.tile_experts import (
    end_latent,
    fill_pieces,
    fill_units,
    inner_alone,
    latent_alone,
    others_sums,
    start_latent,
    tiles_down,
    tiles_up,
)
from targets.kimi_k3.seeds.persistent.tile_route import bias_of, choose_experts, route_alone

# ---- producer


@cute.jit
def fill_layer(c: Tiles, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """All of one FFN; waits for the routing before the routed experts."""
    d, wide, inner = op.d, Int64(2 * op.d.hidden), Int64(2 * op.d.shared_dim)
    timeline.mark(c.brought, "bring front", layer)
    first, n = share(d.router_rows, c.cta, op.ctas)
    router = field(c, layer, T["router"], COUNT_T) + Int64(first) * wide
    it = fill_tiles(c, it, ((router, wide, Int32(0), 1),), n, op.tile(d.hidden, 8), op)
    first, n = share(d.latent_rows, c.cta, op.ctas)
    latent = field(c, layer, T["latent_down"], COUNT_T) + Int64(first) * wide
    first, pairs = share(d.shared_dim, c.cta, op.ctas)
    gate = field(c, layer, T["shared_gate_up"], COUNT_T) + Int64(first) * wide
    rows = (
        (latent, wide, Int32(0), 1),
        (gate, wide, n, 2),
        (gate + d.shared_dim * wide, wide, n + 1, 2),
    )
    it = fill_tiles(c, it, rows, n + 2 * pairs, op.tile(d.hidden, 16), op)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    start = field(c, layer, T["shared_down"], COUNT_T)
    rows = ((start + Int64(first) * inner, inner, Int32(0), 1),)
    many = Int32(n)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first, others = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        rows = (*rows, (start + Int64(d.hidden_local + first) * inner, inner, Int32(n), 1))
        many = n + others
    it = fill_tiles(c, it, rows, many, op.tile(d.shared_dim, 16), op)
    timeline.mark(c.brought, "routing", layer, kind="wait")
    cute.arch.mbarrier_wait(c.routed, layer & 1)
    timeline.mark(c.brought, "bring experts", layer)
    it = fill_units(c, layer, it, op)
    it = fill_pieces(c, layer, it, op)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    back = Int64(2 * d.latent)
    rows = ((field(c, layer, T["latent_up"], COUNT_T) + Int64(first) * back, back, Int32(0), 1),)
    return fill_tiles(c, it, rows, n, op.tile(d.latent, 8), op)


# ---- consumers


@cute.jit
def tile_router(c: Tiles, layer: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """This CTA's logits."""
    d, g, t = op.d, op.tile(op.d.hidden, 8), op.tokens
    first, n = share(d.router_rows, c.cta, op.ctas)
    it = drain_tiles(c, it, n, rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n * t, op.threads, unroll=1):
        send(
            c, "logits", layer, i % t * d.router_rows + first + i // t, gathered(c, i, g.active), op
        )
    return it


@cute.jit
def tile_front(c: Tiles, layer: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """Latent and the shared expert's hidden vector, this CTA's share."""
    d, g, t = op.d, op.tile(op.d.hidden, 16), op.tokens
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    it = drain_tiles(c, it, n_l + 2 * n_s, rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, (n_l + n_s) * t, op.threads, unroll=1):
        row, m = i // t, i % t
        if row < n_l:
            send(
                c, "latent", layer, m * d.latent_rows + first_l + row, gathered(c, i, g.active), op
            )
        else:
            row -= n_l
            gate = gathered(c, (n_l + 2 * row) * t + m, g.active)
            up = gathered(c, (n_l + 2 * row + 1) * t + m, g.active)
            x = situ(round_bf16(gate), round_bf16(up))
            send(c, "hs", layer, m * d.shared_dim + first_s + row, x, op)
    return it


@cute.jit
def far_sums(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """This thread's sums of the other ranks for `tile_shared`."""
    d, t = op.d, op.tokens
    first, n = share(d.hidden_local, c.cta, op.ctas)
    many = -(-(-(-d.hidden_local // op.ctas) * t) // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((many,)), Float32)
    r.fill(0.0)
    if cutlass.const_expr(d.ranks > 1):
        gFar = at(Float32, field(c, layer, T["remote_shared"], COUNT_T), t * d.hidden_local)
        for k in cutlass.range_constexpr(many):
            i = within(c.tid + k * op.threads, n * t)
            r[k] = gFar[i % t * d.hidden_local + first + i // t]
    return r


@cute.jit
def tile_shared(
    c: Tiles, layer: Int32, it: Int32, rX: cute.Tensor, rFar: cute.Tensor, op: cutlass.Constexpr
):
    """c.own = bf(shared partial + the others') of this CTA's columns; the rest is sent. Ends with a barrier."""
    d, g, t = op.d, op.tile(op.d.shared_dim, 16), op.tokens
    first, n = share(d.hidden_local, c.cta, op.ctas)
    many = Int32(n)
    far = d.hidden - d.hidden_local
    first_s, n_s = share(far, c.cta, op.ctas)
    if cutlass.const_expr(far > 0):
        many = n + n_s
    it = drain_tiles(c, it, many, rX, g, op)
    consumers(op)
    for k in cutlass.range_constexpr(rFar.shape[0]):
        i = c.tid + k * op.threads
        if i < n * t:
            x = round_bf16(gathered(c, i, g.active))
            c.own[i] = round_bf16(x + rFar[k]) if cutlass.const_expr(d.ranks > 1) else x
    if cutlass.const_expr(far > 0):
        gSend = at(BFloat16, field(c, layer, T["send"], COUNT_T), t * far)
        for i in cutlass.range(c.tid, n_s * t, op.threads, unroll=1):
            x = gathered(c, n * t + i, g.active)
            gSend[i % t * far + first_s + i // t] = x.to(BFloat16)
    consumers(op)
    return it


@cute.jit
def norm_words(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """This lane's weights of the latent's norm."""
    g = op.tile(op.d.latent, 8)
    rN = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.spans)), Uint32)
    rN.fill(0)
    if c.warp < g.active:
        for s in cutlass.range_constexpr(2 * g.spans):
            words_at(field(c, layer, T["latent_norm"], COUNT_T), columns_of(c, s, g), rN[None, s])
    return rN


@cute.jit
def tile_norm(
    c: Tiles, rX: cute.Tensor, rN: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """rX words <- bf(RMS(x; norm)) of the lane's token; a barrier inside."""
    square = Float32(0.0)
    for v in cutlass.range_constexpr(2 * g.spans):
        for e in cutlass.range_constexpr(4):
            a, b = low(rX[e, v]), high(rX[e, v])
            square += a * a + b * b
    square = lanes_sum(square, 4)
    token = c.lane // 4
    if token < op.tokens and c.lane % 4 == 0:
        c.red[token * STRIDE + c.warp] = square
    consumers(op)
    total = Float32(0.0)
    if token < op.tokens:
        for w in cutlass.range_constexpr(g.active):
            total += c.red[token * STRIDE + w]
    scale = cute.math.rsqrt(total / g.k + op.d.eps)
    for v in cutlass.range_constexpr(2 * g.spans):
        for e in cutlass.range_constexpr(4):
            a = low(rX[e, v]) * scale * low(rN[e, v])
            rX[e, v] = pack_bf16(a, high(rX[e, v]) * scale * high(rN[e, v]))


@cute.jit
def norm_alone(c: Tiles, layer: Int32, rN: cute.Tensor, op: cutlass.Constexpr):
    """c.vec = bf(RMS(z; norm)) of a single token, rN this thread's words of norm. Ends with a barrier."""
    vecs = op.d.latent // 8
    many = -(-vecs // op.threads)
    start = place(c, "z", layer, op)
    r = cute.make_rmem_tensor(cute.make_layout((4, many)), Uint32)
    r.fill(0)
    square = Float32(0.0)
    for v in cutlass.range_constexpr(many):
        peek(start + Int64(within(c.tid + v * op.threads, vecs)) * 16, r[None, v])
    for v in cutlass.range_constexpr(many):
        i = c.tid + v * op.threads
        sure(start + Int64(within(i, vecs)) * 16, r[None, v], 2, op)
        if i >= vecs:
            r[None, v].fill(0)
        for e in cutlass.range_constexpr(4):
            a, b = low(r[e, v]), high(r[e, v])
            square += a * a + b * b
    square = lanes_sum(square, 32)
    if c.lane == 0:
        c.red[c.warp] = square
    consumers(op)
    total = Float32(0.0)
    for w in cutlass.range_constexpr(op.warps):
        total += c.red[w]
    scale = cute.math.rsqrt(total / op.d.latent + op.d.eps)
    for v in cutlass.range_constexpr(many):
        i = c.tid + v * op.threads
        for e in cutlass.range_constexpr(4):
            a = low(r[e, v]) * scale * low(rN[e, v])
            r[e, v] = pack_bf16(a, high(r[e, v]) * scale * high(rN[e, v]))
        if i < vecs:
            cute.autovec_copy(r[None, v], cute.local_tile(c.vec, (4,), (i,)))
    consumers(op)


@cute.jit
def norm_words_alone(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """This thread's words of the latent's norm, for a single token."""
    many = -(-op.d.latent // 8 // op.threads)
    rN = cute.make_rmem_tensor(cute.make_layout((4, many)), Uint32)
    rN.fill(0)
    for v in cutlass.range_constexpr(many):
        i = within(c.tid + v * op.threads, op.d.latent // 8)
        words_at(field(c, layer, T["latent_norm"], COUNT_T), i, rN[None, v])
    return rN


@cute.jit
def tile_up(c: Tiles, layer: Int32, it: Int32, rN: cute.Tensor, op: cutlass.Constexpr):
    """y = bf(bf(RMS(z; latent_norm) W_up^T) + shared) of this CTA's columns, and the next instance's x."""
    d, g, t = op.d, op.tile(op.d.latent, 8), op.tokens
    first, n = share(d.hidden_local, c.cta, op.ctas)
    more = layer + 1 < d.layers
    after = layer + 1 if more else layer
    gX = at(BFloat16, field(c, after, T["x"], COUNT_T), t * d.hidden)
    gY = at(BFloat16, field(c, layer, T["y"], COUNT_T), t * d.hidden)
    many = -(-(-(-d.hidden_local // op.ctas) * t) // op.threads)
    rNext = cute.make_rmem_tensor(cute.make_layout((many,)), Float32)
    rNext.fill(0.0)
    for k in cutlass.range_constexpr(many):
        i = within(c.tid + k * op.threads, n * t)
        rNext[k] = gX[i % t * d.hidden + first + i // t].to(Float32)
    if cutlass.const_expr(op.alone):
        norm_alone(c, layer, rN, op)
        rX = from_vec(c, 0, g)
    else:
        rX = take_box(c, place(c, "z", layer, op), g, op)
        tile_norm(c, rX, rN, g, op)
    it = drain_tiles(c, it, n, rX, g, op)
    consumers(op)
    for k in cutlass.range_constexpr(many):
        i = c.tid + k * op.threads
        if i < n * t:
            y = round_bf16(round_bf16(gathered(c, i, g.active)) + c.own[i])
            column = i % t * d.hidden + first + i // t
            gY[column] = y.to(BFloat16)
            if more:
                send(c, "x", layer + 1, column, rNext[k] + y, op)
    return it


@cute.jit
def tail_columns(
    c: Tiles, layer: Int32, i0: Int32, threads: cutlass.Constexpr, op: cutlass.Constexpr
):
    """The gathered columns of y and of the next instance's x, a share per CTA, by `threads` threads."""
    d, t = op.d, op.tokens
    vecs = (d.hidden - d.hidden_local) // 8
    if cutlass.const_expr(vecs > 0):
        first, n = share(vecs * t, c.cta, op.ctas)
        rY = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        far = field(c, layer, T["remote_delta"], COUNT_T)
        for i in cutlass.range(first + i0, first + n, threads, unroll=1):
            m, v = i // vecs, i % vecs
            to = Int64(m * d.hidden + d.hidden_local + 8 * v) * 2
            words_at(far, i, rY)
            words_at(field(c, within(layer + 1, d.layers), T["x"], COUNT_T) + to, Int32(0), rX)
            store16(field(c, layer, T["y"], COUNT_T) + to, rY)
            if layer + 1 < d.layers:
                for e in cutlass.range_constexpr(4):
                    rX[e] = add_bf16x2(rX[e], rY[e])
                store16(place(c, "x", layer + 1, op) + to, rX)


@cute.jit
def first_x(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """rX[4, steps] of this lane's token: from the inputs in the first instance, else from its box."""
    g = op.tile(op.d.hidden, 16)
    start = place(c, "x", layer, op)
    start = field(c, layer, T["x"], COUNT_T) if layer == 0 else start
    if cutlass.const_expr(op.alone):
        to_vec(c, start, 0, op.d.hidden, op)
        consumers(op)
        rX = from_vec(c, 0, g)
    else:
        rX = take_box(c, start, g, op)
    return rX


@cute.jit
def tile_front_part(
    c: Tiles, layer: Int32, edge: Int32, it: Int32, given: tuple, op: cutlass.Constexpr
):
    """Up to the shared expert: the routing is known to whoever waits for it, rL is the latent."""
    mIds, chosen = given
    rX = first_x(c, layer, op)
    timeline.mark(c.track, "router", layer)
    it = tile_router(c, layer, it, rX, op)
    tell(c, op, ROUTE)
    timeline.mark(c.track, "front", layer)
    it = tile_front(c, layer, it, rX, op)
    tell(c, op)
    rFar = far_sums(c, layer, op)
    if cutlass.const_expr(not op.alone):
        timeline.mark(c.track, "edge logits", layer, kind="edge")
        rBias = bias_of(c, layer, op)
        tail_columns(c, layer, c.tid, op.threads, op)
        meet(c, layer + 1, op, ROUTE)
        timeline.mark(c.track, "choose", layer)
        choose_experts(c, layer, rBias, chosen, mIds, op)
    timeline.mark(c.track, "edge front", layer, kind="edge")
    meet(c, edge + 1, op)
    timeline.mark(c.track, "shared down", layer)
    g = op.tile(op.d.shared_dim, 16)
    if cutlass.const_expr(op.alone):
        inner_alone(c, layer, op)
        it = tile_shared(c, layer, it, from_vec(c, 0, g), rFar, op)
        rL = latent_alone(c, op)
    else:
        rL = start_latent(c, layer, op)
        it = tile_shared(c, layer, it, take_box(c, place(c, "hs", layer, op), g, op), rFar, op)
        end_latent(c, layer, rL, op)
    return it, edge + 1, rL


@cute.jit
def tile_moe(c: Tiles, layer: Int32, edge: Int32, it: Int32, given: tuple, op: cutlass.Constexpr):
    """The FFN of one instance; its y and the next one's x are there after the edge that is told of last."""
    it, edge, rL = tile_front_part(c, layer, edge, it, given, op)
    if cutlass.const_expr(op.alone):
        timeline.mark(c.track, "routing", layer, kind="wait")
        cute.arch.mbarrier_wait(c.routed, layer & 1)
    timeline.mark(c.track, "experts up", layer)
    it = tiles_up(c, layer, it, rL, op)
    tell(c, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    rRemote = others_sums(c, layer, op)
    meet(c, edge, op)
    timeline.mark(c.track, "experts down", layer)
    it = tiles_down(c, layer, it, rRemote, op)
    tell(c, op)
    edge += 1
    timeline.mark(c.track, "edge z", layer, kind="edge")
    rN = (
        norm_words_alone(c, layer, op) if cutlass.const_expr(op.alone) else norm_words(c, layer, op)
    )
    meet(c, edge, op)
    timeline.mark(c.track, "up projection", layer)
    it = tile_up(c, layer, it, rN, op)
    return it, edge


@cute.jit
def route_layers(c: Tiles, mIds: cute.Tensor, op: cutlass.Constexpr):
    """The routing warp of a single token; it also does what nobody waits for."""
    for layer in cutlass.range(op.d.layers, unroll=1):
        tail_columns(c, layer, c.lane, 32, op)
        clear(c, layer, op)
        ids = at(Int32, mIds.iterator.toint() + Int64(layer * op.pairs * 4), op.pairs)
        route_alone(c, layer, ids, op)
