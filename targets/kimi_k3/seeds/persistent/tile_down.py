"""w2 of the routed experts in the tile kernel: a warp has a tile of rows of every so many experts; z."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import round_bf16
from targets.kimi_k3.seeds.persistent.device import at, consumers, field
from targets.kimi_k3.seeds.persistent.ring import bulk, stage_done, stage_free, stage_full
from targets.kimi_k3.seeds.persistent.row_products import mma_rows
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_boxes import place, send, to_vec
from targets.kimi_k3.seeds.persistent.tile_codes import (
    CODE_SCALE_T,
    group_of,
    join_columns,
    operands,
    piece_times,
    sum_columns,
    sums_of,
    wanted,
)
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles, within
from targets.kimi_k3.seeds.persistent.tile_rows import sum_of


@cute.jit
def fill_pieces(c: Tiles, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """This CTA's rows of w2 of every expert, `down_slots` experts a stage: [codes | scales] each. A lane an expert."""
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    w = field(c, layer, T["w2"], COUNT_T)
    scale = field(c, layer, T["w2_scale"], COUNT_T)
    experts = wanted(c, op)
    for start in cutlass.range(0, experts, op.down_slots, unroll=1):
        slot = stage_free(c, it, op)
        many = experts - start if experts - start < op.down_slots else Int32(op.down_slots)
        if c.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(
                c.full + slot, many * n * (g.code_bytes + g.scale_bytes)
            )
        cute.arch.sync_warp()
        for k in cutlass.range(c.lane, many, 32, unroll=1):
            row = Int64(c.ids[start + k]) * d.latent + first
            bulk(c, slot, k * op.down_piece, w + row * g.code_bytes, n * g.code_bytes, op)
            at_scale = k * op.down_piece + op.down_rows * g.code_bytes
            bulk(c, slot, at_scale, scale + row * g.scale_bytes, n * g.scale_bytes, op)
        it += 1
    return it


