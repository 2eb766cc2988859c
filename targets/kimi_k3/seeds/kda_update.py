"""Part of KDA: the recurrent update of one token a request, and the steps that `kda_tokens` shares with it.

It launches nothing; the projections around it are plain products.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from targets.kimi_k3.seeds.common import begin, lanes_sum, round_bf16, sigmoid, silu, smem

K = 128
"""Width of a head, of its keys and of the low-rank decay projection; the lane mapping depends on it."""


@dataclass(frozen=True)
class Kda:
    """Compile-time sizes; `width` = heads x 128."""

    heads: int
    threads: int
    eps: float
    pdl: bool
    tokens: int = 1
    low_rank: bool = False

    @property
    def f_at(self):
        """Column of f_a in a projected row; g_a follows it in models with a low-rank gate."""
        return 3 * self.width + self.heads if self.low_rank else 4 * self.width

    @property
    def beta_at(self):
        return 3 * self.width if self.low_rank else 4 * self.width + K

    @property
    def width(self):
        return self.heads * K

    @property
    def passes(self):
        """Rows of the state per thread: eight lanes share a row."""
        return K * 8 // self.threads


class KdaTensors(NamedTuple):
    """conv f32 [3 D, 4], f_b bf16 [D, 128], A_log f32 [H], dt_bias f32 [D], o_norm bf16 [128]; the states conv_taps
    bf16 [slots, 3, 3 D] (oldest tap first) and S f32 [slots, H, V, K]; slots i32 [M]."""

    conv: Any
    f_b: Any
    A_log: Any
    dt_bias: Any
    o_norm: Any
    conv_taps: Any
    S: Any
    slots: Any


@cute.jit
def convolve(mY: cute.Tensor, w: KdaTensors, sU: cute.Tensor, at: tuple, op: cutlass.Constexpr):
    """sU[q 128 | k 128 | v 128] = silu of the four-tap convolution of this head's channels; shifts the history."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, slot = at
    for c in cutlass.range(tid, 3 * K, op.threads, unroll=1):
        channel = c // K * op.width + h * K + c % K
        safe = slot if slot > 0 else 0
        tap0 = w.conv_taps[safe, 0, channel]
        tap1 = w.conv_taps[safe, 1, channel]
        tap2 = w.conv_taps[safe, 2, channel]
        x = mY[m, channel]
        u = tap0.to(Float32) * w.conv[channel, 0] + tap1.to(Float32) * w.conv[channel, 1]
        u += tap2.to(Float32) * w.conv[channel, 2] + x.to(Float32) * w.conv[channel, 3]
        sU[c] = silu(u)
        if slot > 0:
            w.conv_taps[slot, 0, channel] = tap1
            w.conv_taps[slot, 1, channel] = tap2
            w.conv_taps[slot, 2, channel] = x


@cute.jit
def decay(mY: cute.Tensor, w: KdaTensors, sDecay: cute.Tensor, at: tuple, op: cutlass.Constexpr):
    """sDecay[k] = exp(-5 sg(exp(A_log) (bf(f_a W_fb^T) + dt_bias))): sixteen lanes to a row of f_b."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = at
    lane = tid % 16
    gY = cute.logical_divide(mY, (None, 8))
    gF = cute.logical_divide(w.f_b, (None, 8))
    rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rF = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    cute.autovec_copy(gY[m, (None, op.f_at // 8 + lane)], rX)
    rate = cute.math.exp(w.A_log[h])
    for k in cutlass.range(tid // 16, K, op.threads // 16, unroll=4):
        cute.autovec_copy(gF[h * K + k, (None, lane)], rF)
        dot = (rX.load().to(Float32) * rF.load().to(Float32)).reduce(
            cute.ReductionOp.ADD, Float32(0.0), 0
        )
        raw = round_bf16(lanes_sum(dot, 16))
        if lane == 0:
            gate = sigmoid(rate * (raw + w.dt_bias[h * K + k]))
            sDecay[k] = cute.math.exp(-5.0 * gate)


@cute.jit
def norm_scale(sX: cute.Tensor):
    """rsqrt(sum x^2 + 1e-6) of 128 values, by every warp for itself."""
    tid, _, _ = cute.arch.thread_idx()
    square = Float32(0.0)
    for i in cutlass.range_constexpr(4):
        x = sX[tid % 32 + 32 * i]
        square += x * x
    return cute.math.rsqrt(lanes_sum(square, 32) + 1e-6)


@cute.jit
def share(sX: cute.Tensor):
    """This lane's 16 of 128 values, as rS has them: 4 at (8 c + lane) * 4, c = 0..3."""
    tid, _, _ = cute.arch.thread_idx()
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    for c in cutlass.range_constexpr(4):
        cute.autovec_copy(cute.local_tile(sX, (4,), (c * 8 + tid % 8,)), rX[None, c])
    return rX


