"""The routed experts of many tokens: a list entry's matrices times its up to eight pairs.

Weights are the A operand of m16n8k16, sixteen rows of codes made bf16 once, pairs the eight columns of B. An operand is
loaded into a ring of registers: a piece is asked for again as soon as it is used, so loads are always in flight.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import begin, pack_bf16, situ, smem
from targets.kimi_k3.seeds.grouped.codes import load_columns, times
from targets.kimi_k3.seeds.grouped.pairs import NUMBERS, TOGETHER
from targets.kimi_k3.seeds.latent_moe_codes import CODE_SCALE, Codes, load_codes


# ---- up
@cute.jit
def load_step(w: tuple, at: tuple, step: Int32, into: tuple, op: cutlass.Constexpr):
    """A ring's piece: codes and scales of w1 and w3 of one step, and x. at = (expert, first row, x, its row, there)."""
    tid, _, _ = cute.arch.thread_idx()
    expert, first, gX, row, there = at
    rCode, rScale, rX = into
    group = step * 4 + tid % 4
    for t in cutlass.range_constexpr(op.tile):
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                load_codes(
                    w[half],
                    (expert, first + 16 * t + 8 * r + tid % 32 // 4, group),
                    rCode[None, r, half, t],
                    rScale[None, r, half, t],
                    op.groups,
                )
    load_columns(gX, row, group, there, rX, op)


@cute.jit
def up_sums(
    gX: cute.Tensor,
    w: tuple,
    mList: cute.Tensor,
    entry: Int32,
    sC: cute.Tensor,
    op: cutlass.Constexpr,
):
    """sC[row, pair, half, warp]: this warp's part of k of the entry's products."""
    tid, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    warp, g, q = tid // 32, tid % 32 // 4, tid % 4
    there = Int32(1) if g < mList[entry, 1] else Int32(0)
    row = mList[entry, NUMBERS + g] // op.topk if there == 1 else Int32(0)
    at = (mList[entry, 0], tile * op.height, gX, row, there)
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2, op.tile)), Float32)
    rCode = cute.make_rmem_tensor(cute.make_layout((4, 2, 2, op.tile, op.ring)), Uint32)
    rScale = cute.make_rmem_tensor(cute.make_layout((1, 2, 2, op.tile, op.ring)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4, op.ring)), Uint32)
    rC.fill(0.0)
    rX.fill(0)
    rScale.fill(0)
    for u in cutlass.range_constexpr(op.ring):
        into = (
            rCode[None, None, None, None, u],
            rScale[None, None, None, None, u],
            rX[None, None, u],
        )
        load_step(w, at, u * op.warps + warp, into, op)
    for turn in cutlass.range(0, op.steps, op.warps * op.ring, unroll=1):
        for u in cutlass.range_constexpr(op.ring):
            into = (
                rCode[None, None, None, None, u],
                rScale[None, None, None, None, u],
                rX[None, None, u],
            )
            step = turn + u * op.warps + warp
            if step < op.steps:
                for t in cutlass.range_constexpr(op.tile):
                    for half in cutlass.range_constexpr(2):
                        times(
                            rC[None, half, t],
                            into[0][None, None, half, t],
                            into[1][None, None, half, t],
                            into[2],
                            op.nv,
                        )
            if step + op.warps * op.ring < op.steps:
                load_step(w, at, step + op.warps * op.ring, into, op)
    for t in cutlass.range_constexpr(op.tile):
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                sC[16 * t + i // 2 * 8 + g, 2 * q + i % 2, half, warp] = rC[i, half, t]


@cute.jit
def store_hidden(
    sC: cute.Tensor,
    w: tuple,
    mList: cute.Tensor,
    entry: Int32,
    mH: cute.Tensor,
    op: cutlass.Constexpr,
):
    """The warps' sums added in their order, SiTU."""
    tid, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    for i in cutlass.range(tid, mList[entry, 1] * op.height, op.warps * 32, unroll=1):
        r, pair = i % op.height, i // op.height
        gate, up = Float32(0.0), Float32(0.0)
        for part in cutlass.range(op.warps, unroll_full=True):
            gate += sC[r, pair, 0, part]
            up += sC[r, pair, 1, part]
        if cutlass.const_expr(op.nv):
            gate *= w[0].factor[mList[entry, 0]]
            up *= w[1].factor[mList[entry, 0]]
        # (0 4)(1 5)(2 6)(3 7)
        place = tile * op.height + r // 8 * 8 + r % 4 * 2 + r % 8 // 4
        value = situ(gate * CODE_SCALE, up * CODE_SCALE).to(BFloat16)
        mH[mList[entry, NUMBERS + pair], place] = value


@cute.kernel
def grouped_up_kernel(
    mX: cute.Tensor, w: tuple, mList: cute.Tensor, mH: cute.Tensor, op: cutlass.Constexpr
):
    """mX bf16 [M, k] in the order of `expand`, w = (w1, w3), mList i32 [entries.., WORDS]; grid (rows / height, usual).

    mH bf16 [M topk, rows] = bf(SiTU(w1 x, w3 x)) of the entries' pairs, in the order of `expand`; products and SiTU in
    f32. A CTA has every so many-th entry, most have one.
    """
    _, entry, _ = cute.arch.block_idx()
    _, every, _ = cute.arch.grid_dim()
    begin(op.pdl)
    # four words of padding keep the lanes of a store in different banks
    pitch = op.height + 4
    sC = smem(
        Float32,
        (op.height, TOGETHER, 2, op.warps),
        (1, pitch, pitch * TOGETHER, 2 * pitch * TOGETHER),
    )
    gX = cute.logical_divide(cute.recast_tensor(mX, Uint32), (None, 4))
    expert = mList[entry, 0]
    while expert >= 0:
        # asked for here, it is there when it is wanted
        expert = mList[entry + every, 0]
        up_sums(gX, w, mList, entry, sC, op)
        cute.arch.sync_threads()
        store_hidden(sC, w, mList, entry, mH, op)
        # lanes have parted in its loop
        cute.arch.sync_warp()
        cute.arch.sync_threads()
        entry += every


# ---- down
@cute.jit
def load_w2(w: Codes, expert: Int32, first: Int32, into: tuple, op: cutlass.Constexpr):
    """A ring's piece: all codes and scales of `tile` x 16 rows; rows 2 g and 2 g + 1 are g and g + 8 of the product."""
    tid, _, _ = cute.arch.thread_idx()
    rCode, rScale = into
    for t in cutlass.range_constexpr(op.tile):
        for step in cutlass.range_constexpr(op.steps):
            for r in cutlass.range_constexpr(2):
                load_codes(
                    w,
                    (expert, first + 16 * t + tid % 32 // 4 * 2 + r, step * 4 + tid % 4),
                    rCode[None, r, step, t],
                    rScale[None, r, step, t],
                    op.groups,
                )


@cute.jit
def store_tile(
    rC: cute.Tensor, gY: cute.Tensor, numbers: tuple, row: Int32, factor: Any, op: cutlass.Constexpr
):
    """Two rows of two pairs, each pair's in one word; numbers of the pairs, -1 for none."""
    if cutlass.const_expr(op.nv):
        rC.store(rC.load() * factor)
    for i in cutlass.range_constexpr(2):
        if numbers[i] >= 0:
            gY[numbers[i], row // 2] = pack_bf16(rC[i] * CODE_SCALE, rC[2 + i] * CODE_SCALE)


@cute.jit
def down_tiles(
    gX: cute.Tensor,
    w: Codes,
    mList: cute.Tensor,
    entry: Int32,
    gY: cute.Tensor,
    op: cutlass.Constexpr,
):
    """This warp's rows of the entry's products."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    g, q = tid % 32 // 4, tid % 4
    expert, many = mList[entry, 0], mList[entry, 1]
    unit = 16 * op.tile
    first = (cta * op.warps + tid // 32) * op.turns * op.ring * unit
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.tile)), Float32)
    rCode = cute.make_rmem_tensor(cute.make_layout((4, 2, op.steps, op.tile, op.ring)), Uint32)
    rScale = cute.make_rmem_tensor(cute.make_layout((1, 2, op.steps, op.tile, op.ring)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4, op.steps)), Uint32)
    rScale.fill(0)
    rX.fill(0)
    for u in cutlass.range_constexpr(op.ring):
        into = (rCode[None, None, None, None, u], rScale[None, None, None, None, u])
        load_w2(w, expert, first + u * unit, into, op)
    there = Int32(1) if g < many else Int32(0)
    row = mList[entry, NUMBERS + g] if there == 1 else Int32(0)
    for step in cutlass.range_constexpr(op.steps):
        load_columns(gX, row, step * 4 + q, there, rX[None, None, step], op)
    numbers = tuple(
        mList[entry, NUMBERS + 2 * q + i] if 2 * q + i < many else Int32(-1) for i in range(2)
    )
    factor = w.factor[expert] if cutlass.const_expr(op.nv) else None
    for turn in cutlass.range(op.turns, unroll=1):
        for u in cutlass.range_constexpr(op.ring):
            into = (rCode[None, None, None, None, u], rScale[None, None, None, None, u])
            at = first + (turn * op.ring + u) * unit
            # always so, but it keeps loads from being put off until all pieces are used
            if at < op.rows:
                rC.fill(0.0)
                for t in cutlass.range_constexpr(op.tile):
                    for step in cutlass.range_constexpr(op.steps):
                        times(
                            rC[None, t], into[0][None, None, step, t], into[1][None, None, step, t],
                            rX[None, None, step], op.nv,
                        )  # fmt: skip
            if turn + 1 < op.turns:
                load_w2(w, expert, at + op.ring * unit, into, op)
            for t in cutlass.range_constexpr(op.tile):
                store_tile(rC[None, t], gY, numbers, at + 16 * t + 2 * g, factor, op)


@cute.kernel
def grouped_down_kernel(
    mH: cute.Tensor, w: Codes, mList: cute.Tensor, mY: cute.Tensor, op: cutlass.Constexpr
):
    """mH bf16 [M topk, k] in the order of `expand`, w = w2; grid (rows / (16 tile ring turns warps), usual).

    mY bf16 [M topk, rows] = bf(w2 h) of the entries' pairs. A warp has whole rows.
    """
    _, entry, _ = cute.arch.block_idx()
    _, every, _ = cute.arch.grid_dim()
    begin(op.pdl)
    gX = cute.logical_divide(cute.recast_tensor(mH, Uint32), (None, 4))
    gY = cute.recast_tensor(mY, Uint32)
    expert = mList[entry, 0]
    while expert >= 0:
        expert = mList[entry + every, 0]
        down_tiles(gX, w, mList, entry, gY, op)
        # lanes without a pair have parted
        cute.arch.sync_warp()
        entry += every
