"""What the decode step brings ahead of its consumers: the producer's list, small vectors and idle memory into L2."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from targets.kimi_k3.seeds.persistent.device import Ctx, at, field
from targets.kimi_k3.seeds.persistent.exchange import own_first
from targets.kimi_k3.seeds.persistent.ffn import fill_ffn
from targets.kimi_k3.seeds.persistent.fields import COUNT, IS_DENSE, IS_MLA, F, vectors
from targets.kimi_k3.seeds.persistent.halves import Io
from targets.kimi_k3.seeds.persistent.mla_cache import cache_of, fill_cache
from targets.kimi_k3.seeds.persistent.moe_fill import fill_dense
from targets.kimi_k3.seeds.persistent.ring import bring, to_l2
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.units import choose_alone


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
