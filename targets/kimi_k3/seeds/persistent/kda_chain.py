"""Persistent KDA chain: one cooperative launch for all instances, up to eight tokens; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across instances and edges, so that memory stays busy while
consumers wait for each other; states, taps and the low-rank decay are in registers before the edge that needs them.

It cannot hang: every CTA arrives at an edge before it waits for it and waits for edges in their order, and a producer
waits only for stages that its own CTA's consumers give back in order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.chain import add_before, load_x0, prefetch_vectors, shape
from targets.kimi_k3.seeds.persistent.device import Ctx, at, field, hint, leave, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F, chain_tensors
from targets.kimi_k3.seeds.persistent.kda import fill_kda, kda
from targets.kimi_k3.seeds.persistent.kda_rows import (
    fill_kda_rows,
    fold_taps,
    kda_rows,
    load_rows,
    load_taps,
    seat,
    slots_here,
)
from targets.kimi_k3.seeds.persistent.l2 import Piece, fill_on, fill_tiles_on
from targets.kimi_k3.seeds.persistent.plan import share
from targets.kimi_k3.seeds.persistent.setup import empty_boxes, open_cta

TUNABLES = {
    "ring_stages": (7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336),
    "tiles_from": (2, 1),
    "tile_stages": (6, 12, 5, 4, 3, 2),
    "tile_bytes": (29696, 15360),
    "l2_ahead": (0, 4, 8, 2, 12),
    "direct": (False, True),
    "in_flight": (0, 2, 3, 4, 1, 5, 6),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 12, 16, 32, 64, 128, 132),
    "spin_limit": (0, 200000, 2000000),
}


MOST_ROWS = 8


@cute.jit
def pieces(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """This CTA's rows of in_proj and of o_proj."""
    d = op.d
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    inward = Piece(field(c, layer, F["in_proj"], COUNT) + Int64(first) * (2 * d.hidden), Int32(n))
    first, n = share(d.hidden, c.cta, op.ctas)
    outward = Piece(field(c, layer, F["o_proj"], COUNT) + Int64(first) * (2 * d.kda_dim), Int32(n))
    return inward, outward


@cute.jit
def produce(c: Ctx, op: cutlass.Constexpr):
    d = op.d
    it = Int32(0)
    prefetch_vectors(c, Int32(0), "K", op)
    g, h = op.rows(d.hidden), op.rows(d.kda_dim)
    if cutlass.const_expr(op.tiled):
        g, h = op.tiles(d.hidden), op.tiles(d.kda_dim)
    for layer in cutlass.range(d.layers, unroll=1):
        if layer + 1 < d.layers:
            prefetch_vectors(c, layer + 1, "K", op)
        if cutlass.const_expr(op.ahead == 0):
            if cutlass.const_expr(op.tiled):
                it = fill_kda_rows(c, layer, it, op)
            else:
                it = fill_kda(c, layer, it, op)
        else:
            inward, outward = pieces(c, layer, op)
            following, _ = pieces(c, layer + 1 if layer + 1 < d.layers else layer, op)
            rows = following.rows if layer + 1 < d.layers else Int32(0)
            following = Piece(following.source, rows)
            if cutlass.const_expr(op.tiled):
                it = fill_tiles_on(c, it, (inward, g), (outward, h), op)
                it = fill_tiles_on(c, it, (outward, h), (following, g), op)
            else:
                it = fill_on(c, it, (inward, g), (outward, h), op)
                it = fill_on(c, it, (outward, h), (following, g), op)


@cute.jit
def consume(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    d = op.d
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.wide.per)), Uint32)
    rX.fill(0)
    it, edge = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        load_x0(c, layer, rX, op)
        if layer > 0:
            edge += 1
            timeline.mark(c.track, "edge y", layer, kind="edge")
            wait(c, edge, op, acquire=False)
        timeline.mark(c.track, "sum", layer)
        add_before(c, layer, rX, d.hidden, op)
        y = at(BFloat16, field(c, layer, F["y"], COUNT), d.hidden)
        it, edge = kda(c, layer, layer, (it, edge), rX, slots, y, op)
        hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge y", d.layers, kind="edge")
    wait(c, edge, op)
    timeline.end(c.track)
    leave(c, edge, (Int32(0), Int32(d.layers), Int32(d.layers)), op)


@cute.jit
def consume_rows(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    """As `consume` for several tokens; a CTA sends its columns of the next instance's x instead of y."""
    d = op.d
    it, edge = Int32(0), Int32(0)
    slots_here(c, slots, op)
    taps = fold_taps(c, load_taps(c, Int32(0), seat(c, op), op), op)
    for layer in cutlass.range(d.layers, unroll=1):
        if layer > 0:
            edge += 1
            timeline.mark(c.track, "edge y", layer, kind="edge")
            wait(c, edge, op, acquire=False)
        timeline.mark(c.track, "input", layer)
        rX = load_rows(c, layer, op)
        y = at(BFloat16, field(c, layer, F["y"], COUNT), d.rows * d.hidden)
        it, edge, taps = kda_rows(c, layer, (it, edge), rX, taps, y, op)
        hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge y", d.layers, kind="edge")
    wait(c, edge, op)
    timeline.end(c.track)
    leave(c, edge, (Int32(0), Int32(d.layers), Int32(d.layers)), op)


@cute.kernel
def chain_kernel(
    layers: tuple,
    slots: cute.Tensor,
    mMail: cute.Tensor,
    mSync: cute.Tensor,
    phases: Any,
    names: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Grid (ctas), cooperative; op.warps consumer warps and one producer warp."""
    c = open_cta(layers, mSync, mMail, phases, names, (0,) * op.d.layers, op)
    if c.warp == op.warps:
        if c.lane == 0:
            produce(c, op)
    elif cutlass.const_expr(not op.tiled):
        consume(c, slots, op)
    else:
        consume_rows(c, slots, op)


def workspace(dims, cfg):
    return {
        "mail": ("i32", (shape(dims, cfg, MOST_ROWS).mail_words,), "undefined", "persistent"),
        "sync": ("i32", (128,), "zero", "persistent"),
    }


@cute.jit
def prepare(t, cfg, stream):
    empty_boxes(t.workspace.mail, stream)


@cute.jit
def step(t, cfg, stream):
    """y_i = a of the KDA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    op = shape(cfg.dims, cfg, MOST_ROWS)
    found = [chain_tensors(t, n, cfg.dims) for n in range(cfg.dims.layers)]
    names = tuple(tuple(x) for x in found)
    tensors = tuple(tuple(x.values()) for x in found)
    w = t.workspace
    chain_kernel(
        tensors, t.inputs.slots, w.mail, w.sync, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.threads + 32, 1, 1), stream=stream, cooperative=True, min_blocks_per_mp=1,
    )  # fmt: skip
