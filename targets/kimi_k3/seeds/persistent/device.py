"""Device pieces of the persistent kernel: edges between CTAs, the ring of weights, dot products, sums over a CTA."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import high, lanes_sum, low
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.plan import STRIDE

EVICT_FIRST = 0x12F0000000000000


class Ctx(NamedTuple):
    """Where a thread is, and the shared memory of its CTA.

    ring: stages of weights (words); full, empty: mbarriers, one each a stage; routed: mbarrier, the ids are known, and
    behind it, for a warp that chooses, one that says that this CTA's logits are posted, one that MLA begins to wait;
    part, red: sums of warps; tab: addresses by layer and field; sync: counters of the edges (global), a line each:
    ALL at 0, ROUTE at 32, the record of a spin that gave up at 64, what the counters were at the launch from 96; mail:
    boxes of what CTAs send each other (global); track, brought: timelines of consumers and producer, None in a normal
    build; list: what the producer brings of each matrix (`bring`), where it has one;
    kept: this thread's columns of the prefix and, where there is room, of the bank (words).
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
    mail: Any
    track: Any
    brought: Any
    list: Any
    kept: Any


ALL, ROUTE = 0, 32
"""Lines of the counters: edges that every CTA waits for in turn; the router's edge, which is waited for later."""


@cute.jit
def consumers(op: cutlass.Constexpr):
    """Barrier of the consumer warps."""
    cute.arch.barrier(barrier_id=1, number_of_threads=op.threads)


@cute.jit
def dawdle(c: Ctx, op: cutlass.Constexpr):
    """One arrival in sixteen is late by up to `jitter` ns, by a hash of the clock; nothing in a normal build."""
    if cutlass.const_expr(getattr(op, "jitter", 0) > 0):
        if c.tid == 0:
            cute.arch.inline_ptx(
                """{
                .reg .u32 a, b;
                .reg .pred p;
                mov.u32 a, %clock;
                xor.b32 a, a, {$r0};
                mul.lo.u32 a, a, 0x9E3779B1;
                shr.u32 b, a, 28;
                setp.eq.u32 p, b, 0;
                shr.u32 a, a, 8;
                and.b32 a, a, {$r1};
                @p nanosleep.u32 a;
                }""",
                read_only_args=[c.cta * 7919, Int32(op.jitter - 1)],
            )


