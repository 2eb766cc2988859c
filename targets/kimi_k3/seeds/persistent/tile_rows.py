"""Tiles of bf16 rows through the ring and times one to eight tokens; sums of warps by row and token."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import mma_k32
from targets.kimi_k3.seeds.persistent.device import within
from targets.kimi_k3.seeds.persistent.ring import bulk, stage_free, stage_full, stage_loaded
from targets.kimi_k3.seeds.persistent.row_products import mma_rows
from targets.kimi_k3.seeds.persistent.tile_device import Tiles


@cute.jit
def fill_tiles(
    c: Tiles, it: Int32, rows: tuple, n: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """Stages of all tiles of `n` rows; rows = two ranges (address, bytes from row to row, first row, last row of it).

    The producer's lanes have a row each.
    """
    for first in cutlass.range(0, n, g.height, unroll=1):
        many = n - first if n - first < g.height else Int32(g.height)
        r = first + c.lane
        source = Int64(0)
        for a in cutlass.range_constexpr(len(rows)):
            address, pitch, begin_, every = rows[a]
            source = (
                address + Int64((r - begin_) // every) * pitch
                if r >= begin_ and (r - begin_) % every == 0
                else source
            )
        target = c.lane // (g.height // 2) * g.block + c.lane % (g.height // 2) * g.piece
        for s in cutlass.range(g.slices, unroll=1):
            slot = stage_free(c, it, op)
            if c.lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, many * g.piece)
            cute.arch.sync_warp()
            if c.lane < many:
                bulk(c, slot, target, source + Int64(s) * g.piece, Int32(g.piece), op)
            it += 1
    return it


@cute.jit
def fill_blocks(
    c: Tiles, it: Int32, start: Int64, n: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """As `fill_tiles` for n rows that lie together and are whole in a stage: two copies a tile, as copies cost time."""
    half = g.height // 2
    for first in cutlass.range(0, n, g.height, unroll=1):
        slot = stage_free(c, it, op)
        many = n - first if n - first < g.height else Int32(g.height)
        if c.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, many * g.piece)
        cute.arch.sync_warp()
        mine = many - c.lane * half
        mine = mine if mine < half else Int32(half)
        if c.lane < 2 and mine > 0:
            source = start + Int64(first + c.lane * half) * g.piece
            bulk(c, slot, c.lane * g.block, source, mine * g.piece, op)
        it += 1
    return it


@cute.jit
def tile_rows(c: Tiles, left: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr):
    """Where this lane's rows of a tile begin in a stage, in 16 bytes; beyond `left` of them the last."""
    half = g.height // 2
    row = c.lane // 4 % 2 * half + c.lane // 8
    found = []
    for k in cutlass.range_constexpr(g.height // 8):
        r = within(row + 4 * k, left)
        found.append(r // half * (g.block // 16) + r % half * (g.piece // 16))
    return found


@cute.jit
def tile_times(
    c: Tiles, it: Int32, rX: cute.Tensor, left: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """rC[4] = a tile times x: (row g, token 2 q), (g, 2 q + 1), (g + 8, ..) of lane 4 g + q; this warp's columns. The
    tile has `left` rows, or more; rows that it has not are anything.
    """
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    rC.fill(0.0)
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.wide)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.wide)), Uint32)
    row = (c.lane // 4 % 2) * (g.block // 16) + c.lane // 8 * (g.piece // 16)
    rows = tile_rows(c, left, g, op) if cutlass.const_expr(op.tokens > 1) else [row]
    for s in cutlass.range_constexpr(g.slices):
        slot = stage_full(c, it, op)
        if c.warp < g.active:
            for j in cutlass.range_constexpr(2 * g.wide):
                column = (j // 2 * g.active * 2 + c.warp * 2 + j % 2) * 4 + c.lane % 4
                i = slot * (op.stage // 16) + rows[0] + column
                cute.autovec_copy(cute.local_tile(c.ring, (4,), (i,)), rA[None, j])
                if cutlass.const_expr(g.height == 16):
                    if cutlass.const_expr(op.tokens > 1):
                        i = slot * (op.stage // 16) + rows[1] + column
                    else:
                        i += 4 * (g.piece // 16)
                    cute.autovec_copy(cute.local_tile(c.ring, (4,), (i,)), rB[None, j])
            for j in cutlass.range_constexpr(2 * g.wide):
                x = rX[None, s * 2 * g.wide + j]
                if cutlass.const_expr(g.height == 16):
                    mma_rows(rC[None, j % 2], rA[None, j], rB[None, j], x)
                else:
                    mma_k32(rC[None, j % 2], rA[None, j], tuple(x[e] for e in range(4)))
        stage_loaded(c, slot)
        it += 1
    for e in cutlass.range_constexpr(4):
        rC[e, 0] = rC[e, 0] + rC[e, 1]
    return it, rC


@cute.jit
def keep(
    c: Tiles, rC: cute.Tensor, rows: tuple, first: Int32, column: Int32, op: cutlass.Constexpr
):
    """part[(first + row) tokens + token, column] = the sums of the lane's rows; rows = (g, or g and g + 8, end)."""
    for half in cutlass.range_constexpr(len(rows) - 1):
        row = rows[half]
        for e in cutlass.range_constexpr(2):
            token = c.lane % 4 * 2 + e
            if token < op.tokens and row < rows[len(rows) - 1]:
                c.part[((first + row) * op.tokens + token) * op.stride + column] = rC[2 * half + e]


@cute.jit
def sum_of(c: Tiles, i: Int32, width: cutlass.Constexpr, op: cutlass.Constexpr):
    """The sum of row i of the partial sums over `width` warps, in their order."""
    total = c.part[i * op.stride]
    for w in cutlass.range_constexpr(1, width):
        total += c.part[i * op.stride + w]
    return total


@cute.jit
def drain_tiles(
    c: Tiles, it: Int32, span: tuple, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """part[(base + row) tokens + token, warp] for n rows; span = (base, n). The first half of a tile is even rows
    of the MMA, the others odd ones.
    """
    base, n = span
    for first in cutlass.range(0, n, g.height, unroll=1):
        it, rC = tile_times(c, it, rX, n - first, g, op)
        row = c.lane // 4 % 2 * (g.height // 2) + c.lane // 8
        if c.warp < g.active:
            if cutlass.const_expr(g.height == 16):
                keep(c, rC, (row, row + 4, n - first), base + first, c.warp, op)
            else:
                keep(c, rC, (row, n - first), base + first, c.warp, op)
    return it


@cute.jit
def columns_of(c: Tiles, t: cutlass.Constexpr, g: cutlass.Constexpr):
    """Which 16 bytes of a row of x this thread has as its t-th."""
    return (t // 2 * g.active * 2 + c.warp * 2 + t % 2) * 4 + c.lane % 4
