"""Products of bf16 rows in the ring with one token, on tensor cores: sums of warps, a row each."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from targets.kimi_k3.seeds.persistent.device import Ctx, within
from targets.kimi_k3.seeds.persistent.ring import stage_done, stage_full
from targets.kimi_k3.seeds.persistent.row_products import (
    diagonal,
    diagonal_sum,
    drain_twos,
    load_row,
    mma_rows,
)
from targets.kimi_k3.seeds.persistent.stages import STRIDE, one_in_hand


def four_in_hand(g):
    """Whether stages have so many rows that a warp takes four at once: then a stage is one turn, not two."""
    return not g.pair and g.per == 1 and g.chunk >= 4 * g.passes


@cute.jit
def drain_four(
    c: Ctx,
    it: Int32,
    rows: Int32,
    base: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """`drain` of single rows, four in hand: their sums travel between lanes together."""
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    r = cute.make_rmem_tensor(cute.make_layout((4, g.per, 4)), Uint32)
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        if c.warp < g.width * g.passes:
            for i in cutlass.range(4 * (c.warp // g.width), n, 4 * g.passes, unroll=1):
                for k in cutlass.range_constexpr(4):
                    start = slot * (op.stage // 16) + within(i + k, n) * g.vecs
                    load_row(c, start, r[None, None, k], g)
                rC.fill(0.0)
                for v in cutlass.range_constexpr(g.per):
                    mma_rows(rC[None, 0], r[None, v, 0], r[None, v, 1], rX[None, v])
                    mma_rows(rC[None, 1], r[None, v, 2], r[None, v, 3], rX[None, v])
                x, y = diagonal(c, rC[None, 0])
                z, w = diagonal(c, rC[None, 1])
                x = x + cute.arch.shuffle_sync_bfly(y, offset=1)
                z = z + cute.arch.shuffle_sync_bfly(w, offset=1)
                x = x + cute.arch.shuffle_sync_bfly(z, offset=2)
                for k in cutlass.range_constexpr(3):
                    x = x + cute.arch.shuffle_sync_bfly(x, offset=(4, 9, 18)[k])
                if c.lane < 4 and i + c.lane < n:
                    c.part[(base + first + i + c.lane) * STRIDE + c.warp % g.width] = x
        stage_done(c, slot)
        it += 1
    return it


@cute.jit
def drain(
    c: Ctx,
    it: Int32,
    rows: Int32,
    base: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
    held: Any = None,
):
    """part[base + row, warp of the row] for `rows` rows (pairs: 2 row is gate, 2 row + 1 up); rX words [4, per]. held:
    as `drain_pairs`."""
    if cutlass.const_expr(getattr(op, "couples", 1) > 1 and four_in_hand(g)):
        it = drain_four(c, it, rows, base, rX, g, op)
    elif cutlass.const_expr(getattr(op, "couples", 1) > 1 and one_in_hand(g, op)):
        it = drain_twos(c, it, rows, Boolean(g.pair), base, rX, op, held)
    else:
        it = drain_rows(c, it, rows, base, rX, g, op)
    return it


@cute.jit
def drain_rows(
    c: Ctx,
    it: Int32,
    rows: Int32,
    base: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """`drain`, two rows in hand."""
    halves = 2 if g.pair else 1
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        if c.warp < g.width * g.passes:
            for i in cutlass.range(2 * (c.warp // g.width), halves * n, 2 * g.passes, unroll=1):
                a, b = i, i + 1
                if cutlass.const_expr(g.pair):
                    a, b = i // 2, g.chunk + i // 2
                else:
                    b = i + 1 if i + 1 < n else i
                load_row(c, slot * (op.stage // 16) + a * g.vecs, rA, g)
                load_row(c, slot * (op.stage // 16) + b * g.vecs, rB, g)
                rC.fill(0.0)
                for v in cutlass.range_constexpr(g.per):
                    mma_rows(rC, rA[None, v], rB[None, v], rX[None, v])
                x, y = diagonal(c, rC)
                sum = diagonal_sum(x, y)
                if c.lane < 2 and i + c.lane < halves * n:
                    c.part[(base + halves * first + i + c.lane) * STRIDE + c.warp % g.width] = sum
        stage_done(c, slot)
        it += 1
    return it


@cute.jit
def drain_wide(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr,
    held: Any = None,
):  # fmt: skip
    """`drain` for rows of `hidden` columns, single or in pairs as the caller finds at run time: one copy of the code
    serves them all."""
    if cutlass.const_expr(getattr(op, "couples", 1) > 1 and one_in_hand(op.wide, op)):
        it = drain_twos(c, it, rows, pairs, base, rX, op, held)
    else:
        it = drain_wide_rows(c, it, rows, pairs, base, rX, op)
    return it


@cute.jit
def drain_wide_rows(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain_wide`, whatever a stage holds."""
    g, h = op.wide, op.rows(op.d.hidden, pair=True)
    chunk = Int32(h.chunk) if pairs else Int32(g.chunk)
    halves = Int32(2) if pairs else Int32(1)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for first in cutlass.range(0, rows, chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = rows - first if rows - first < chunk else chunk
        if g.width * g.passes > c.warp:
            for i in cutlass.range(2 * (c.warp // g.width), halves * n, 2 * g.passes, unroll=1):
                a, b = i, i + 1
                if pairs:
                    a, b = i // 2, chunk + i // 2
                else:
                    b = i + 1 if i + 1 < n else i
                load_row(c, slot * (op.stage // 16) + a * g.vecs, rA, g)
                load_row(c, slot * (op.stage // 16) + b * g.vecs, rB, g)
                rC.fill(0.0)
                for v in cutlass.range_constexpr(g.per):
                    mma_rows(rC, rA[None, v], rB[None, v], rX[None, v])
                x, y = diagonal(c, rC)
                total = diagonal_sum(x, y)
                if c.lane < 2 and i + c.lane < halves * n:
                    c.part[(base + halves * first + i + c.lane) * STRIDE + c.warp % g.width] = total
        stage_done(c, slot)
        it += 1
    return it


@cute.jit
def gathered(c: Ctx, i: Int32, width: cutlass.Constexpr):
    """The sum of row i over its warps, in their order."""
    total = c.part[i * STRIDE]
    for w in cutlass.range_constexpr(1, width):
        total += c.part[i * STRIDE + w]
    return total
