"""The paged cache of several requests: their pages in one row, a stretch of it a CTA; rows that nobody else inserts."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from targets.kimi_k3.seeds.persistent.boxes import box
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, field
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.many_setup import Requests
from targets.kimi_k3.seeds.persistent.mla_cache import Cache, new_row, orphan
from targets.kimi_k3.seeds.persistent.ring import bulk, stage_free
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.vectors import load_norm


@cute.jit
def among(r: Requests, op: cutlass.Constexpr):
    """How many CTAs share the pages: with fewer pages than CTAs the first ones, so that none between two has none."""
    pages = r.first[op.d.rows]
    return pages if pages < op.ctas else Int32(op.ctas)


@cute.jit
def pages_of_cta(c: Ctx, r: Requests, op: cutlass.Constexpr):
    """(first, how many) of all requests' pages."""
    first, n = Int32(0), Int32(0)
    if c.cta < among(r, op):
        first, n = share(r.first[op.d.rows], c.cta, among(r, op))
    return first, n


@cute.jit
def owner_of(page: Int32, r: Requests, op: cutlass.Constexpr):
    """Which CTA has that one of all pages."""
    return ((page + 1) * among(r, op) - 1) // r.first[op.d.rows]


@cute.jit
def request_of(r: Requests, page: Int32, op: cutlass.Constexpr):
    """Whose page it is."""
    m = Int32(0)
    for k in cutlass.range_constexpr(1, op.d.rows):
        m = Int32(k) if page >= r.first[k] else m
    return m


@cute.jit
def cache_of_token(r: Requests, m: Int32, op: cutlass.Constexpr):
    start = r.table + Int64(m) * (4 * op.d.pages_per_request)
    pointer = cute.make_ptr(Int32, start, cute.AddressSpace.gmem, assumed_align=4)
    gTable = cute.make_tensor(pointer, cute.make_layout((op.d.pages_per_request,)))
    return Cache(gTable, r.first[m + 1] - r.first[m], r.length[m], r.row[m])


@cute.jit
def fill_pages(c: Ctx, layer: Int32, it: Int32, r: Requests, op: cutlass.Constexpr):
    """This CTA's pages, `cache_rows` tokens a stage; by one lane."""
    d = op.d
    size = d.page * d.kv_dim * 2
    first, n = pages_of_cta(c, r, op)
    for p in cutlass.range(first, first + n, unroll=1):
        m = request_of(r, p, op)
        physical = cache_of_token(r, m, op).table[p - r.first[m]]
        source = field(c, layer, F["kv"], COUNT) + Int64(physical) * size
        for j in cutlass.range_constexpr(op.cache_stages):
            part = min(op.cache_rows, d.page - j * op.cache_rows) * d.kv_dim * 2
            s = stage_free(c, it, op)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + s, part)
            bulk(c, s, Int32(0), source + j * op.cache_rows * d.kv_dim * 2, Int32(part), op)
            it += 1
    return it


@cute.jit
def make_row(c: Ctx, layer: Int32, m: Int32, turn: Int32, op: cutlass.Constexpr):
    """The pool's first values: the cache row of token m. Ends with a barrier."""
    a = box(c, "a", turn, op) + Int64(m * op.pitch(op.d.a_proj_rows)) * 2
    norm = field(c, layer, F["kv_a_norm"], COUNT)
    new_row(c, a, load_norm(c, norm, op.rows(op.d.kv_lora)), op)
    consumers(op)


@cute.jit
def orphans(c: Ctx, layer: Int32, r: Requests, turn: Int32, op: cutlass.Constexpr):
    """The new row of a token whose page is out of its request's sight, by the CTA of its number."""
    if c.cta < op.d.rows:
        cache = cache_of_token(r, c.cta, op)
        if cache.row >= 0:
            make_row(c, layer, c.cta, turn, op)
            orphan(c._replace(cta=Int32(0)), layer, cache, op)
            consumers(op)
