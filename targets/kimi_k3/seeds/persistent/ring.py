"""The ring of stages through which weights pass: one producer fills, all consumer warps give back."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from targets.kimi_k3.seeds.persistent.device import Ctx
from targets.kimi_k3.seeds.persistent.fields import COUNT

EVICT_FIRST = 0x12F0000000000000


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
def ask_until(bar: Any, parity: Int32):
    """Waits for the phase of that parity of an mbarrier by asking again and again: a lane whose next copy waits for it
    hears sooner than one that `mbarrier_wait` lets sleep."""
    ready = Int32(0)
    while ready == 0:
        ready = passed(bar, parity)


@cute.jit
def at_hand(x: Int32):
    """x, computed here: what a wait is followed by shall be ready when it ends, and a compiler moves it behind."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )


@cute.jit
def at_hand_address(x: Int64):
    """As `at_hand`."""
    return cute.arch.inline_ptx(
        "mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[x]
    )


@cute.jit
def stage_free(c: Ctx, it: Int32, op: cutlass.Constexpr, quick: Any = None):
    """Slot of stage number `it`, once its last use is over and few enough stages are on their way.

    What is on its way queues before everything else in the memory system: with a whole ring of 200 KB a CTA an edge
    takes 3 us instead of 0.6. But consumers that find nothing in the ring wait for one stage after another, the longer
    the slower their SM is: while fewer than `hungry` stages are on their way or there, the next one waits for none.
    quick: whether consumers are at what is brought and wait for no edge, in the decode step: then `burst` stages may
    travel.
    """
    slot = it % op.stages
    hungry = 0 < op.in_flight < getattr(op, "hungry", 0) <= op.stages
    paced = 0 < op.in_flight < op.stages and not hungry
    if cutlass.const_expr(paced):
        before = it - op.in_flight
        if cutlass.const_expr(quick is not None and op.burst > 0):
            before = it - op.burst if quick else before
        near, turn = at_hand(before % op.stages), at_hand((before // op.stages) & 1)
    if it >= op.stages:
        ask_until(c.empty + slot, (it // op.stages - 1) & 1)
    if cutlass.const_expr(hungry):
        near, far = it - op.in_flight, it - op.hungry
        if far >= 0:
            ready = Int32(0)
            while ready == 0:
                ready = passed(c.full + near % op.stages, (near // op.stages) & 1, 128)
                if ready == 0:
                    ready = passed(c.empty + far % op.stages, (far // op.stages) & 1)
    elif cutlass.const_expr(paced):
        if before >= 0:
            ask_until(c.full + near, turn)
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
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        start = at_hand_address(source + Int64(first) * g.row_bytes)
        size = at_hand(n * g.row_bytes)
        slot = stage_free(c, it, op)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, size)
        bulk(c, slot, Int32(0), start, size, op)
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
    """Stages of this CTA's rows of matrix number `part` of `decode_bring.parts`: one copy of the code for all of them,
    which one warp alone would else fetch anew every time.

    Quick are those of a layer's first matrix that the ring did not hold when it began, and the first of the shared
    expert's, which comes behind a stage of a row or two."""
    row = cute.make_tensor(c.list.iterator + part * 6, cute.make_layout((6,)))
    source = c.tab[layer * COUNT + row[0]] + Int64(row[1])
    rows, row_bytes, chunk, apart = row[2], row[3], row[4], row[5]
    for first in cutlass.range(0, rows, chunk, unroll=1):
        quick = first // chunk >= op.stages if part == 0 or part == 2 else part == 6 and first == 0
        n = rows - first if rows - first < chunk else chunk
        start = at_hand_address(source + Int64(first) * row_bytes)
        size = at_hand(n * row_bytes)
        slot = stage_free(c, it, op, quick)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * size if apart > 0 else size)
        bulk(c, slot, Int32(0), start, size, op)
        if apart > 0:
            bulk(c, slot, chunk * row_bytes, start + Int64(apart), size, op)
        it += 1
    return it


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
def stage_loaded(c: Ctx, slot: Int32):
    """As `stage_done`, where nothing that the compiler keeps in place has used what was loaded of the stage.

    An arrival does not wait for the loads before it: behind others that wait for memory they can still be on their way
    when the stage is filled again, by the async proxy (seen in the latent MoE, docs/kernels-log.md, L19). Products do
    not help where they come last: ptxas moves them behind the arrival. Where sums of them are stored or added before,
    `stage_done` does; `sandbox.sass.early_arrivals` of the machine code tells which it is.
    """
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")
    stage_done(c, slot)
