"""KDA attention of one layer: input projection, one recurrent update per head, output projection.

The update is one launch, a CTA per head and request: short convolution, decay, delta rule on the f32 state, norm and
gate. The state is in registers, eight lanes to a row of it, loaded before anything that depends on the projection.
Several tokens a request, and models whose output gate has low rank, take a second kernel that walks the tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from targets.kimi_k3.seeds.common import (
    begin,
    lanes_sum,
    pick,
    pick_layer,
    round_bf16,
    sigmoid,
    silu,
    smem,
)
from targets.kimi_k3.seeds.gemv import Extra, gemv, gemv_of_sum

TUNABLES = {
    "kda_threads": (512, 256, 1024),
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "fuse_add": (True, False),
    "pdl": (False, True),
}
KDA_WEIGHTS = ("in_proj", "f_b", "conv", "A_log", "dt_bias", "o_norm", "o_proj")
KDA_STATES = ("conv", "S")
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


@cute.jit
def convolve_tokens(
    mY: cute.Tensor, w: KdaTensors, sAll: cute.Tensor, at: tuple, op: cutlass.Constexpr
):
    """sAll[token, q 128 | k 128 | v 128] of all tokens of request b. at = (head, b, conv page, accepted - 1): the page
    becomes the two taps before the new tokens, then these. A thread has whole channels, so it reads before it writes.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, b, page, kept = at
    safe = page if page > 0 else 0
    for c in cutlass.range(tid, 3 * K, op.threads, unroll=1):
        channel = c // K * op.width + h * K + c % K
        old = w.conv_taps[safe, kept, channel].to(Float32)
        middle = w.conv_taps[safe, kept + 1, channel]
        young = w.conv_taps[safe, kept + 2, channel]
        if page > 0:
            w.conv_taps[page, 0, channel] = middle
            w.conv_taps[page, 1, channel] = young
        middle, young = middle.to(Float32), young.to(Float32)
        for t in cutlass.range_constexpr(op.tokens):
            new = mY[b * op.tokens + t, channel]
            if page > 0:
                w.conv_taps[page, t + 2, channel] = new
            new = new.to(Float32)
            total = old * w.conv[channel, 0] + middle * w.conv[channel, 1]
            total += young * w.conv[channel, 2] + new * w.conv[channel, 3]
            sAll[t, c] = silu(total)
            old, middle, young = middle, young, new


