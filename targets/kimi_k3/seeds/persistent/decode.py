"""Persistent decode kernel: one cooperative launch for a run of layers, one row; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across layers and edges, so that memory stays busy while
consumers wait for each other; only the routed experts wait, for their ids.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import add_bf16x2
from targets.kimi_k3.seeds.persistent.device import (
    LAYERS,
    Ctx,
    arrive,
    at,
    box,
    field,
    gathered_from,
    leave,
    turn_of,
    vector,
    wait,
    wide_box,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import (
    COUNT,
    IS_DENSE,
    IS_MLA,
    F,
    kind,
    layer_tensors,
    vectors,
)
from targets.kimi_k3.seeds.persistent.kda import fill_kda, kda, out_projection
from targets.kimi_k3.seeds.persistent.mix import Banks, early, late
from targets.kimi_k3.seeds.persistent.mla import MlaSpace, cache_of, fill_mla, mla
from targets.kimi_k3.seeds.persistent.moe import moe
from targets.kimi_k3.seeds.persistent.moe_dense import Space, dense
from targets.kimi_k3.seeds.persistent.moe_fill import fill_dense, fill_moe
from targets.kimi_k3.seeds.persistent.plan import Op, refuse_others
from targets.kimi_k3.seeds.persistent.setup import empty_boxes, open_cta
from targets.kimi_k3.seeds.persistent.vectors import load_x

TUNABLES = {
    "ring_stages": (7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 16, 32, 64, 128, 132),
    "spin_limit": (0, 200000, 2000000),
}


class Io(NamedTuple):
    """Inputs and outputs that are not of one layer; None where there is none."""

    x0: Any
    delta: Any
    bank_old: Any
    slots: Any
    lengths: Any
    table: Any
    mapping: Any
    bank: Any
    ids: Any
    prefix: Any
    out: Any
    res_norm: Any
    res_proj: Any
    norm: Any


@cute.jit
def prefetch(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """The small vectors of a layer into L2: otherwise their first use costs a trip to memory behind an edge."""
    what = Int32(field(c, layer, F["kind"], COUNT))
    found = vectors(op.d)
    for k in cutlass.range_constexpr(len(found)):
        wanted = what >= 0
        if cutlass.const_expr(found[k][2] == "K"):
            wanted = what & IS_MLA == 0
        elif cutlass.const_expr(found[k][2] == "M"):
            wanted = what & IS_MLA != 0
        elif cutlass.const_expr(found[k][2] == "E"):
            wanted = what & IS_DENSE == 0
        if wanted:
            start = field(c, layer, F[found[k][0]], COUNT)
            for line in cutlass.range(c.cta, -(-found[k][1] // 128), op.ctas, unroll=1):
                cute.arch.inline_ptx(
                    "prefetch.global.L2 [{$r0}];", read_only_args=[start + Int64(line) * 128]
                )


@cute.jit
def produce(c: Ctx, io: Io, op: cutlass.Constexpr):
    """The list of one CTA: all stages in the order in which the consumers take them."""
    d = op.d
    it, routed = Int32(0), Int32(0)
    prefetch(c, Int32(0), op)
    for layer in cutlass.range(d.layers, unroll=1):
        if layer + 1 < d.layers:
            prefetch(c, layer + 1, op)
        what = Int32(field(c, layer, F["kind"], COUNT))
        if cutlass.const_expr("K" in d.attn):
            if what & IS_MLA == 0:
                it = fill_kda(c, layer, it, op)
        if cutlass.const_expr("M" in d.attn):
            if what & IS_MLA != 0:
                it = fill_mla(c, layer, it, cache_of(io.lengths, io.table, io.mapping, op), op)
        if cutlass.const_expr("D" in d.ffn):
            if what & IS_DENSE != 0:
                it = fill_dense(c, layer, it, op)
        if cutlass.const_expr("E" in d.ffn):
            if what & IS_DENSE == 0:
                it = fill_moe(c, layer, it, routed, op)
                routed += 1


@cute.jit
def add_delta(
    c: Ctx, layer: Int32, routed: Int32, rP: cute.Tensor, io: Io, ws: Space, op: cutlass.Constexpr
):
    """rP <- bf(rP + delta): the FFN output of the layer before, FFN with experts number routed - 1 or a dense one."""
    d, g = op.d, op.wide
    rD = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rD.fill(0)
    if layer == 0:
        if cutlass.const_expr(d.first > 0):
            load_x(c, io.delta, rD, g)
    else:
        what = Int32(field(c, layer - 1, F["kind"], COUNT))
        if cutlass.const_expr("D" in d.ffn):
            if what & IS_DENSE != 0:
                load_x(c, ws.delta, rD, g)
        if cutlass.const_expr("E" in d.ffn):
            if what & IS_DENSE == 0:
                start = box(c, "delta", turn_of(c, routed - 1), op)
                gathered_from(c, start, layer - 1, rD, d.hidden_local, op)
    if layer > 0 or d.first > 0:
        for v in cutlass.range_constexpr(g.per):
            for e in cutlass.range_constexpr(4):
                rP[e, v] = add_bf16x2(rP[e, v], rD[e, v])


@cute.jit
def store_wide(c: Ctx, r: cute.Tensor, address: Int64, op: cutlass.Constexpr):
    """This thread's words of a vector of `hidden`; one CTA, one replica."""
    for v in cutlass.range_constexpr(op.wide.per):
        i = vector(c, v, op.wide)
        if i < op.wide.vecs and c.cta == 0 and c.warp < op.wide.width:
            pointer = cute.make_ptr(
                Uint32, address + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
            )
            cute.autovec_copy(r[None, v], cute.make_tensor(pointer, cute.make_layout((4,))))


