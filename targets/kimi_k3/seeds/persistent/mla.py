"""MLA in the persistent kernel: a CTA has a share of the heads' columns, and whole pages of the cache for all heads.

Old cache rows are immutable, so their pages pass the ring like weights, early; the new token's row replaces what the
ring brought for it, in shared memory, and is written to the cache by the CTA that has its page.

Four edges are for all (a, query, partial sums, gated values); the two between CTAs of one head (its query before W_UK,
its latent sum) have no counter: who needs them looks into the boxes until they are there. Nothing here is fenced.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import lanes_max, lanes_sum, round_bf16, sigmoid
from targets.kimi_k3.seeds.mla_attention import mma_16x32
from targets.kimi_k3.seeds.persistent.device import (
    MLAS,
    Ctx,
    at,
    box,
    bulk,
    consumers,
    drain,
    empty_some,
    field,
    gathered,
    hint,
    insist,
    insist_half,
    peek,
    peek_half,
    post,
    post_some,
    put,
    stage_done,
    stage_free,
    stage_full,
    take,
    turn_of,
    unpack,
    vector,
    view,
    wait,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.moe_route import insist_word, peek_word
from targets.kimi_k3.seeds.persistent.plan import most, share
from targets.kimi_k3.seeds.persistent.vectors import load_norm, normalise


class Cache(NamedTuple):
    """table i32 [pages]; pages in sight; length; flat row of the new token, -1 = not inserted."""

    table: Any
    pages: Any
    length: Any
    row: Any


@cute.jit
def cache_of(lengths: cute.Tensor, table: cute.Tensor, mapping: cute.Tensor, op: cutlass.Constexpr):
    length = lengths[0] if lengths[0] > 0 else Int32(0)
    gTable = cute.make_tensor(table.iterator, cute.make_layout((op.d.pages_per_request,)))
    return Cache(gTable, (length + op.d.page - 1) // op.d.page, length, Int32(mapping[0]))


# ---- producer


@cute.jit
def fill_cache(c: Ctx, layer: Int32, it: Int32, cache: Cache, op: cutlass.Constexpr):
    """This CTA's pages, `cache_rows` tokens a stage."""
    d = op.d
    size = d.page * d.kv_dim * 2
    for p in cutlass.range(c.cta, cache.pages, op.ctas, unroll=1):
        source = field(c, layer, F["kv"], COUNT) + Int64(cache.table[p]) * size
        for j in cutlass.range_constexpr(op.cache_stages):
            part = min(op.cache_rows, d.page - j * op.cache_rows) * d.kv_dim * 2
            s = stage_free(c, it, op)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + s, part)
            bulk(c, s, Int32(0), source + j * op.cache_rows * d.kv_dim * 2, Int32(part), op)
            it += 1
    return it


# ---- consumers


@cute.jit
def load_mail(c: Ctx, start: Int64, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr):
    """rX words [4, per]: this thread's columns of bf16 in a box, from an address on."""
    rX.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            peek(start + Int64(vector(c, v, g)) * 16, rX[None, v])
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            insist(start + Int64(vector(c, v, g)) * 16, rX[None, v], 2, op)


