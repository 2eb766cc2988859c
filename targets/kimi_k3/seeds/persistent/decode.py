"""Persistent decode kernel: one cooperative launch for a run of layers, one row; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across layers and edges, so that memory stays busy while
consumers wait for each other; only the routed experts wait, for their ids. Consumers go from one half of a layer to the
next in one loop, so that AttnRes exists once in the code. What a CTA sends to others says itself that it is there
(boxes), and counters only hint that it is worth looking; nothing is fenced but the plain buffers of dense FFNs and the
last edge, after which what all have read is written.

With `units` a warp of its own chooses experts and brings what a layer needs early into L2. `hungry`, `couples`, `bank`
and `idle` are explained at `plan.Op`; docs/kernels-log.md has what each was made for.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import add_bf16x2
from targets.kimi_k3.seeds.persistent.device import (
    LAYERS,
    Ctx,
    arrive,
    at,
    box,
    bring,
    field,
    hint,
    insist,
    leave,
    peek,
    to_l2,
    turn_of,
    vector,
    wait,
    words_at,
)
from targets.kimi_k3.seeds.persistent.exchange import (
    close_inbox,
    gather_wide,
    inbox,
    join_ranks,
    open_inbox,
    own_first,
)
from targets.kimi_k3.seeds.persistent.ffn import ffn, fill_ffn
from targets.kimi_k3.seeds.persistent.fields import (
    COUNT,
    IS_DENSE,
    IS_MLA,
    F,
    kind,
    layer_tensors,
    vectors,
)
from targets.kimi_k3.seeds.persistent.kda import out_projection
from targets.kimi_k3.seeds.persistent.kda_half import kda_half
from targets.kimi_k3.seeds.persistent.kda_taps import move_taps
from targets.kimi_k3.seeds.persistent.mix import (
    Banks,
    early,
    keep_old,
    kept_at,
    late,
    weigh_vectors,
)
from targets.kimi_k3.seeds.persistent.mla import cache_of, fill_cache, mla
from targets.kimi_k3.seeds.persistent.moe_dense import Space, dense
from targets.kimi_k3.seeds.persistent.moe_fill import fill_dense
from targets.kimi_k3.seeds.persistent.plan import STRIDE, refuse_others, share
from targets.kimi_k3.seeds.persistent.setup import empty_boxes, open_cta
from targets.kimi_k3.seeds.persistent.unit_plan import DecodeOp, ring_stage
from targets.kimi_k3.seeds.persistent.units import choose_alone
from targets.kimi_k3.seeds.persistent.vectors import load_x

TUNABLES = {
    "ring_stages": (0, 7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336, 2560),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 16, 32, 64, 128, 132),
    "in_flight": (1, 2, 0, 3, 4),
    "hungry": (3, 0, 2, 4, 5),
    "units": (1, 0),
    "shared_first": (0, 1),
    "couples": (2, 1),
    "idle": (0, 1, 2),
    "bank": (0, 1),
    "missing": (0, 4, 16, 64),
    "jitter": (0, 16384),
    "spin_limit": (0, 2000000, 200000),
}


SHARED_MEMORY = 232448
"""Of a CTA on sm_90a, sm_100a and sm_103a."""


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
    norm: Any
    weigh: Any


def small(dims):
    """(field, lines of 128 bytes, mask and value of the kinds of layer that have it) of the small vectors."""
    kinds = {"K": (IS_MLA, 0), "M": (IS_MLA, IS_MLA), "E": (IS_DENSE, 0), "KM": (0, 0)}
    found = [x for x in vectors(dims) if "res_" not in x[0]]
    return [(F[name], -(-size // 128), *kinds[which]) for name, size, which in found]


def parts(c, op):
    """(field, offset, rows, row bytes, rows a stage, bytes to the other half of pairs) of what a CTA's producer brings;
    the order is that of `produce` and of `fill_ffn`."""
    d, found = op.d, []

    def add(name, rows, g, first_row=0, apart=0):
        first, n = share(rows, c.cta, op.ctas)
        found.append((F[name], (first_row + first) * g.row_bytes, n, g.row_bytes, g.chunk, apart))

    none = (0, 0, 0, 16, 1, 0)
    if "K" in d.attn:
        add("in_proj", 4 * d.kda_dim + d.f_rank + d.kda_heads, op.wide)
        add("o_proj", d.hidden, op.rows(d.kda_dim))
    else:
        found += [none] * 2
    if "M" in d.attn:
        add("a_proj", d.a_proj_rows, op.wide)
        add("q_b", d.mla_heads * (d.qk_nope + d.qk_rope), op.rows(d.q_lora))
        head, g = c.cta // op.slices, op.rows(d.kv_lora)
        first, n = share(d.v_dim, c.cta % op.slices, op.slices)
        n = n * Int32(head < d.mla_heads)
        found.append(
            (F["w_uv"], (head * d.v_dim + first) * g.row_bytes, n, g.row_bytes, g.chunk, 0)
        )
        add("o_proj", d.hidden, op.rows(d.mla_dim))
    else:
        found += [none] * 4
    if "E" in d.ffn:
        g = op.rows(d.hidden, pair=True)
        add("shared_gate_up", d.shared_dim, g, 0, d.shared_dim * g.row_bytes)
        g = op.rows(d.shared_dim)
        own, others = own_first(c, op)
        add("shared_down", d.hidden_local, g, own)
        add("latent_up", d.hidden_local, op.rows(d.latent))
        add("shared_down", d.hidden - d.hidden_local, g, others)
    return found


@cute.jit
def write_list(c: Ctx, op: cutlass.Constexpr):
    found = parts(c, op)
    for k in cutlass.range_constexpr(len(found)):
        for j in cutlass.range_constexpr(6):
            c.list[6 * k + j] = Int32(found[k][j])


@cute.jit
def write_small(c: Ctx, op: cutlass.Constexpr):
    lines = small(op.d)
    for k in cutlass.range_constexpr(len(lines)):
        for j in cutlass.range_constexpr(4):
            c.list[60 + 4 * k + j] = Int32(lines[k][j])


@cute.jit
def prefetch(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """The small vectors of a layer into L2: otherwise their first use costs a trip to memory behind an edge.

    By one lane or, with units, by the lanes of a warp."""
    what = Int32(field(c, layer, F["kind"], COUNT))
    first, every = Int32(0), 1
    if cutlass.const_expr(op.units):
        first, every = c.lane, 32
    for k in cutlass.range(first, len(small(op.d)), every, unroll=1):
        row = cute.make_tensor(c.list.iterator + 60 + 4 * k, cute.make_layout((4,)))
        if what & row[2] == row[3]:
            start = c.tab[layer * COUNT + row[0]]
            for line in cutlass.range(c.cta, row[1], op.ctas, unroll=1):
                cute.arch.inline_ptx(
                    "prefetch.global.L2 [{$r0}];", read_only_args=[start + Int64(line) * 128]
                )


@cute.jit
def prefetch_parts(c: Ctx, layer: Int32, io: Io, op: cutlass.Constexpr):
    """What a layer's attention loads without the ring, into L2; CTAs of a head share what they share."""
    d = op.d
    what = Int32(field(c, layer, F["kind"], COUNT))
    head, part = c.cta // op.slices, c.cta % op.slices
    lines = 2 * d.hidden // 32
    first, n = share(lines, c.cta, op.ctas)
    to_l2(io.weigh.iterator.toint() + Int64(layer * lines + first) * 128, n * 128)
    if cutlass.const_expr("K" in d.attn):
        if what & IS_MLA == 0 and head < d.kda_heads:
            slot = io.slots[0] if io.slots[0] > 0 else Int32(0)
            n = d.head_dim
            first, rows = share(n, part, op.slices)
            state = field(c, layer, F["state_S"], COUNT) + Int64(slot) * (4 * d.kda_heads * n * n)
            to_l2(state + Int64(head * n + first) * (4 * n), rows * (4 * n))
            to_l2(
                field(c, layer, F["f_b"], COUNT) + Int64(head * n + first) * (2 * d.f_rank),
                rows * (2 * d.f_rank),
            )
            if part < 3:
                conv = field(c, layer, F["conv"], COUNT)
                to_l2(conv + Int64(part * d.kda_dim + head * n) * 16, Int32(16 * n))
            if part < 9:
                taps = field(c, layer, F["state_conv"], COUNT) + Int64(slot) * (18 * d.kda_dim)
                to_l2(taps + Int64(part * d.kda_dim + head * n) * 2, Int32(2 * n))
    if cutlass.const_expr("M" in d.attn):
        if what & IS_MLA != 0 and head < d.mla_heads:
            first, rows = share(d.qk_nope, part, op.slices)
            row = 2 * d.kv_lora
            to_l2(
                field(c, layer, F["w_uk"], COUNT) + Int64(head * d.qk_nope + first) * row,
                rows * row,
            )


