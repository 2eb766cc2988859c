"""Products of bf16 rows in the ring with one token, on tensor cores: sums of warps, a row each."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from targets.kimi_k3.seeds.persistent.device import Ctx, vector, within
from targets.kimi_k3.seeds.persistent.ring import stage_done, stage_full, stage_loaded
from targets.kimi_k3.seeds.persistent.stages import STRIDE


@cute.jit
def mma_rows(rC: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, rX: cute.Tensor):
    """rC += two rows times x: each lane's four words of row a and of row b with the same lane's words of x.

    A lane's words are columns of its own row of the MMA (g for a, g + 8 for b), its x the same columns of column g of
    the other operand; so only the diagonal of the product means anything, and it sums over the four lanes of g.
    """
    out = cute.arch.inline_ptx(
        """{
        .reg .f32 c0, c1, c2, c3;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3},
            {{$r0}, {$r4}, {$r1}, {$r5}}, {{$r8}, {$r9}}, {{$r12}, {$r13}, {$r14}, {$r15}};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r2}, {$r6}, {$r3}, {$r7}}, {{$r10}, {$r11}}, {c0, c1, c2, c3};
        }""",
        write_only_types=[Float32] * 4,
        read_only_args=[
            *(rA[i] for i in range(4)), *(rB[i] for i in range(4)), *(rX[i] for i in range(4)),
            *(rC[i] for i in range(4)),
        ],
    )  # fmt: skip
    for i in cutlass.range_constexpr(4):
        rC[i] = out[i]


@cute.jit
def diagonal(c: Ctx, rC: cute.Tensor):
    """(row a, row b): this lane's element of the diagonal, zero in lanes that have none."""
    g, q = c.lane // 4, c.lane % 4
    odd = g % 2 == 1
    a = rC[1] if odd else rC[0]
    b = rC[3] if odd else rC[2]
    mine = q == g // 2
    a = a if mine else Float32(0.0)
    b = b if mine else Float32(0.0)
    return a, b


@cute.jit
def diagonal_sum(a: Float32, b: Float32):
    """Sum of the diagonal: row a in lane 0, row b in lane 1 (of a's eight lanes b borrows the neighbours)."""
    x = a + cute.arch.shuffle_sync_bfly(b, offset=1)
    for offset in cutlass.range_constexpr(3):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=(4, 9, 18)[offset])
    return x


@cute.jit
def load_row(c: Ctx, first: Int32, rW: cute.Tensor, g: cutlass.Constexpr):
    """rW[4, per]: this thread's words of the row that starts at 16 bytes times `first` in the ring."""
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if cutlass.const_expr(g.exact):
            cute.autovec_copy(cute.local_tile(c.ring, (4,), (first + i,)), rW[None, v])
        else:
            rW[None, v].fill(0)
            if i < g.vecs:
                cute.autovec_copy(cute.local_tile(c.ring, (4,), (first + i,)), rW[None, v])


def four_in_hand(g):
    """Whether stages have so many rows that a warp takes four at once: then a stage is one turn, not two."""
    return not g.pair and g.per == 1 and g.chunk >= 4 * g.passes


def one_in_hand(g, op):
    """Whether a stage has just two rows of `hidden` columns, single or a pair."""
    pair = op.rows(g.k, pair=True)
    return g.k == op.wide.k and op.wide.chunk == 2 and pair.chunk == 1


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
def drain_two(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain_wide` where a stage has two rows: it is given back once they are in registers, before their product."""
    g = op.wide
    chunk = Int32(1) if pairs else Int32(2)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for first in cutlass.range(0, rows, chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = Int32(1) if rows - first < chunk else Int32(2)
        # warps beyond the width make sums that nobody keeps
        load_row(c, slot * (op.stage // 16), rA, g)
        load_row(c, slot * (op.stage // 16) + (n - 1) * g.vecs, rB, g)
        stage_loaded(c, slot)
        rC.fill(0.0)
        for v in cutlass.range_constexpr(g.per):
            mma_rows(rC, rA[None, v], rB[None, v], rX[None, v])
        x, y = diagonal(c, rC)
        total = diagonal_sum(x, y)
        if c.lane < n and c.warp < g.width:
            row = 2 * first if pairs else first
            c.part[(base + row + c.lane) * STRIDE + c.warp] = total
        it += 1
    return it


@cute.jit
def take_stage(
    c: Ctx, it: Int32, n: Int32, rA: cute.Tensor, rB: cute.Tensor, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """The diagonals of a stage's two rows (the first twice if n is 1), which is given back before its product."""
    g = op.wide
    slot = stage_full(c, it, op)
    load_row(c, slot * (op.stage // 16), rA, g)
    load_row(c, slot * (op.stage // 16) + (n - 1) * g.vecs, rB, g)
    stage_loaded(c, slot)
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    rC.fill(0.0)
    for v in cutlass.range_constexpr(g.per):
        mma_rows(rC[None, v % 2], rA[None, v], rB[None, v], rX[None, v])
    for e in cutlass.range_constexpr(4):
        rC[e, 0] = rC[e, 0] + rC[e, 1]
    return diagonal(c, rC[None, 0])


@cute.jit
def drain_pairs(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain_two` of two stages at a time: their sums travel between lanes together."""
    g = op.wide
    chunk = Int32(1) if pairs else Int32(2)
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for first in cutlass.range(0, rows, 2 * chunk, unroll=1):
        left = rows - first
        n = Int32(1) if left < chunk else Int32(2)
        m = Int32(0)
        x, y = take_stage(c, it, n, rA, rB, rX, op)
        it += 1
        z, w = Float32(0.0), Float32(0.0)
        if left > chunk:
            m = Int32(1) if left - chunk < chunk else Int32(2)
            z, w = take_stage(c, it, m, rA, rB, rX, op)
            it += 1
        x = x + cute.arch.shuffle_sync_bfly(y, offset=1)
        z = z + cute.arch.shuffle_sync_bfly(w, offset=1)
        x = x + cute.arch.shuffle_sync_bfly(z, offset=2)
        for k in cutlass.range_constexpr(3):
            x = x + cute.arch.shuffle_sync_bfly(x, offset=(4, 9, 18)[k])
        if c.lane < n + m and c.warp < g.width:
            row = 2 * first if pairs else first
            c.part[(base + row + c.lane) * STRIDE + c.warp] = x
    return it


@cute.jit
def drain_twos(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    if cutlass.const_expr(getattr(op, "twos", 1) > 1):
        it = drain_pairs(c, it, rows, pairs, base, rX, op)
    else:
        it = drain_two(c, it, rows, pairs, base, rX, op)
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
):
    """part[base + row, warp of the row] for `rows` rows (pairs: 2 row is gate, 2 row + 1 up); rX words [4, per]."""
    if cutlass.const_expr(getattr(op, "couples", 1) > 1 and four_in_hand(g)):
        it = drain_four(c, it, rows, base, rX, g, op)
    elif cutlass.const_expr(getattr(op, "couples", 1) > 1 and one_in_hand(g, op)):
        it = drain_twos(c, it, rows, Boolean(g.pair), base, rX, op)
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
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain` for rows of `hidden` columns, single or in pairs as the caller finds at run time: one copy of the code
    serves them all."""
    if cutlass.const_expr(getattr(op, "couples", 1) > 1 and one_in_hand(op.wide, op)):
        it = drain_twos(c, it, rows, pairs, base, rX, op)
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
