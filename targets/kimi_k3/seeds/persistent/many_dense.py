"""The FFN of a layer without experts for several tokens. The model has one such layer, so its two edges are fenced and
its boxes are plain memory."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from kernelgen import timeline

from targets.kimi_k3.seeds.common import round_bf16, situ
from targets.kimi_k3.seeds.persistent.boxes import box
from targets.kimi_k3.seeds.persistent.device import Ctx, at, field
from targets.kimi_k3.seeds.persistent.edges import arrive, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.many_rows import fill_matrix, take_tokens, times, total_of
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_rows import fill_tiles


@cute.jit
def fill_dense_tokens(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """Rows of gate and up in turn, then this CTA's share of the down-projection."""
    d, top, wide = op.d, op.tiles_op, Int64(2 * op.d.hidden)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    gate = field(c, layer, F["dense_gate_up"], COUNT) + Int64(first) * wide
    rows = ((gate, wide, Int32(0), 2), (gate + d.dense_dim * wide, wide, Int32(1), 2))
    it = fill_tiles(c, it, rows, 2 * n, top.tile(d.hidden, 8), top)
    first, n = share(d.hidden, c.cta, op.ctas)
    down = field(c, layer, F["dense_down"], COUNT) + Int64(first) * (2 * d.dense_dim)
    return fill_matrix(c, it, down, n, d.dense_dim, op)


@cute.jit
def dense_tokens(c: Ctx, layer: Int32, at_: tuple, rX: cute.Tensor, op: cutlass.Constexpr):
    """The box dense = the delta of all tokens, complete for who acquires the next edge."""
    it, edge = at_
    d = op.d
    tokens = d.rows
    timeline.mark(c.track, "dense up", layer)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    it = times(c, it, 2 * n, rX, d.hidden, op)
    pitch = op.pitch(d.dense_dim)
    gHidden = at(BFloat16, box(c, "hidden", Int32(0), op), tokens * pitch)
    for i in cutlass.range(c.tid, n * tokens, op.threads, unroll=1):
        row, m = i // tokens, i % tokens
        gate = round_bf16(total_of(c, 2 * row * tokens + m, d.hidden, op))
        up = round_bf16(total_of(c, (2 * row + 1) * tokens + m, d.hidden, op))
        gHidden[m * pitch + first + row] = situ(gate, up).to(BFloat16)
    arrive(c, op)
    edge += 1
    timeline.mark(c.track, "edge hidden", layer, kind="edge")
    wait(c, edge, op)
    timeline.mark(c.track, "dense down", layer)
    rH = take_tokens(c, box(c, "hidden", Int32(0), op), pitch, d.dense_dim, op)
    first, n = share(d.hidden, c.cta, op.ctas)
    it = times(c, it, n, rH, d.dense_dim, op)
    pitch = op.pitch(d.hidden)
    gDelta = at(BFloat16, box(c, "dense", Int32(0), op), tokens * pitch)
    for i in cutlass.range(c.tid, n * tokens, op.threads, unroll=1):
        row, m = i // tokens, i % tokens
        y = total_of(c, i, d.dense_dim, op)
        if cutlass.const_expr(d.ranks > 1):
            gFar = at(Float32, field(c, layer, F["remote_dense"], COUNT), tokens * d.hidden)
            y = round_bf16(y) + gFar[m * d.hidden + first + row]
        gDelta[m * pitch + first + row] = y.to(BFloat16)
    return it, edge
