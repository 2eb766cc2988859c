"""What comes after the routed experts in the tile kernel: norm, up-projection, y and the next instance's x."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2, high, lanes_sum, low, pack_bf16, round_bf16
from targets.kimi_k3.seeds.persistent.boxes import peek
from targets.kimi_k3.seeds.persistent.device import at, consumers, field, words_at
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_boxes import (
    from_vec,
    place,
    send,
    store16,
    sure,
    take_box,
)
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles, within
from targets.kimi_k3.seeds.persistent.tile_rows import columns_of, drain_tiles, sum_of


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
        c.red[token * op.stride + c.warp] = square
    consumers(op)
    total = Float32(0.0)
    if token < op.tokens:
        for w in cutlass.range_constexpr(g.active):
            total += c.red[token * op.stride + w]
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
    it = drain_tiles(c, it, (0, n), rX, g, op)
    consumers(op)
    for k in cutlass.range_constexpr(many):
        i = c.tid + k * op.threads
        if i < n * t:
            y = round_bf16(round_bf16(sum_of(c, i, g.active, op)) + c.own[i])
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
