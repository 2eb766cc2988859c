"""The product in the one-launch chain: weights through a ring of column groups, x from the mix of the one before."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2, high, low, mma_k32, pack_bf16
from targets.kimi_k3.seeds.parity import await_four, peek_four, row_sum, value_of
from targets.kimi_k3.seeds.stack_parts import (
    FIELDS,
    NORM,
    O_PROJ,
    OUT,
    PROJ,
    Ahead,
    Ctx,
    Row,
    X,
    Y,
    consumers,
    pair_of,
    word_into,
    words_at,
)


@cute.jit
def produce(c: Ctx, op: cutlass.Constexpr):
    """One warp: the weights of all instances, a group of eight rows as soon as its place is free."""
    size = 2 * op.k
    for n in cutlass.range(op.layers, unroll=1):
        source = c.table[n * len(FIELDS) + O_PROJ] + Int64(c.first) * (8 * size)
        for g in cutlass.range(c.count, unroll=1):
            if n > 0:
                cute.arch.mbarrier_wait(c.empty + g, (n - 1) & 1)
            if c.lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(c.full + g, 8 * size)
            cute.arch.sync_warp()
            if c.lane < 8:
                row = g * 8 + c.lane
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                    " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[
                        Int32(c.weights.iterator.toint()) + row * op.pitch, source + Int64(row) * size, Int32(size),
                        Int32((c.full + g).toint()),
                    ],
                )  # fmt: skip


@cute.jit
def multiply(c: Ctx, n: Int32, op: cutlass.Constexpr):
    """c.sums[warp, row, column] = this warp's share of k of the CTA's products."""
    octet, quarter = c.lane // 4, c.lane % 4
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.blocks)), Uint32)
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rX.fill(0)
    if c.warp < op.split:
        for b in cutlass.range_constexpr(op.blocks):
            place = (c.warp * op.blocks + b) * 4 + quarter
            if octet < op.rows:
                at = octet * (op.k // 8 + 1) + place
                cute.autovec_copy(cute.local_tile(c.x, (4,), (at,)), rX[None, b])
        for g in cutlass.range_constexpr(op.per):
            if g < c.count:
                cute.arch.mbarrier_wait(c.full + g, n & 1)
                rC.fill(0.0)
                for b in cutlass.range_constexpr(op.blocks):
                    place = (c.warp * op.blocks + b) * 4 + quarter
                    at = (g * 8 + octet) * (op.pitch // 16) + place
                    cute.autovec_copy(cute.local_tile(c.weights, (4,), (at,)), rW)
                    mma_k32(rC, rX[None, b], tuple(rW[e] for e in range(4)))
                cute.arch.sync_warp()
                if c.lane == 0:
                    cute.arch.mbarrier_arrive(c.empty + g)
                if octet < op.rows:
                    at = ((c.warp * op.rows + octet) * op.width + g * 8) // 2 + quarter
                    two = cute.make_tensor(rC.iterator, cute.make_layout((2,)))
                    cute.autovec_copy(two, cute.local_tile(c.sums, (2,), (at,)))


# ---- x


@cute.jit
def unit_of(c: Ctx, u: cutlass.Constexpr, op: cutlass.Constexpr):
    return c.part * 32 + c.lane + u * 32 * op.share


@cute.jit
def look_ahead(c: Ctx, n: Int32, a: Ahead, op: cutlass.Constexpr):
    """Begins to load what instance n will want; the norm of x is that of the instance before."""
    if n < op.layers and c.part < op.share:
        line = n * len(FIELDS)
        for u in cutlass.range_constexpr(op.units):
            i = unit_of(c, u, op)
            if i < op.k // 4:
                words_at(c.table[line + X], c.row * (op.k // 4) + i, a.x[None, u], 2)
                if n > 0:
                    words_at(c.table[line - len(FIELDS) + OUT], i, a.scale[None, u], 2)
    if n < op.layers and c.warp < op.rows:
        line = n * len(FIELDS)
        for t in cutlass.range_constexpr(op.turns):
            _, i, there = pair_of(c, t)
            if there:
                for r, f in ((a.norm, NORM), (a.proj, PROJ)):
                    words_at(
                        c.table[line + f],
                        i,
                        cute.make_tensor(r.iterator + t, cute.make_layout((1,))),
                        1,
                    )


@cute.jit
def write_y(c: Ctx, n: Int32, row: Row, a: Ahead, op: cutlass.Constexpr):
    """This warp's columns of y of instance n; c.scale[row] = 1 / RMS of the row's mix, once it is known."""
    start = c.squares + Int64(n * op.rows + c.row) * (4 * op.ctas4)
    scale = cute.math.rsqrt(row_sum(start, c.flag, op.ctas, op.spin) / op.hidden + op.eps)
    if c.lane == 0:
        c.scale[c.row] = scale
    for t in cutlass.range_constexpr(op.turns):
        _, i, there = pair_of(c, t)
        if there:
            y = pack_bf16(
                row.mix[0, t] * scale * low(a.out[t]), row.mix[1, t] * scale * high(a.out[t])
            )
            word_into(c.table[n * len(FIELDS) + Y], c.row * (op.hidden // 2) + i, y)


@cute.jit
def fetch_mix(c: Ctx, n: Int32, rM: cute.Tensor, op: cutlass.Constexpr):
    """rM[4, units] = this thread's columns of the mix of instance n."""
    start = c.mixed + Int64(n * op.rows + c.row) * (4 * op.k)
    if c.part < op.share:
        for u in cutlass.range_constexpr(op.units):
            if unit_of(c, u, op) < op.k // 4:
                peek_four(start + Int64(unit_of(c, u, op)) * 16, rM[None, u])
        for u in cutlass.range_constexpr(op.units):
            if unit_of(c, u, op) < op.k // 4:
                at = start + Int64(unit_of(c, u, op)) * 16
                await_four(at, rM[None, u], c.flag, Int32(4), op.spin)


@cute.jit
def bring_x(c: Ctx, n: Int32, a: Ahead, op: cutlass.Constexpr):
    """c.x = bf(x_n + y_{n-1}) as soon as the mix is there."""
    rM = cute.make_rmem_tensor(cute.make_layout((4, op.units)), Uint32)
    rM.fill(0)
    if cutlass.const_expr(op.eager):
        if n > 0:
            fetch_mix(c, n - 1, rM, op)
    consumers(op)
    if cutlass.const_expr(not op.eager):
        if n > 0:
            fetch_mix(c, n - 1, rM, op)
    if c.part < op.share:
        scale = c.scale[c.row]
        for u in cutlass.range_constexpr(op.units):
            i = unit_of(c, u, op)
            if i < op.k // 4:
                if n > 0:
                    for e in cutlass.range_constexpr(2):
                        m0, m1 = (value_of(rM[2 * e + k, u]) for k in range(2))
                        y = pack_bf16(
                            m0 * scale * low(a.scale[e, u]), m1 * scale * high(a.scale[e, u])
                        )
                        a.x[e, u] = add_bf16x2(a.x[e, u], y)
                at = c.row * (op.k // 4 + 2) + i
                cute.autovec_copy(a.x[None, u], cute.local_tile(c.x, (2,), (at,)))
