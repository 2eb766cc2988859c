"""KDA between its projections: a CTA has a head and some rows of its state, a warp one row at a time.

The state, the taps and f_b are in registers before the edge that brings the projection.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import lanes_sum, round_bf16, sigmoid, silu
from targets.kimi_k3.seeds.persistent.boxes import (
    KDAS,
    box,
    insist,
    insist_half,
    peek,
    peek_half,
    post,
    turn_of,
)
from targets.kimi_k3.seeds.persistent.device import (
    Ctx,
    at,
    consumers,
    field,
    unpack,
    view,
    within,
    words_at,
)
from targets.kimi_k3.seeds.persistent.edges import hint, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda_out import gated, out_projection
from targets.kimi_k3.seeds.persistent.kda_seat import channel_of, seat
from targets.kimi_k3.seeds.persistent.kda_sizes import HEAD
from targets.kimi_k3.seeds.persistent.kda_taps import fresh
from targets.kimi_k3.seeds.persistent.products import drain, gathered
from targets.kimi_k3.seeds.persistent.ring import fill
from targets.kimi_k3.seeds.persistent.stages import share


class State(NamedTuple):
    """What is loaded early. rows: state rows of this warp f32 [4, turns]; f_b words [4, turns]; taps: of this
    thread's channel."""

    rows: Any
    f_b: Any
    conv: Any
    taps: Any
    bias: Any
    rate: Any


class Place(NamedTuple):
    """head (-1: this CTA has none), first state row and how many, state slot (<= 0: none)."""

    head: Any
    slice: Any
    first: Any
    count: Any
    slot: Any