@cute.jit
def delta_rule(
    rS: cute.Tensor,
    sU: cute.Tensor,
    sDecay: cute.Tensor,
    sO: cute.Tensor,
    beta: Float32,
    op: cutlass.Constexpr,
):
    """S <- S * decay; S += beta (v - S k) k; o = S q, on this thread's rows. sums over k: 16 in order, then 8 lanes."""
    tid, _, _ = cute.arch.thread_idx()
    sQ = cute.local_tile(sU, (K,), (0,))
    sK = cute.local_tile(sU, (K,), (1,))
    q = share(sQ).load() * (norm_scale(sQ) * K**-0.5)
    k = share(sK).load() * norm_scale(sK)
    d = share(sDecay).load()
    for p in cutlass.range_constexpr(op.passes):
        row = p * (op.threads // 8) + tid // 8
        s = rS[None, None, p].load() * d
        seen = lanes_sum((s * k).reduce(cute.ReductionOp.ADD, Float32(0.0), 0), 8)
        s = s + k * (beta * (sU[2 * K + row] - seen))
        rS[None, None, p].store(s)
        o = lanes_sum((s * q).reduce(cute.ReductionOp.ADD, Float32(0.0), 0), 8)
        if tid % 8 == 0:
            sO[row] = o


@cute.kernel
def kda_kernel(mY: cute.Tensor, w: KdaTensors, mOut: cute.Tensor, op: cutlass.Constexpr):
    """mY bf16 [M, q D | k D | v D | g D | f_a 128 | b H | pad], mOut bf16 [M, D]; grid (H, M).

    All f32 between the projection (bf16) and out = bf(RMS(o; o_norm) * sg(g)). A request in the null slot (id <= 0)
    gets zeros and touches no state.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    slot = w.slots[m]
    at = (h, m, slot)
    rS = cute.make_rmem_tensor(cute.make_layout((4, 4, op.passes)), Float32)
    gS = cute.logical_divide(w.S[slot if slot > 0 else 0, h, None, None], (None, 4))
    for p in cutlass.range_constexpr(op.passes):
        for c in cutlass.range_constexpr(4):
            row = p * (op.threads // 8) + tid // 8
            cute.autovec_copy(gS[row, (None, c * 8 + tid % 8)], rS[None, c, p])
    begin(op.pdl)
    sU, sDecay, sO = (
        smem(Float32, (3 * K,), (1,)),
        smem(Float32, (K,), (1,)),
        smem(Float32, (K,), (1,)),
    )
    convolve(mY, w, sU, at, op)
    decay(mY, w, sDecay, at, op)
    cute.arch.sync_threads()
    beta = sigmoid(mY[m, 4 * op.width + K + h].to(Float32))
    delta_rule(rS, sU, sDecay, sO, beta, op)
    if slot > 0:
        for p in cutlass.range_constexpr(op.passes):
            for c in cutlass.range_constexpr(4):
                row = p * (op.threads // 8) + tid // 8
                cute.autovec_copy(rS[None, c, p], gS[row, (None, c * 8 + tid % 8)])
    cute.arch.sync_threads()
    scale = head_scale(sO, op)
    if tid < K:
        gate = sigmoid(mY[m, 3 * op.width + h * K + tid].to(Float32))
        y = sO[tid] * scale * w.o_norm[tid].to(Float32) * gate
        mOut[m, h * K + tid] = (y if slot > 0 else Float32(0.0)).to(BFloat16)


@cute.jit
def head_scale(sO: cute.Tensor, op: cutlass.Constexpr):
    """rsqrt(mean o^2 + eps) over the head, by every warp for itself."""
    tid, _, _ = cute.arch.thread_idx()
    square = Float32(0.0)
    for i in cutlass.range_constexpr(4):
        x = sO[tid % 32 + 32 * i]
        square += x * x
    return cute.math.rsqrt(lanes_sum(square, 32) / K + op.eps)


def kda_shape(cfg):
    d = cfg.dims
    if (d.head_dim, d.f_rank) != (K, K):
        raise ValueError(f"head_dim {d.head_dim} and f_rank {d.f_rank}: this kernel is for {K}")
    low_rank = d.gate_rank > 0
    if low_rank and (d.gate_rank != K or d.kda_heads % 8):
        raise ValueError(
            f"gate_rank {d.gate_rank}, {d.kda_heads} heads: this kernel is for {K} and multiples of 8"
        )
    return Kda(d.kda_heads, cfg.kda_threads, d.eps, cfg.pdl, d.q, low_rank)