@cute.jit
def arrive(c: Ctx, op: cutlass.Constexpr):
    """All that this CTA's consumers wrote is visible to who waits for this edge."""
    dawdle(c, op)
    consumers(op)
    if c.tid == 0:
        cute.arch.red(c.sync, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")


@cute.jit
def hint(c: Ctx, op: cutlass.Constexpr, line: cutlass.Constexpr = ALL):
    """This CTA's consumers have posted: it is worth looking into the boxes. Orders nothing; what is in a box says so.

    A release here would first drain all that the CTA wrote, about a microsecond under load.
    """
    dawdle(c, op)
    consumers(op)
    if c.tid == 0:
        cute.arch.red(c.sync + line, Int32(1), op="add", dtype="u32", sem="relaxed", scope="gpu")


@cute.jit
def counter(c: Ctx, line: cutlass.Constexpr, acquire: cutlass.Constexpr):
    seen = Int32(0)
    if cutlass.const_expr(acquire):
        seen = cute.arch.load(c.sync + line, Int32, sem="acquire", scope="gpu")
    else:
        seen = cute.arch.load(c.sync + line, Int32, sem="relaxed", scope="gpu")
    return seen


@cute.jit
def wait(
    c: Ctx,
    edge: Int32,
    op: cutlass.Constexpr,
    line: cutlass.Constexpr = ALL,
    acquire: cutlass.Constexpr = True,
    missing: cutlass.Constexpr = 0,
):
    """Until every CTA (but `missing`) arrived at edge number `edge` (counted from 1) of this launch on this line.

    `acquire`: what they wrote before an `arrive` can be read then. After a `hint` there is nothing to acquire.
    """
    if c.tid == 0:
        await_line(c, edge, op, line, acquire, missing)
    consumers(op)


@cute.jit
def await_line(
    c: Ctx,
    edge: Int32,
    op: cutlass.Constexpr,
    line: cutlass.Constexpr,
    acquire: cutlass.Constexpr,
    missing: cutlass.Constexpr,
):
    """As `wait`, by one thread."""
    base = c.base[line // 32]
    target = base + edge * op.ctas - missing
    seen = counter(c, line, acquire)
    if cutlass.const_expr(op.spin == 0):
        while seen - target < 0:
            seen = counter(c, line, acquire)
    else:
        turns = Int32(0)
        while seen - target < 0 and turns < op.spin:
            seen = counter(c, line, acquire)
            turns += 1
        if seen - target < 0:
            record = cute.make_tensor(c.sync + 64, cute.make_layout((4,)))
            record[0], record[1], record[2], record[3] = (
                c.cta + 1,
                edge,
                seen - base,
                target - base,
            )


@cute.jit
def leave(c: Ctx, edge: Int32, counts: tuple, op: cutlass.Constexpr):
    """The next launch counts on from here. After the last edge, when every CTA has read where this one began.

    counts: FFNs with experts, KDAs, layers and MLAs, those that the kernel has.
    """
    if c.tid == 0 and c.cta == 0:
        state = cute.make_tensor(c.sync + 96, cute.make_layout((6,)))
        state[0] = c.base[0] + edge * op.ctas
        state[1] = c.base[1] + counts[0] * op.ctas
        for k in cutlass.range_constexpr(len(counts)):
            state[2 + k] = c.base[2 + k] + counts[k]


# ---- boxes: an element that is all ones is empty; no result of bf16 or f32 arithmetic has these bits


@cute.jit
def box(c: Ctx, name: cutlass.Constexpr, turn: Int32, op: cutlass.Constexpr):
    """Address of a box for this turn (0 or 1)."""
    start, size, n = op.boxes[name]
    return c.mail + start + Int64(turn) * op.box_bytes(size, n)


@cute.jit
def post(c: Ctx, name: cutlass.Constexpr, turn: Int32, i: Int32, x: Float32, op: cutlass.Constexpr):
    """x into element i of a box; its place for the other turn is emptied, which all have read by now.

    One thread has an element always, so emptying and filling it keep their order.
    """
    size = op.boxes[name][1]
    here = box(c, name, turn, op) + Int64(i) * size
    there = box(c, name, 1 - turn, op) + Int64(i) * size
    if cutlass.const_expr(size == 2):
        cute.arch.inline_ptx(
            """{
            .reg .b16 h, e;
            cvt.rn.bf16.f32 h, {$r1};
            mov.b16 e, 0xFFFF;
            st.relaxed.gpu.global.b16 [{$r0}], h;
            st.relaxed.gpu.global.b16 [{$r2}], e;
            }""",
            read_only_args=[here, x, there],
        )
    else:
        cute.arch.inline_ptx(
            """{
            .reg .b32 e;
            mov.b32 e, 0xFFFFFFFF;
            st.relaxed.gpu.global.f32 [{$r0}], {$r1};
            st.relaxed.gpu.global.b32 [{$r2}], e;
            }""",
            read_only_args=[here, x, there],
        )


def registers(n, first, step):
    """The operand of a vector instruction: n registers of inline PTX from number `first` on."""
    return "{" + ", ".join("{$r" + str(first + step * k) + "}" for k in range(n)) + "}"


@cute.jit
def post_some(here: Int64, there: Int64, r: cute.Tensor, n: cutlass.Constexpr):
    """As `post`, n = 2 or 4 f32 at once: r[n] to `here`; its place for the other turn is emptied."""
    size = ".v" + str(n)
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global{size}.f32 [{{$r0}}], {registers(n, 3, 1)};"
        f" st.relaxed.gpu.global{size}.b32 [{{$r1}}], {registers(n, 2, 0)};",
        read_only_args=[here, there, Uint32(0xFFFFFFFF), *(r[k] for k in range(n))],
    )


@cute.jit
def empty_some(there: Int64, n: cutlass.Constexpr):
    """n = 2 or 4 f32 of a box are emptied by a CTA that has nothing for them this time."""
    size = ".v" + str(n)
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global{size}.b32 [{{$r0}}], {registers(n, 1, 0)};",
        read_only_args=[there, Uint32(0xFFFFFFFF)],
    )


@cute.jit
def peek(address: Int64, r: cute.Tensor):
    """r[4 words] = 16 bytes of a box, whether they are there or not."""
    words = cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
    for e in cutlass.range_constexpr(4):
        r[e] = words[e]


