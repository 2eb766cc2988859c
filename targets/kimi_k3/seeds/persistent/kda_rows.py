"""KDA between its projections for up to eight tokens of different sequences: a CTA has a head and some state rows of
every token, eight lanes a row.

States are stages of the ring and taps lie in shared memory (`kda_bring`), so that in registers nothing is kept over
an edge but words of f_b. What is added to the sum of o_proj is there before its weights.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import lanes_sum, pack_bf16, round_bf16
from targets.kimi_k3.seeds.persistent.device import (
    KDAS,
    LAYERS,
    Ctx,
    at,
    box,
    consumers,
    field,
    hint,
    insist,
    insist_half,
    mma_rows,
    peek,
    peek_half,
    post,
    stage_done,
    stage_full,
    turn_of,
    view,
    wait,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda_bring import (
    Seat,
    Taps,
    fill_states,
    seat,
    slot_of,
    state_row,
    window_first,
)
from targets.kimi_k3.seeds.persistent.kda_sizes import HEAD, channels_of, pitch_of, state_stages
from targets.kimi_k3.seeds.persistent.kda_taps import fresh
from targets.kimi_k3.seeds.persistent.plan import most, share
from targets.kimi_k3.seeds.persistent.tensor import (
    TILE,
    TOKENS,
    anew,
    column,
    drain_tiles,
    fill_tiles,
    further,
    tile_sum,
    token_words,
)


class Spot(NamedTuple):
    """token; row of this CTA's part, 0 if it has none here; whether it has; its quad of rows, -1 without; its row in
    the stage.
    """

    token: Any
    row: Any
    there: Any
    quad: Any
    inner: Any


class Late(NamedTuple):
    """What an edge is not waited for: words of two rows of f_b, their biases, A_log."""

    rows: Any
    bias: Any
    rate: Any


# ---- which thread has what


def projected(d):
    """Rows of in_proj that mean something."""
    return 4 * d.kda_dim + d.f_rank + d.kda_heads


def turns_of(op):
    """Turns of threads over the channels of all tokens."""
    return -(-op.d.rows * channels_of(op) // op.threads)


def quads_of(op):
    """Quads of state rows a token."""
    return -(-op.state_rows // 4)


def squares(op):
    """Parts of a head's sum of squares: one of each quad of rows of each CTA that has some of them."""
    return op.slices * quads_of(op)


