"""MLA in the persistent kernel: a CTA has a share of the heads' columns, and whole pages of the cache for all heads.

Old cache rows are immutable, so their pages pass the ring like weights, early; the new token's row replaces what the
ring brought for it, in shared memory, and is written to the cache by the CTA that has its page.

Four edges are for all (a, query, partial sums, gated values); the two between CTAs of one head (its query before W_UK,
its latent sum) have no counter: who needs them looks into the boxes until they are there. Nothing here is fenced.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import lanes_max, lanes_sum, round_bf16, sigmoid
from targets.kimi_k3.seeds.persistent.boxes import (
    MLAS,
    box,
    insist,
    insist_half,
    peek,
    peek_half,
    post,
    turn_of,
)
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, field, view
from targets.kimi_k3.seeds.persistent.edges import hint, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.mla_attend import attend, empty_sums
from targets.kimi_k3.seeds.persistent.mla_cache import Cache, entry, load_mail, new_row, orphan
from targets.kimi_k3.seeds.persistent.mla_query import absorb, load_head, load_uk, post_sums
from targets.kimi_k3.seeds.persistent.moe_route import insist_word, peek_word
from targets.kimi_k3.seeds.persistent.products import drain, gathered
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.vectors import load_norm, normalise


@cute.jit
def join(c: Ctx, turn: Int32, cache: Cache, op: cutlass.Constexpr):
    """Box lat = bf(sum over CTAs of weight * sum) of this CTA's head and columns."""
    d = op.d
    each = 16 // op.sums_size
    vectors, groups, pitch = op.groups_of(each)
    turns = -(-op.ctas // groups)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // each, c.cta % op.slices, op.slices)
    apart = op.sums_size * d.mla_heads * d.kv_lora
    parts = cache.pages if cache.pages < op.ctas else Int32(op.ctas)
    sW = view(c, Float32, 0, op.ctas)
    sPart = view(c, Float32, -(-4 * op.ctas // 16) * 16, groups * pitch)
    v, group = c.tid % vectors, c.tid // vectors
    rX = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    rS = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    rS.fill(0.0)
    sums = box(c, "sums", turn, op) + Int64(head * (d.kv_lora // each) + first + v) * 16
    mine = head < d.mla_heads and group < groups and v < n
    if head < d.mla_heads:
        for k in cutlass.range_constexpr(turns):
            s = group + k * groups
            if mine and s < parts:
                peek(sums + Int64(s) * apart, rX[None, k])
        if c.warp == 0:
            weights_of(c, head, parts, sW, turn, op)
        consumers(op)
        for k in cutlass.range_constexpr(turns):
            s = group + k * groups
            if mine and s < parts:
                insist(sums + Int64(s) * apart, rX[None, k], op.sums_size, op)
                for e in cutlass.range_constexpr(4):
                    if cutlass.const_expr(op.narrow):
                        x, y = unpack_f16(rX[e, k])
                        rS[2 * e] = rS[2 * e] + x * sW[s]
                        rS[2 * e + 1] = rS[2 * e + 1] + y * sW[s]
                    else:
                        rS[e] = rS[e] + rX[e, k].bitcast(Float32) * sW[s]
        if group < groups:
            place = (group * pitch + v * each) // 4
            for k in cutlass.range_constexpr(each // 4):
                part = cute.local_tile(rS, (4,), (k,))
                cute.autovec_copy(part, cute.local_tile(sPart, (4,), (place + k,)))
        consumers(op)
        place = (head * d.kv_lora + each * first, each * n)
        post_sums(c, "lat", turn, place, sPart, (groups, pitch), op)


@cute.jit
def unpack_f16(pair: Uint32):
    """The f16 in bits 0..15 and that in bits 16..31, as f32."""
    return cute.arch.inline_ptx(
        """{
        .reg .f16 x, y;
        mov.b32 {x, y}, {$r0};
        cvt.f32.f16 {$w0}, x;
        cvt.f32.f16 {$w1}, y;
        }""",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


@cute.jit
def weights_of(
    c: Ctx, head: Int32, parts: Int32, sW: cute.Tensor, turn: Int32, op: cutlass.Constexpr
):
    """sW[s] = the weight of CTA s's sums of a head, or of what its pages attend to (`narrow`); by one warp."""
    d = op.d
    turns = -(-op.ctas // 32)
    stats = box(c, "stats", turn, op) + Int64(head) * 8
    rS = cute.make_rmem_tensor(cute.make_layout((2, turns)), Float32)
    top = -Float32.inf
    for k in cutlass.range_constexpr(turns):
        s = c.lane + 32 * k
        rS[0, k], rS[1, k] = -Float32.inf, Float32(0.0)
        if s < parts:
            rS[0, k] = peek_word(stats + Int64(s) * (8 * d.mla_heads))
            rS[1, k] = peek_word(stats + Int64(s) * (8 * d.mla_heads) + 4)
    for k in cutlass.range_constexpr(turns):
        s = c.lane + 32 * k
        if s < parts:
            rS[0, k] = insist_word(stats + Int64(s) * (8 * d.mla_heads), rS[0, k], op)
            rS[1, k] = insist_word(stats + Int64(s) * (8 * d.mla_heads) + 4, rS[1, k], op)
        top = cute.arch.fmax(top, rS[0, k])
    top = lanes_max(top)
    total = Float32(0.0)
    for k in cutlass.range_constexpr(turns):
        if c.lane + 32 * k < parts:
            rS[0, k] = cute.math.exp(rS[0, k] - top)
            total += rS[0, k] * rS[1, k]
    total = lanes_sum(total, 32)
    weight = cute.arch.rcp_approx(total)
    for k in cutlass.range_constexpr(turns):
        if c.lane + 32 * k < parts:
            x = rS[0, k] * rS[1, k] if cutlass.const_expr(op.narrow) else rS[0, k]
            sW[c.lane + 32 * k] = x * weight


@cute.jit
def values(c: Ctx, it: Int32, length: Int32, turn: Int32, op: cutlass.Constexpr):
    """Box out = bf(bf(lat W_UV[h]) * sg(gate)) of this CTA's rows of its head."""
    d = op.d
    g = op.rows(d.kv_lora)
    head = c.cta // op.slices
    if head < d.mla_heads:
        first, n = share(d.v_dim, c.cta % op.slices, op.slices)
        gates = box(c, "a", turn, op) + Int64(2 * (d.q_lora + d.kv_dim + head * d.v_dim + first))
        bits = Uint32(0)
        if c.tid < n:
            bits = peek_half(gates + Int64(c.tid) * 2)
        rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
        load_mail(c, box(c, "lat", turn, op) + Int64(head * d.kv_lora) * 2, rX, g, op)
        it = drain(c, it, n, Int32(0), rX, g, op)
        consumers(op)
        if c.tid < n:
            gate = sigmoid(insist_half(gates + Int64(c.tid) * 2, bits, op))
            y = round_bf16(gathered(c, c.tid, g.width)) * gate
            y = y if length > 0 else Float32(0.0)
            post(c, "out", turn, head * d.v_dim + first + c.tid, y, op)
    return it


@cute.jit
def mla(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    cache: Cache,
    rO: cute.Tensor,
    op: cutlass.Constexpr,
    held: Any = None,
):
    """rO words [4, per]: this thread's columns of the gated values of MLA `number` of the launch."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, MLAS)
    timeline.mark(c.track, "a_proj", layer)
    first, n = share(d.a_proj_rows, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, op.wide, op, held)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "a", turn, first + i, gathered(c, i, op.wide.width), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge a", layer, kind="edge")
    g = op.rows(d.q_lora)
    rQ = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rUk = load_uk(c, layer, op)
    rN = load_norm(c, field(c, layer, F["q_a_norm"], COUNT), g)
    wait(c, edge, op, acquire=False, missing=op.missing)
    if cutlass.const_expr(op.idle > 0):
        if c.tid == 0:
            cute.arch.mbarrier_arrive(c.routed + 2)
    timeline.mark(c.track, "q_b", layer)
    a = box(c, "a", turn, op)
    load_mail(c, a, rQ, g, op)
    normalise(c, rQ, rN, g, op)
    first, n = share(d.mla_heads * (d.qk_nope + d.qk_rope), c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rQ, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "q", turn, first + i, gathered(c, i, g.width), op)
    timeline.mark(c.track, "absorb", layer)
    load_head(c, turn, op)
    absorb(c, rUk, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "new row", layer)
    physical = entry(c, c.cta, cache)
    rNew = load_norm(c, field(c, layer, F["kv_a_norm"], COUNT), op.rows(d.kv_lora))
    new_row(c, a, rNew, op)
    consumers(op)
    timeline.mark(c.track, "edge query", layer, kind="edge")
    orphan(c, layer, cache, op)
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "attend", layer)
    it = attend(c, layer, it, cache, physical, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge sums", layer, kind="edge")
    empty_sums(c, turn, op)
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "join", layer)
    join(c, turn, cache, op)
    timeline.mark(c.track, "values", layer)
    it = values(c, it, cache.length, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge out", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "o_proj", layer)
    load_mail(c, box(c, "out", turn, op), rO, op.rows(d.mla_dim), op)
    return it, edge