@cute.jit
def gate_of(mY: cute.Tensor, mG: cute.Tensor, sGate: cute.Tensor, at: tuple, op: cutlass.Constexpr):
    """sGate[k] = sg(g) of a row and head: g = bf(g_a W_gb^T) with a low-rank gate (mG = W_gb), else in the row."""
    tid, _, _ = cute.arch.thread_idx()
    h, row = at
    if cutlass.const_expr(op.low_rank):
        lane = tid % 16
        gY = cute.logical_divide(mY, (None, 8))
        gG = cute.logical_divide(mG, (None, 8))
        rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
        rG = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
        cute.autovec_copy(gY[row, (None, (op.f_at + K) // 8 + lane)], rX)
        for k in cutlass.range(tid // 16, K, op.threads // 16, unroll=4):
            cute.autovec_copy(gG[h * K + k, (None, lane)], rG)
            product = rX.load().to(Float32) * rG.load().to(Float32)
            value = round_bf16(lanes_sum(product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0), 16))
            if lane == 0:
                sGate[k] = sigmoid(value)
    else:
        if tid < K:
            sGate[tid] = sigmoid(mY[row, 3 * op.width + h * K + tid].to(Float32))


@cute.kernel
def kda_tokens_kernel(
    mY: cute.Tensor, w: KdaTensors, more: tuple, mOut: cute.Tensor, op: cutlass.Constexpr
):
    """As kda_kernel for `op.tokens` tokens of a request in order, grid (H, B); more = (accepted i32 [B], g_b bf16 [D,
    128]), None where there is none. w.slots i32 [B, tokens]: the state after each token goes there unless the id is
    <= 0; the request starts from slot accepted - 1 of its row, a null one gets zeros and touches nothing.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, b, _ = cute.arch.block_idx()
    mAccepted, mG = more
    kept = mAccepted[b] - 1 if cutlass.const_expr(op.tokens > 1) else 0
    mSlots = cute.make_tensor(
        w.slots.iterator,
        cute.make_layout((mY.shape[0] // op.tokens, op.tokens), stride=(op.tokens, 1)),
    )
    start = mSlots[b, kept]
    page = mSlots[b, 0] if start > 0 else start
    rS = cute.make_rmem_tensor(cute.make_layout((4, 4, op.passes)), Float32)
    gS = cute.logical_divide(w.S[start if start > 0 else 0, h, None, None], (None, 4))
    for p in cutlass.range_constexpr(op.passes):
        for c in cutlass.range_constexpr(4):
            cute.autovec_copy(
                gS[p * (op.threads // 8) + tid // 8, (None, c * 8 + tid % 8)], rS[None, c, p]
            )
    begin(op.pdl)
    sAll = smem(Float32, (op.tokens, 3 * K), (3 * K, 1))
    sDecay, sGate = smem(Float32, (K,), (1,)), smem(Float32, (K,), (1,))
    sO = smem(Float32, (K,), (1,))
    convolve_tokens(mY, w, sAll, (h, b, page, kept), op)
    for t in cutlass.range(op.tokens, unroll=1):
        m = b * op.tokens + t
        decay(mY, w, sDecay, (h, m, start), op)
        gate_of(mY, mG, sGate, (h, m), op)
        cute.arch.sync_threads()
        strength = sigmoid(mY[m, op.beta_at + h].to(Float32))
        delta_rule(rS, sAll[t, None], sDecay, sO, strength, op)
        slot = mSlots[b, t] if start > 0 else start
        gTarget = cute.logical_divide(w.S[slot if slot > 0 else 0, h, None, None], (None, 4))
        if slot > 0:
            for p in cutlass.range_constexpr(op.passes):
                for c in cutlass.range_constexpr(4):
                    row = p * (op.threads // 8) + tid // 8
                    cute.autovec_copy(rS[None, c, p], gTarget[row, (None, c * 8 + tid % 8)])
        cute.arch.sync_threads()
        normed = head_scale(sO, op)
        if tid < K:
            out = sO[tid] * normed * w.o_norm[tid].to(Float32) * sGate[tid]
            mOut[m, h * K + tid] = (out if start > 0 else Float32(0.0)).to(BFloat16)
        cute.arch.sync_threads()


@cute.jit
def kda_tokens(
    mY: cute.Tensor, w: KdaTensors, more: tuple, mOut: cute.Tensor, cfg: cutlass.Constexpr, stream
):
    op = kda_shape(cfg)
    kda_tokens_kernel(mY, w, more, mOut, op).launch(
        grid=(op.heads, mY.shape[0] // op.tokens, 1),
        block=(op.threads, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


@cute.jit
def kda_update(mY: cute.Tensor, w: KdaTensors, mOut: cute.Tensor, cfg: cutlass.Constexpr, stream):
    op = kda_shape(cfg)
    kda_kernel(mY, w, mOut, op).launch(
        grid=(op.heads, mY.shape[0], 1),
        block=(op.threads, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


@cute.jit
def kda_core(weights, states, inputs, space, cfg, stream):
    """From space.kda_proj [M, in_proj_rows] to space.kda_out [M, D]."""
    w = KdaTensors(
        weights.conv, weights.f_b, weights.A_log, weights.dt_bias, weights.o_norm, states.conv, states.S, inputs.slots
    )  # fmt: skip
    d = cfg.dims
    if cutlass.const_expr(d.q > 1 or d.gate_rank > 0):
        accepted = inputs.accepted if d.q > 1 else None
        g_b = weights.g_b if d.gate_rank > 0 else None
        kda_tokens(space.kda_proj, w, (accepted, g_b), space.kda_out, cfg, stream)
    else:
        kda_update(space.kda_proj, w, space.kda_out, cfg, stream)


def kda_weights(dims):
    """The names of a layer's weights."""
    return (*KDA_WEIGHTS, "g_b") if dims.gate_rank > 0 else KDA_WEIGHTS


def kda_workspace(dims):
    return {
        "kda_proj": ("bf16", (dims.rows, dims.in_proj_rows), "undefined", "step"),
        "kda_out": ("bf16", (dims.rows, dims.kda_dim), "undefined", "step"),
    }


def workspace(dims, cfg):
    total = {} if cfg.fuse_add else {"sum": ("bf16", (dims.rows, dims.hidden), "undefined", "step")}
    return {**kda_workspace(dims), **total}


@cute.jit
def step(t, cfg, stream):
    """y_i = a of the KDA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    x, y, space = t.inputs.x, t.outputs.y, t.workspace
    mSum = None if cfg.fuse_add else space.sum
    remote = [r.attn for r in t.inputs.remote.layers] if cfg.dims.ranks > 1 else None
    gemv(x[0], t.weights.layers[0].in_proj, space.kda_proj, Extra(), cfg, stream)
    for i in cutlass.range(len(x), unroll=1):
        w = pick_layer(t.weights.layers, i, kda_weights(cfg.dims))
        s = pick_layer(t.states.layers, i, KDA_STATES)
        if i > 0:
            gemv_of_sum(pick(x, i), pick(y, i - 1), mSum, w.in_proj, space.kda_proj, cfg, stream)
        kda_core(w, s, t.inputs, space, cfg, stream)
        extra = Extra() if remote is None else Extra(remote=pick(remote, i))
        gemv(space.kda_out, w.o_proj, pick(y, i), extra, cfg, stream)
