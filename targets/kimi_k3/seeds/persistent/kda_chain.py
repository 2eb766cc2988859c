"""Persistent KDA chain: one cooperative launch for all instances, one row; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across instances and edges, so that memory stays busy while
consumers wait for each other; states, taps and the low-rank decay are in registers before the edge that needs them.

It cannot hang: every CTA arrives at an edge before it waits for it and waits for edges in their order, and a producer
waits only for stages that its own CTA's consumers give back in order.
"""

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32

from targets.kimi_k3.seeds.persistent.chain import load_sum, prefetch_vectors, shape
from targets.kimi_k3.seeds.persistent.device import Ctx, arrive, at, field, leave, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F, chain_tensors
from targets.kimi_k3.seeds.persistent.kda import fill_kda, kda
from targets.kimi_k3.seeds.persistent.setup import open_cta

TUNABLES = {
    "ring_stages": (7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336),
    "consumer_warps": (14, 7),
    "ctas": (0, 4, 8, 16, 32, 64, 128, 132),
    "spin_limit": (0, 200000, 2000000),
}


@cute.jit
def produce(c: Ctx, op: cutlass.Constexpr):
    it = Int32(0)
    prefetch_vectors(c, Int32(0), "K", op)
    for layer in cutlass.range(op.d.layers, unroll=1):
        if layer + 1 < op.d.layers:
            prefetch_vectors(c, layer + 1, "K", op)
        it = fill_kda(c, layer, it, op)


@cute.jit
def consume(c: Ctx, slots: cute.Tensor, proj: cute.Tensor, mO: cute.Tensor, op: cutlass.Constexpr):
    d = op.d
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.wide.per)), Uint32)
    rX.fill(0)
    it, edge = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        if layer > 0:
            edge += 1
            wait(c, edge, op)
        load_sum(c, layer, rX, d.hidden, op)
        y = at(BFloat16, field(c, layer, F["y"], COUNT), d.hidden)
        it, edge = kda(c, layer, it, edge, rX, slots, SimpleNamespace(proj=proj, o=mO, attn=y), op)
        arrive(c, op)
    edge += 1
    wait(c, edge, op)
    leave(c, edge, Int32(0), op)


@cute.kernel
def chain_kernel(
    layers: tuple, slots: cute.Tensor, space: Any, mSync: cute.Tensor, names: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """Grid (ctas), cooperative; op.warps consumer warps and one producer warp. space = (proj, o)."""
    c = open_cta(layers, mSync, names, (0,) * op.d.layers, op)
    if c.warp == op.warps:
        if c.lane == 0:
            produce(c, op)
    else:
        consume(c, slots, space[0], space[1], op)


def workspace(dims, cfg):
    return {
        "proj": ("bf16", (dims.in_proj_rows,), "undefined", "step"),
        "o": ("f32", (dims.kda_dim,), "undefined", "step"), "sync": ("i32", (128,), "zero", "persistent"),
    }  # fmt: skip


@cute.jit
def step(t, cfg, stream):
    """y_i = a of the KDA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    op = shape(cfg.dims, cfg)
    w = t.workspace
    found = [chain_tensors(t, n, cfg.dims) for n in range(cfg.dims.layers)]
    chain_kernel(
        tuple(tuple(x.values()) for x in found), t.inputs.slots, (w.proj, w.o), w.sync,
        tuple(tuple(x) for x in found), op,
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.threads + 32, 1, 1), stream=stream, cooperative=True, min_blocks_per_mp=1,
    )  # fmt: skip
