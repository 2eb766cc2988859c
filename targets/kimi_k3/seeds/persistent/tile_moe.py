"""One FFN of the tile kernel: what the producer brings, the phases of the consumers, the routing warp's work."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.device import at, field
from targets.kimi_k3.seeds.persistent.edges import ROUTE
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_alone import route_alone
from targets.kimi_k3.seeds.persistent.tile_back import (
    norm_words,
    norm_words_alone,
    tail_columns,
    tile_up,
)
from targets.kimi_k3.seeds.persistent.tile_boxes import clear, from_vec, meet, place, take_box, tell
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles
from targets.kimi_k3.seeds.persistent.tile_down import (
    fill_pieces,
    others_sums,
    spread_ahead,
    tiles_down,
)
from targets.kimi_k3.seeds.persistent.tile_front import (
    far_sums,
    first_x,
    tile_front,
    tile_router,
    tile_shared,
)
from targets.kimi_k3.seeds.persistent.tile_route import bias_of, choose_experts
from targets.kimi_k3.seeds.persistent.tile_rows import fill_blocks, fill_tiles
from targets.kimi_k3.seeds.persistent.tile_up import (
    end_latent,
    fill_units,
    inner_alone,
    latent_alone,
    start_latent,
    tiles_up,
)


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
    it = fill_tiles(c, it, rows, n + 2 * pairs, op.tile(d.hidden, 8), op)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    start = field(c, layer, T["shared_down"], COUNT_T)
    it = fill_blocks(c, it, start + Int64(first) * inner, n, op.tile(d.shared_dim, 16), op)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first, n = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        others = start + Int64(d.hidden_local + first) * inner
        it = fill_blocks(c, it, others, n, op.tile(d.shared_dim, 16), op)
    timeline.mark(c.brought, "routing", layer, kind="wait")
    cute.arch.mbarrier_wait(c.routed, layer & 1)
    timeline.mark(c.brought, "bring experts", layer)
    it = fill_units(c, layer, it, op)
    it = fill_pieces(c, layer, it, op)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    back = Int64(2 * d.latent)
    rows = ((field(c, layer, T["latent_up"], COUNT_T) + Int64(first) * back, back, Int32(0), 1),)
    return fill_tiles(c, it, rows, n, op.tile(d.latent, 8), op)


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
    if cutlass.const_expr(op.alone):
        # the warp that routes may write over the last routing
        if c.tid == 0:
            cute.arch.mbarrier_arrive(c.routed + 1)
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
    rW = spread_ahead(c, it, op) if cutlass.const_expr(op.alone and op.ahead > 0) else None
    meet(c, edge, op)
    timeline.mark(c.track, "experts down", layer)
    it = tiles_down(c, layer, it, rRemote, rW, op)
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