@cute.jit
def words_if(there: Int32, address: Int64, r: cute.Tensor):
    """r[4 words] = 16 bytes at an address, zeros if `there` is 0: a load without a branch."""
    words = cute.arch.inline_ptx(
        """{
        .reg .pred p;
        setp.ne.b32 p, {$r0}, 0;
        mov.b32 {$w0}, 0;
        mov.b32 {$w1}, 0;
        mov.b32 {$w2}, 0;
        mov.b32 {$w3}, 0;
        @p ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}];
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[there, address],
    )
    for e in cutlass.range_constexpr(4):
        r[e] = words[e]


@cute.jit
def load_hidden(
    c: Tiles,
    layer: Int32,
    expert: Int32,
    v: cutlass.Constexpr,
    rX: cute.Tensor,
    op: cutlass.Constexpr,
):
    """rX[4, 4]: this lane's group of chunk v of h of its token and expert number `expert`; zeros if that one is not
    wanted. Of eight tokens one wants an expert as a rule: the others' lanes load nothing.
    """
    d = op.d
    groups = d.expert_dim // 32
    token, group = within(c.lane // 4, op.tokens), 4 * v + c.lane % 4
    pair = c.pair[within(expert, wanted(c, op)) * op.tokens + token]
    known = pair >= 0 and group < groups and expert < wanted(c, op)
    there = Int32(1) if known else Int32(0)
    pair = pair if pair >= 0 else Int32(0)
    start = place(c, "h", layer, op) + Int64(pair) * (2 * d.expert_dim)
    start += Int64(within(group, groups)) * 64
    for k in cutlass.range_constexpr(4):
        words_if(there, start + 16 * k, rX[None, k])


@cute.jit
def hidden_alone(
    c: Tiles, expert: Int32, v: cutlass.Constexpr, rX: cute.Tensor, op: cutlass.Constexpr
):
    """rX[4, 4]: the first four lanes' groups of chunk v of h of expert number `expert`, of a single token."""
    group = 4 * v + c.lane % 4
    groups = op.d.expert_dim // 32
    if c.lane < 4 and group < groups:
        for k in cutlass.range_constexpr(4):
            i = (expert * groups + group) * 4 + k
            cute.autovec_copy(cute.local_tile(c.vec, (4,), (i,)), rX[None, k])


@cute.jit
def spread_ahead(c: Tiles, it: Int32, op: cutlass.Constexpr):
    """rW[4, 2, 4, chunks]: the first chunks of this warp's first expert as operands, made before h is there."""
    g = op.down
    n = share(op.d.latent, c.cta, op.ctas, g.unit)[1]
    tile, turn = c.warp % op.down_tiles, c.warp // op.down_tiles
    expert = turn if turn < op.down_share else Int32(0)
    slot = stage_full(c, it + expert // op.down_slots, op)
    piece = slot * op.stage + expert % op.down_slots * op.down_piece
    scales = piece + op.down_rows * g.code_bytes
    rW = cute.make_rmem_tensor(cute.make_layout((4, 2, 4, op.ahead)), Uint32)
    for v in cutlass.range_constexpr(op.ahead):
        j = 4 * v + c.lane % 4
        j = j if j < op.d.expert_dim // 32 else op.d.expert_dim // 32 - 1
        for half in cutlass.range_constexpr(2):
            row = tile * 16 + c.lane // 4 + 8 * half
            row = row if row < n else n - 1
            words, scale = group_of(
                c, piece // 16 + row * (g.code_bytes // 16) + j, scales + row * g.scale_bytes + j
            )
            for k in cutlass.range_constexpr(4):
                out = operands(words[k], scale, op)
                for e in cutlass.range_constexpr(4):
                    rW[e, half, k, v] = out[e]
    return rW


@cute.jit
def first_expert(
    c: Tiles, it: Int32, expert: Int32, rW: cute.Tensor, given: tuple, op: cutlass.Constexpr
):
    """rC = w2 h of this warp's first expert, the first chunks from rW."""
    rC, rX, n, tile = given
    rC.fill(0.0)
    slot = (it + expert // op.down_slots) % op.stages
    piece = slot * op.stage + expert % op.down_slots * op.down_piece
    for v in cutlass.range_constexpr(op.down_chunks):
        hidden_alone(c, expert, v, rX[None, None, v], op)
        if cutlass.const_expr(v < op.ahead):
            for k in cutlass.range_constexpr(4):
                column = sum_columns(v, op)[k % len(sum_columns(v, op))]
                mma_rows(rC[None, column], rW[None, 0, k, v], rW[None, 1, k, v], rX[None, k, v])
        else:
            piece_times(c, piece, tile, v, (rC, sum_columns(v, op), rX[None, None, v], n), op)
    join_columns(rC)


@cute.jit
def weigh(c: Tiles, expert: Int32, rC: cute.Tensor, rSum: cute.Tensor, op: cutlass.Constexpr):
    """rSum[4] += weight of the expert for the lane's two tokens times bf(rC)."""
    for e in cutlass.range_constexpr(2):
        token = c.lane % 4 * 2 + e
        if token < op.tokens:
            w = c.share[expert * op.tokens + token]
            a, b = round_bf16(rC[e, 0] * CODE_SCALE_T), round_bf16(rC[2 + e, 0] * CODE_SCALE_T)
            rSum[e] = rSum[e] + w * a if w != Float32(0.0) else rSum[e]
            rSum[2 + e] = rSum[2 + e] + w * b if w != Float32(0.0) else rSum[2 + e]


@cute.jit
def tiles_down(
    c: Tiles, layer: Int32, it: Int32, rRemote: cute.Tensor, rW: Any, op: cutlass.Constexpr
):
    """z = bf(bf(sum over experts of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has one tile of the rows and every `down_share`-th expert; the next expert's h is on its way meanwhile.
    """
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    experts = wanted(c, op)
    tile, turn = c.warp % op.down_tiles, c.warp // op.down_tiles
    works = turn < op.down_share
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4, op.down_chunks)), Uint32)
    rSum = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC = cute.make_rmem_tensor(cute.make_layout((4, sums_of(op.down_chunks, op))), Float32)
    rSum.fill(0.0)
    rX.fill(0)
    expert = turn if works else Int32(op.touched)
    if cutlass.const_expr(op.alone):
        to_vec(c, place(c, "h", layer, op), 0, d.topk * d.expert_dim, op)
        consumers(op)
        if cutlass.const_expr(op.ahead > 0):
            if works:
                first_expert(c, it, expert, rW, (rC, rX, n, tile), op)
                weigh(c, expert, rC, rSum, op)
                expert += op.down_share
    else:
        for v in cutlass.range_constexpr(op.down_chunks):
            load_hidden(c, layer, expert, v, rX[None, None, v], op)
    for start in cutlass.range(0, experts, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        end = start + op.down_slots if start + op.down_slots < experts else experts
        while expert < end:
            rC.fill(0.0)
            piece = slot * op.stage + (expert - start) * op.down_piece
            for v in cutlass.range_constexpr(op.down_chunks):
                if cutlass.const_expr(op.alone):
                    hidden_alone(c, expert, v, rX[None, None, v], op)
                piece_times(c, piece, tile, v, (rC, sum_columns(v, op), rX[None, None, v], n), op)
                if cutlass.const_expr(not op.alone):
                    load_hidden(c, layer, expert + op.down_share, v, rX[None, None, v], op)
            join_columns(rC)
            weigh(c, expert, rC, rSum, op)
            expert += op.down_share
        stage_done(c, slot)
        it += 1
    octet = c.lane // 4
    if works:
        for half in cutlass.range_constexpr(2):
            row = tile * 16 + octet + 8 * half
            for e in cutlass.range_constexpr(2):
                token = c.lane % 4 * 2 + e
                if token < op.tokens and row < n:
                    c.part[(row * op.tokens + token) * op.stride + turn] = rSum[2 * half + e]
    consumers(op)
    for k in cutlass.range_constexpr(-(-op.down_rows * op.tokens // op.threads)):
        i = c.tid + k * op.threads
        if i < n * op.tokens:
            total = sum_of(c, i, op.down_share, op)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k]
            send(c, "z", layer, i % op.tokens * d.latent + first + i // op.tokens, total, op)
    return it


@cute.jit
def others_sums(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """This thread's sums of the other ranks for `tiles_down`, on their way before they are wanted."""
    d = op.d
    many = -(-op.down_rows * op.tokens // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((many,)), Float32)
    r.fill(0.0)
    if cutlass.const_expr(d.ranks > 1):
        first, n = share(d.latent, c.cta, op.ctas, op.down.unit)
        gFar = at(Float32, field(c, layer, T["remote_moe"], COUNT_T), op.tokens * d.latent)
        for k in cutlass.range_constexpr(many):
            i = within(c.tid + k * op.threads, n * op.tokens)
            r[k] = gFar[i % op.tokens * d.latent + first + i // op.tokens]
    return r
