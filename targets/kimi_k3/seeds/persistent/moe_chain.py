"""Persistent latent-MoE chain: one cooperative launch for all instances, one row; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across instances and edges, so that memory stays busy while
consumers wait for each other. The router's rows come first and its logits have an edge of their own; by the time the
routing is known, latent-down and the shared expert's matrices are still on their way, so the routed experts follow
them without a gap.

It cannot hang: every CTA arrives at an edge before it waits for it, edges of a line are waited for in their order, and
a producer waits only for stages that its own CTA's consumers give back in order and for the routing, which they
publish before they take the first stage of an expert.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.chain import (
    close,
    post_layer,
    prefetch_vectors,
    shape,
    take_sum,
)
from targets.kimi_k3.seeds.persistent.device import Ctx, at, field, words_at
from targets.kimi_k3.seeds.persistent.fields import COUNT, F, chain_tensors, table
from targets.kimi_k3.seeds.persistent.moe import moe
from targets.kimi_k3.seeds.persistent.moe_fill import fill_moe
from targets.kimi_k3.seeds.persistent.setup import empty_boxes, lasting, open_cta
from targets.kimi_k3.seeds.persistent.stages import share

TUNABLES = {
    "ring_stages": (7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 16, 32, 64, 128, 132),
    "spin_limit": (0, 200000, 2000000),
}


@cute.jit
def produce(c: Ctx, op: cutlass.Constexpr):
    it = Int32(0)
    prefetch_vectors(c, Int32(0), "E", op)
    for layer in cutlass.range(op.d.layers, unroll=1):
        if layer + 1 < op.d.layers:
            prefetch_vectors(c, layer + 1, "E", op)
        it = fill_moe(c, layer, it, layer, op)


@cute.jit
def copy_tail(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """The gathered columns of y, a share per CTA. Nobody reads them here."""
    d = op.d
    first, n = share((d.hidden - d.hidden_local) // 8, c.cta, op.ctas)
    rY = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    gY = field(c, layer, F["y"], COUNT) + Int64(d.hidden_local * 2)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        words_at(field(c, layer, F["remote_delta"], COUNT), first + i, rY)
        pointer = cute.make_ptr(
            Uint32, gY + Int64(first + i) * 16, cute.AddressSpace.gmem, assumed_align=16
        )
        cute.autovec_copy(rY, cute.make_tensor(pointer, cute.make_layout((4,))))


@cute.jit
def consume(c: Ctx, mIds: cute.Tensor, op: cutlass.Constexpr):
    d = op.d
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.wide.per)), Uint32)
    rX.fill(0)
    it, edge = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        edge = take_sum(c, layer, edge, rX, d.hidden_local, op)
        ids = at(Int32, mIds.iterator.toint() + Int64(layer * d.topk * 4), d.topk)
        y = at(BFloat16, field(c, layer, F["y"], COUNT), d.hidden)
        it, edge = moe(c, layer, layer, (it, edge), rX, (ids, y), op)
        post_layer(c, layer, op)
        if cutlass.const_expr(d.ranks > 1):
            copy_tail(c, layer, op)
    close(c, edge, (Int32(d.layers), Int32(0), Int32(0)), op)


@cute.kernel
def chain_kernel(
    layers: tuple,
    mIds: cute.Tensor,
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
    else:
        consume(c, mIds, op)


def workspace(dims, cfg):
    return lasting(shape(dims, cfg))


@cute.jit
def prepare(t, cfg, stream):
    empty_boxes(t.workspace.mail, stream)


@cute.jit
def step(t, cfg, stream):
    """y_i = the FFN's delta on x_i = bf(inputs.x[i] + y_{i-1}); outputs.ids[i] is its routing."""
    op = shape(cfg.dims, cfg)
    names, tensors = table(chain_tensors(t, n, cfg.dims) for n in range(cfg.dims.layers))
    w = t.workspace
    chain_kernel(
        tensors, t.outputs.ids, w.mail, w.sync, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.threads + 32, 1, 1), stream=stream, cooperative=True, min_blocks_per_mp=1,
    )  # fmt: skip
