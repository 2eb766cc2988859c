"""The FFN with experts in the decode step, in orders that cover what the chain of FFNs waits for.

`rows`: all warps choose, the shared expert's first half comes after the choice (while experts are chosen and their
first rows are on the way, the ring still has rows to bring) and its second half after the experts' first, so that h
travels meanwhile; who needs the latent or the shared expert's hidden vector looks into its box, without an edge: both
were posted some microseconds before. `units`: a warp of its own chooses while the shared expert's first half is made,
or both halves of it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.boxes import post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, field
from targets.kimi_k3.seeds.persistent.edges import ROUTE, hint, wait
from targets.kimi_k3.seeds.persistent.exchange import tell_rank
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.moe import shared_down, up_projection
from targets.kimi_k3.seeds.persistent.moe_experts import experts_down, experts_up
from targets.kimi_k3.seeds.persistent.moe_fill import fill_down, fill_up
from targets.kimi_k3.seeds.persistent.moe_route import choose, load_bias
from targets.kimi_k3.seeds.persistent.products import drain_wide, gathered
from targets.kimi_k3.seeds.persistent.ring import bring, bulk, fill, stage_free
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.units import (
    ask_latent,
    fill_experts,
    keep_latent,
    units_down,
    units_up,
)
from targets.kimi_k3.seeds.persistent.vectors import load_norm, situ_pair


# ---- producer
@cute.jit
def fill_two(c: Ctx, it: Int32, one: tuple, two: tuple, op: cutlass.Constexpr):
    """Stages of the rows of two matrices of `hidden` columns, those of the second behind those of the first; each =
    (address, rows)."""
    g = op.wide
    for first in cutlass.range(0, one[1] + two[1], g.chunk, unroll=1):
        left = one[1] + two[1] - first
        n = left if left < g.chunk else Int32(g.chunk)
        a = one[1] - first if one[1] > first else Int32(0)
        a = a if a < n else n
        slot = stage_free(c, it, op)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, n * g.row_bytes)
        if a > 0:
            bulk(c, slot, Int32(0), one[0] + Int64(first) * g.row_bytes, a * g.row_bytes, op)
        if n > a:
            source = two[0] + Int64(first + a - one[1]) * g.row_bytes
            bulk(c, slot, a * g.row_bytes, source, (n - a) * g.row_bytes, op)
        it += 1
    return it


@cute.jit
def fill_ffn(c: Ctx, layer: Int32, it: Int32, routing: Int32, op: cutlass.Constexpr):
    """All of one FFN; waits for the routing, number `routing` of the launch, before the routed experts."""
    d = op.d
    row = op.wide.row_bytes
    timeline.mark(c.brought, "bring front", layer)
    first, n = share(d.router_rows, c.cta, op.ctas)
    router = (field(c, layer, F["router"], COUNT) + Int64(first) * row, Int32(n))
    first, n = share(d.latent_rows, c.cta, op.ctas)
    latent = (field(c, layer, F["latent_down"], COUNT) + Int64(first) * row, Int32(n))
    if cutlass.const_expr(op.router_first):
        for part in cutlass.range(2, unroll=1):
            source = router[0] if part == 0 else latent[0]
            it = fill(c, it, source, router[1] if part == 0 else latent[1], op.wide, op)
    else:
        it = fill_two(c, it, router, latent, op)
    if cutlass.const_expr(op.units and op.shared_first):
        for part in cutlass.range(4, unroll=1):
            which = 6 + part if part < 2 else 11 - part
            if part == 3:
                timeline.mark(c.brought, "routing", layer, kind="wait")
                cute.arch.mbarrier_wait(c.routed, routing & 1)
                timeline.mark(c.brought, "bring experts", layer)
                it = fill_experts(c, layer, it, op)
                it = fill_down(c, layer, it, op)
            it = bring(c, layer, it, which, op)
    else:
        for part in cutlass.range(3, unroll=1):
            it = bring(c, layer, it, 6 + part, op)
            if part == 0:
                timeline.mark(c.brought, "routing", layer, kind="wait")
                cute.arch.mbarrier_wait(c.routed, routing & 1)
                timeline.mark(c.brought, "bring experts", layer)
                if cutlass.const_expr(op.units):
                    it = fill_experts(c, layer, it, op)
                else:
                    it = fill_up(c, layer, it, op)
            elif part == 1:
                it = bring(c, layer, it, Int32(9), op)
                it = fill_down(c, layer, it, op)
    return it


# ---- consumers
@cute.jit
def post_front(c: Ctx, layer: Int32, part: Int32, turn: Int32, op: cutlass.Constexpr):
    """This CTA's logits and latent (with `router_first` the latent is a part of its own), or its elements of the shared
    expert's hidden vector; parts lie in `c.part` one behind the other."""
    d, width = op.d, op.wide.width
    first_r, n_r = share(d.router_rows, c.cta, op.ctas)
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    start, n = Int32(0), n_r + n_l
    if cutlass.const_expr(op.router_first):
        start, n = (Int32(0), n_r) if part == 0 else (n_r, n_l)
    if part == op.fronts - 1:
        start, n = n_r + n_l, n_s
    for k in cutlass.range(c.tid, n, op.threads, unroll=1):
        if part == op.fronts - 1:
            post(c, "hs", turn, first_s + k, situ_pair(c, start + 2 * k, width), op)
        else:
            i = start + k
            x = gathered(c, i, width)
            if i < n_r:
                post(c, "logits", turn, first_r + i, x, op)
            else:
                post(c, "latent", turn, first_l + i - n_r, x, op)
                if cutlass.const_expr(d.gpus > 1 and d.latent_sharded):
                    tell_rank(c, "latent", layer, first_l + i - n_r, x)


