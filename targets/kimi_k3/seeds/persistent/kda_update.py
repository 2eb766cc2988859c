"""The update of KDA for several tokens: convolution, decays and the recurrence, from the projection to o."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, round_bf16
from targets.kimi_k3.seeds.persistent.boxes import box, insist, insist_half, peek, peek_half, post
from targets.kimi_k3.seeds.persistent.device import Ctx, at, consumers, field, words_at
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda_bring import slot_of, state_row, window_first
from targets.kimi_k3.seeds.persistent.kda_places import (
    convolved,
    decays,
    mine,
    place_of,
    projected,
    quads_of,
    row_token,
    squares,
    turns_of,
)
from targets.kimi_k3.seeds.persistent.kda_seat import Seat, channel_of
from targets.kimi_k3.seeds.persistent.kda_sizes import HEAD, channels_of, pitch_of, state_stages
from targets.kimi_k3.seeds.persistent.kda_taps import fresh
from targets.kimi_k3.seeds.persistent.ring import stage_done, stage_full
from targets.kimi_k3.seeds.persistent.row_products import mma_rows
from targets.kimi_k3.seeds.persistent.tensor import TILE


class Late(NamedTuple):
    """What an edge is not waited for: words of two rows of f_b, their biases, A_log."""

    rows: Any
    bias: Any
    rate: Any


@cute.jit
def load_late(c: Ctx, layer: Int32, s: Seat, op: cutlass.Constexpr):
    """On their way while the projection is posted and the edge awaited, when no token is in registers."""
    rF = cute.make_rmem_tensor(cute.make_layout((4, 4, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((2,)), Float32)
    head = s.head if s.head >= 0 else Int32(0)
    f_b = field(c, layer, F["f_b"], COUNT) + Int64(head * HEAD * 256)
    bias = at(Float32, field(c, layer, F["dt_bias"], COUNT), op.d.kda_dim)
    for half in cutlass.range_constexpr(2):
        row = c.warp % (HEAD // TILE) * TILE + half * 8 + c.lane // 4
        for e in cutlass.range_constexpr(4):
            words_at(f_b, row * 16 + e * 4 + c.lane % 4, rF[None, e, half])
        rB[half] = bias[head * HEAD + row]
    rate = at(Float32, field(c, layer, F["A_log"], COUNT), op.d.kda_heads)[head]
    return Late(rF, rB, rate)


@cute.jit
def update_rows(
    c: Ctx, layer: Int32, at_: tuple, s: Seat, given: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """From the projection to o of this CTA's rows, both in boxes; writes states and the newest taps. All that
    comes from boxes is asked for before any of it is used. at_: (stage number, turn of the boxes); given: Taps, Late.
    """
    taps, late = given
    it, turn = at_
    d = op.d
    proj = box(c, "proj", turn, op)
    pitch = op.pitch(projected(d))
    if s.head >= 0:
        turns = turns_of(op)
        rows, cuts, tokens, stages = state_stages(op)
        each = -(-tokens * -(-rows // 4) // op.warps)
        rX = cute.make_rmem_tensor(cute.make_layout((turns,)), Uint32)
        rB = cute.make_rmem_tensor(cute.make_layout((stages * each,)), Uint32)
        rG = cute.make_rmem_tensor(cute.make_layout((stages * each,)), Uint32)
        rN = cute.make_rmem_tensor(cute.make_layout((stages * each,)), BFloat16)
        rA = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
        beta_at = proj + Int64((4 * d.kda_dim + HEAD + s.head) * 2)
        gate_at = proj + Int64((3 * d.kda_dim + s.head * HEAD + s.first) * 2)
        f_at = proj + Int64((row_token(c, op) * pitch + 4 * d.kda_dim) * 2 + c.lane % 4 * 16)
        norm = at(BFloat16, field(c, layer, F["o_norm"], COUNT), HEAD)
        for k in cutlass.range_constexpr(turns):
            token, own, _ = mine(c, k, s, op)
            rX[k] = peek_half(proj + Int64((token * pitch + channel_of(s, own, op)) * 2))
        for e in cutlass.range_constexpr(4):
            peek(f_at + e * 64, rA[None, e])
        for j in cutlass.range_constexpr(stages * each):
            p = place_of(c, j, s, op)
            rB[j] = peek_half(beta_at + Int64(p.token * pitch * 2))
            rG[j] = peek_half(gate_at + Int64((p.token * pitch + p.row) * 2))
            rN[j] = norm[s.first + p.row]
        if c.warp < HEAD // TILE:
            for e in cutlass.range_constexpr(4):
                insist(f_at + e * 64, rA[None, e], 2, op)
            cute.arch.sync_warp()
            decay_rows(c, late, rA, op)
        convolve_rows(c, layer, s, (taps, rX), proj, op)
        consumers(op)
        for n in cutlass.range_constexpr(stages):
            slot = stage_full(c, it, op)
            for j in cutlass.range_constexpr(n * each, (n + 1) * each):
                p = place_of(c, j, s, op)
                beta = quick_sigmoid(insist_half(beta_at + Int64(p.token * pitch * 2), rB[j], op))
                g = insist_half(gate_at + Int64((p.token * pitch + p.row) * 2), rG[j], op)
                scale = rN[j].to(Float32) * quick_sigmoid(g)
                # by all lanes, also those without a row: it shuffles
                cute.arch.sync_warp()
                step_row(c, layer, s, (p, slot, beta, scale, turn), op)
            stage_done(c, slot)
            it += 1
    else:
        consumers(op)
    return it


@cute.jit
def step_row(c: Ctx, layer: Int32, s: Seat, given: tuple, op: cutlass.Constexpr):
    """A row of a state: its o and square posted, its new value written. given: Spot, stage, beta, o's scale, turn."""
    p, slot, beta, scale, turn = given
    d = op.d
    rS = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for e in cutlass.range_constexpr(4):
        i = slot * (op.stage // 16) + p.inner * (HEAD // 4) + e * 8 + c.lane % 8
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (i,)), rW)
        for f in cutlass.range_constexpr(4):
            rS[f, e] = rW[f].bitcast(Float32)
    o = delta_row(c, rS, (p.token, p.row, beta), op)
    state = slot_of(c, p.token)
    o = o if state > 0 and p.there else Float32(0.0)
    square = o * o
    square = square + cute.arch.shuffle_sync_bfly(square, offset=8)
    square = square + cute.arch.shuffle_sync_bfly(square, offset=16)
    if p.there and c.lane % 8 == 0:
        i = p.token * op.pitch(d.kda_dim) + s.head * HEAD + s.first + p.row
        post(c, "o", turn, i, o * scale, op)
    if p.quad >= 0 and c.lane == 0:
        i = p.token * op.pitch(d.kda_heads * squares(op)) + s.head * squares(op)
        post(c, "sq", turn, i + s.slice * quads_of(op) + p.quad, square, op)
    if p.there and state > 0:
        gRow = state_row(c, layer, state, s, p.row, op)
        for e in cutlass.range_constexpr(4):
            cute.autovec_copy(rS[None, e], cute.local_tile(gRow, (4,), (e * 8 + c.lane % 8,)))


