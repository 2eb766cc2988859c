"""Products of streamed bf16 rows with up to eight tokens on tensor cores: m16n8k16, weights as A, tokens as B.

A tile of sixteen rows passes the ring in slices of columns (`TileRows`); a warp has the same blocks of 32 columns
of every tile, so its part of the tokens stays in registers, and its accumulators live through the slices of a tile.
The columns of a block are dealt to lanes as whole vectors of eight for both operands: which k of the MMA a column
is does not matter as long as they agree. Two loads of 16 bytes and two MMAs make 16 x 32 weights, for one token or
eight. Sums over warps are made tile by tile in shared memory.

`pack_rows` lays a matrix out so that a stage is one piece of memory and a warp reads a block of it without conflicts:
sixteen copies of a row's part instead of one took a producer 60 ns each, longer than memory takes for them. No edges
and no epilogues here.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, words_at
from targets.kimi_k3.seeds.persistent.ring import bulk, stage_free, stage_full, stage_loaded
from targets.kimi_k3.seeds.persistent.row_products import mma_rows

TILE = 16
TOKENS = 8
PACKERS = 512
"""Threads of a CTA that packs."""


@cute.jit
def anew(c: Ctx):
    """The same thread, with its numbers read again: what is computed from them cannot be kept over the layers in
    registers that are needed for tokens, to be spilled to an L1 of which the ring leaves nothing.
    """
    tid, cta = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0}; mov.b32 {$w1}, {$r1};",
        write_only_types=[Int32, Int32],
        read_only_args=[c.tid, c.cta],
    )
    warp = cute.arch.make_warp_uniform(tid // 32)
    return c._replace(tid=tid, warp=warp, lane=tid % 32, cta=cta)


# ---- when weights are loaded
@cute.kernel
def pack_kernel(gFrom: cute.Tensor, gTo: cute.Tensor):
    """Grid (ctas): each packs the rows that it will use, their vectors of eight columns where its tiles want them."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    rows, k = gFrom.shape
    first = rows * cta // ctas
    count = rows * (cta + 1) // ctas - first
    source = cute.make_tensor(
        cute.recast_ptr(gFrom.iterator, dtype=Uint32), cute.make_layout((rows * k // 2,))
    )
    target = cute.make_tensor(
        cute.recast_ptr(gTo.iterator, dtype=Uint32), cute.make_layout((rows * k // 2,))
    )
    r = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(tid, count * (k // 8), PACKERS, unroll=1):
        cute.autovec_copy(cute.local_tile(source, (4,), (first * (k // 8) + i,)), r)
        row, v = i // (k // 8), i % (k // 8)
        tile = row // TILE * TILE
        n = count - tile if count - tile < TILE else Int32(TILE)
        at = (first + tile) * (k // 8) + (row - tile) * 4 + v // 4 * (n * 4) + v % 4
        cute.autovec_copy(r, cute.local_tile(target, (4,), (at,)))


@cute.jit
def pack_rows(
    gFrom: cute.Tensor, gTo: cute.Tensor, rows: cutlass.Constexpr, ctas: cutlass.Constexpr, stream
):
    """The first `rows` rows of a matrix, as `share` deals them to CTAs."""
    k = gFrom.shape[1]
    part = cute.make_tensor(gFrom.iterator, cute.make_layout((rows, k), stride=(k, 1)))
    pack_kernel(part, gTo).launch(grid=(ctas, 1, 1), block=(PACKERS, 1, 1), stream=stream)


# ---- producer
@cute.jit
def fill_tiles(
    c: Ctx, it: Int32, source: Int64, rows: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """Stages of `rows` packed rows: tile by tile, slice by slice, one after the other in memory."""
    for first in cutlass.range(0, rows, TILE, unroll=1):
        n = rows - first if rows - first < TILE else Int32(TILE)
        size = n * g.piece_bytes
        for _ in cutlass.range(g.slices, unroll=1):
            slot = stage_free(c, it, op)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, size)
            bulk(c, slot, Int32(0), source, size, op)
            source += Int64(size)
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
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Sums of `rows` rows and all tokens, to be read by `tile_sum` after a barrier. rX words [4, vectors] as `column`
    says, zeros for tokens that are not there.
    """
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for first in cutlass.range(0, rows, TILE, unroll=1):
        rC.fill(0.0)
        n = rows - first if rows - first < TILE else Int32(TILE)
        for j in cutlass.range_constexpr(g.slices):
            slot = stage_full(c, it, op)
            if c.warp < g.width:
                slice_product(c, slot, rC, rX, (n, j), g, op)
            stage_loaded(c, slot)
            it += 1
        buffer = first // TILE % 2 * (op.warps * TILE * TOKENS)
        keep(c, buffer, rC, g)
        consumers(op)
        for k in cutlass.range_constexpr(-(-TILE * TOKENS // op.threads)):
            i = c.tid + k * op.threads
            if i < n * TOKENS:
                total = Float32(0.0)
                for w in cutlass.range_constexpr(g.width):
                    total += c.part[buffer + w * (TILE * TOKENS) + i]
                c.part[op.sums_at + first * TOKENS + i] = total
    return it


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
    """rC += n rows of the stage times this warp's columns of slice j; rows beyond are read from the last."""
    n, j = where
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    a = c.lane // 4
    a, b = (a if a < n else n - 1), (a + TILE // 2 if a + TILE // 2 < n else n - 1)
    first = slot * (op.stage // 16) + c.warp * g.per * (n * 4) + c.lane % 4
    for p in cutlass.range_constexpr(g.per):
        i = first + p * (n * 4)
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (i + a * 4,)), rA[None, p])
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (i + b * 4,)), rB[None, p])
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
