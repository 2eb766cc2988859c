"""Products of streamed bf16 rows with up to eight tokens on tensor cores: m16n8k16, weights as A, tokens as B.

A tile of sixteen rows passes the ring in slices of columns (`plan.Tiles`); a warp has the same blocks of 32 columns
of every tile, so its part of the tokens stays in registers, and its accumulators live through the slices of a tile.
The columns of a block are dealt to lanes as whole vectors of eight for both operands: which k of the MMA a column
is does not matter as long as they agree. Two loads of 16 bytes and two MMAs make 16 x 32 weights, for one token or
eight. Sums over warps are made tile by tile in shared memory. No edges and no epilogues here.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.persistent.device import (
    Ctx,
    bulk,
    consumers,
    mma_rows,
    stage_done,
    stage_free,
    stage_full,
    words_at,
)

TILE = 16
TOKENS = 8


# ---- producer


@cute.jit
def fill_tiles(
    c: Ctx, it: Int32, source: Int64, rows: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """Stages of `rows` rows that lie together: tile by tile, slice by slice."""
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        start = source + Int64(first) * g.row_bytes
        for _ in cutlass.range(g.slices, unroll=1):
            slot = stage_free(c, it, op)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, n * g.piece_bytes)
            for r in cutlass.range(n, unroll=1):
                bulk(c, slot, r * g.pitch, start + Int64(r) * g.row_bytes, Int32(g.piece_bytes), op)
            start += g.piece_bytes
            it += 1
    return it


@cute.jit
def fill_tile_pairs(
    c: Ctx,
    it: Int32,
    source: Int64,
    apart: Int64,
    rows: Int32,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """As `fill_tiles` for pairs of rows, the second `apart` bytes behind the first: rows r and r + 8 of a tile."""
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        start = source + Int64(first) * g.row_bytes
        for _ in cutlass.range(g.slices, unroll=1):
            slot = stage_free(c, it, op)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * n * g.piece_bytes)
            for r in cutlass.range(n, unroll=1):
                row = start + Int64(r) * g.row_bytes
                bulk(c, slot, r * g.pitch, row, Int32(g.piece_bytes), op)
                bulk(c, slot, (r + TOKENS) * g.pitch, row + apart, Int32(g.piece_bytes), op)
            start += g.piece_bytes
            it += 1
    return it


# ---- consumers


@cute.jit
def column(c: Ctx, g: cutlass.Constexpr):
    """Which vector of eight columns this thread has as its first; its token is `lane // 4`. Warps from `width` on have
    none, and must not ask.
    """
    return c.warp * (4 * g.per) + c.lane % 4


def further(v, g):
    """How many vectors its v-th lies behind its first: a constant, so that addresses share a register."""
    return (v // g.per * g.piece + v % g.per) * 4


@cute.jit
def token_words(
    c: Ctx, start: Int64, bytes: cutlass.Constexpr, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rX words [4, vectors] = this thread's columns of its token, rows `bytes` apart at an address; else zeros."""
    token = c.lane // 4
    rX.fill(0)
    if c.warp < g.width and token < op.d.rows:
        mine = start + Int64(token) * bytes + Int64(column(c, g)) * 16
        for v in cutlass.range_constexpr(g.vectors):
            words_at(mine + 16 * further(v, g), Int32(0), rX[None, v])


@cute.jit
def drain_tiles(
    c: Ctx,
    it: Int32,
    rows: Int32,
    base: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Sum `(base + row, token)` for `rows` rows (pairs: 2 row is the first, 2 row + 1 the second), to be read by
    `tile_sum` after a barrier. rX words [4, vectors] as `column` says, zeros for tokens that are not there.
    """
    halves = 2 if g.pair else 1
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        rC.fill(0.0)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        a, b = tile_rows(c, n, g)
        for j in cutlass.range_constexpr(g.slices):
            slot = stage_full(c, it, op)
            if c.warp < g.width:
                slice_product(c, slot, rC, rX, (a, b, j), g, op)
            stage_done(c, slot)
            it += 1
        buffer = first // g.chunk % 2 * (op.warps * TILE * TOKENS)
        keep(c, buffer, rC, g)
        consumers(op)
        for k in cutlass.range_constexpr(-(-TILE * TOKENS // op.threads)):
            i = c.tid + k * op.threads
            row, other = i // TOKENS, i // TOKENS
            if cutlass.const_expr(g.pair):
                row, other = row % TOKENS, 2 * (row % TOKENS) + row // TOKENS
            if i < TILE * TOKENS and row < n:
                total = Float32(0.0)
                for w in cutlass.range_constexpr(g.width):
                    total += c.part[buffer + w * (TILE * TOKENS) + i]
                at = (base + halves * first + other) * TOKENS + i % TOKENS
                c.part[op.sums_at + at] = total
    return it


@cute.jit
def tile_rows(c: Ctx, n: Int32, g: cutlass.Constexpr):
    """This lane's two rows of a tile with n rows (pairs); rows that are not there are read from the last."""
    a = c.lane // 4
    b = a + TILE // 2
    last = n - 1
    if cutlass.const_expr(g.pair):
        a = a if a < last else last
        b = a + TILE // 2
    else:
        a = a if a < last else last
        b = b if b < last else last
    return a, b


@cute.jit
def slice_product(
    c: Ctx,
    slot: Int32,
    rC: cute.Tensor,
    rX: cute.Tensor,
    where: tuple,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """rC += sixteen rows of the stage times this warp's columns of slice j. where: this lane's two rows, j."""
    a, b, j = where
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    first = slot * (op.stage // 16) + column(c, g)
    a, b = first + a * (g.pitch // 16), first + b * (g.pitch // 16)
    for p in cutlass.range_constexpr(g.per):
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (a + 4 * p,)), rA[None, p])
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (b + 4 * p,)), rB[None, p])
    for p in cutlass.range_constexpr(g.per):
        mma_rows(rC, rA[None, p], rB[None, p], rX[None, j * g.per + p])


@cute.jit
def keep(c: Ctx, buffer: Int32, rC: cute.Tensor, g: cutlass.Constexpr):
    """This warp's part of a tile: [row, token]."""
    if c.warp < g.width:
        i = buffer + c.warp * (TILE * TOKENS) + c.lane // 4 * TOKENS + c.lane % 4 * 2
        for half in cutlass.range_constexpr(2):
            c.part[i + half * (TILE // 2 * TOKENS)] = rC[2 * half]
            c.part[i + half * (TILE // 2 * TOKENS) + 1] = rC[2 * half + 1]


@cute.jit
def tile_sum(c: Ctx, row: Int32, token: Int32, op: cutlass.Constexpr):
    """The product of a drained row with a token."""
    return c.part[op.sums_at + row * TOKENS + token]