@cute.jit
def ffn(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    mIds: cute.Tensor,
    op: cutlass.Constexpr,
    nx: Any = None,
    held: Any = None,
):
    """The FFN of a layer with experts, number `number` of the launch; delta is posted, not yet hinted at."""
    it, edge = at_
    turn = turn_of(c, number)
    if cutlass.const_expr(not op.units):
        rBias = load_bias(c, layer, op)
    _, n_r = share(op.d.router_rows, c.cta, op.ctas)
    _, n_l = share(op.d.latent_rows, c.cta, op.ctas)
    _, n_s = share(op.d.shared_dim, c.cta, op.ctas)
    for part in cutlass.range(op.fronts, unroll=1):
        timeline.mark(c.track, "front", layer)
        start, n = Int32(0), n_r + n_l
        if cutlass.const_expr(op.router_first):
            start, n = (Int32(0), n_r) if part == 0 else (n_r, n_l)
        if part == op.fronts - 1:
            start, n = n_r + n_l, n_s
        first = None
        if cutlass.const_expr(held is not None):
            first = (held[0], held[1] and part == 0)
        it = drain_wide(c, it, n, part == op.fronts - 1, start, rX, op, first)
        consumers(op)
        post_front(c, layer, part, turn, op)
        if part == 0:
            hint(c, op, ROUTE)
            if cutlass.const_expr(op.units):
                # the warp that chooses may use the pool again
                if c.tid == 0:
                    cute.arch.mbarrier_arrive(c.routed + 1)
            else:
                timeline.mark(c.track, "edge route", layer, kind="edge")
                wait(c, number + 1, op, ROUTE, False, op.missing)
                timeline.mark(c.track, "choose", layer)
                choose(c, layer, turn, rBias, mIds, op)
        elif cutlass.const_expr(not op.units):
            consumers(op)
    if cutlass.const_expr(op.units):
        it, edge = units(c, layer, number, (it, edge), op)
    else:
        it, edge = rows(c, layer, turn, (it, edge), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge z", layer, kind="edge")
    rN = load_norm(c, field(c, layer, F["latent_norm"], COUNT), op.rows(op.d.latent))
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "up projection", layer)
    it = up_projection(c, layer, rN, turn, it, None, op, nx)
    return it, edge


@cute.jit
def rows(c: Ctx, layer: Int32, turn: Int32, at_: tuple, op: cutlass.Constexpr):
    """Box z, with experts whose pairs of rows warps have whole; the shared expert's second half between theirs."""
    it, edge = at_
    timeline.mark(c.track, "experts up", layer)
    it = experts_up(c, layer, turn, it, op)
    hint(c, op)
    timeline.mark(c.track, "shared down", layer)
    it = shared_down(c, layer, turn, it, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "experts down", layer)
    return experts_down(c, layer, turn, it, op), edge


@cute.jit
def units(c: Ctx, layer: Int32, number: Int32, at_: tuple, op: cutlass.Constexpr):
    """Box z, with experts in units; the shared expert's second half is made while a warp chooses, behind an edge of its
    own (`shared_first`), or, without one, while h travels."""
    it, edge = at_
    turn = turn_of(c, number)
    if cutlass.const_expr(op.shared_first):
        hint(c, op)
        edge += 1
        timeline.mark(c.track, "edge front", layer, kind="edge")
        wait(c, edge, op, acquire=False, missing=op.missing)
        timeline.mark(c.track, "shared down", layer)
        rL = ask_latent(c, layer, turn, op)
        it = shared_down(c, layer, turn, it, op)
    else:
        rL = ask_latent(c, layer, turn, op)
    keep_latent(c, turn, rL, op)
    timeline.mark(c.track, "routing", layer, kind="wait")
    cute.arch.mbarrier_wait(c.routed, number & 1)
    timeline.mark(c.track, "experts up", layer)
    it = units_up(c, turn, it, op)
    hint(c, op)
    if cutlass.const_expr(not op.shared_first):
        timeline.mark(c.track, "shared down", layer)
        it = shared_down(c, layer, turn, it, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "experts down", layer)
    return units_down(c, layer, turn, it, op), edge
