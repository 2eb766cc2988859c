"""What comes before the routed experts in the tile kernel: router, latent, shared expert."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from targets.kimi_k3.seeds.common import round_bf16, situ
from targets.kimi_k3.seeds.persistent.device import at, consumers, field
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_boxes import from_vec, place, send, take_box, to_vec
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles, within
from targets.kimi_k3.seeds.persistent.tile_rows import drain_tiles, sum_of


@cute.jit
def tile_router(c: Tiles, layer: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """This CTA's logits."""
    d, g, t = op.d, op.tile(op.d.hidden, 8), op.tokens
    first, n = share(d.router_rows, c.cta, op.ctas)
    it = drain_tiles(c, it, (0, n), rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n * t, op.threads, unroll=1):
        send(
            c,
            "logits",
            layer,
            i % t * d.router_rows + first + i // t,
            sum_of(c, i, g.active, op),
            op,
        )
    return it


@cute.jit
def tile_front(c: Tiles, layer: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """Latent and the shared expert's hidden vector, this CTA's share."""
    d, g, t = op.d, op.tile(op.d.hidden, 8), op.tokens
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    it = drain_tiles(c, it, (0, n_l + 2 * n_s), rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, (n_l + n_s) * t, op.threads, unroll=1):
        row, m = i // t, i % t
        if row < n_l:
            send(
                c,
                "latent",
                layer,
                m * d.latent_rows + first_l + row,
                sum_of(c, i, g.active, op),
                op,
            )
        else:
            row -= n_l
            gate = sum_of(c, (n_l + 2 * row) * t + m, g.active, op)
            up = sum_of(c, (n_l + 2 * row + 1) * t + m, g.active, op)
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
    far = d.hidden - d.hidden_local
    first_s, n_s = share(far, c.cta, op.ctas)
    it = drain_tiles(c, it, (0, n), rX, g, op)
    if cutlass.const_expr(far > 0):
        it = drain_tiles(c, it, (n, n_s), rX, g, op)
    consumers(op)
    for k in cutlass.range_constexpr(rFar.shape[0]):
        i = c.tid + k * op.threads
        if i < n * t:
            x = round_bf16(sum_of(c, i, g.active, op))
            c.own[i] = round_bf16(x + rFar[k]) if cutlass.const_expr(d.ranks > 1) else x
    if cutlass.const_expr(far > 0):
        gSend = at(BFloat16, field(c, layer, T["send"], COUNT_T), t * far)
        for i in cutlass.range(c.tid, n_s * t, op.threads, unroll=1):
            x = sum_of(c, n * t + i, g.active, op)
            gSend[i % t * far + first_s + i // t] = x.to(BFloat16)
    consumers(op)
    return it


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
