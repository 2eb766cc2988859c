"""Device pieces of the persistent kernel: edges between CTAs, the ring of weights, dot products, sums over a CTA."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32

from targets.kimi_k3.seeds.common import high, lanes_sum, low
from targets.kimi_k3.seeds.persistent.plan import STRIDE

EVICT_FIRST = 0x12F0000000000000


class Ctx(NamedTuple):
    """Where a thread is, and the shared memory of its CTA.

    ring: stages of weights (words); full, empty: mbarriers, one each a stage; routed: mbarrier, the ids are known;
    part, red: sums of warps; tab: addresses by layer and field; sync: counter and base of the edges (global).
    """

    tid: Any
    warp: Any
    lane: Any
    cta: Any
    ring: Any
    full: Any
    empty: Any
    routed: Any
    part: Any
    red: Any
    tab: Any
    ids: Any
    weights: Any
    own: Any
    pool: Any
    sync: Any
    base: Any


@cute.jit
def consumers(op: cutlass.Constexpr):
    """Barrier of the consumer warps."""
    cute.arch.barrier(barrier_id=1, number_of_threads=op.threads)


@cute.jit
def arrive(c: Ctx, op: cutlass.Constexpr):
    """All that this CTA's consumers wrote is visible to who waits for this edge."""
    consumers(op)
    if c.tid == 0:
        cute.arch.red(c.sync, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")


@cute.jit
def wait(c: Ctx, edge: Int32, op: cutlass.Constexpr):
    """Until every CTA arrived at edge number `edge` (counted from 1) of this launch."""
    if c.tid == 0:
        target = c.base + edge * op.ctas
        seen = cute.arch.load(c.sync, Int32, sem="acquire", scope="gpu")
        if cutlass.const_expr(op.spin == 0):
            while seen - target < 0:
                seen = cute.arch.load(c.sync, Int32, sem="acquire", scope="gpu")
        else:
            turns = Int32(0)
            while seen - target < 0 and turns < op.spin:
                seen = cute.arch.load(c.sync, Int32, sem="acquire", scope="gpu")
                turns += 1
            if seen - target < 0:
                record = cute.make_tensor(c.sync + 64, cute.make_layout((4,)))
                record[0], record[1], record[2], record[3] = (
                    c.cta + 1,
                    edge,
                    seen - c.base,
                    target - c.base,
                )
    consumers(op)


@cute.jit
def at(dtype: cutlass.Constexpr, address: Int64, n: cutlass.Constexpr):
    """n elements in global memory at an address that is a multiple of 16."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((n,)))


@cute.jit
def words_at(address: Int64, i: Int32, r: cute.Tensor):
    """r[4 words] = the i-th 16 bytes at an address."""
    pointer = cute.make_ptr(
        Uint32, address + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
    )
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout((4,))), r)


@cute.jit
def view(c: Ctx, dtype: cutlass.Constexpr, offset: cutlass.Constexpr, n: cutlass.Constexpr):
    """n elements of the scratch pool, `offset` bytes in."""
    pointer = cute.recast_ptr(c.pool.iterator + offset // 4, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout((n,)))


@cute.jit
def field(c: Ctx, layer: Int32, f: cutlass.Constexpr, fields: cutlass.Constexpr):
    return c.tab[layer * fields + f]


@cute.jit
def unpack(r: cute.Tensor, x: cute.Tensor):
    """x[8] f32 of r[4] words of bf16."""
    for e in cutlass.range_constexpr(4):
        x[2 * e], x[2 * e + 1] = low(r[e]), high(r[e])


# ---- producer


@cute.jit
def stage_free(c: Ctx, it: Int32, op: cutlass.Constexpr):
    """Slot of stage number `it`, once its last use is over."""
    slot = it % op.stages
    if it >= op.stages:
        cute.arch.mbarrier_wait(c.empty + slot, (it // op.stages - 1) & 1)
    return slot


@cute.jit
def bulk(c: Ctx, slot: Int32, offset: Int32, source: Int64, size: Int32, op: cutlass.Constexpr):
    target = Int32(c.ring.iterator.toint()) + slot * op.stage + offset
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[
            target, source, size, Int32((c.full + slot).toint()), Int64(EVICT_FIRST)
        ],
    )  # fmt: skip


@cute.jit
def fill(
    c: Ctx, it: Int32, source: Int64, rows: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """Stages of `rows` rows that lie together."""
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_free(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, n * g.row_bytes)
        bulk(c, slot, Int32(0), source + Int64(first) * g.row_bytes, n * g.row_bytes, op)
        it += 1
    return it


@cute.jit
def fill_pairs(
    c: Ctx,
    it: Int32,
    source: Int64,
    apart: Int64,
    rows: Int32,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """As `fill`, with as many rows from `apart` bytes further on."""
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_free(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * n * g.row_bytes)
        start = source + Int64(first) * g.row_bytes
        bulk(c, slot, Int32(0), start, n * g.row_bytes, op)
        bulk(c, slot, Int32(g.chunk * g.row_bytes), start + apart, n * g.row_bytes, op)
        it += 1
    return it


# ---- consumers


@cute.jit
def stage_full(c: Ctx, it: Int32, op: cutlass.Constexpr):
    slot = it % op.stages
    cute.arch.mbarrier_wait(c.full + slot, (it // op.stages) & 1)
    return slot


@cute.jit
def stage_done(c: Ctx, slot: Int32):
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(c.empty + slot)


@cute.jit
def vector(c: Ctx, v: cutlass.Constexpr, g: cutlass.Constexpr):
    """Which vector of eight columns this thread has as its v-th."""
    return (c.warp % g.width) * 32 + c.lane + v * 32 * g.width


@cute.jit
def dot(c: Ctx, first: Int32, rX: cute.Tensor, g: cutlass.Constexpr):
    """This thread's share of x times the row that starts at vector `first` of the ring."""
    rW = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    a, b = Float32(0.0), Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if cutlass.const_expr(g.exact):
            cute.autovec_copy(cute.local_tile(c.ring, (4,), (first + i,)), rW[None, v])
        else:
            rW[None, v].fill(0)
            if i < g.vecs:
                cute.autovec_copy(cute.local_tile(c.ring, (4,), (first + i,)), rW[None, v])
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            a += low(rW[e, v]) * rX[2 * e, v]
            b += high(rW[e, v]) * rX[2 * e + 1, v]
    return a + b


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
    """part[base + row, warp of the row] for `rows` rows (pairs: 2 row is gate, 2 row + 1 up)."""
    halves = 2 if g.pair else 1
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        if c.warp < g.width * g.passes:
            for i in cutlass.range(c.warp // g.width, halves * n, g.passes, unroll=2):
                row = i
                if cutlass.const_expr(g.pair):
                    row = (i % 2) * g.chunk + i // 2
                sum = lanes_sum(dot(c, slot * (op.stage // 16) + row * g.vecs, rX, g), 32)
                if c.lane == 0:
                    c.part[(base + halves * first + i) * STRIDE + c.warp % g.width] = sum
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


@cute.jit
def put(c: Ctx, slot: cutlass.Constexpr, x: Float32):
    """This warp's part of reduction `slot`."""
    x = lanes_sum(x, 32)
    if c.lane == 0:
        c.red[slot * STRIDE + c.warp] = x


@cute.jit
def take(c: Ctx, slot: cutlass.Constexpr, width: cutlass.Constexpr):
    """Sum of the first `width` warps' parts, after a barrier."""
    x = Float32(0.0)
    if c.lane < width:
        x = c.red[slot * STRIDE + c.lane]
    return lanes_sum(x, 32)
