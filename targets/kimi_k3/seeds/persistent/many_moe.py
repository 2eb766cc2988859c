"""The FFN of the decode step for several tokens: the tile kernel's phases, x from its box, delta into one."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from kernelgen import timeline

from targets.kimi_k3.seeds.common import round_bf16
from targets.kimi_k3.seeds.persistent.boxes import post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, field
from targets.kimi_k3.seeds.persistent.edges import ROUTE
from targets.kimi_k3.seeds.persistent.many_rows import fill_matrix
from targets.kimi_k3.seeds.persistent.stages import most, share
from targets.kimi_k3.seeds.persistent.tile_back import norm_words, tile_norm
from targets.kimi_k3.seeds.persistent.tile_boxes import meet, place, take_box, tell
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles
from targets.kimi_k3.seeds.persistent.tile_down import fill_pieces, others_sums, tiles_down
from targets.kimi_k3.seeds.persistent.tile_front import (
    far_sums,
    tile_front,
    tile_router,
    tile_shared,
)
from targets.kimi_k3.seeds.persistent.tile_route import bias_of, choose_experts
from targets.kimi_k3.seeds.persistent.tile_rows import drain_tiles, fill_blocks, fill_tiles, sum_of
from targets.kimi_k3.seeds.persistent.tile_up import end_latent, fill_units, start_latent, tiles_up


@cute.jit
def fill_moe(t: Tiles, layer: Int32, it: Int32, number: Int32, op: cutlass.Constexpr):
    """All of FFN `number` of the launch; waits for the routing before the routed experts."""
    d, top, wide = op.d, op.tiles_op, Int64(2 * op.d.hidden)
    timeline.mark(t.brought, "bring front", layer)
    first, n = share(d.router_rows, t.cta, op.ctas)
    router = field(t, layer, T["router"], COUNT_T) + Int64(first) * wide
    it = fill_matrix(t, it, router, n, d.hidden, op)
    first, n = share(d.latent_rows, t.cta, op.ctas)
    latent = field(t, layer, T["latent_down"], COUNT_T) + Int64(first) * wide
    first, pairs = share(d.shared_dim, t.cta, op.ctas)
    gate = field(t, layer, T["shared_gate_up"], COUNT_T) + Int64(first) * wide
    rows = (
        (latent, wide, Int32(0), 1),
        (gate, wide, n, 2),
        (gate + d.shared_dim * wide, wide, n + 1, 2),
    )
    it = fill_tiles(t, it, rows, n + 2 * pairs, top.tile(d.hidden, 8), top)
    first, n = share(d.hidden_local, t.cta, op.ctas)
    start = field(t, layer, T["shared_down"], COUNT_T)
    inner, g = 2 * d.shared_dim, top.tile(d.shared_dim, 16)
    it = fill_blocks(t, it, start + Int64(first) * inner, n, g, top)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first, n = share(d.hidden - d.hidden_local, t.cta, op.ctas)
        others = start + Int64(d.hidden_local + first) * inner
        it = fill_blocks(t, it, others, n, g, top)
    timeline.mark(t.brought, "routing", layer, kind="wait")
    cute.arch.mbarrier_wait(t.routed, number & 1)
    timeline.mark(t.brought, "bring experts", layer)
    it = fill_units(t, layer, it, top)
    it = fill_pieces(t, layer, it, top)
    first, n = share(d.hidden_local, t.cta, op.ctas)
    up = field(t, layer, T["latent_up"], COUNT_T) + Int64(first) * (2 * d.latent)
    return fill_matrix(t, it, up, n, d.latent, op)


@cute.jit
def front_part(
    t: Tiles, layer: Int32, number: Int32, at_: tuple, rX: cute.Tensor, given: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """Up to the shared expert; the routing is known, rL is the latent. given: ids of the output, scratch for them."""
    it, edge = at_
    mIds, chosen = given
    top = op.tiles_op
    timeline.mark(t.track, "router", layer)
    it = tile_router(t, layer, it, rX, top)
    tell(t, top, ROUTE)
    timeline.mark(t.track, "front", layer)
    it = tile_front(t, layer, it, rX, top)
    tell(t, top)
    rFar = far_sums(t, layer, top)
    timeline.mark(t.track, "edge logits", layer, kind="edge")
    rBias = bias_of(t, layer, top)
    meet(t, number + 1, top, ROUTE)
    timeline.mark(t.track, "choose", layer)
    choose_experts(t, layer, rBias, chosen, mIds, top)
    timeline.mark(t.track, "edge front", layer, kind="edge")
    meet(t, edge + 1, top)
    timeline.mark(t.track, "shared down", layer)
    rL = start_latent(t, layer, top)
    rH = take_box(t, place(t, "hs", layer, top), top.tile(op.d.shared_dim, 16), top)
    it = tile_shared(t, layer, it, rH, rFar, top)
    end_latent(t, layer, rL, top)
    return it, edge + 1, rL


@cute.jit
def moe_tokens(
    c: Ctx, t: Tiles, layer: Int32, number: Int32, at_: tuple, rX: cute.Tensor, given: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """The box delta of FFN `number` of the launch; not hinted at yet."""
    top = op.tiles_op
    it, edge, rL = front_part(t, layer, number, at_, rX, given, op)
    timeline.mark(t.track, "experts up", layer)
    it = tiles_up(t, layer, it, rL, top)
    tell(t, top)
    edge += 1
    timeline.mark(t.track, "edge h", layer, kind="edge")
    rRemote = others_sums(t, layer, top)
    meet(t, edge, top)
    timeline.mark(t.track, "experts down", layer)
    it = tiles_down(t, layer, it, rRemote, None, top)
    tell(t, top)
    edge += 1
    timeline.mark(t.track, "edge z", layer, kind="edge")
    rN = norm_words(t, layer, top)
    meet(t, edge, top)
    timeline.mark(t.track, "up projection", layer)
    it = up_tokens(c, t, layer, number, it, rN, op)
    return it, edge


@cute.jit
def up_tokens(
    c: Ctx, t: Tiles, layer: Int32, number: Int32, it: Int32, rN: cute.Tensor, op: cutlass.Constexpr
):
    """The box delta = bf(bf(RMS(z; latent_norm) W_up^T) + shared) of this CTA's columns of every token."""
    d, top = op.d, op.tiles_op
    g = top.tile(d.latent, 8)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    rX = take_box(t, place(t, "z", layer, top), g, top)
    tile_norm(t, rX, rN, g, top)
    it = drain_tiles(t, it, (Int32(0), n), rX, g, top)
    consumers(op)
    turn = turn_of(c, number)
    for k in cutlass.range_constexpr(-(-most(d.hidden_local, op.ctas) * d.rows // op.threads)):
        i = c.tid + k * op.threads
        if i < n * d.rows:
            y = round_bf16(sum_of(t, i, g.active, top)) + t.own[i]
            place_ = i % d.rows * op.pitch(d.hidden_local) + first + i // d.rows
            post(c, "delta", turn, place_, y, op)
    return it