@cute.jit
def empty(r: cute.Tensor, size: cutlass.Constexpr):
    """Whether one of the elements in four words is empty: a half of ~w that is zero borrows from its highest bit."""
    found = Uint32(0)
    for e in cutlass.range_constexpr(4):
        if cutlass.const_expr(size == 2):
            found = found | ((~r[e] - Uint32(0x00010001)) & r[e] & Uint32(0x80008000))
        else:
            found = found | (Uint32(1) if r[e] == Uint32(0xFFFFFFFF) else Uint32(0))
    return found != Uint32(0)


@cute.jit
def insist(address: Int64, r: cute.Tensor, size: cutlass.Constexpr, op: cutlass.Constexpr):
    """After `peek`: again until all elements are there."""
    if cutlass.const_expr(op.spin == 0):
        while empty(r, size):
            peek(address, r)
    else:
        turns = Int32(0)
        while empty(r, size) and turns < op.spin:
            peek(address, r)
            turns += 1


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
def within(i: Int32, n: Any):
    """i, or the last of n: a load is waited for at the end of a branch, so loads stand in none."""
    return i if i < n else n - 1


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


FFNS, KDAS, LAYERS, MLAS = 0, 1, 2, 3


@cute.jit
def turn_of(c: Ctx, number: Int32, what: cutlass.Constexpr = FFNS):
    """The half of its boxes that FFN, KDA, layer or MLA `number` of the launch uses: in turn, across launches too."""
    return (c.base[2 + what] + number) & 1


@cute.jit
def wide_box(c: Ctx, start: Int64, r: cute.Tensor, op: cutlass.Constexpr):
    """r words [4, per]: this thread's columns of a box of `hidden` elements."""
    g = op.wide
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            peek(start + Int64(vector(c, v, g)) * 16, r[None, v])
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            insist(start + Int64(vector(c, v, g)) * 16, r[None, v], 2, op)