@cute.jit
def fill_kda(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    source = field(c, layer, F["in_proj"], COUNT) + Int64(first) * op.wide.row_bytes
    it = fill(c, it, source, n, op.wide, op)
    g = op.rows(d.kda_dim)
    first, n = share(d.hidden, c.cta, op.ctas)
    return fill(c, it, field(c, layer, F["o_proj"], COUNT) + Int64(first) * g.row_bytes, n, g, op)


@cute.jit
def place(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    s = seat(c, op)
    return Place(s.head, s.slice, s.first, s.count, slots[0])


@cute.jit
def tap_sum(rT: cute.Tensor, rC: cute.Tensor):
    """What three taps add to a channel."""
    u = rT[0].to(Float32) * rC[0] + rT[1].to(Float32) * rC[1]
    return u + rT[2].to(Float32) * rC[2]


@cute.jit
def load_early(c: Ctx, layer: Int32, p: Place, used: cutlass.Constexpr, op: cutlass.Constexpr):
    """`used`: ends with all taps used, in sU, and A_log; else `taps` and `rate` are as they were loaded."""
    d = op.d
    sU = view(c, Float32, 0, 3 * HEAD)
    turns, looks = -(-op.state_rows // op.warps), -(-HEAD // (2 * op.warps))
    rS = cute.make_rmem_tensor(cute.make_layout((4, turns)), Float32)
    rF = cute.make_rmem_tensor(cute.make_layout((4, looks)), Uint32)
    rT = cute.make_rmem_tensor(cute.make_layout((3,)), BFloat16)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rS.fill(0.0)
    rF.fill(0)
    rT.fill(0.0)
    rC.fill(0.0)
    rate, bias = Float32(0.0), Float32(0.0)
    if p.head >= 0:
        safe = p.slot if p.slot > 0 else Int32(0)
        state = field(c, layer, F["state_S"], COUNT) + Int64(safe) * (4 * d.kda_heads * HEAD * HEAD)
        for j in cutlass.range_constexpr(turns):
            row = c.warp + j * op.warps
            if row < p.count:
                gRow = at(Float32, state + Int64((p.head * HEAD + p.first + row) * 512), HEAD)
                cute.autovec_copy(cute.local_tile(gRow, (4,), (c.lane,)), rS[None, j])
        f_b = field(c, layer, F["f_b"], COUNT) + Int64(p.head * HEAD * 256)
        for j in cutlass.range_constexpr(looks):
            row = (c.warp + j * op.warps) * 2 + c.lane // 16
            if row < HEAD:
                words_at(f_b, row * 16 + c.lane % 16, rF[None, j])
        if c.tid < 2 * HEAD + p.count:
            ch = channel_of(p, c.tid, op)
            taps = field(c, layer, F["state_conv"], COUNT) + Int64(safe) * (18 * d.kda_dim)
            gTap = at(BFloat16, taps, 9 * d.kda_dim)
            for k in cutlass.range_constexpr(3):
                rT[k] = gTap[3 * d.kda_dim * k + ch]
            gConv = at(Float32, field(c, layer, F["conv"], COUNT), 12 * d.kda_dim)
            cute.autovec_copy(cute.local_tile(gConv, (4,), (ch,)), rC)
            if cutlass.const_expr(used):
                sU[c.tid] = tap_sum(rT, rC)
        rate = at(Float32, field(c, layer, F["A_log"], COUNT), d.kda_heads)[p.head]
        if cutlass.const_expr(used):
            rate = cute.math.exp(rate)
        if c.tid < HEAD:
            bias = at(Float32, field(c, layer, F["dt_bias"], COUNT), d.kda_dim)[
                p.head * HEAD + c.tid
            ]
    return State(rS, rF, rC, rT, bias, rate)


@cute.jit
def update(
    c: Ctx,
    layer: Int32,
    p: Place,
    s: State,
    turn: Int32,
    op: cutlass.Constexpr,
):
    """From the projection to o of this CTA's rows, both in boxes; writes the state, and the newest q, k and v to where
    `move_taps` finds them."""
    d = op.d
    proj = box(c, "proj", turn, op)
    if p.head >= 0:
        sU = view(c, Float32, 0, 3 * HEAD)
        sRaw = view(c, Float32, 3 * HEAD * 4, HEAD)
        live = p.slot > 0
        rA = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        rAf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rFf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        # all that is in the box is on its way before the first look at any of it
        ch = channel_of(p, within(c.tid, 2 * HEAD + p.count), op)
        f_a = proj + Int64(8 * d.kda_dim) + Int64(c.lane % 16) * 16
        b = proj + Int64(8 * d.kda_dim + 2 * HEAD) + Int64(p.head) * 2
        bits, gate_bits = peek_half(proj + Int64(ch) * 2), peek_half(b)
        peek(f_a, rA)
        if c.tid < 2 * HEAD + p.count:
            x = insist_half(proj + Int64(ch) * 2, bits, op)
            sU[c.tid] = silu(sU[c.tid] + x * s.conv[3])
            if live and (p.slice == 0 or c.tid >= 2 * HEAD):
                gFresh = at(BFloat16, fresh(c, layer, op), 3 * d.kda_dim)
                gFresh[ch] = x.to(BFloat16)
        insist(f_a, rA, 2, op)
        unpack(rA, rAf)
        for j in cutlass.range_constexpr(-(-HEAD // (2 * op.warps))):
            row = (c.warp + j * op.warps) * 2 + c.lane // 16
            unpack(s.f_b[None, j], rFf)
            raw = Float32(0.0)
            for e in cutlass.range_constexpr(8):
                raw += rAf[e] * rFf[e]
            raw = round_bf16(lanes_sum(raw, 16))
            if c.lane % 16 == 0 and row < HEAD:
                sRaw[row] = raw
        consumers(op)
        if c.tid < HEAD:
            gate = sigmoid(s.rate * (sRaw[c.tid] + s.bias))
            sRaw[c.tid] = cute.math.exp(-5.0 * gate)
        consumers(op)
        beta = sigmoid(insist_half(b, gate_bits, op))
        rows_update(c, layer, p, s, (sU, sRaw, beta), turn, op)
    else:
        consumers(op)
        consumers(op)


@cute.jit
def rows_update(
    c: Ctx, layer: Int32, p: Place, s: State, given: tuple, turn: Int32, op: cutlass.Constexpr
):
    sU, sDecay, beta = given
    rQ = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rK = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rD = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    cute.autovec_copy(cute.local_tile(sU, (4,), (c.lane,)), rQ)
    cute.autovec_copy(cute.local_tile(sU, (4,), (32 + c.lane,)), rK)
    cute.autovec_copy(cute.local_tile(sDecay, (4,), (c.lane,)), rD)
    q2, k2 = Float32(0.0), Float32(0.0)
    for e in cutlass.range_constexpr(4):
        q2 += rQ[e] * rQ[e]
        k2 += rK[e] * rK[e]
    q2 = cute.math.rsqrt(lanes_sum(q2, 32) + 1e-6) * HEAD**-0.5
    k2 = cute.math.rsqrt(lanes_sum(k2, 32) + 1e-6)
    for e in cutlass.range_constexpr(4):
        rQ[e] = rQ[e] * q2
        rK[e] = rK[e] * k2
    state = field(c, layer, F["state_S"], COUNT) + Int64(p.slot) * (
        4 * op.d.kda_heads * HEAD * HEAD
    )
    for j in cutlass.range_constexpr(-(-op.state_rows // op.warps)):
        row = c.warp + j * op.warps
        if row < p.count:
            seen, o = Float32(0.0), Float32(0.0)
            for e in cutlass.range_constexpr(4):
                s.rows[e, j] = s.rows[e, j] * rD[e]
                seen += s.rows[e, j] * rK[e]
            change = beta * (sU[2 * HEAD + row] - lanes_sum(seen, 32))
            for e in cutlass.range_constexpr(4):
                s.rows[e, j] = s.rows[e, j] + change * rK[e]
                o += s.rows[e, j] * rQ[e]
            o = lanes_sum(o, 32)
            if c.lane == 0:
                post(c, "o", turn, p.head * HEAD + p.first + row, o, op)
            if p.slot > 0:
                gRow = at(Float32, state + Int64((p.head * HEAD + p.first + row) * 512), HEAD)
                cute.autovec_copy(s.rows[None, j], cute.local_tile(gRow, (4,), (c.lane,)))


@cute.jit
def kda(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    slots: cute.Tensor,
    y: Any,
    op: cutlass.Constexpr,
):
    """The box attn (and y, where given) = a of a KDA layer, number `number` of the launch; not hinted at yet."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, KDAS)
    p = place(c, slots, op)
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    state = load_early(c, layer, p, True, op)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "proj", turn, first + i, gathered(c, i, op.wide.width), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge proj", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "update", layer)
    update(c, layer, p, state, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge o", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "o_proj", layer)
    g = op.rows(d.kda_dim)
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    gated(c, layer, p.slot, turn, rO, op)
    it = out_projection(c, layer, it, rO, y, g, op)
    return it, edge
