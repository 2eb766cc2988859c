"""KDA between its projections for up to eight tokens of different sequences: a CTA has a head and some state rows of
every token, eight lanes a row.

States are stages of the ring and taps lie in shared memory (`kda_bring`), so that in registers nothing is kept over
an edge but words of f_b. What is added to the sum of o_proj is there before its weights.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.boxes import KDAS, LAYERS, box, insist, peek, post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, field
from targets.kimi_k3.seeds.persistent.edges import hint, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda_bring import Taps, fill_states
from targets.kimi_k3.seeds.persistent.kda_places import owned, projected
from targets.kimi_k3.seeds.persistent.kda_rows_out import gated_rows, out_rows
from targets.kimi_k3.seeds.persistent.kda_seat import seat
from targets.kimi_k3.seeds.persistent.kda_update import load_late, update_rows
from targets.kimi_k3.seeds.persistent.stages import most, share
from targets.kimi_k3.seeds.persistent.tensor import (
    anew,
    column,
    drain_tiles,
    fill_tiles,
    further,
    tile_sum,
    token_words,
)


@cute.jit
def fill_kda_rows(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """in_proj and o_proj are packed; the states lie between them."""
    d = op.d
    g = op.tiles(d.hidden)
    first, n = share(projected(d), c.cta, op.ctas)
    source = field(c, layer, F["in_proj"], COUNT) + Int64(first) * g.row_bytes
    it = fill_tiles(c, it, source, n, g, op)
    it = fill_states(c, layer, it, op)
    g = op.tiles(d.kda_dim)
    first, n = share(d.hidden, c.cta, op.ctas)
    source = field(c, layer, F["o_proj"], COUNT) + Int64(first) * g.row_bytes
    return fill_tiles(c, it, source, n, g, op)


@cute.jit
def kda_rows(
    c: Ctx, layer: Int32, at_: tuple, rX: cute.Tensor, taps: Taps, y: Any, op: cutlass.Constexpr
):
    """A KDA instance after its input; not hinted at yet."""
    it, edge = at_
    d = op.d
    g = op.tiles(d.hidden)
    turn = turn_of(c, layer, KDAS)
    rows = projected(d)
    widest = most(rows, op.ctas)
    first, n = share(rows, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    it = drain_tiles(c, it, n, rX, g, op)
    c = anew(c)
    s = seat(c, op)
    late = load_late(c, layer, s, op)
    consumers(op)
    for k in cutlass.range_constexpr(-(-d.rows * widest // op.threads)):
        token, row = owned(c, k, widest, op)
        if token < d.rows and row < n:
            i = token * op.pitch(rows) + first + row
            post(c, "proj", turn, i, tile_sum(c, row, token, op), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge proj", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "update", layer)
    it = update_rows(c, layer, (it, turn), s, (taps, late), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge o", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "o_proj", layer)
    c = anew(c)
    rO = cute.make_rmem_tensor(cute.make_layout((4, op.tiles(d.kda_dim).vectors)), Uint32)
    gated_rows(c, layer, turn, rO, op)
    it = out_rows(c, layer, it, rO, y, op)
    return it, edge


@cute.jit
def load_rows(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """Words [4, vectors]: this thread's columns of its token of x, from the box attn after the first instance."""
    d = op.d
    g = op.tiles(d.hidden)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.vectors)), Uint32)
    rX.fill(0)
    token = c.lane // 4
    if layer == 0:
        token_words(c, field(c, layer, F["x"], COUNT), 2 * d.hidden, rX, g, op)
    elif c.warp < g.width and token < d.rows:
        start = box(c, "attn", turn_of(c, layer - 1, LAYERS), op)
        start += Int64(token * op.pitch(d.hidden) + column(c, g) * 8) * 2
        for v in cutlass.range_constexpr(g.vectors):
            peek(start + 16 * further(v, g), rX[None, v])
        for v in cutlass.range_constexpr(g.vectors):
            insist(start + 16 * further(v, g), rX[None, v], 2, op)
    cute.arch.sync_warp()
    return rX