@cute.jit
def peek_half(address: Int64):
    """The bits of one bf16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; ld.relaxed.gpu.global.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def insist_half(address: Int64, x: Uint32, op: cutlass.Constexpr):
    turns = Int32(0)
    while x == Uint32(0xFFFF) and (op.spin == 0 or turns < op.spin):
        x = peek_half(address)
        turns += 1
    return low(x)


@cute.jit
def gathered_from(
    c: Ctx, start: Int64, layer: Int32, rY: cute.Tensor, own: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rY words [4, per]: the first `own` columns from a box, the others as they came from other ranks."""
    g = op.wide
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < own // 8:
            peek(start + Int64(i) * 16, rY[None, v])
        elif i < g.vecs:
            if cutlass.const_expr(own < op.d.hidden):
                words_at(field(c, layer, F["remote_delta"], COUNT), i - own // 8, rY[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < own // 8:
            insist(start + Int64(i) * 16, rY[None, v], 2, op)


@cute.jit
def ahead(c: Ctx, address: Int64, n: Int32, most_: cutlass.Constexpr, op: cutlass.Constexpr):
    """This thread's f32 of `n` at an address (at most `most_`), on their way before they are wanted."""
    turns = -(-most_ // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((turns,)), Float32)
    r.fill(0.0)
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < n:
            pointer = cute.make_ptr(
                Float32, address + Int64(i) * 4, cute.AddressSpace.gmem, assumed_align=4
            )
            r[k] = cute.make_tensor(pointer, cute.make_layout((1,)))[0]
    return r


# ---- producer


@cute.jit
def passed(bar: Any, parity: Int32, patience: cutlass.Constexpr = 0):
    """1 if the phase of that parity of an mbarrier is over, else 0; asks once, and sleeps for up to `patience` ns."""
    ask, limit = "test_wait", ""
    if cutlass.const_expr(patience > 0):
        ask, limit = "try_wait", f", {patience}"
    return cute.arch.inline_ptx(
        "{ .reg .pred p; "
        f"mbarrier.{ask}.parity.shared::cta.b64 p, [{{$r0}}], {{$r1}}{limit}; "
        "selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[Int32(bar.toint()), parity],
    )


@cute.jit
def stage_free(c: Ctx, it: Int32, op: cutlass.Constexpr):
    """Slot of stage number `it`, once its last use is over and few enough stages are on their way.

    What is on its way queues before everything else in the memory system: with a whole ring of 200 KB a CTA an edge
    takes 3 us instead of 0.6. But consumers that find nothing in the ring wait for one stage after another, the longer
    the slower their SM is: while fewer than `hungry` stages are on their way or there, the next one waits for none.
    """
    slot = it % op.stages
    if it >= op.stages:
        cute.arch.mbarrier_wait(c.empty + slot, (it // op.stages - 1) & 1)
    if cutlass.const_expr(0 < op.in_flight < getattr(op, "hungry", 0) <= op.stages):
        near, far = it - op.in_flight, it - op.hungry
        if far >= 0:
            ready = Int32(0)
            while ready == 0:
                ready = passed(c.full + near % op.stages, (near // op.stages) & 1, 128)
                if ready == 0:
                    ready = passed(c.empty + far % op.stages, (far // op.stages) & 1)
    elif cutlass.const_expr(0 < op.in_flight < op.stages):
        before = it - op.in_flight
        if before >= 0:
            cute.arch.mbarrier_wait(c.full + before % op.stages, (before // op.stages) & 1)
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
def to_l2(address: Int64, size: Int32):
    """A piece of memory into L2; both are multiples of 16."""
    if size > 0:
        cute.arch.inline_ptx(
            "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[address, size]
        )


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


@cute.jit
def bring(c: Ctx, layer: Int32, it: Int32, part: Int32, op: cutlass.Constexpr):
    """Stages of this CTA's rows of matrix number `part` of `table.PARTS`: one copy of the code for all of them, which
    one warp alone would else fetch anew every time."""
    row = cute.make_tensor(c.list.iterator + part * 6, cute.make_layout((6,)))
    source = c.tab[layer * COUNT + row[0]] + Int64(row[1])
    rows, row_bytes, chunk, apart = row[2], row[3], row[4], row[5]
    for first in cutlass.range(0, rows, chunk, unroll=1):
        slot = stage_free(c, it, op)
        n = rows - first if rows - first < chunk else chunk
        start = source + Int64(first) * row_bytes
        size = n * row_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * size if apart > 0 else size)
        bulk(c, slot, Int32(0), start, size, op)
        if apart > 0:
            bulk(c, slot, chunk * row_bytes, start + Int64(apart), size, op)
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
    """`drain_wide` where a stage has two rows: it is given back as soon as they are in registers."""
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
        stage_done(c, slot)
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
        it = drain_two(c, it, rows, Boolean(g.pair), base, rX, op)
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
        it = drain_two(c, it, rows, pairs, base, rX, op)
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


@cute.jit
def put(c: Ctx, slot: cutlass.Constexpr, x: Float32):
    """This warp's part of reduction `slot`."""
    x = lanes_sum(x, 32)
    if c.lane == 0:
        c.red[slot * STRIDE + c.warp] = x


@cute.jit
def put_two(c: Ctx, slot: cutlass.Constexpr, x: Float32, y: Float32):
    """This warp's parts of the reductions `slot` and `slot` + 1: half of the lanes go on with either."""
    upper = c.lane >= 16
    sum = (y if upper else x) + cute.arch.shuffle_sync_bfly(x if upper else y, offset=16)
    sum = lanes_sum(sum, 16)
    if c.lane % 16 == 0:
        c.red[(slot + c.lane // 16) * STRIDE + c.warp] = sum


@cute.jit
def take_two(c: Ctx, slot: cutlass.Constexpr, width: cutlass.Constexpr):
    """Both sums of the first `width` (at most 16) warps' parts, after a barrier."""
    x = Float32(0.0)
    if c.lane % 16 < width:
        x = c.red[(slot + c.lane // 16) * STRIDE + c.lane % 16]
    x = lanes_sum(x, 16)
    return cute.arch.shuffle_sync(x, 0), cute.arch.shuffle_sync(x, 16)


@cute.jit
def take(c: Ctx, slot: cutlass.Constexpr, width: cutlass.Constexpr):
    """Sum of the first `width` warps' parts, after a barrier."""
    x = Float32(0.0)
    if c.lane % 16 < width:
        x = c.red[slot * STRIDE + c.lane % 16]
    return lanes_sum(x, 16)
