"""What the decode step for several tokens brings ahead of its consumers: stages, taps, small vectors into L2."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from targets.kimi_k3.seeds.persistent.device import Ctx, field
from targets.kimi_k3.seeds.persistent.fields import COUNT, IS_DENSE, IS_MLA, F, vectors
from targets.kimi_k3.seeds.persistent.halves import Io
from targets.kimi_k3.seeds.persistent.kda_bring import Taps, copy_taps, fill_states
from targets.kimi_k3.seeds.persistent.kda_places import projected
from targets.kimi_k3.seeds.persistent.kda_seat import seat
from targets.kimi_k3.seeds.persistent.kda_sizes import state_stages
from targets.kimi_k3.seeds.persistent.many_cache import fill_pages, pages_of_cta
from targets.kimi_k3.seeds.persistent.many_dense import fill_dense_tokens
from targets.kimi_k3.seeds.persistent.many_moe import fill_moe
from targets.kimi_k3.seeds.persistent.many_rows import fill_matrix
from targets.kimi_k3.seeds.persistent.many_setup import Requests
from targets.kimi_k3.seeds.persistent.ring import to_l2
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_device import Tiles


def small_of(dims):
    """(field, lines of 128 bytes, mask and value of the kinds of layer that have it) of what a layer's phases load
    without the ring; what comes from other ranks is as much for each token.
    """
    found = [x for x in vectors(dims) if "res_" not in x[0]]
    many = [(n, size * (dims.rows if n.startswith("remote") else 1), k) for n, size, k in found]
    if "K" in dims.attn:
        many.append(("f_b", 2 * dims.kda_dim * dims.f_rank, "K"))
    if "M" in dims.attn:
        many.append(("w_uk", 2 * dims.mla_heads * dims.qk_nope * dims.kv_lora, "M"))
    kinds = {"K": (IS_MLA, 0), "M": (IS_MLA, IS_MLA), "E": (IS_DENSE, 0), "KM": (0, 0)}
    return [(F[n], -(-size // 128), *kinds[k]) for n, size, k in many]


@cute.jit
def fetch_small(c: Ctx, layer: Int32, io: Io, op: cutlass.Constexpr):
    """Small things of a layer into L2, each CTA its lines: otherwise their first use costs a trip to memory."""
    what = Int32(field(c, layer, F["kind"], COUNT))
    lines = 2 * op.d.hidden // 32
    first, n = share(lines, c.cta, op.ctas)
    if c.lane == 0:
        to_l2(io.weigh.iterator.toint() + Int64(layer * lines + first) * 128, n * 128)
    found = small_of(op.d)
    for k in cutlass.range_constexpr(len(found)):
        index, lines, mask, value = found[k]
        if what & mask == value:
            start = c.tab[layer * COUNT + index]
            for line in cutlass.range(c.cta + c.lane * op.ctas, lines, 32 * op.ctas, unroll=1):
                cute.arch.inline_ptx(
                    "prefetch.global.L2 [{$r0}];", read_only_args=[start + Int64(line) * 128]
                )


@cute.jit
def bring_rows(
    c: Ctx, layer: Int32, it: Int32, given: tuple, rows: cutlass.Constexpr, k: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """This CTA's share of a matrix; given: its field, its first row, which part this is and how many there are."""
    f, above, part, parts = given
    first, n = share(rows, part, parts)
    start = field(c, layer, f, COUNT) + Int64(above + first) * (2 * k)
    return fill_matrix(c, it, start, n, k, op)


@cute.jit
def fill_kda_tokens(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    all_ = (Int32(0), c.cta, op.ctas)
    it = bring_rows(c, layer, it, (F["in_proj"], *all_), projected(d), d.hidden, op)
    if c.lane == 0:
        fill_states(c, layer, it, op)
    cute.arch.sync_warp()
    if seat(c, op).head >= 0:
        it += state_stages(op)[3]
    return bring_rows(c, layer, it, (F["o_proj"], *all_), d.hidden, d.kda_dim, op)


@cute.jit
def fill_mla_tokens(c: Ctx, layer: Int32, it: Int32, r: Requests, op: cutlass.Constexpr):
    d = op.d
    all_ = (Int32(0), c.cta, op.ctas)
    it = bring_rows(c, layer, it, (F["a_proj"], *all_), d.a_proj_rows, d.hidden, op)
    rows = d.mla_heads * (d.qk_nope + d.qk_rope)
    it = bring_rows(c, layer, it, (F["q_b"], *all_), rows, d.q_lora, op)
    if c.lane == 0:
        fill_pages(c, layer, it, r, op)
    cute.arch.sync_warp()
    it += pages_of_cta(c, r, op)[1] * op.cache_stages
    head = c.cta // op.slices
    if head < d.mla_heads:
        given = (F["w_uv"], head * d.v_dim, c.cta % op.slices, op.slices)
        it = bring_rows(c, layer, it, given, d.v_dim, d.kv_lora, op)
    return bring_rows(c, layer, it, (F["o_proj"], *all_), d.hidden, d.mla_dim, op)


@cute.jit
def produce_tokens(c: Ctx, t: Tiles, io: Io, r: Any, op: cutlass.Constexpr):
    """All stages of a CTA in the order in which its consumers take them; by a warp."""
    d = op.d
    it, routed = Int32(0), Int32(0)
    fetch_small(c, Int32(0), io, op)
    for layer in cutlass.range(d.layers, unroll=1):
        if layer + 1 < d.layers:
            fetch_small(c, layer + 1, io, op)
        what = Int32(field(c, layer, F["kind"], COUNT))
        if cutlass.const_expr("K" in d.attn):
            if what & IS_MLA == 0:
                it = fill_kda_tokens(c, layer, it, op)
        if cutlass.const_expr("M" in d.attn):
            if what & IS_MLA != 0:
                it = fill_mla_tokens(c, layer, it, r, op)
        if cutlass.const_expr("D" in d.ffn):
            if what & IS_DENSE != 0:
                it = fill_dense_tokens(c, layer, it, op)
        if cutlass.const_expr("E" in d.ffn):
            if what & IS_DENSE == 0:
                it = fill_moe(t, layer, it, routed, op)
                routed += 1


@cute.jit
def bring_all_taps(c: Ctx, taps: Taps, op: cutlass.Constexpr):
    """As `bring_taps` in a stack where some layers have no KDA: for those the page is turned without anything on it."""
    s = seat(c, op)
    if s.head >= 0:
        for layer in cutlass.range(op.d.layers, unroll=1):
            if layer > 0:
                cute.arch.mbarrier_wait(taps.empty, (layer - 1) & 1)
            if Int32(field(c, layer, F["kind"], COUNT)) & IS_MLA == 0:
                copy_taps(c, taps, layer, s, op)
            elif c.lane == 0:
                cute.arch.mbarrier_arrive(taps.full)
            cute.arch.sync_warp()