@cute.jit
def new_row(c: Ctx, a: Int64, rN: cute.Tensor, op: cutlass.Constexpr):
    """The pool's first kv_dim values: the new token's cache row, of what is in box a; rN: kv_a_norm."""
    d = op.d
    g = op.rows(d.kv_lora)
    sNew = view(c, BFloat16, 0, d.kv_dim)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    sWord = cute.recast_tensor(sNew, Uint32)
    load_mail(c, a + 2 * d.q_lora, rX, g, op)
    normalise(c, rX, rN, g, op)
    if c.warp < g.width:
        for v in cutlass.range_constexpr(g.per):
            i = vector(c, v, g)
            if i < g.vecs:
                cute.autovec_copy(rX[None, v], cute.local_tile(sWord, (4,), (i,)))
    for i in cutlass.range(c.tid, d.qk_rope // 8, op.threads, unroll=1):
        rK = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        place = a + 2 * (d.q_lora + d.kv_lora) + Int64(i) * 16
        peek(place, rK)
        insist(place, rK, 2, op)
        cute.autovec_copy(rK, cute.local_tile(sWord, (4,), (d.kv_lora // 8 + i,)))


@cute.jit
def load_uk(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """This thread's part of W_UK: eight columns, every `groups`-th row of the head; words [4, turns]."""
    d = op.d
    vectors = most(d.kv_lora // 8, op.slices)
    groups = op.threads // vectors
    turns = -(-d.qk_nope // groups)
    rW = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    rW.fill(0)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 8, c.cta % op.slices, op.slices)
    v, group = c.tid % vectors, c.tid // vectors
    if head < d.mla_heads and v < n and group < groups:
        base = field(c, layer, F["w_uk"], COUNT) + Int64(head * d.qk_nope * d.kv_lora * 2)
        for j in cutlass.range_constexpr(turns):
            row = group + j * groups
            if row < d.qk_nope:
                words_at(base, row * (d.kv_lora // 8) + first + v, rW[None, j])
    return rW


@cute.jit
def load_head(c: Ctx, turn: Int32, op: cutlass.Constexpr):
    """The pool behind the new row: the query of this CTA's head, which the CTAs of the head have just posted."""
    d = op.d
    many = (d.qk_nope + d.qk_rope) // 8
    head = c.cta // op.slices
    sWord = view(c, Uint32, op.new_bytes, 4 * many)
    rQ = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    if c.tid < many and head < d.mla_heads:
        start = box(c, "q", turn, op) + Int64(head * many + c.tid) * 16
        peek(start, rQ)
        insist(start, rQ, 2, op)
        cute.autovec_copy(rQ, cute.local_tile(sWord, (4,), (c.tid,)))
    consumers(op)


@cute.jit
def absorb(c: Ctx, rW: cute.Tensor, turn: Int32, op: cutlass.Constexpr):
    """Box query [head, kv_dim]: bf(Q_nope W_UK[h]) of this CTA's columns; the first of a head copies Q_pe."""
    d = op.d
    vectors = most(d.kv_lora // 8, op.slices)
    groups = op.threads // vectors
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 8, c.cta % op.slices, op.slices)
    v, group = c.tid % vectors, c.tid // vectors
    sHead = view(c, BFloat16, op.new_bytes, d.qk_nope + d.qk_rope)
    sPart = view(c, Float32, op.new_bytes + op.head_bytes, groups * vectors * 8)
    if head < d.mla_heads:
        rF = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rS = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rS.fill(0.0)
        if group < groups:
            for j in cutlass.range_constexpr(-(-d.qk_nope // groups)):
                row = group + j * groups
                if row < d.qk_nope:
                    x = sHead[row].to(Float32)
                    unpack(rW[None, j], rF)
                    for e in cutlass.range_constexpr(8):
                        rS[e] = rS[e] + x * rF[e]
            for e in cutlass.range_constexpr(8):
                sPart[(group * vectors + v) * 8 + e] = rS[e]
        consumers(op)
        for i in cutlass.range(c.tid, 8 * n, op.threads, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range(groups, unroll=8):
                total += sPart[k * vectors * 8 + i]
            post(c, "query", turn, head * d.kv_dim + 8 * first + i, total, op)
        if c.cta % op.slices == 0 and c.tid < d.qk_rope:
            pe = sHead[d.qk_nope + c.tid].to(Float32)
            post(c, "query", turn, head * d.kv_dim + d.kv_lora + c.tid, pe, op)


@cute.jit
def mma_k16(rC: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor):
    """rC[4] += A[16, 16] B[16, 8]; rA: rows g, g + 8, then the same eight columns on."""
    out = cute.arch.inline_ptx(
        """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};""",
        write_only_types=[Float32] * 4,
        read_only_args=[
            *(rA[i] for i in range(4)),
            *(rB[i] for i in range(2)),
            *(rC[i] for i in range(4)),
        ],
    )
    for i in cutlass.range_constexpr(4):
        rC[i] = out[i]


@cute.jit
def token_at(c: Ctx, it: Int32, token: Int32, op: cutlass.Constexpr):
    """Where in the ring, in units of 16 bytes, a token of the page starts whose first stage is number `it`."""
    slot = (it + token // op.cache_rows) % op.stages
    return slot * (op.stage // 16) + token % op.cache_rows * (op.d.kv_dim // 8)


@cute.jit
def patch(
    c: Ctx,
    layer: Int32,
    it: Int32,
    physical: Int32,
    left: Int32,
    cache: Cache,
    op: cutlass.Constexpr,
):
    """The new row in its place, in the ring and in the cache; rows beyond the context become zero."""
    d = op.d
    sNew = view(c, Uint32, 0, d.kv_dim // 2)
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    vecs = d.kv_dim // 8
    if cache.row >= 0 and cache.row // d.page == physical:
        place = token_at(c, it, cache.row % d.page, op)
        gRow = field(c, layer, F["kv"], COUNT) + Int64(cache.row) * (2 * d.kv_dim)
        for i in cutlass.range(c.tid, vecs, op.threads, unroll=1):
            cute.autovec_copy(cute.local_tile(sNew, (4,), (i,)), rW)
            cute.autovec_copy(rW, cute.local_tile(c.ring, (4,), (place + i,)))
            pointer = cute.make_ptr(
                Uint32, gRow + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
            )
            cute.autovec_copy(rW, cute.make_tensor(pointer, cute.make_layout((4,))))
        consumers(op)
    if left < d.page:
        rW.fill(0)
        for i in cutlass.range(left * vecs + c.tid, d.page * vecs, op.threads, unroll=1):
            place = token_at(c, it, i // vecs, op) + i % vecs
            cute.autovec_copy(rW, cute.local_tile(c.ring, (4,), (place,)))
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")
    consumers(op)


@cute.jit
def scores(c: Ctx, it: Int32, sQ: cute.Tensor, op: cutlass.Constexpr):
    """part[head, token]: scaled scores of a page; a warp has eight tokens."""
    d = op.d
    g, q = c.lane // 4, c.lane % 4
    words = op.query_words
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA.fill(0)
    for octet in cutlass.range(c.warp, d.page // 8, op.warps, unroll=1):
        rC.fill(0.0)
        row = token_at(c, it, octet * 8 + g, op)
        for k in cutlass.range(d.kv_dim // 32, unroll=2):
            cute.autovec_copy(cute.local_tile(c.ring, (4,), (row + k * 4 + q,)), rB)
            if g < d.mla_heads:
                cute.autovec_copy(
                    cute.local_tile(sQ, (4,), (g * (words // 4) + k * 4 + q,)), rA[None, 0]
                )
            if g + 8 < d.mla_heads:
                cute.autovec_copy(
                    cute.local_tile(sQ, (4,), ((g + 8) * (words // 4) + k * 4 + q,)), rA[None, 1]
                )
            mma_16x32(rC, rA, rB)
        scale = (d.qk_nope + d.qk_rope) ** -0.5
        for i in cutlass.range_constexpr(4):
            c.part[(g + i // 2 * 8) * (d.page + 4) + octet * 8 + 2 * q + i % 2] = rC[i] * scale


@cute.jit
def soften(c: Ctx, left: Int32, sP: cute.Tensor, sState: cute.Tensor, op: cutlass.Constexpr):
    """Online softmax of a page: sP[head, token] bf16; sState[max | sum | factor of all before] of sixteen heads."""
    d = op.d
    turns = -(-d.page // 32)
    for h in cutlass.range(c.warp, d.mla_heads, op.warps, unroll=1):
        before = sState[h]
        top = before
        for t in cutlass.range_constexpr(turns):
            token = t * 32 + c.lane
            if token < d.page and token < left:
                top = cute.arch.fmax(top, c.part[h * (d.page + 4) + token])
        top = lanes_max(top)
        total = Float32(0.0)
        for t in cutlass.range_constexpr(turns):
            token = t * 32 + c.lane
            if token < d.page:
                p = Float32(0.0)
                if token < left:
                    p = cute.math.exp(c.part[h * (d.page + 4) + token] - top)
                total += p
                sP[h * (d.page + 8) + token] = p.to(BFloat16)
        total = lanes_sum(total, 32)
        cute.arch.sync_warp()
        if c.lane == 0:
            factor = cute.math.exp(before - top)
            sState[h] = top
            sState[16 + h] = sState[16 + h] * factor + total
            sState[32 + h] = factor


@cute.jit
def weigh(
    c: Ctx, it: Int32, sP: cute.Tensor, sState: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr
):
    """rC[4, n] = factor rC + P C: a warp makes 8 `each` columns, lane g the columns g * each .. of them."""
    d = op.d
    each, half = op.value_each, op.value_each // 2
    g, q = c.lane // 4, c.lane % 4
    sWord = cute.recast_tensor(sP, Uint32)
    rA = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((2,)), Uint32)
    rRow = cute.make_rmem_tensor(cute.make_layout((half, 4)), Uint32)
    pitch = (d.page + 8) // 2
    for n in cutlass.range_constexpr(each):
        for i in cutlass.range_constexpr(4):
            rC[i, n] = rC[i, n] * sState[32 + g + i // 2 * 8]
    for k in cutlass.range(d.page // 16, unroll=1):
        for i in cutlass.range_constexpr(4):
            rA[i] = sWord[(g + i % 2 * 8) * pitch + k * 8 + q + i // 2 * 4]
            token = k * 16 + 2 * q + i % 2 + i // 2 * 8
            place = token_at(c, it, token, op) * 4 + (c.warp * 8 + g) * half
            cute.autovec_copy(cute.local_tile(c.ring, (half,), (place // half,)), rRow[None, i])
        for n in cutlass.range_constexpr(half):
            for odd in cutlass.range_constexpr(2):
                select = Uint32(0x7632 if odd else 0x5410)
                for i in cutlass.range_constexpr(2):
                    rB[i] = cute.arch.prmt(rRow[n, 2 * i], rRow[n, 2 * i + 1], select)
                mma_k16(rC[None, 2 * n + odd], rA, rB)


@cute.jit
def load_query(c: Ctx, turn: Int32, sQ: cute.Tensor, op: cutlass.Constexpr):
    """sQ = the queries of all heads, `query_words` apart."""
    d = op.d
    words, vecs = op.query_words, d.kv_dim // 8
    turns = -(-d.mla_heads * vecs // op.threads)
    start = box(c, "query", turn, op)
    rW = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < d.mla_heads * vecs:
            peek(start + Int64(i) * 16, rW[None, k])
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < d.mla_heads * vecs:
            insist(start + Int64(i) * 16, rW[None, k], 2, op)
            place = i // vecs * (words // 4) + i % vecs
            cute.autovec_copy(rW[None, k], cute.local_tile(sQ, (4,), (place,)))


@cute.jit
def entry(c: Ctx, p: Int32, cache: Cache):
    """Where page p is, -1 if there is none."""
    found = Int32(-1)
    if p < cache.pages:
        found = cache.table[p]
    return found


@cute.jit
def attend(
    c: Ctx, layer: Int32, it: Int32, cache: Cache, physical: Int32, turn: Int32, op: cutlass.Constexpr
):  # fmt: skip
    """Boxes sums and stats of this CTA's pages for all heads, the first of them at `physical`.

    A CTA without pages empties its places of the other turn. Not even a maximum of -inf is an empty element.
    """
    d = op.d
    each = op.value_each
    words = op.query_words
    sQ = view(c, Uint32, op.new_bytes, d.mla_heads * words)
    sP = view(c, BFloat16, op.new_bytes + 4 * d.mla_heads * words, 16 * (d.page + 8))
    sState = view(c, Float32, op.new_bytes + 4 * d.mla_heads * words + 32 * (d.page + 8), 48)
    if c.cta < cache.pages:
        load_query(c, turn, sQ, op)
    if c.tid < 16:
        sState[c.tid], sState[16 + c.tid], sState[32 + c.tid] = (
            -Float32.inf,
            Float32(0.0),
            Float32(0.0),
        )
    consumers(op)
    rC = cute.make_rmem_tensor(cute.make_layout((4, each)), Float32)
    rC.fill(0.0)
    for p in cutlass.range(c.cta, cache.pages, op.ctas, unroll=1):
        for j in cutlass.range_constexpr(op.cache_stages):
            stage_full(c, it + j, op)
        left = cache.length - p * d.page
        patch(c, layer, it, physical, left, cache, op)
        physical = entry(c, p + op.ctas, cache)
        scores(c, it, sQ, op)
        consumers(op)
        soften(c, left, sP, sState, op)
        consumers(op)
        if c.warp < op.value_warps:
            weigh(c, it, sP, sState, rC, op)
        for j in cutlass.range_constexpr(op.cache_stages):
            stage_done(c, (it + j) % op.stages)
        it += op.cache_stages
        consumers(op)
    send_sums(c, c.cta < cache.pages, sState, rC, turn, op)
    return it


@cute.jit
def send_sums(
    c: Ctx, any: Boolean, sState: cute.Tensor, rC: cute.Tensor, turn: Int32, op: cutlass.Constexpr
):
    """rC [4, each] of the value warps and the statistics of each head into their boxes, if there are any."""
    d = op.d
    each = op.value_each
    if c.tid < d.mla_heads:
        i = (c.cta * d.mla_heads + c.tid) * 2
        if any:
            post(c, "stats", turn, i, sState[c.tid], op)
            post(c, "stats", turn, i + 1, sState[16 + c.tid], op)
        else:
            empty_some(box(c, "stats", 1 - turn, op) + Int64(i) * 4, 2)
    here, there = box(c, "sums", turn, op), box(c, "sums", 1 - turn, op)
    if c.warp < op.value_warps:
        size = min(4, each)
        rOut = cute.make_rmem_tensor(cute.make_layout((size,)), Float32)
        g, q = c.lane // 4, c.lane % 4
        for i in cutlass.range_constexpr(4):
            h = g + i // 2 * 8
            if h < d.mla_heads:
                first = (c.cta * d.mla_heads + h) * d.kv_lora + (c.warp * 8 + 2 * q + i % 2) * each
                for part in cutlass.range_constexpr(each // size):
                    at_ = Int64(first + size * part) * 4
                    for n in cutlass.range_constexpr(size):
                        rOut[n] = rC[i, size * part + n]
                    if any:
                        post_some(here + at_, there + at_, rOut, size)
                    else:
                        empty_some(there + at_, size)


@cute.jit
def join(c: Ctx, turn: Int32, cache: Cache, op: cutlass.Constexpr):
    """Box lat = bf(sum over CTAs of weight * sum) of this CTA's head and columns."""
    d = op.d
    vectors = most(d.kv_lora // 4, op.slices)
    groups = op.threads // vectors
    turns = -(-op.ctas // groups)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 4, c.cta % op.slices, op.slices)
    parts = cache.pages if cache.pages < op.ctas else Int32(op.ctas)
    sW = view(c, Float32, 0, op.ctas)
    sPart = view(c, Float32, -(-4 * op.ctas // 16) * 16, groups * vectors * 4)
    v, group = c.tid % vectors, c.tid // vectors
    rX = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    rS = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rS.fill(0.0)
    sums = box(c, "sums", turn, op) + Int64(head * (d.kv_lora // 4) + first + v) * 16
    mine = head < d.mla_heads and group < groups and v < n
    if head < d.mla_heads:
        for k in cutlass.range_constexpr(turns):
            s = group + k * groups
            if mine and s < parts:
                peek(sums + Int64(s) * (4 * d.mla_heads * d.kv_lora), rX[None, k])
        if c.warp == 0:
            weights_of(c, head, parts, sW, turn, op)
        consumers(op)
        for k in cutlass.range_constexpr(turns):
            s = group + k * groups
            if mine and s < parts:
                insist(sums + Int64(s) * (4 * d.mla_heads * d.kv_lora), rX[None, k], 4, op)
                for e in cutlass.range_constexpr(4):
                    rS[e] = rS[e] + rX[e, k].bitcast(Float32) * sW[s]
        if group < groups:
            cute.autovec_copy(rS, cute.local_tile(sPart, (4,), (group * vectors + v,)))
        consumers(op)
        for i in cutlass.range(c.tid, 4 * n, op.threads, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range(groups, unroll=8):
                total += sPart[k * vectors * 4 + i]
            post(c, "lat", turn, head * d.kv_lora + 4 * first + i, total, op)


@cute.jit
def weights_of(
    c: Ctx, head: Int32, parts: Int32, sW: cute.Tensor, turn: Int32, op: cutlass.Constexpr
):
    """sW[s] = the weight of CTA s's sums of a head; by one warp."""
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
    for k in cutlass.range_constexpr(turns):
        if c.lane + 32 * k < parts:
            sW[c.lane + 32 * k] = rS[0, k] / total


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
def orphan(c: Ctx, layer: Int32, cache: Cache, op: cutlass.Constexpr):
    """The first CTA inserts the new row when its page is out of sight, so that nobody else does."""
    d = op.d
    if c.cta == 0 and cache.row >= 0:
        seen = Float32(0.0)
        for p in cutlass.range(c.tid, cache.pages, op.threads, unroll=1):
            if cache.table[p] == cache.row // d.page:
                seen = Float32(1.0)
        put(c, 0, seen)
        consumers(op)
        if take(c, 0, op.warps) == 0.0:
            sNew = view(c, BFloat16, 0, d.kv_dim)
            gRow = at(
                BFloat16,
                field(c, layer, F["kv"], COUNT) + Int64(cache.row) * (2 * d.kv_dim),
                d.kv_dim,
            )
            for i in cutlass.range(c.tid, d.kv_dim, op.threads, unroll=1):
                gRow[i] = sNew[i]


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
):
    """rO words [4, per]: this thread's columns of the gated values of MLA `number` of the launch."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, MLAS)
    timeline.mark(c.track, "a_proj", layer)
    first, n = share(d.a_proj_rows, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
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
