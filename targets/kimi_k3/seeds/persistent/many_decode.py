"""Persistent decode kernel for two to eight tokens of different requests: one cooperative launch for a run of layers.

A producer warp per CTA follows a fixed list of stages across layers and edges: tiles of weight rows, which tensor
cores multiply with all tokens at once, KDA's states and the caches' pages. An expert that several tokens want passes
once. In AttnRes a CTA has one token, in all else a share of the rows of every matrix for all of them.

What CTAs send each other says itself that it is there (boxes), but for the experts' vectors and the partial sums of
MLA, whose edges are fenced. It cannot hang: every CTA arrives at an edge before it waits for it, edges of a line are
waited for in their order, a producer waits only for stages that its own CTA's consumers give back in order and for the
routing, which they publish before they take an expert's first stage; `many_schedule` proves it on the host.

Judged on an H200 at M = 8 (docs/kernels-log.md).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import smem
from targets.kimi_k3.seeds.persistent.boxes import box
from targets.kimi_k3.seeds.persistent.device import Ctx, at, consumers, field
from targets.kimi_k3.seeds.persistent.edges import arrive, hint, leave, wait
from targets.kimi_k3.seeds.persistent.fields import (
    COUNT,
    IS_DENSE,
    IS_MLA,
    F,
    kind,
    layer_tensors,
    table,
)
from targets.kimi_k3.seeds.persistent.halves import Io, half
from targets.kimi_k3.seeds.persistent.kda_bring import open_rows
from targets.kimi_k3.seeds.persistent.kda_taps import move_taps
from targets.kimi_k3.seeds.persistent.many_bring import bring_all_taps, produce_tokens
from targets.kimi_k3.seeds.persistent.many_dense import dense_tokens
from targets.kimi_k3.seeds.persistent.many_kda import kda_tokens, out_tokens, pass_taps
from targets.kimi_k3.seeds.persistent.many_mix import (
    add_token,
    banks_of,
    first_row,
    keep_token,
    load_prefix,
    post_x,
    store_out,
)
from targets.kimi_k3.seeds.persistent.many_mla import mla_tokens
from targets.kimi_k3.seeds.persistent.many_moe import moe_tokens
from targets.kimi_k3.seeds.persistent.many_plan import many_shape
from targets.kimi_k3.seeds.persistent.many_rows import take_tokens
from targets.kimi_k3.seeds.persistent.many_setup import requests_of, tiles_of
from targets.kimi_k3.seeds.persistent.mix import early, late, weigh_vectors
from targets.kimi_k3.seeds.persistent.setup import empty_boxes, lasting, open_cta
from targets.kimi_k3.seeds.persistent.tile_device import Tiles
from targets.kimi_k3.seeds.persistent.tile_pack import (
    code_copies,
    copies_fit,
    pack_experts,
    with_copies,
)

TUNABLES = {
    "ring_stages": (0, 7, 6, 5, 4, 3, 2),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 12, 16, 32, 64, 128, 132),
    "in_flight": (2, 0, 3, 4, 1),
    "packed": (1, 0),
    "jitter": (0, 16384),
    "spin_limit": (0, 2000000, 200000),
}


@cute.jit
def attention_tokens(
    c: Ctx, t: Tiles, layer: Int32, number: tuple, at_: tuple, rX: cute.Tensor, given: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """Box attn of a layer; number: KDAs and MLAs before it in the launch; given: Taps, Requests."""
    d = op.d
    it, edge = at_
    taps, r = given
    mla = Int32(field(c, layer, F["kind"], COUNT)) & IS_MLA
    if cutlass.const_expr("K" in d.attn):
        if mla == 0:
            it, edge = kda_tokens(c, layer, number[0], (it, edge), rX, taps, op)
    if cutlass.const_expr("M" in d.attn):
        if mla != 0:
            rO, it, edge = mla_tokens(c, t, layer, number[1], (it, edge), rX, r, op)
            it = out_tokens(c, layer, it, rO, d.mla_dim, op)
            if cutlass.const_expr("K" in d.attn):
                pass_taps(c, layer, taps, op)
    return it, edge


@cute.jit
def consume_tokens(c: Ctx, t: Tiles, io: Io, own: Int64, given: tuple, op: cutlass.Constexpr):
    """own: address of the prefix and the bank rows that this CTA keeps for itself; given: Taps, Requests, scratch of
    the routing."""
    d, g = op.d, op.wide
    taps, r, chosen = given
    banks = banks_of(c, io, own, op)
    first_row(c, io, own, op)
    it, edge, routed, kdas, mlas = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for step in cutlass.range(2 * d.layers + 1, unroll=1):
        h = half(c, step, io, op)
        timeline.mark(c.track, "early", h.layer)
        before = early(c, banks, h.sources, h.weight, h.out, op)
        rP = load_prefix(c, own, op)
        if step > 0:
            edge += 1
            timeline.mark(c.track, "edge mix", h.layer, kind="edge")
            if cutlass.const_expr("D" in d.ffn):
                wait(c, edge, op)
            elif h.closing:
                wait(c, edge, op)
            else:
                wait(c, edge, op, acquire=False)
        else:
            # where several warps have the same columns, one of them writes the prefix that all have read
            consumers(op)
        timeline.mark(c.track, "mix", h.layer)
        add_token(c, h, routed, rP, io, own, op)
        keep_token(c, h, rP, banks, io, op)
        late(c, banks, rP, before, h.sources, h.closing, rX, op)
        if h.closing:
            store_out(c, rX, io, op)
        else:
            turn, release = step & 1, Boolean(False)
            what = Int32(field(c, h.layer, F["kind"], COUNT))
            post_x(c, rX, turn, op)
            hint(c, op)
            edge += 1
            timeline.mark(c.track, "edge x", h.layer, kind="edge")
            wait(c, edge, op, acquire=False)
            timeline.mark(c.track, "input", h.layer)
            rT = take_tokens(c, box(c, "x", turn, op), op.pitch(d.hidden), d.hidden, op)
            if not h.second:
                it, edge = attention_tokens(
                    c, t, h.layer, (kdas, mlas), (it, edge), rT, (taps, r), op
                )
                kdas += Int32(1) if what & IS_MLA == 0 else Int32(0)
                mlas += Int32(1) if what & IS_MLA != 0 else Int32(0)
            else:
                if cutlass.const_expr("D" in d.ffn):
                    if what & IS_DENSE != 0:
                        it, edge = dense_tokens(c, h.layer, (it, edge), rT, op)
                        release = h.second
                if cutlass.const_expr("E" in d.ffn):
                    if what & IS_DENSE == 0:
                        many = d.rows * d.topk
                        ids = at(Int32, io.ids.iterator.toint() + Int64(routed * many * 4), many)
                        given_ = (ids, chosen)
                        it, edge = moe_tokens(c, t, h.layer, routed, (it, edge), rT, given_, op)
                        routed += 1
            if release or step + 1 == 2 * d.layers:
                arrive(c, op)
            else:
                hint(c, op)
    timeline.end(c.track)
    leave(c, edge, (routed, kdas, Int32(d.layers), mlas), op)


@cute.kernel
def tokens_kernel(
    layers: tuple,
    io: Io,
    mKept: cute.Tensor,
    mMail: cute.Tensor,
    mSync: cute.Tensor,
    phases: Any,
    names: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Grid (ctas), cooperative; op.warps consumer warps, a producer warp, one that brings taps."""
    d = op.d
    c = open_cta(
        layers, mSync, mMail, phases, names, tuple(kind(d, n) for n in range(d.layers)), op
    )
    t = tiles_of(c, layers, names, op)
    many = d.rows * d.topk
    chosen = (smem(Int32, (many,), (1,)), smem(Float32, (many,), (1,)))
    r, taps = None, None
    if cutlass.const_expr("M" in d.attn):
        r = requests_of(c, io.lengths, io.table, io.mapping, op)
    if cutlass.const_expr("K" in d.attn):
        taps = open_rows(c, io.slots, op)
    else:
        cute.arch.sync_threads()
    if c.warp == op.warps:
        produce_tokens(c, t, io, r, op)
    elif c.warp > op.warps:
        if cutlass.const_expr("K" in d.attn):
            bring_all_taps(c, taps, op)
    else:
        size = 2 * d.hidden * (1 + d.bank_rows - d.bank_old)
        own = mKept.iterator.toint() + Int64(c.cta) * size
        consume_tokens(c, t, io, own, (taps, r, chosen), op)
    if cutlass.const_expr("K" in d.attn):
        # behind all roles, where it costs the loop over layers no registers
        if c.warp < op.warps:
            move_taps(c, io.slots, op)


