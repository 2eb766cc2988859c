"""Persistent decode kernel: one cooperative launch for a run of layers, one row; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across layers and edges, so that memory stays busy while
consumers wait for each other; only the routed experts wait, for their ids. Consumers go from one half of a layer to the
next in one loop, so that AttnRes exists once in the code. What a CTA sends to others says itself that it is there
(boxes), and counters only hint that it is worth looking; nothing is fenced but the plain buffers of dense FFNs and the
last edge, after which what all have read is written.

With `units` a warp of its own chooses experts and brings what a layer needs early into L2, and with `packed` too their
codes come from copies whose bits lie better (`tile_pack`: 1.85 GB more a layer at tp8, for up to 16 layers). `hungry`,
`couples`, `bank` and `idle` are explained at `plan.Op`, `dots` and `hold` at `unit_plan.DecodeOp`; docs/kernels-log.md
has what each was made for.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.decode_bring import choose_all, produce
from targets.kimi_k3.seeds.persistent.device import Ctx, at, field, vector, words_at
from targets.kimi_k3.seeds.persistent.dots import (
    ask_dots,
    early_dots,
    late_dots,
    open_dots,
)
from targets.kimi_k3.seeds.persistent.edges import arrive, hint, leave, wait
from targets.kimi_k3.seeds.persistent.exchange import close_inbox, inbox, open_inbox
from targets.kimi_k3.seeds.persistent.ffn import ffn
from targets.kimi_k3.seeds.persistent.fields import (
    COUNT,
    IS_DENSE,
    IS_MLA,
    F,
    kind,
    layer_tensors,
    table,
)
from targets.kimi_k3.seeds.persistent.halves import (
    Io,
    add,
    coming,
    half,
    keep,
    keep_row,
    next_half,
    releases,
    store_wide,
)
from targets.kimi_k3.seeds.persistent.kda_half import kda_half
from targets.kimi_k3.seeds.persistent.kda_out import out_projection
from targets.kimi_k3.seeds.persistent.kda_taps import move_taps
from targets.kimi_k3.seeds.persistent.mix import Banks, early, keep_old, late, weigh_vectors
from targets.kimi_k3.seeds.persistent.mla import mla
from targets.kimi_k3.seeds.persistent.mla_cache import cache_of
from targets.kimi_k3.seeds.persistent.moe_dense import Space, dense
from targets.kimi_k3.seeds.persistent.plan import ctas_of, refuse_others
from targets.kimi_k3.seeds.persistent.row_products import hold
from targets.kimi_k3.seeds.persistent.setup import empty_boxes, open_cta
from targets.kimi_k3.seeds.persistent.stages import SHARED_MEMORY, STRIDE
from targets.kimi_k3.seeds.persistent.tile_pack import (
    code_copies,
    copies_fit,
    pack_experts,
    with_copies,
)
from targets.kimi_k3.seeds.persistent.unit_plan import DecodeOp, ring_stage

TUNABLES = {
    "ring_stages": (0, 7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336, 4096, 2560),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 16, 32, 64, 128, 132),
    "in_flight": (1, 2, 0, 3, 4),
    "hungry": (0, 2, 3, 4, 5),
    "burst": (2, 0, 3, 4),
    "twos": (2, 1),
    "units": (1, 0),
    "shared_first": (0, 1),
    "router_first": (1, 0),
    "packed": (1, 0),
    "couples": (2, 1),
    "idle": (0, 1, 2),
    "bank": (0, 1),
    "narrow": (1, 0),
    "spread": (1, 0),
    "brisk": (1, 0),
    "dots": (1, 0),
    "hold": (1, 0),
    "missing": (4, 0, 16, 64),
    "jitter": (0, 16384),
    "spin_limit": (0, 2000000, 200000),
}


@cute.jit
def attention(
    c: Ctx, layer: Int32, number: tuple, at_: tuple, rX: cute.Tensor, io: Io, op: cutlass.Constexpr, nx: Any,
    held: Any,
):  # fmt: skip
    """Box attn of a layer; number: KDAs and MLAs before it in the launch. nx: `columns.Next`, or None without `dots`;
    held: as of `row_products.drain_pairs`."""
    d = op.d
    it, edge = at_
    what = Int32(field(c, layer, F["kind"], COUNT))
    if cutlass.const_expr("K" in d.attn):
        if what & IS_MLA == 0:
            it, edge = kda_half(c, layer, number[0], (it, edge), rX, io.slots, op, nx, held)
    if cutlass.const_expr("M" in d.attn):
        if what & IS_MLA != 0:
            cache = cache_of(io.lengths, io.table, io.mapping, op)
            go = op.rows(d.mla_dim)
            rO = cute.make_rmem_tensor(cute.make_layout((4, go.per)), Uint32)
            it, edge = mla(c, layer, number[1], (it, edge), rX, cache, rO, op, held)
            it = out_projection(c, layer, it, rO, None, go, op, nx)
    return it, edge


@cute.jit
def consume(c: Ctx, io: Io, ws: Space, own: Int64, op: cutlass.Constexpr):
    """own: address of this CTA's bank rows, where they are not kept in shared memory."""
    d, g = op.d, op.wide
    words = cute.make_tensor(c.kept.iterator, cute.make_layout((op.kept_row,)))
    kept = None
    if cutlass.const_expr(op.bank_kept):
        kept = cute.make_tensor(
            c.kept.iterator + op.kept_row, cute.make_layout((d.bank_rows * op.kept_row,))
        )
    banks = Banks(
        Int64(0) if cutlass.const_expr(io.bank_old is None) else io.bank_old.iterator.toint(), own, kept
    )  # fmt: skip
    keep_old(c, banks, op)
    rP = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rP.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(io.x0.iterator.toint(), vector(c, v, g), rP[None, v])
    keep_row(c, rP, words, Int32(0), op)
    if cutlass.const_expr(op.dots):
        open_dots(c, banks, op)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    it, edge, routed, kdas, mlas = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    for step in cutlass.range(2 * d.layers + 1, unroll=1):
        h = half(c, step, io, op)
        timeline.mark(c.track, "early", h.layer)
        held = None
        if cutlass.const_expr(op.held):
            held = (hold(c, it, *coming(c, h, op), op), Boolean(True))
        if cutlass.const_expr(op.dots):
            before = early_dots(c, banks, h, op)
        else:
            before = early(c, banks, h.sources, h.weight, h.out, op)
        if step > 0:
            edge += 1
            timeline.mark(c.track, "edge mix", h.layer, kind="edge")
            if cutlass.const_expr("D" in d.ffn):
                wait(c, edge, op)
            elif h.closing:
                wait(c, edge, op)
            else:
                wait(c, edge, op, acquire=False, missing=op.missing)
        timeline.mark(c.track, "mix", h.layer)
        nx, entries = None, None
        if cutlass.const_expr(op.dots):
            entries = ask_dots(c, h, op)
        rP = add(c, h, routed, words, io, ws, op)
        keep(c, h, rP, banks, io, op)
        if cutlass.const_expr(op.dots):
            late_dots(c, h, entries, rP, before, rX, op)
            nx = next_half(c, h, banks, op)
        else:
            late(c, banks, rP, before, h.sources, h.closing, rX, op)
        if not h.closing:
            what = Int32(field(c, h.layer, F["kind"], COUNT))
            if not h.second:
                it, edge = attention(c, h.layer, (kdas, mlas), (it, edge), rX, io, op, nx, held)
                kdas += Int32(1) if what & IS_MLA == 0 else Int32(0)
                mlas += Int32(1) if what & IS_MLA != 0 else Int32(0)
            else:
                if cutlass.const_expr("D" in d.ffn):
                    if what & IS_DENSE != 0:
                        it, edge = dense(c, h.layer, it, edge, rX, ws, op, nx, held)
                if cutlass.const_expr("E" in d.ffn):
                    if what & IS_DENSE == 0:
                        mIds = at(
                            Int32, io.ids.iterator.toint() + Int64(routed * d.topk * 4), d.topk
                        )
                        it, edge = ffn(c, h.layer, routed, (it, edge), rX, mIds, op, nx, held)
                        routed += 1
            if cutlass.const_expr(not op.dots):
                if releases(c, h, op):
                    arrive(c, op)
                else:
                    hint(c, op)
    if c.cta == 0:
        store_wide(c, rX, io.out.iterator.toint(), op)
    timeline.end(c.track)
    leave(c, edge, (routed, kdas, Int32(d.layers), mlas), op)
    if cutlass.const_expr("K" in d.attn):
        move_taps(c, io.slots, op)
    if cutlass.const_expr(d.gpus > 1):
        close_inbox(c, op)