@cute.jit
def convolve_rows(c: Ctx, layer: Int32, s: Seat, given: tuple, proj: Int64, op: cutlass.Constexpr):
    """silu of the convolution into the pool, the newest of live slots to where `move_taps` finds them; gives back the
    taps in shared memory. given: Taps, new values as peeked.
    """
    taps, rX = given
    d, pitch = op.d, op.pitch(projected(op.d))
    sU, far = convolved(c, op), pitch_of(op)
    beside = s.first - window_first(s, op)
    cute.arch.mbarrier_wait(taps.full, layer & 1)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for k in cutlass.range_constexpr(turns_of(op)):
        token, own, there = mine(c, k, s, op)
        ch = channel_of(s, own, op)
        i = token * 3 * far + own + (beside if own >= 2 * HEAD else Int32(0))
        a, b, e = taps.taps[i], taps.taps[i + far], taps.taps[i + 2 * far]
        cute.autovec_copy(cute.local_tile(taps.weights, (4,), (own,)), rC)
        u = a.to(Float32) * rC[0] + b.to(Float32) * rC[1]
        u = u + e.to(Float32) * rC[2]
        x = insist_half(proj + Int64((token * pitch + ch) * 2), rX[k], op)
        if there:
            sU[c.tid + k * op.threads] = quick_silu(u + x * rC[3])
            slot = slot_of(c, token)
            if slot > 0 and (s.slice == 0 or own >= 2 * HEAD):
                gFresh = at(BFloat16, fresh(c, layer, op), 3 * d.rows * d.kda_dim)
                gFresh[token * 3 * d.kda_dim + ch] = x.to(BFloat16)
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(taps.empty)