@cute.jit
def consume(c: Ctx, io: Io, ws: Space, op: cutlass.Constexpr):
    d, g = op.d, op.wide
    old = Int64(0) if cutlass.const_expr(io.bank_old is None) else io.bank_old.iterator.toint()
    new = Int64(0) if cutlass.const_expr(io.bank is None) else io.bank.iterator.toint()
    banks = Banks(old, new)
    rP = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rP.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(io.x0.iterator.toint(), vector(c, v, g), rP[None, v])
    it, edge, routed, kdas = Int32(0), Int32(0), Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        depth = layer + d.first
        opens = depth % d.block == 0
        sources = (depth + d.block - 1) // d.block
        what = Int32(field(c, layer, F["kind"], COUNT))
        first = early(
            c, banks, sources, field(c, layer, F["attn_res_norm"], COUNT), field(c, layer, F["attn_res_proj"], COUNT),
            field(c, layer, F["attn_norm"], COUNT), op,
        )  # fmt: skip
        if layer > 0:
            edge += 1
            timeline.mark(c.track, "edge delta", layer, kind="edge")
            wait(c, edge, op)
        timeline.mark(c.track, "mix", layer)
        add_delta(c, layer, routed, rP, io, ws, op)
        if cutlass.const_expr(d.bank_rows > d.bank_old):
            if opens:
                store_wide(c, rP, new + Int64((depth // d.block - d.bank_old) * d.hidden * 2), op)
        late(c, rP, first, sources, False, rX, op)
        if cutlass.const_expr("K" in d.attn):
            if what & IS_MLA == 0:
                it, edge = kda(c, layer, kdas, (it, edge), rX, io.slots, None, op)
                kdas += 1
        if cutlass.const_expr("M" in d.attn):
            if what & IS_MLA != 0:
                timeline.mark(c.track, "mla", layer)
                cache = cache_of(io.lengths, io.table, io.mapping, op)
                it, edge = mla(c, layer, it, edge, rX, cache, (ws.proj, ws.mla), op)
                go = op.rows(d.mla_dim)
                rO = cute.make_rmem_tensor(cute.make_layout((4, go.per)), Uint32)
                load_x(c, ws.mla.out, rO, go)
                it = out_projection(c, layer, it, rO, None, go, op)
        arrive(c, op)
        timeline.mark(c.track, "early", layer)
        restart = Int32(1) if opens else Int32(0)
        second = early(
            c, banks, sources + restart, field(c, layer, F["mlp_res_norm"], COUNT),
            field(c, layer, F["mlp_res_proj"], COUNT),
            field(c, layer, F["mlp_norm"], COUNT), op,
        )  # fmt: skip
        edge += 1
        timeline.mark(c.track, "edge attn", layer, kind="edge")
        wait(c, edge, op)
        timeline.mark(c.track, "mix 2", layer)
        rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
        rA.fill(0)
        wide_box(c, box(c, "attn", turn_of(c, layer, LAYERS), op), rA, op)
        for v in cutlass.range_constexpr(g.per):
            for e in cutlass.range_constexpr(4):
                rP[e, v] = rA[e, v] if opens else add_bf16x2(rP[e, v], rA[e, v])
        late(c, rP, second, sources + restart, False, rX, op)
        if cutlass.const_expr("D" in d.ffn):
            if what & IS_DENSE != 0:
                it, edge = dense(c, layer, it, edge, rX, ws, op)
        if cutlass.const_expr("E" in d.ffn):
            if what & IS_DENSE == 0:
                mIds = at(Int32, io.ids.iterator.toint() + Int64(routed * d.topk * 4), d.topk)
                it, edge = moe(c, layer, routed, (it, edge), rX, (mIds, None), op)
                routed += 1
        arrive(c, op)
    last = early(
        c, banks, Int32(d.bank_rows),
        io.res_norm.iterator.toint(), io.res_proj.iterator.toint(), io.norm.iterator.toint(), op
    )  # fmt: skip
    edge += 1
    timeline.mark(c.track, "edge delta", d.layers, kind="edge")
    wait(c, edge, op)
    timeline.mark(c.track, "close", d.layers)
    add_delta(c, Int32(d.layers), routed, rP, io, ws, op)
    store_wide(c, rP, io.prefix.iterator.toint(), op)
    late(c, rP, last, Int32(d.bank_rows), True, rX, op)
    store_wide(c, rX, io.out.iterator.toint(), op)
    timeline.end(c.track)
    leave(c, edge, (routed, kdas, Int32(d.layers)), op)


@cute.kernel
def decode_kernel(
    layers: tuple,
    io: Io,
    ws: Space,
    mMail: cute.Tensor,
    mSync: cute.Tensor,
    phases: Any,
    names: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Grid (ctas), cooperative; op.warps consumer warps and one producer warp."""
    c = open_cta(
        layers, mSync, mMail, phases, names, tuple(kind(op.d, n) for n in range(op.d.layers)), op
    )
    if c.warp == op.warps:
        if c.lane == 0:
            produce(c, io, op)
    else:
        consume(c, io, ws, op)


def shape(dims, cfg):
    refuse_others(dims)
    fits = max(1, min(cfg.sms, dims.hidden // 32))
    return Op(
        dims,
        cfg.ctas or fits,
        cfg.consumer_warps,
        cfg.stage_bytes,
        cfg.ring_stages,
        cfg.spin_limit,
    )


def workspace(dims, cfg):
    bf = lambda n: ("bf16", (max(n, 8),), "undefined", "step")  # noqa: E731
    f32 = lambda n: ("f32", (max(n, 8),), "undefined", "step")  # noqa: E731
    found = {
        "proj": bf(dims.a_proj_rows),
        "hs": bf(dims.dense_dim), "delta": bf(dims.hidden), "sync": ("i32", (128,), "zero", "persistent"),
        "mail": ("i32", (shape(dims, cfg).mail_words,), "undefined", "persistent"),
    }  # fmt: skip
    if "M" in dims.attn:
        h, ctas = dims.mla_heads, shape(dims, cfg).ctas
        found |= {
            "q": bf(h * (dims.qk_nope + dims.qk_rope)), "query": bf(h * dims.kv_dim),
            "sums": f32(ctas * h * dims.kv_lora), "stats": f32(ctas * h * 2),
            "lat": bf(h * dims.kv_lora), "values": bf(dims.mla_dim),
        }  # fmt: skip
    return found


@cute.jit
def prepare(t, cfg, stream):
    empty_boxes(t.workspace.mail, stream)


@cute.jit
def step(t, cfg, stream):
    """The layers of the run, then h = the closing AttnRes and out = bf(RMS(h; out_norm))."""
    d, op = cfg.dims, shape(cfg.dims, cfg)
    found = [layer_tensors(t, n, d) for n in range(d.layers)]
    i, o, w = t.inputs, t.outputs, t.workspace
    has_k, has_m = "K" in d.attn, "M" in d.attn
    io = Io(
        i.x0, i.delta if d.first else None, i.bank if d.first else None, i.slots if has_k else None,
        i.lengths if has_m else None, i.block_table if has_m else None, i.slot_mapping if has_m else None,
        o.bank if d.bank_rows > d.bank_old else None, o.ids if "E" in d.ffn else None, o.prefix, o.out,
        t.weights.out_res_norm, t.weights.out_res_proj, t.weights.out_norm,
    )  # fmt: skip
    ms = MlaSpace(w.q, w.query, w.sums, w.stats, w.lat, w.values) if has_m else None
    ws = Space(w.proj, w.hs, w.delta, ms)
    tensors = tuple(tuple(x.values()) for x in found)
    names = tuple(tuple(x) for x in found)
    decode_kernel(
        tensors, io, ws, w.mail, w.sync, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.threads + 32, 1, 1), stream=stream, cooperative=True, min_blocks_per_mp=1,
    )  # fmt: skip
