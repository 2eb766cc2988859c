"""Attention of all heads over a CTA's stretch of pages, request after request; sums of each into a piece of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32

from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, view
from targets.kimi_k3.seeds.persistent.many_cache import (
    cache_of_token,
    make_row,
    pages_of_cta,
    request_of,
)
from targets.kimi_k3.seeds.persistent.many_query import load_query_of
from targets.kimi_k3.seeds.persistent.many_setup import Requests
from targets.kimi_k3.seeds.persistent.mla_attend import scores, send_sums, soften, weigh
from targets.kimi_k3.seeds.persistent.mla_cache import patch
from targets.kimi_k3.seeds.persistent.ring import stage_full, stage_loaded


@cute.jit
def begin_request(c: Ctx, layer: Int32, m: Int32, given: tuple, turn: Int32, op: cutlass.Constexpr):
    """The new row, the queries and empty sums of token m. Ends with a barrier."""
    d = op.d
    sQ, sP, sState, rC = given
    make_row(c, layer, m, turn, op)
    load_query_of(c, m, turn, sQ, op)
    if c.tid < 16:
        sState[c.tid], sState[16 + c.tid] = -Float32.inf, Float32(0.0)
        sState[32 + c.tid] = Float32(0.0)
    # rows of heads that there are not go through the product of weights and values too
    for i in cutlass.range(c.tid, (16 - d.mla_heads) * (d.page + 8), op.threads, unroll=1):
        sP[d.mla_heads * (d.page + 8) + i] = BFloat16(0.0)
    rC.fill(0.0)
    consumers(op)


@cute.jit
def attend_tokens(c: Ctx, layer: Int32, it: Int32, r: Requests, turn: Int32, op: cutlass.Constexpr):
    """Boxes sums and stats of this CTA's pages for all heads: piece number CTA + token, which no two have."""
    d = op.d
    words = op.query_words
    sQ = view(c, Uint32, op.new_bytes, d.mla_heads * words)
    sP = view(c, BFloat16, op.new_bytes + 4 * d.mla_heads * words, 16 * (d.page + 8))
    sState = view(c, Float32, op.new_bytes + 4 * d.mla_heads * words + 32 * (d.page + 8), 48)
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.value_each)), Float32)
    rC.fill(0.0)
    first, n = pages_of_cta(c, r, op)
    for p in cutlass.range(first, first + n, unroll=1):
        m = request_of(r, p, op)
        cache = cache_of_token(r, m, op)
        inner = p - r.first[m]
        if p == first or inner == 0:
            begin_request(c, layer, m, (sQ, sP, sState, rC), turn, op)
        for j in cutlass.range_constexpr(op.cache_stages):
            stage_full(c, it + j, op)
        left = cache.length - inner * d.page
        patch(c, layer, it, cache.table[inner], left, cache, op)
        scores(c, it, sQ, op)
        consumers(op)
        soften(c, left, sP, sState, op)
        consumers(op)
        if c.warp < op.value_warps:
            weigh(c, it, sP, sState, rC, op)
        for j in cutlass.range_constexpr(op.cache_stages):
            stage_loaded(c, (it + j) % op.stages)
        it += op.cache_stages
        consumers(op)
        if p + 1 == first + n or inner + 1 == cache.pages:
            send_sums(c._replace(cta=c.cta + m), Boolean(True), sState, rC, turn, op)
            consumers(op)
    return it
