"""Persistent KDA chain: one cooperative launch for all instances, up to eight tokens; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across instances and edges, so that memory stays busy while
consumers wait for each other; states, taps and the low-rank decay are in registers before the edge that needs them.

At tp8 on an H200 a token takes 30 us an instance, the seed 41; eight take 44 to 45, the seed 51 (docs/kernels-log.md).

It cannot hang: every CTA arrives at an edge before it waits for it and waits for edges in their order, and a producer
waits only for stages that its own CTA's consumers give back in order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.chain import (
    await_y,
    close,
    post_layer,
    prefetch_vectors,
    shape,
    take_sum,
)
from targets.kimi_k3.seeds.persistent.device import Ctx, at, field
from targets.kimi_k3.seeds.persistent.fields import COUNT, F, chain_tensors, table
from targets.kimi_k3.seeds.persistent.kda import fill_kda, kda
from targets.kimi_k3.seeds.persistent.kda_bring import bring_taps, open_rows
from targets.kimi_k3.seeds.persistent.kda_places import projected
from targets.kimi_k3.seeds.persistent.kda_rows import fill_kda_rows, kda_rows, load_rows
from targets.kimi_k3.seeds.persistent.kda_taps import move_taps
from targets.kimi_k3.seeds.persistent.setup import empty_boxes, lasting, open_cta
from targets.kimi_k3.seeds.persistent.tensor import pack_rows

TUNABLES = {
    "ring_stages": (7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336),
    "tiles_from": (2, 1),
    "tile_warps": (14, 8),
    "tile_stages": (6, 5, 10, 12, 4, 3, 2),
    "tile_bytes": (28672, 32768, 16384, 14336),
    "in_flight": (2, 3, 0, 4, 1, 5, 6),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 12, 16, 32, 64, 128, 132),
    "spin_limit": (0, 200000, 2000000),
}


MOST_ROWS = 8


@cute.jit
def produce(c: Ctx, op: cutlass.Constexpr):
    it = Int32(0)
    prefetch_vectors(c, Int32(0), "K", op)
    for layer in cutlass.range(op.d.layers, unroll=1):
        if layer + 1 < op.d.layers:
            prefetch_vectors(c, layer + 1, "K", op)
        if cutlass.const_expr(op.tiled):
            it = fill_kda_rows(c, layer, it, op)
        else:
            it = fill_kda(c, layer, it, op)


@cute.jit
def consume(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    d = op.d
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.wide.per)), Uint32)
    rX.fill(0)
    it, edge = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        edge = take_sum(c, layer, edge, rX, d.hidden, op)
        y = at(BFloat16, field(c, layer, F["y"], COUNT), d.hidden)
        it, edge = kda(c, layer, layer, (it, edge), rX, slots, y, op)
        post_layer(c, layer, op)
    close(c, edge, (Int32(0), Int32(d.layers), Int32(d.layers)), op)
    move_taps(c, slots, op)


@cute.jit
def consume_rows(c: Ctx, taps: tuple, op: cutlass.Constexpr):
    """As `consume` for several tokens; a CTA sends its columns of the next instance's x instead of y. Moves no taps."""
    d = op.d
    it, edge = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        edge = await_y(c, layer, edge, op)
        timeline.mark(c.track, "input", layer)
        rX = load_rows(c, layer, op)
        y = at(BFloat16, field(c, layer, F["y"], COUNT), d.rows * d.hidden)
        it, edge = kda_rows(c, layer, (it, edge), rX, taps, y, op)
        post_layer(c, layer, op)
    close(c, edge, (Int32(0), Int32(d.layers), Int32(d.layers)), op)


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
    """Grid (ctas), cooperative; op.warps consumer warps and one producer warp, of tiles one that brings taps."""
    c = open_cta(layers, mSync, mMail, phases, names, (0,) * op.d.layers, op)
    taps = None
    if cutlass.const_expr(op.tiled):
        taps = open_rows(c, slots, op)
    if c.warp == op.warps:
        if c.lane == 0:
            produce(c, op)
    elif cutlass.const_expr(not op.tiled):
        consume(c, slots, op)
    elif c.warp == op.warps + 1:
        bring_taps(c, taps, op)
    else:
        consume_rows(c, taps, op)
    if cutlass.const_expr(op.tiled):
        # behind all roles: within the consumers' it cost registers in their loop over layers
        if c.warp < op.warps:
            move_taps(c, slots, op)


def workspace(dims, cfg):
    op = shape(dims, cfg, MOST_ROWS)
    packed = {
        "packed_in": (
            "bf16",
            (dims.layers, projected(dims), dims.hidden),
            "undefined",
            "persistent",
        ),
        "packed_out": ("bf16", (dims.layers, dims.hidden, dims.kda_dim), "undefined", "persistent"),
    }
    return {**lasting(op), **(packed if op.tiled else {})}


@cute.jit
def prepare(t, cfg, stream):
    op = shape(cfg.dims, cfg, MOST_ROWS)
    empty_boxes(t.workspace.mail, stream)
    if cutlass.const_expr(op.tiled):
        for n in cutlass.range_constexpr(cfg.dims.layers):
            w = t.weights.layers[n]
            rows = projected(cfg.dims)
            pack_rows(w.in_proj, t.workspace.packed_in[n, None, None], rows, op.ctas, stream)
            rows = cfg.dims.hidden
            pack_rows(w.o_proj, t.workspace.packed_out[n, None, None], rows, op.ctas, stream)


@cute.jit
def step(t, cfg, stream):
    """y_i = a of the KDA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    op = shape(cfg.dims, cfg, MOST_ROWS)
    found = [chain_tensors(t, n, cfg.dims) for n in range(cfg.dims.layers)]
    if cutlass.const_expr(op.tiled):
        for n in cutlass.range_constexpr(cfg.dims.layers):
            found[n]["in_proj"] = t.workspace.packed_in[n, None, None]
            found[n]["o_proj"] = t.workspace.packed_out[n, None, None]
    names, tensors = table(found)
    w = t.workspace
    chain_kernel(
        tensors, t.inputs.slots, w.mail, w.sync, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.threads + (64 if op.tiled else 32), 1, 1),
        stream=stream, cooperative=True, min_blocks_per_mp=1,
    )  # fmt: skip
