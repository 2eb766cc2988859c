"""The recurrent update of KDA: one program per head and request, from the projection to the gated output."""

import triton
import triton.language as tl

from targets.kimi_k3.baseline.kernels.common import begin_open, bf, fetch, sigmoid


@triton.jit
def remembered(taps, conv, channel, D3: tl.constexpr):
    """What the three old values of these channels add to the four-tap sum."""
    w = conv + channel * 4
    u = tl.load(taps + channel).to(tl.float32) * tl.load(w)
    u += tl.load(taps + D3 + channel).to(tl.float32) * tl.load(w + 1)
    return u + tl.load(taps + 2 * D3 + channel).to(tl.float32) * tl.load(w + 2)


@triton.jit
def convolved(past, x, conv, channel):
    """silu of the four-tap sum."""
    u = past + x.to(tl.float32) * tl.load(conv + channel * 4 + 3)
    return u * sigmoid(u)


@triton.jit
def moved_on(taps, channel, x, live, D3: tl.constexpr):
    """The history one value further."""
    t1 = tl.load(taps + D3 + channel)
    t2 = tl.load(taps + 2 * D3 + channel)
    tl.store(taps + channel, t1, mask=live)
    tl.store(taps + D3 + channel, t2, mask=live)
    tl.store(taps + 2 * D3 + channel, x, mask=live)


@triton.jit
def kda_kernel(
    y, y_stride, f_b, conv, rate, dt_bias, o_norm, taps, states, slots, out, eps, ahead,
    HEADS: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr,
    LANES: tl.constexpr, OPEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y bf16 [M, q | k | v | g | f_a | b]; taps bf16 [slots, 3, 3 D], states f32 [slots, HEADS, V, K], W wide;
    rate f32 = exp(A_log). out bf16 [M, D]; a slot <= 0 gets zeros and keeps its state. Grid (HEADS, M), with
    CHUNKS > 0 more columns that fetch `ahead`.

    All that the launch before does not write is read while it runs: weights, the state, the history.
    """
    h = tl.program_id(0)
    m = tl.program_id(1)
    if CHUNKS > 0:
        if h >= HEADS:
            if m == 0:
                fetch(ahead, h - HEADS, CHUNKS, STRIDE, LANES)
            return
    D: tl.constexpr = HEADS * W
    i = tl.arange(0, W)
    j = tl.arange(0, RANK)
    c = h * W + i
    slot = tl.load(slots + m)
    live = slot > 0
    safe = tl.maximum(slot, 0).to(tl.int64)
    at = states + (safe * HEADS + h) * W * W + i[:, None] * W + i[None, :]
    S = tl.load(at)
    low = tl.load(f_b + c[:, None] * RANK + j[None, :])
    taps += safe * (9 * D)
    past_q = remembered(taps, conv, c, 3 * D)
    past_k = remembered(taps, conv, D + c, 3 * D)
    past_v = remembered(taps, conv, 2 * D + c, 3 * D)
    slope = tl.load(rate + h)
    bias = tl.load(dt_bias + c)
    scale = tl.load(o_norm + i).to(tl.float32)
    begin_open(PDL, OPEN)
    y += m * y_stride
    xq = tl.load(y + c)
    xk = tl.load(y + D + c)
    xv = tl.load(y + 2 * D + c)
    f_a = tl.load(y + 4 * D + j)
    beta = sigmoid(tl.load(y + 4 * D + RANK + h).to(tl.float32))
    open_gate = sigmoid(tl.load(y + 3 * D + c).to(tl.float32))
    # tensor cores want sixteen columns: all are f_a
    raw = bf(tl.max(tl.dot(low, f_a[:, None] + tl.zeros([RANK, 16], dtype=tl.bfloat16)), 1))
    q = convolved(past_q, xq, conv, c)
    k = convolved(past_k, xk, conv, D + c)
    v = convolved(past_v, xv, conv, 2 * D + c)
    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) * (W**-0.5)
    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    S = S * tl.exp(-5.0 * sigmoid(slope * (raw + bias)))[None, :]
    error = beta * (v - tl.sum(S * k[None, :], 1))
    o = tl.sum(S * q[None, :], 1) + error * tl.sum(k * q, 0)
    o = o / tl.sqrt(tl.sum(o * o, 0) / W + eps) * scale * open_gate
    tl.store(out + m * D + c, tl.where(live, o, 0.0).to(tl.bfloat16))
    tl.store(at, S + error[:, None] * k[None, :], mask=live)
    moved_on(taps, c, xq, live, 3 * D)
    moved_on(taps, D + c, xk, live, 3 * D)
    moved_on(taps, 2 * D + c, xv, live, 3 * D)
