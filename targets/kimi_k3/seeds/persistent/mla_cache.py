"""The paged cache of MLA: pages as stages of the ring, and the new token's row in its place."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.persistent.boxes import insist, peek
from targets.kimi_k3.seeds.persistent.device import Ctx, at, consumers, field, vector, view
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.ring import bulk, stage_free
from targets.kimi_k3.seeds.persistent.sums import put, take
from targets.kimi_k3.seeds.persistent.vectors import normalise


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
def entry(c: Ctx, p: Int32, cache: Cache):
    """Where page p is, -1 if there is none."""
    found = Int32(-1)
    if p < cache.pages:
        found = cache.table[p]
    return found


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