def tokens_shape(dims, cfg):
    """tile_pack is of the candidate's, which the plain sizes do not import."""
    return many_shape(dims, cfg, bool(cfg.packed) and "E" in dims.ffn and copies_fit(dims))


def workspace(dims, cfg):
    op = tokens_shape(dims, cfg)
    own = op.ctas * dims.hidden * (1 + dims.bank_rows - dims.bank_old)
    return {
        **lasting(op), "kept": ("bf16", (own,), "undefined", "step"),
        "weigh": ("f32", ((2 * dims.layers + 1) * dims.hidden,), "undefined", "persistent"),
        **(code_copies(dims) if op.packed else {}),
    }  # fmt: skip


@cute.jit
def prepare(t, cfg, stream):
    """All boxes empty; products of norms and projections of AttnRes; copies of the experts' codes."""
    empty_boxes(t.workspace.mail, stream)
    w = t.weights
    if cutlass.const_expr(tokens_shape(cfg.dims, cfg).packed):
        experts = tuple(w.layers[n] for n in range(cfg.dims.layers) if cfg.dims.ffn[n] == "E")
        pack_experts(experts, t.workspace.packed, cfg.dims, stream)
    halves = [x for n in range(cfg.dims.layers) for x in (w.layers[n], w.layers[n])]
    norms = [x.mlp_res_norm if k % 2 else x.attn_res_norm for k, x in enumerate(halves)]
    projs = [x.mlp_res_proj if k % 2 else x.attn_res_proj for k, x in enumerate(halves)]
    weigh_vectors(
        (*norms, w.out_res_norm), (*projs, w.out_res_proj), t.workspace.weigh, cfg.dims.hidden, stream
    )  # fmt: skip


@cute.jit
def step(t, cfg, stream):
    """The layers of the run, then h = the closing AttnRes and out = bf(RMS(h; out_norm))."""
    d, op = cfg.dims, tokens_shape(cfg.dims, cfg)
    found = [layer_tensors(t, n, d) for n in range(d.layers)]
    if cutlass.const_expr(op.packed):
        found = with_copies(found, t.workspace.packed)
    names, tensors = table(found)
    i, o, w = t.inputs, t.outputs, t.workspace
    has_k, has_m = "K" in d.attn, "M" in d.attn
    io = Io(
        i.x0, i.delta if d.first else None, i.bank if d.first else None, i.slots if has_k else None,
        i.lengths if has_m else None, i.block_table if has_m else None, i.slot_mapping if has_m else None,
        o.bank if d.bank_rows > d.bank_old else None, o.ids if "E" in d.ffn else None, o.prefix,
        o.out, t.weights.out_norm, w.weigh,
    )  # fmt: skip
    tokens_kernel(
        tensors, io, w.kept, w.mail, w.sync, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.block, 1, 1), stream=stream, cooperative=True, min_blocks_per_mp=1,
    )  # fmt: skip