@cute.jit
def produce(c: Ctx, io: Io, op: cutlass.Constexpr):
    """The list of one CTA: all stages in the order in which the consumers take them."""
    d = op.d
    it, routed = Int32(0), Int32(0)
    write_list(c, op)
    if cutlass.const_expr(not op.units):
        write_small(c, op)
    for ahead_ in cutlass.range(d.layers + 1, unroll=1):
        # small things a layer ahead
        if cutlass.const_expr(not op.units):
            if ahead_ < d.layers:
                prefetch(c, ahead_, op)
                prefetch_parts(c, ahead_, io, op)
        layer = ahead_ - 1
        if layer >= 0:
            what = Int32(field(c, layer, F["kind"], COUNT))
            first, many = Int32(0), Int32(2)
            if what & IS_MLA != 0:
                first, many = Int32(2), Int32(4)
            for part in cutlass.range(many, unroll=1):
                it = bring(c, layer, it, first + part, op)
                if cutlass.const_expr("M" in d.attn):
                    if first == 2 and part == 1:
                        cache = cache_of(io.lengths, io.table, io.mapping, op)
                        it = fill_cache(c, layer, it, cache, op)
            if cutlass.const_expr("D" in d.ffn):
                if what & IS_DENSE != 0:
                    it = fill_dense(c, layer, it, op)
            if cutlass.const_expr("E" in d.ffn):
                if what & IS_DENSE == 0:
                    it = fill_ffn(c, layer, it, routed, op)
                    routed += 1