@cute.kernel
def decode_kernel(
    layers: tuple,
    io: Io,
    ws: Space,
    mBank: cute.Tensor,
    mMail: cute.Tensor,
    mSync: cute.Tensor,
    link: Any,
    phases: Any,
    names: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Grid (ctas), cooperative; op.warps consumer warps, a producer warp and, with units, one that chooses experts."""
    c = open_cta(
        layers, mSync, mMail, phases, names, tuple(kind(op.d, n) for n in range(op.d.layers)), op
    )
    if cutlass.const_expr(op.d.gpus > 1):
        open_inbox(c, *link, op)
    if c.warp == op.warps:
        if c.lane == 0:
            produce(c, io, op)
    elif c.warp > op.warps:
        if cutlass.const_expr(op.units):
            choose_all(c, io, op)
    else:
        size = op.d.hidden * 2 * max(1, op.d.bank_rows - op.d.bank_old)
        consume(c, io, ws, mBank.iterator.toint() + Int64(c.cta) * size, op)


def used(op):
    """Bytes of shared memory of a CTA."""
    ring = op.stages * op.stage + 4 * STRIDE * (op.part_rows + op.reductions)
    return ring + 8 * op.d.layers * COUNT + op.pool + 4 * op.kept_words + 2048


def shape(dims, cfg):
    refuse_others(dims)
    ctas, units = ctas_of(dims, cfg), bool(cfg.units) and dims.gpus == 1
    # who brings what MLA leaves idle must have chosen before the next MLA
    with_experts = all(f == "E" for a, f in zip(dims.attn, dims.ffn, strict=True) if a == "M")
    for stages in (cfg.ring_stages,) if cfg.ring_stages else (7, 6, 5, 4, 3):
        op = DecodeOp(
            dims,
            ctas,
            cfg.consumer_warps,
            ring_stage(dims, ctas, cfg.consumer_warps, cfg.stage_bytes, units),
            stages,
            cfg.spin_limit,
            in_flight=cfg.in_flight,
            jitter=cfg.jitter,
            missing=cfg.missing * ctas // 132,
            kept=True,
            hungry=cfg.hungry,
            burst=cfg.burst,
            twos=cfg.twos,
            couples=cfg.couples,
            idle=cfg.idle if units and with_experts else 0,
            bank=bool(cfg.bank),
            units=units,
            shared_first=bool(cfg.shared_first),
            router_first=bool(cfg.router_first) and units,
            packed=bool(cfg.packed) and units and "E" in dims.ffn and copies_fit(dims),
            narrow=bool(cfg.narrow),
            spread=bool(cfg.spread),
            brisk=bool(cfg.brisk),
            # marks take registers, and where there are none left everything is slow
            hold=bool(cfg.hold) and not cfg.timeline,
        )
        op = replace(op, dots=bool(cfg.dots) and op.bank_held and dims.gpus == 1)
        if used(op) <= SHARED_MEMORY:
            return op
    raise ValueError(f"{used(op)} bytes of shared memory: fewer layers or stages of the ring")


def workspace(dims, cfg):
    op = shape(dims, cfg)
    bf = lambda n: ("bf16", (max(n, 8),), "undefined", "step")  # noqa: E731
    between = code_copies(dims) if op.packed else {}
    between |= {"inbox": inbox(dims)} if dims.gpus > 1 else {}
    return {
        **between,
        "hs": bf(dims.dense_dim), "delta": bf(dims.hidden),
        "bank": bf(8 if op.bank_kept else op.ctas * dims.hidden * max(1, dims.bank_rows - dims.bank_old)),
        "weigh": ("f32", ((2 * dims.layers + 1) * dims.hidden,), "undefined", "persistent"),
        "sync": ("i32", (128,), "zero", "persistent"), "mail": ("i32", (op.mail_words,), "undefined", "persistent"),
    }  # fmt: skip


@cute.jit
def prepare(t, cfg, stream):
    """All boxes empty; products of norms and projections of AttnRes; packed codes."""
    empty_boxes(t.workspace.mail, stream)
    w = t.weights
    if cutlass.const_expr(shape(cfg.dims, cfg).packed):
        moes = tuple(w.layers[n] for n in range(cfg.dims.layers) if cfg.dims.ffn[n] == "E")
        pack_experts(moes, t.workspace.packed, cfg.dims, stream)
    halves = [x for n in range(cfg.dims.layers) for x in (w.layers[n], w.layers[n])]
    norms = [x.mlp_res_norm if k % 2 else x.attn_res_norm for k, x in enumerate(halves)]
    projs = [x.mlp_res_proj if k % 2 else x.attn_res_proj for k, x in enumerate(halves)]
    weigh_vectors(
        (*norms, w.out_res_norm), (*projs, w.out_res_proj), t.workspace.weigh, cfg.dims.hidden, stream
    )  # fmt: skip


@cute.jit
def step(t, cfg, stream):
    """The layers of the run, then h = the closing AttnRes and out = bf(RMS(h; out_norm))."""
    d, op = cfg.dims, shape(cfg.dims, cfg)
    found = [layer_tensors(t, n, d) for n in range(d.layers)]
    if cutlass.const_expr(op.packed):
        found = with_copies(found, t.workspace.packed)
    names, tensors = table(found)
    i, o, w = t.inputs, t.outputs, t.workspace
    has_k, has_m = "K" in d.attn, "M" in d.attn
    io = Io(
        i.x0, i.delta if d.first else None, i.bank if d.first else None, i.slots if has_k else None,
        i.lengths if has_m else None, i.block_table if has_m else None, i.slot_mapping if has_m else None,
        o.bank if d.bank_rows > d.bank_old else None, o.ids if "E" in d.ffn else None, o.prefix, o.out,
        t.weights.out_norm, t.workspace.weigh,
    )  # fmt: skip
    ws = Space(None, w.hs, w.delta, None)
    link = (w.inbox, t.peers[0].workspace.inbox, t.rank) if d.gpus > 1 else None
    decode_kernel(
        tensors, io, ws, w.bank, w.mail, w.sync, link, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.block, 1, 1), stream=stream, cooperative=True,
        min_blocks_per_mp=1,
    )  # fmt: skip
