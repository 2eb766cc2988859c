"""Rows of `hidden` columns in the ring, two a stage, times one token on tensor cores; a stage can be held over an
edge."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from targets.kimi_k3.seeds.persistent.device import Ctx, vector
from targets.kimi_k3.seeds.persistent.ring import stage_full, stage_loaded
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


class Rows2(NamedTuple):
    """Words [4, per] of the two rows of a stage."""

    a: Any
    b: Any


def no_rows(op):
    return Rows2(*(cute.make_rmem_tensor(cute.make_layout((4, op.wide.per)), Uint32) for _ in "ab"))


@cute.jit
def load_stage(c: Ctx, it: Int32, n: Int32, r: Rows2, op: cutlass.Constexpr):
    """A stage's two rows (the first twice if n is 1), which is given back."""
    g = op.wide
    slot = stage_full(c, it, op)
    load_row(c, slot * (op.stage // 16), r.a, g)
    load_row(c, slot * (op.stage // 16) + (n - 1) * g.vecs, r.b, g)
    stage_loaded(c, slot)


@cute.jit
def hold(c: Ctx, it: Int32, rows: Int32, pairs: Boolean, op: cutlass.Constexpr):
    """The first stage of `drain_pairs` before what it is multiplied with is known: the ring has room for one more while
    this CTA waits for others. Zeros where there are no rows."""
    r = no_rows(op)
    for x in r:
        # not what it was a half ago, which would stay in registers until then
        x.fill(0)
    if rows > 0:
        load_stage(c, it, Int32(2) if pairs or rows > 1 else Int32(1), r, op)
    return r


@cute.jit
def drain_two(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain_wide` where a stage has two rows: it is given back once they are in registers, before their product."""
    g = op.wide
    chunk = Int32(1) if pairs else Int32(2)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    r = no_rows(op)
    for first in cutlass.range(0, rows, chunk, unroll=1):
        n = Int32(1) if rows - first < chunk else Int32(2)
        # warps beyond the width make sums that nobody keeps
        load_stage(c, it, n, r, op)
        rC.fill(0.0)
        for v in cutlass.range_constexpr(g.per):
            mma_rows(rC, r.a[None, v], r.b[None, v], rX[None, v])
        x, y = diagonal(c, rC)
        total = diagonal_sum(x, y)
        if c.lane < n and c.warp < g.width:
            row = 2 * first if pairs else first
            c.part[(base + row + c.lane) * STRIDE + c.warp] = total
        it += 1
    return it


@cute.jit
def times_stage(c: Ctx, r: Rows2, rX: cute.Tensor, op: cutlass.Constexpr):
    """The diagonals of a stage's two rows."""
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    rC.fill(0.0)
    for v in cutlass.range_constexpr(op.wide.per):
        mma_rows(rC[None, v % 2], r.a[None, v], r.b[None, v], rX[None, v])
    for e in cutlass.range_constexpr(4):
        rC[e, 0] = rC[e, 0] + rC[e, 1]
    return diagonal(c, rC[None, 0])


@cute.jit
def drain_pairs(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr,
    held: Any = None,
):  # fmt: skip
    """`drain_two` of two stages at a time: their sums travel between lanes together. held = (the first one's `Rows2`,
    whether it is there)."""
    g = op.wide
    chunk = Int32(1) if pairs else Int32(2)
    r, here = (no_rows(op), Boolean(False)) if held is None else held
    for first in cutlass.range(0, rows, 2 * chunk, unroll=1):
        left = rows - first
        n = Int32(1) if left < chunk else Int32(2)
        m = Int32(0)
        if first > 0 or not here:
            load_stage(c, it, n, r, op)
        x, y = times_stage(c, r, rX, op)
        it += 1
        z, w = Float32(0.0), Float32(0.0)
        if left > chunk:
            m = Int32(1) if left - chunk < chunk else Int32(2)
            load_stage(c, it, m, r, op)
            z, w = times_stage(c, r, rX, op)
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
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr,
    held: Any = None,
):  # fmt: skip
    if cutlass.const_expr(getattr(op, "twos", 1) > 1):
        it = drain_pairs(c, it, rows, pairs, base, rX, op, held)
    else:
        it = drain_two(c, it, rows, pairs, base, rX, op)
    return it