IDLE_PIECE, IDLE_PAUSE = 14336, 1400
"""Bytes that a CTA asks L2 for at once, and nanoseconds until it asks again: a third of what memory can bring."""


@cute.jit
def trickle(c: Ctx, start: Int64, size: Int32, op: cutlass.Constexpr):
    """A piece of memory into L2, slowly; twice as fast if there is more to bring."""
    for at_ in cutlass.range(0, size, IDLE_PIECE, unroll=1):
        to_l2(start + Int64(at_), size - at_ if size - at_ < IDLE_PIECE else Int32(IDLE_PIECE))
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(IDLE_PAUSE // op.idle)])


@cute.jit
def trickle_rows(
    c: Ctx, layer: Int32, name: cutlass.Constexpr, rows: cutlass.Constexpr, row_bytes: cutlass.Constexpr,
    op: cutlass.Constexpr,
):  # fmt: skip
    """This CTA's rows of a matrix."""
    first, n = share(rows, c.cta, op.ctas)
    start = field(c, layer, F[name], COUNT) + Int64(first) * row_bytes
    trickle(c, start, n * row_bytes, op)


@cute.jit
def bring_idle(c: Ctx, layer: Int32, mlas: Int32, op: cutlass.Constexpr):
    """While MLA number `mlas` waits for itself and the ring is full, what comes after it into L2."""
    d = op.d
    cute.arch.mbarrier_wait(c.routed + 2, mlas & 1)
    if c.lane == 0:
        trickle_rows(c, layer, "o_proj", d.hidden, 2 * d.mla_dim, op)
        if cutlass.const_expr(op.idle > 1 and "E" in d.ffn):
            if Int32(field(c, layer, F["kind"], COUNT)) & IS_DENSE == 0:
                trickle_rows(c, layer, "router", d.router_rows, 2 * d.hidden, op)
                trickle_rows(c, layer, "latent_down", d.latent_rows, 2 * d.hidden, op)
    cute.arch.sync_warp()


@cute.jit
def choose_all(c: Ctx, io: Io, op: cutlass.Constexpr):
    """The launch of the warp that chooses experts: what a layer needs early into L2, then its choice."""
    d = op.d
    if c.lane == 0:
        write_small(c, op)
    cute.arch.sync_warp()
    number, mlas = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        prefetch(c, layer, op)
        if c.lane == 0:
            prefetch_parts(c, layer, io, op)
        cute.arch.sync_warp()
        if cutlass.const_expr(op.idle > 0 and "M" in d.attn):
            if Int32(field(c, layer, F["kind"], COUNT)) & IS_MLA != 0:
                bring_idle(c, layer, mlas, op)
                mlas += 1
        if cutlass.const_expr("E" in d.ffn):
            if Int32(field(c, layer, F["kind"], COUNT)) & IS_DENSE == 0:
                mIds = at(Int32, io.ids.iterator.toint() + Int64(number * d.topk * 4), d.topk)
                choose_alone(c, layer, number, mIds, op)
                number += 1


class Half(NamedTuple):
    """Half a layer, or the end of the run: step, its layer, whether it is the second half, the end, and whether the
    prefix starts anew in this layer; sources in the bank, and the addresses of the mix's vectors."""

    step: Any
    layer: Any
    second: Any
    closing: Any
    opens: Any
    sources: Any
    weight: Any
    out: Any


@cute.jit
def half(c: Ctx, step: Int32, io: Io, op: cutlass.Constexpr):
    d = op.d
    layer = step // 2
    second = step % 2 == 1
    closing = step == 2 * d.layers
    depth = layer + d.first
    opens = depth % d.block == 0 and not closing
    sources = (depth + d.block - 1) // d.block
    weight = io.weigh.iterator.toint() + Int64(step) * (4 * d.hidden)
    out = io.norm.iterator.toint()
    if closing:
        sources = Int32(d.bank_rows)
    else:
        out = field(c, layer, F["attn_norm"], COUNT)
        if second:
            sources += Int32(1) if opens else Int32(0)
            out = field(c, layer, F["mlp_norm"], COUNT)
    return Half(step, layer, second, closing, opens, sources, weight, out)


@cute.jit
def add(c: Ctx, h: Half, routed: Int32, sP: cute.Tensor, io: Io, ws: Space, op: cutlass.Constexpr):
    """The prefix, words [4, per]: bf(before + what the half before made), or only that where it starts anew; sP too."""
    d, g = op.d, op.wide
    rD = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rD.fill(0)
    boxed = h.second
    start, others = box(c, "attn", turn_of(c, h.layer, LAYERS), op), Int64(0)
    own = Int32(g.vecs)
    if h.step == 0:
        if cutlass.const_expr(d.first > 0):
            load_x(c, io.delta, rD, g)
    elif not h.second:
        what = Int32(field(c, h.layer - 1, F["kind"], COUNT))
        if cutlass.const_expr("D" in d.ffn):
            if what & IS_DENSE != 0:
                load_x(c, ws.delta, rD, g)
                if cutlass.const_expr(d.gpus > 1):
                    join_ranks(c, "dense", h.layer - 1, rD, g, op)
        if cutlass.const_expr("E" in d.ffn and d.gpus > 1):
            if what & IS_DENSE == 0:
                start = box(c, "delta", turn_of(c, routed - 1), op)
                gather_wide(c, "delta", h.layer - 1, start, d.hidden_local // 8, rD, op)
        elif cutlass.const_expr("E" in d.ffn):
            if what & IS_DENSE == 0:
                boxed = h.step > 0
                start, own = box(c, "delta", turn_of(c, routed - 1), op), Int32(d.hidden_local // 8)
                if cutlass.const_expr(d.hidden_local < d.hidden):
                    others = field(c, h.layer - 1, F["remote_delta"], COUNT)
    if boxed:
        for v in cutlass.range_constexpr(g.per):
            i = vector(c, v, g)
            if i < g.vecs:
                peek((start if i < own else others - Int64(own) * 16) + Int64(i) * 16, rD[None, v])
        for v in cutlass.range_constexpr(g.per):
            i = vector(c, v, g)
            if i < own:
                insist(start + Int64(i) * 16, rD[None, v], 2, op)
        if cutlass.const_expr(d.gpus > 1):
            join_ranks(c, "attn", h.layer, rD, g, op)
    anew = h.second and h.opens
    rP = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for v in cutlass.range_constexpr(g.per):
        cute.autovec_copy(kept_at(c, sP, Int32(0), v, op), rP[None, v])
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            sum = add_bf16x2(rP[e, v], rD[e, v])
            if cutlass.const_expr(d.first == 0):
                sum = rP[e, v] if h.step == 0 else sum
            rP[e, v] = rD[e, v] if anew else sum
    keep_row(c, rP, sP, Int32(0), op)
    return rP


@cute.jit
def store_wide(c: Ctx, r: cute.Tensor, address: Int64, op: cutlass.Constexpr):
    """This thread's words of a vector of `hidden`; one replica of the warps."""
    for v in cutlass.range_constexpr(op.wide.per):
        i = vector(c, v, op.wide)
        if i < op.wide.vecs and c.warp < op.wide.width:
            pointer = cute.make_ptr(
                Uint32, address + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
            )
            cute.autovec_copy(r[None, v], cute.make_tensor(pointer, cute.make_layout((4,))))


@cute.jit
def keep_row(c: Ctx, r: cute.Tensor, sKept: cute.Tensor, row: Int32, op: cutlass.Constexpr):
    """This thread's columns of a vector of `hidden` as a row in shared memory, where only the same thread looks."""
    for v in cutlass.range_constexpr(op.wide.per):
        cute.autovec_copy(r[None, v], kept_at(c, sKept, row, v, op))


@cute.jit
def keep(c: Ctx, h: Half, rP: cute.Tensor, banks: Banks, io: Io, op: cutlass.Constexpr):
    """The prefix where it is wanted later: as a row of the bank, of this CTA's own for its own use and of the output
    by the first CTA, and at the end of the run."""
    d = op.d
    target = io.prefix.iterator.toint()
    wanted = h.closing
    if cutlass.const_expr(d.bank_rows > d.bank_old):
        if h.opens and not h.second:
            number = (h.layer + d.first) // d.block
            row = Int64((number - d.bank_old) * d.hidden * 2)
            target = io.bank.iterator.toint() + row
            wanted = h.step >= 0
            if cutlass.const_expr(banks.kept is None):
                store_wide(c, rP, banks.new + row, op)
            else:
                keep_row(c, rP, banks.kept, number, op)
    if wanted and c.cta == 0:
        store_wide(c, rP, target, op)


@cute.jit
def attention(
    c: Ctx, layer: Int32, number: tuple, at_: tuple, rX: cute.Tensor, io: Io, op: cutlass.Constexpr
):
    """Box attn of a layer; number: KDAs and MLAs before it in the launch."""
    d = op.d
    it, edge = at_
    what = Int32(field(c, layer, F["kind"], COUNT))
    if cutlass.const_expr("K" in d.attn):
        if what & IS_MLA == 0:
            it, edge = kda_half(c, layer, number[0], (it, edge), rX, io.slots, op)
    if cutlass.const_expr("M" in d.attn):
        if what & IS_MLA != 0:
            cache = cache_of(io.lengths, io.table, io.mapping, op)
            go = op.rows(d.mla_dim)
            rO = cute.make_rmem_tensor(cute.make_layout((4, go.per)), Uint32)
            it, edge = mla(c, layer, number[1], (it, edge), rX, cache, rO, op)
            it = out_projection(c, layer, it, rO, None, go, op)
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
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    it, edge, routed, kdas, mlas = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    for step in cutlass.range(2 * d.layers + 1, unroll=1):
        h = half(c, step, io, op)
        timeline.mark(c.track, "early", h.layer)
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
        rP = add(c, h, routed, words, io, ws, op)
        keep(c, h, rP, banks, io, op)
        late(c, banks, rP, before, h.sources, h.closing, rX, op)
        release = Boolean(False)
        if not h.closing:
            what = Int32(field(c, h.layer, F["kind"], COUNT))
            if not h.second:
                it, edge = attention(c, h.layer, (kdas, mlas), (it, edge), rX, io, op)
                kdas += Int32(1) if what & IS_MLA == 0 else Int32(0)
                mlas += Int32(1) if what & IS_MLA != 0 else Int32(0)
            else:
                if cutlass.const_expr("D" in d.ffn):
                    if what & IS_DENSE != 0:
                        it, edge = dense(c, h.layer, it, edge, rX, ws, op)
                        release = h.second
                if cutlass.const_expr("E" in d.ffn):
                    if what & IS_DENSE == 0:
                        mIds = at(
                            Int32, io.ids.iterator.toint() + Int64(routed * d.topk * 4), d.topk
                        )
                        it, edge = ffn(c, h.layer, routed, (it, edge), rX, mIds, op)
                        routed += 1
            if release or step + 1 == 2 * d.layers:
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
    fits = max(1, min(cfg.sms, dims.hidden // 32))
    ctas, units = cfg.ctas or fits, bool(cfg.units) and dims.gpus == 1
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
            missing=cfg.missing,
            kept=True,
            hungry=cfg.hungry,
            couples=cfg.couples,
            idle=cfg.idle if units and with_experts else 0,
            bank=bool(cfg.bank),
            units=units,
            shared_first=bool(cfg.shared_first),
        )
        if used(op) <= SHARED_MEMORY:
            return op
    raise ValueError(f"{used(op)} bytes of shared memory: fewer layers or stages of the ring")


def workspace(dims, cfg):
    op = shape(dims, cfg)
    bf = lambda n: ("bf16", (max(n, 8),), "undefined", "step")  # noqa: E731
    between = {"inbox": inbox(dims)} if dims.gpus > 1 else {}
    return {
        **between,
        "hs": bf(dims.dense_dim), "delta": bf(dims.hidden),
        "bank": bf(8 if op.bank_kept else op.ctas * dims.hidden * max(1, dims.bank_rows - dims.bank_old)),
        "weigh": ("f32", ((2 * dims.layers + 1) * dims.hidden,), "undefined", "persistent"),
        "sync": ("i32", (128,), "zero", "persistent"), "mail": ("i32", (op.mail_words,), "undefined", "persistent"),
    }  # fmt: skip


@cute.jit
def prepare(t, cfg, stream):
    """All boxes empty; products of norms and projections of AttnRes."""
    empty_boxes(t.workspace.mail, stream)
    w = t.weights
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
    i, o, w = t.inputs, t.outputs, t.workspace
    has_k, has_m = "K" in d.attn, "M" in d.attn
    io = Io(
        i.x0, i.delta if d.first else None, i.bank if d.first else None, i.slots if has_k else None,
        i.lengths if has_m else None, i.block_table if has_m else None, i.slot_mapping if has_m else None,
        o.bank if d.bank_rows > d.bank_old else None, o.ids if "E" in d.ffn else None, o.prefix, o.out,
        t.weights.out_norm, t.workspace.weigh,
    )  # fmt: skip
    ws = Space(None, w.hs, w.delta, None)
    tensors = tuple(tuple(x.values()) for x in found)
    names = tuple(tuple(x) for x in found)
    link = (w.inbox, t.peers[0].workspace.inbox, t.rank) if d.gpus > 1 else None
    decode_kernel(
        tensors, io, ws, w.bank, w.mail, w.sync, link, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.block, 1, 1), stream=stream, cooperative=True,
        min_blocks_per_mp=1,
    )  # fmt: skip
