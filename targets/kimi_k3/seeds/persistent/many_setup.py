"""What a CTA of the decode step for several tokens does first: two contexts over one ring, its tokens' requests."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from targets.kimi_k3.seeds.common import smem
from targets.kimi_k3.seeds.persistent.device import Ctx, view
from targets.kimi_k3.seeds.persistent.many_plan import SLOTS
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles


class Requests(NamedTuple):
    """In shared memory, by token. length: i32; first: i32, pages of the tokens before it, of all at the end; row: i32,
    flat cache row of the new token, -1 = not inserted; table: address of i32 [tokens, pages a request].
    """

    length: Any
    first: Any
    row: Any
    table: Any


@cute.jit
def tiles_of(c: Ctx, layers: tuple, names: cutlass.Constexpr, op: cutlass.Constexpr):
    """The tile kernel's context of the same thread: ring, barriers, sums and counters are those of `c`."""
    d, top = op.d, op.tiles_op
    t = Tiles(
        c.tid, c.warp, c.lane, c.cta, c.ring, c.full, c.empty, c.routed, c.part,
        smem(Float32, (top.tokens * top.stride,), (1,)), smem(Int64, (d.layers * COUNT_T,), (1,)),
        smem(Float32, (-(-d.hidden_local // op.ctas) * top.tokens,), (1,)),
        smem(Int32, (top.touched,), (1,)), smem(Int32, (top.touched,), (1,)),
        smem(Int32, (top.touched * top.tokens,), (1,)), smem(Float32, (top.touched * top.tokens,), (1,)),
        smem(Int32, (4,), (1,)), smem(Int32, (top.held,), (1,)), view(c, Uint16, SLOTS, top.tokens * d.experts),
        smem(Uint32, (-(-d.experts // 32),), (1,)), None, None, None, None,
        c.sync, c.base, c.mail + op.tiles_at, c.mail + op.tiles_at, c.track, c.brought,
    )  # fmt: skip
    for n in cutlass.range_constexpr(d.layers):
        if c.tid == 32 * (n % op.warps):
            for i in cutlass.range_constexpr(len(names[n])):
                if cutlass.const_expr(names[n][i] in T):
                    t.tab[n * COUNT_T + T[names[n][i]]] = layers[n][i].iterator.toint()
    return t


@cute.jit
def requests_of(
    c: Ctx, lengths: cute.Tensor, table: cute.Tensor, rows: cute.Tensor, op: cutlass.Constexpr
):
    """By the first thread; a barrier of the CTA has to follow."""
    d = op.d
    r = Requests(
        smem(Int32, (d.rows,), (1,)), smem(Int32, (d.rows + 1,), (1,)), smem(Int32, (d.rows,), (1,)),
        table.iterator.toint(),
    )  # fmt: skip
    if c.tid == 0:
        pages = Int32(0)
        for m in cutlass.range_constexpr(d.rows):
            length = lengths[m] if lengths[m] > 0 else Int32(0)
            r.length[m], r.first[m], r.row[m] = length, pages, Int32(rows[m])
            pages += (length + d.page - 1) // d.page
        r.first[d.rows] = pages
    return r


@cute.jit
def behind_slots(c: Ctx, op: cutlass.Constexpr):
    """The same thread with a pool that begins behind the state slots."""
    pointer = c.pool.iterator + SLOTS // 4
    return c._replace(pool=cute.make_tensor(pointer, cute.make_layout(((op.pool - SLOTS) // 4,))))
