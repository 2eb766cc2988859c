"""The recurrent update of KDA: one program per head and request, from the projection to the gated output."""

import triton
import triton.language as tl

from targets.kimi_k3.baseline.kernels.common import begin, bf, sigmoid


@triton.jit
def convolved(y, taps, conv, channel, old, live, D3: tl.constexpr):
    """silu of the four-tap sum of these channels; the history moves on where the request is live."""
    w = conv + channel * 4
    t0 = tl.load(taps + old + channel)
    t1 = tl.load(taps + old + D3 + channel)
    t2 = tl.load(taps + old + 2 * D3 + channel)
    x = tl.load(y + channel)
    u = t0.to(tl.float32) * tl.load(w) + t1.to(tl.float32) * tl.load(w + 1)
    u += t2.to(tl.float32) * tl.load(w + 2) + x.to(tl.float32) * tl.load(w + 3)
    tl.store(taps + old + channel, t1, mask=live)
    tl.store(taps + old + D3 + channel, t2, mask=live)
    tl.store(taps + old + 2 * D3 + channel, x, mask=live)
    return u * sigmoid(u)


@triton.jit
def kda_kernel(
    y, y_stride, f_b, conv, rate, dt_bias, o_norm, taps, states, slots, out, eps,
    HEADS: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y bf16 [M, q | k | v | g | f_a | b]; taps bf16 [slots, 3, 3 D], states f32 [slots, HEADS, V, K], W wide;
    rate f32 = exp(A_log). out bf16 [M, D]; a slot <= 0 gets zeros and keeps its state. Grid (HEADS, M)."""
    h = tl.program_id(0)
    m = tl.program_id(1)
    D: tl.constexpr = HEADS * W
    i = tl.arange(0, W)
    j = tl.arange(0, RANK)
    slot = tl.load(slots + m)
    live = slot > 0
    safe = tl.maximum(slot, 0).to(tl.int64)
    at = states + (safe * HEADS + h) * W * W + i[:, None] * W + i[None, :]
    S = tl.load(at)
    low = tl.load(f_b + (h * W + i)[:, None] * RANK + j[None, :]).to(tl.float32)
    begin(PDL)
    y += m * y_stride
    old = safe * (9 * D)
    q = convolved(y, taps, conv, h * W + i, old, live, 3 * D)
    k = convolved(y, taps, conv, D + h * W + i, old, live, 3 * D)
    v = convolved(y, taps, conv, 2 * D + h * W + i, old, live, 3 * D)
    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) * (W**-0.5)
    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    f_a = tl.load(y + 4 * D + j).to(tl.float32)
    raw = bf(tl.sum(low * f_a[None, :], 1))
    gate = sigmoid(tl.load(rate + h) * (raw + tl.load(dt_bias + h * W + i)))
    S = S * tl.exp(-5.0 * gate)[None, :]
    beta = sigmoid(tl.load(y + 4 * D + RANK + h).to(tl.float32))
    S = S + (beta * (v - tl.sum(S * k[None, :], 1)))[:, None] * k[None, :]
    tl.store(at, S, mask=live)
    o = tl.sum(S * q[None, :], 1)
    o = o / tl.sqrt(tl.sum(o * o, 0) / W + eps) * tl.load(o_norm + i).to(tl.float32)
    o = o * sigmoid(tl.load(y + 3 * D + h * W + i).to(tl.float32))
    tl.store(out + m * D + h * W + i, tl.where(live, o, 0.0).to(tl.bfloat16))
