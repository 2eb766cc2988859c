"""What the producer brings of an FFN: the front, routed experts once the routing is known, the up-projection."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.device import Ctx, field, within
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.ring import (
    at_hand_address,
    bulk,
    fill,
    fill_pairs,
    stage_free,
)
from targets.kimi_k3.seeds.persistent.stages import share


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
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        found = []
        for k in cutlass.range_constexpr(op.down_slots):
            source = Int64(c.ids[within(start + k, d.topk)]) * d.latent + first
            codes = field(c, layer, F["w2"], COUNT) + source * g.code_bytes
            scales = field(c, layer, F["w2_scale"], COUNT) + source * g.scale_bytes
            found.append((at_hand_address(codes), at_hand_address(scales)))
        s = stage_free(c, it, op)
        cute.arch.mbarrier_arrive_and_expect_tx(
            c.full + s, many * n * (g.code_bytes + g.scale_bytes)
        )
        for k in cutlass.range_constexpr(op.down_slots):
            if k < many:
                place = Int32(k * piece)
                bulk(c, s, place, found[k][0], n * g.code_bytes, op)
                place = Int32(k * piece + op.down_rows * g.code_bytes)
                bulk(c, s, place, found[k][1], n * g.scale_bytes, op)
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