@cute.jit
def fill_kda_rows(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """in_proj and o_proj are packed; the states lie between them."""
    d = op.d
    g = op.tiles(d.hidden)
    first, n = share(projected(d), c.cta, op.ctas)
    source = field(c, layer, F["in_proj"], COUNT) + Int64(first) * g.row_bytes
    it = fill_tiles(c, it, source, n, g, op)
    it = fill_states(c, layer, it, op)
    g = op.tiles(d.kda_dim)
    first, n = share(d.hidden, c.cta, op.ctas)
    source = field(c, layer, F["o_proj"], COUNT) + Int64(first) * g.row_bytes
    return fill_tiles(c, it, source, n, g, op)


@cute.jit
def convolved(c: Ctx, op: cutlass.Constexpr):
    """f32 [token, q 128 | k 128 | v of this CTA]."""
    return view(c, Float32, 4 * TOKENS, op.d.rows * channels_of(op))


@cute.jit
def decays(c: Ctx, op: cutlass.Constexpr):
    """f32 [token, 128]."""
    return view(c, Float32, 4 * TOKENS + 4 * TOKENS * channels_of(op), TOKENS * HEAD)


@cute.jit
def channel_of(s: Seat, i: Int32, op: cutlass.Constexpr):
    """i-th channel of this CTA: 128 of q, 128 of k, then its own of v."""
    width = op.d.kda_dim
    found = s.head * HEAD + i % HEAD
    if i >= HEAD:
        found += width
    if i >= 2 * HEAD:
        found = 2 * width + s.head * HEAD + s.first + i - 2 * HEAD
    return found


# ---- before the edges


@cute.jit
def mine(c: Ctx, k: cutlass.Constexpr, s: Seat, op: cutlass.Constexpr):
    """(token, channel of this CTA, whether there is such a one) of this thread's k-th; clamped, so that what it loads
    needs no branch: loads in branches wait for each other.
    """
    channels = channels_of(op)
    i = c.tid + k * op.threads
    token, own = i // channels, i % channels
    there = token < op.d.rows and own < 2 * HEAD + s.count
    token = token if there else Int32(0)
    own = own if there else Int32(0)
    return token, own, there


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


# ---- the update


@cute.jit
def place_of(c: Ctx, turn: cutlass.Constexpr, s: Seat, op: cutlass.Constexpr):
    """(token, row of this CTA's part, whether there is such a one, its quad, its row in the stage) of eight lanes in
    a turn of warps over all stages. Clamped, so that what it loads needs no branch.
    """
    rows, cuts, tokens, _ = state_stages(op)
    quads = -(-rows // 4)
    each = -(-tokens * quads // op.warps)
    stage, unit = turn // each, c.warp + turn % each * op.warps
    first, above = stage // cuts * tokens, stage % cuts * rows
    token, quad = first + unit // quads, unit % quads + above // 4
    inner = unit % quads * 4 + c.lane // 8
    row = above + inner
    known = unit < tokens * quads and token < op.d.rows
    there = known and inner < rows and row < s.count
    return Spot(
        token if known else Int32(first),
        row if there else Int32(0),
        there,
        quad if known and quad < quads_of(op) else Int32(-1),
        unit // quads * rows + inner if there else Int32(0),
    )


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
def row_token(c: Ctx, op: cutlass.Constexpr):
    """The token of this lane's column of B, the last one for columns that are none."""
    token = c.lane // 4
    return token if token < op.d.rows else Int32(op.d.rows - 1)


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


# ---- the output projection


@cute.jit
def head_scales(c: Ctx, turn: Int32, sScale: cute.Tensor, op: cutlass.Constexpr):
    """sScale[token, head] = rsqrt(mean o^2 + eps) of the parts that came with o: four lanes a head."""
    d = op.d
    parts = squares(op)
    rounds = -(-parts // 4)
    heads = d.rows * d.kda_heads
    for k in cutlass.range_constexpr(-(-4 * heads // op.threads)):
        i = (c.tid + k * op.threads) // 4
        known = i if i < heads else Int32(0)
        token, head = known // d.kda_heads, known % d.kda_heads
        start = box(c, "sq", turn, op)
        start += Int64(token * op.pitch(d.kda_heads * parts) + head * parts) * 4
        rP = cute.make_rmem_tensor(cute.make_layout((rounds,)), Uint32)
        for n in cutlass.range_constexpr(rounds):
            part = n * 4 + c.lane % 4
            rP[n] = peek_word(start + Int64(part if part < parts else Int32(0)) * 4)
        total = Float32(0.0)
        for n in cutlass.range_constexpr(rounds):
            part = n * 4 + c.lane % 4
            x = insist_word(start + Int64(part if part < parts else Int32(0)) * 4, rP[n], op)
            total += x if part < parts else Float32(0.0)
        cute.arch.sync_warp()
        total = lanes_sum(total, 4)
        if i < heads and c.lane % 4 == 0:
            sScale[i] = cute.math.rsqrt(total / HEAD + d.eps)


@cute.jit
def peek_word(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def insist_word(address: Int64, x: Uint32, op: cutlass.Constexpr):
    turns = Int32(0)
    while x == Uint32(0xFFFFFFFF) and (op.spin == 0 or turns < op.spin):
        x = peek_word(address)
        turns += 1
    return x.bitcast(Float32)


@cute.jit
def gated_rows(c: Ctx, layer: Int32, turn: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """rX words [4, vectors] = bf(o times its head's scale) of this thread's columns of its token. What comes as o has
    its norm's weight and its gate in it.
    """
    d = op.d
    g = op.tiles(d.kda_dim)
    rO = cute.make_rmem_tensor(cute.make_layout((4, 2, g.vectors)), Uint32)
    rX.fill(0)
    rO.fill(0)
    token = row_token(c, op)
    here = c.warp < g.width
    sScale = view(c, Float32, 4 * TOKENS, TOKENS * d.kda_heads)
    first = column(c, g)
    o = box(c, "o", turn, op) + Int64(token * op.pitch(d.kda_dim) + first * 8) * 4
    if here:
        for v in cutlass.range_constexpr(g.vectors):
            peek(o + further(v, g) * 32, rO[None, 0, v])
            peek(o + further(v, g) * 32 + 16, rO[None, 1, v])
    head_scales(c, turn, sScale, op)
    if here:
        for v in cutlass.range_constexpr(g.vectors):
            insist(o + further(v, g) * 32, rO[None, 0, v], 4, op)
            insist(o + further(v, g) * 32 + 16, rO[None, 1, v], 4, op)
    consumers(op)
    if here and c.lane // 4 < d.rows:
        for v in cutlass.range_constexpr(g.vectors):
            scale = sScale[token * d.kda_heads + (first + further(v, g)) // 16]
            for e in cutlass.range_constexpr(4):
                pair = []
                for f in cutlass.range_constexpr(2):
                    n = 2 * e + f
                    pair.append(rO[n % 4, n // 4, v].bitcast(Float32) * scale)
                rX[e, v] = pack_bf16(pair[0], pair[1])


@cute.jit
def f32_ahead(c: Ctx, address: Int64, n: Int32, widest: cutlass.Constexpr, op: cutlass.Constexpr):
    """This thread's f32 of an [tokens, hidden] tensor from a column on, as `owned` deals them; loaded in no branch."""
    r = cute.make_rmem_tensor(cute.make_layout((-(-op.d.rows * widest // op.threads),)), Float32)
    r.fill(0.0)
    for k in cutlass.range_constexpr(cute.size(r)):
        token, row = owned(c, k, widest, op)
        there = token < op.d.rows and row < n
        i = token * op.d.hidden + row if there else Int32(0)
        r[k] = one(Float32, address + Int64(i) * 4)
    return r


@cute.jit
def bf16_ahead(c: Ctx, address: Int64, n: Int32, widest: cutlass.Constexpr, op: cutlass.Constexpr):
    """As `f32_ahead` for bf16."""
    r = cute.make_rmem_tensor(cute.make_layout((-(-op.d.rows * widest // op.threads),)), Float32)
    r.fill(0.0)
    for k in cutlass.range_constexpr(cute.size(r)):
        token, row = owned(c, k, widest, op)
        there = token < op.d.rows and row < n
        i = token * op.d.hidden + row if there else Int32(0)
        r[k] = one(BFloat16, address + Int64(i) * 2).to(Float32)
    return r


@cute.jit
def one(dtype: cutlass.Constexpr, address: Int64):
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout((1,)))[0]


@cute.jit
def owned(c: Ctx, k: cutlass.Constexpr, widest: cutlass.Constexpr, op: cutlass.Constexpr):
    """(token, row) of the k-th sum of this thread among [tokens, widest]."""
    i = c.tid + k * op.threads
    return i // widest, i % widest


@cute.jit
def out_rows(
    c: Ctx, layer: Int32, it: Int32, rX: cute.Tensor, y: Any, op: cutlass.Constexpr
):  # fmt: skip
    """y = bf(bf(o W_o^T) + the others' partials) of this CTA's columns; the box attn = bf(y + the next x)."""
    d = op.d
    g = op.tiles(d.kda_dim)
    turn = turn_of(c, layer, LAYERS)
    widest = most(d.hidden, op.ctas)
    first, n = share(d.hidden, c.cta, op.ctas)
    later = layer + 1 if layer + 1 < d.layers else layer
    c = anew(c)
    rNext = bf16_ahead(c, field(c, later, F["x"], COUNT) + Int64(first) * 2, n, widest, op)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_attn"], COUNT) + Int64(first) * 4
        rRemote = f32_ahead(c, remote, n, widest, op)
    it = drain_tiles(c, it, n, rX, g, op)
    consumers(op)
    c = anew(c)
    for k in cutlass.range_constexpr(cute.size(rNext)):
        token, row = owned(c, k, widest, op)
        if token < d.rows and row < n:
            total = tile_sum(c, row, token, op)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k]
            total = round_bf16(total)
            post(c, "attn", turn, token * op.pitch(d.hidden) + first + row, total + rNext[k], op)
            y[token * d.hidden + first + row] = total.to(BFloat16)
    return it


@cute.jit
def kda_rows(
    c: Ctx, layer: Int32, at_: tuple, rX: cute.Tensor, taps: Taps, y: Any, op: cutlass.Constexpr
):
    """A KDA instance after its input; not hinted at yet."""
    it, edge = at_
    d = op.d
    g = op.tiles(d.hidden)
    turn = turn_of(c, layer, KDAS)
    rows = projected(d)
    widest = most(rows, op.ctas)
    first, n = share(rows, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    it = drain_tiles(c, it, n, rX, g, op)
    c = anew(c)
    s = seat(c, op)
    late = load_late(c, layer, s, op)
    consumers(op)
    for k in cutlass.range_constexpr(-(-d.rows * widest // op.threads)):
        token, row = owned(c, k, widest, op)
        if token < d.rows and row < n:
            i = token * op.pitch(rows) + first + row
            post(c, "proj", turn, i, tile_sum(c, row, token, op), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge proj", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "update", layer)
    it = update_rows(c, layer, (it, turn), s, (taps, late), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge o", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "o_proj", layer)
    c = anew(c)
    rO = cute.make_rmem_tensor(cute.make_layout((4, op.tiles(d.kda_dim).vectors)), Uint32)
    gated_rows(c, layer, turn, rO, op)
    it = out_rows(c, layer, it, rO, y, op)
    return it, edge


@cute.jit
def load_rows(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """Words [4, vectors]: this thread's columns of its token of x, from the box attn after the first instance."""
    d = op.d
    g = op.tiles(d.hidden)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.vectors)), Uint32)
    rX.fill(0)
    token = c.lane // 4
    if layer == 0:
        token_words(c, field(c, layer, F["x"], COUNT), 2 * d.hidden, rX, g, op)
    elif c.warp < g.width and token < d.rows:
        start = box(c, "attn", turn_of(c, layer - 1, LAYERS), op)
        start += Int64(token * op.pitch(d.hidden) + column(c, g) * 8) * 2
        for v in cutlass.range_constexpr(g.vectors):
            peek(start + 16 * further(v, g), rX[None, v])
        for v in cutlass.range_constexpr(g.vectors):
            insist(start + 16 * further(v, g), rX[None, v], 2, op)
    cute.arch.sync_warp()
    return rX