@cute.jit
def quick_exp(x: Float32):
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; mul.f32 t, {$r0}, 0f3FB8AA3B; ex2.approx.ftz.f32 {$w0}, t; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


@cute.jit
def quick_sigmoid(x: Float32):
    """Four instructions, right to 2^-21; infinities give 0 and 1."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; mul.f32 t, {$r0}, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 {$w0}, t; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


@cute.jit
def quick_silu(x: Float32):
    return x * quick_sigmoid(x)


@cute.jit
def decay_rows(c: Ctx, late: Late, rA: cute.Tensor, op: cutlass.Constexpr):
    """Of all tokens and the head's 128 columns: a warp has sixteen of them, by an MMA over f_a: words rA."""
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC.fill(0.0)
    for e in cutlass.range_constexpr(4):
        mma_rows(rC, late.rows[None, e, 0], late.rows[None, e, 1], rA[None, e])
    sDecay = decays(c, op)
    rate = cute.math.exp(late.rate)
    for i in cutlass.range_constexpr(4):
        row = c.warp * TILE + i // 2 * 8 + c.lane // 4
        token = c.lane % 4 * 2 + i % 2
        gate = quick_sigmoid(rate * (round_bf16(rC[i]) + late.bias[i // 2]))
        sDecay[token * HEAD + row] = quick_exp(-5.0 * gate)


@cute.jit
def delta_row(c: Ctx, rS: cute.Tensor, given: tuple, op: cutlass.Constexpr):
    """S <- S * decay; S += beta (v - S k) k; o = S q for a row; rS f32 [4, 4] are this lane's columns, eight lanes a
    row. q and k get their norms here.
    """
    token, row, beta = given
    channels = channels_of(op)
    sU, sDecay = convolved(c, op), decays(c, op)
    rQ = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    rK = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    rD = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    v = sU[token * channels + 2 * HEAD + row]
    for e in cutlass.range_constexpr(4):
        for f in cutlass.range_constexpr(4):
            i = (e * 8 + c.lane % 8) * 4 + f
            rQ[f, e] = sU[token * channels + i]
            rK[f, e] = sU[token * channels + HEAD + i]
            rD[f, e] = sDecay[token * HEAD + i]
    q2, k2, seen, o = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
    for e in cutlass.range_constexpr(4):
        for f in cutlass.range_constexpr(4):
            q2 += rQ[f, e] * rQ[f, e]
            k2 += rK[f, e] * rK[f, e]
            rS[f, e] = rS[f, e] * rD[f, e]
            seen += rS[f, e] * rK[f, e]
    q2 = cute.math.rsqrt(lanes_sum(q2, 8) + 1e-6) * HEAD**-0.5
    k2 = cute.math.rsqrt(lanes_sum(k2, 8) + 1e-6)
    change = beta * (v - lanes_sum(seen, 8) * k2) * k2
    for e in cutlass.range_constexpr(4):
        for f in cutlass.range_constexpr(4):
            rS[f, e] = rS[f, e] + change * rK[f, e]
            o += rS[f, e] * rQ[f, e]
    return lanes_sum(o, 8) * q2
