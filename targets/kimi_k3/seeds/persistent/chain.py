"""What the persistent chains of one part of the layer share: their input, a sum, and small vectors fetched early."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import add_bf16x2
from targets.kimi_k3.seeds.persistent.boxes import LAYERS, box, gathered_from, turn_of, wide_box
from targets.kimi_k3.seeds.persistent.device import Ctx, field, vector, words_at
from targets.kimi_k3.seeds.persistent.edges import arrive, hint, leave, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F, vectors
from targets.kimi_k3.seeds.persistent.plan import Op, ctas_of, refuse_others


@cute.jit
def prefetch_vectors(c: Ctx, layer: Int32, kind: cutlass.Constexpr, op: cutlass.Constexpr):
    """The small vectors of an instance into L2: otherwise their first use costs a trip to memory behind an edge."""
    found = [
        x for x in vectors(op.d) if kind in x[2] and "mlp" not in x[0] and "attn_" not in x[0][:5]
    ] + [("x", 2 * op.d.hidden, kind)]
    for k in cutlass.range_constexpr(len(found)):
        start = field(c, layer, F[found[k][0]], COUNT)
        for line in cutlass.range(c.cta, -(-found[k][1] // 128), op.ctas, unroll=1):
            cute.arch.inline_ptx(
                "prefetch.global.L2 [{$r0}];", read_only_args=[start + Int64(line) * 128]
            )


@cute.jit
def load_x0(c: Ctx, layer: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """rX words [4, per] = x_i of the inputs; before the edge."""
    for v in cutlass.range_constexpr(op.wide.per):
        i = vector(c, v, op.wide)
        if i < op.wide.vecs:
            words_at(field(c, layer, F["x"], COUNT), i, rX[None, v])


@cute.jit
def add_before(
    c: Ctx, layer: Int32, rX: cute.Tensor, own: cutlass.Constexpr, op: cutlass.Constexpr
):
    """rX <- bf(x_i + y_{i-1}): `own` columns of an FFN's y come from the box delta, others from remote_delta; those of
    a KDA all come from the box attn."""
    g = op.wide
    rY = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rY.fill(0)
    if layer > 0:
        if cutlass.const_expr(op.d.attn == ""):
            start = box(c, "delta", turn_of(c, layer - 1), op)
            gathered_from(c, start, layer - 1, rY, own, op)
        else:
            wide_box(c, box(c, "attn", turn_of(c, layer - 1, LAYERS), op), rY, op)
        for v in cutlass.range_constexpr(g.per):
            for e in cutlass.range_constexpr(4):
                rX[e, v] = add_bf16x2(rX[e, v], rY[e, v])


@cute.jit
def await_y(c: Ctx, layer: Int32, edge: Int32, op: cutlass.Constexpr):
    """The edge behind which y of the instance before is there; before the first is none."""
    if layer > 0:
        edge += 1
        timeline.mark(c.track, "edge y", layer, kind="edge")
        wait(c, edge, op, acquire=False)
    return edge


@cute.jit
def take_sum(
    c: Ctx, layer: Int32, edge: Int32, rX: cute.Tensor, own: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rX = the x of an instance of one token, for which it waits; `own` as in `add_before`."""
    load_x0(c, layer, rX, op)
    edge = await_y(c, layer, edge, op)
    timeline.mark(c.track, "sum", layer)
    add_before(c, layer, rX, own, op)
    return edge


@cute.jit
def close(c: Ctx, edge: Int32, counts: tuple, op: cutlass.Constexpr):
    """The last edge, and what the next launch counts on from; counts as in `leave`."""
    edge += 1
    timeline.mark(c.track, "edge y", op.d.layers, kind="edge")
    wait(c, edge, op)
    timeline.end(c.track)
    leave(c, edge, counts, op)


@cute.jit
def post_layer(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """A layer's results are in their boxes. After the last one's edge what all CTAs have read is written."""
    if layer + 1 < op.d.layers:
        hint(c, op)
    else:
        arrive(c, op)


def shape(dims, cfg, rows=1):
    """`rows`: the most tokens the chain is written for. Tiles have stages of their own size; several tokens need them,
    one takes them if the tunable `tiles_from` says so.
    """
    refuse_others(dims, rows)
    tiled = rows > 1 and dims.rows >= cfg.tiles_from
    return Op(
        dims,
        ctas_of(dims, cfg),
        cfg.tile_warps if tiled else cfg.consumer_warps,
        cfg.tile_bytes if tiled else cfg.stage_bytes,
        cfg.tile_stages if tiled else cfg.ring_stages,
        cfg.spin_limit,
        tiled,
        getattr(cfg, "in_flight", 0),
    )
