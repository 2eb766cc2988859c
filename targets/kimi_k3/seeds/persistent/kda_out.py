"""The output of KDA for one token: o under its norm and gate, o_proj with the other ranks' partial sums."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, pack_bf16, round_bf16, sigmoid
from targets.kimi_k3.seeds.persistent.boxes import LAYERS, box, insist, peek, post, turn_of
from targets.kimi_k3.seeds.persistent.columns import ask_columns, close_half, sums_at
from targets.kimi_k3.seeds.persistent.device import (
    Ctx,
    ahead,
    consumers,
    field,
    unpack,
    vector,
    words_at,
)
from targets.kimi_k3.seeds.persistent.exchange import tell_rank
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda_sizes import HEAD
from targets.kimi_k3.seeds.persistent.products import drain, gathered
from targets.kimi_k3.seeds.persistent.stages import most, share


@cute.jit
def gated(c: Ctx, layer: Int32, slot: Int32, turn: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """rX words [4, per] = bf(RMS(o; o_norm) * sg(g)) of this thread's vectors of eight columns."""
    for v in cutlass.range_constexpr(op.rows(op.d.kda_dim).per):
        gated_vector(c, layer, (slot, turn, v), rX, op)


@cute.jit
def gated_vector(c: Ctx, layer: Int32, at: tuple, rX: cute.Tensor, op: cutlass.Constexpr):
    """Its v-th, at = (slot, turn, v); a head is sixteen lanes, whichever the vector."""
    slot, turn, v = at
    d, g = op.d, op.rows(op.d.kda_dim)
    i = vector(c, v, g)
    rW = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rO = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rG = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rGf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rN = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rNf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rW.fill(0)
    rG.fill(0)
    o = box(c, "o", turn, op) + Int64(i) * 32
    gate = box(c, "proj", turn, op) + Int64(6 * d.kda_dim) + Int64(i) * 16
    if i < g.vecs:
        peek(o, rW[None, 0])
        peek(o + 16, rW[None, 1])
        peek(gate, rG)
    words_at(field(c, layer, F["o_norm"], COUNT), i % 16, rN)
    if i < g.vecs:
        insist(o, rW[None, 0], 4, op)
        insist(o + 16, rW[None, 1], 4, op)
        insist(gate, rG, 2, op)
    unpack(rN, rNf)
    unpack(rG, rGf)
    for e in cutlass.range_constexpr(8):
        rO[e] = rW[e % 4, e // 4].bitcast(Float32)
    square = Float32(0.0)
    for e in cutlass.range_constexpr(8):
        square += rO[e] * rO[e]
    scale = cute.math.rsqrt(lanes_sum(square, 16) / HEAD + d.eps)
    for e in cutlass.range_constexpr(4):
        a = rO[2 * e] * scale * rNf[2 * e] * sigmoid(rGf[2 * e])
        b = rO[2 * e + 1] * scale * rNf[2 * e + 1] * sigmoid(rGf[2 * e + 1])
        y = pack_bf16(a, b)
        rX[e, v] = y if slot > 0 else Uint32(0)


@cute.jit
def out_projection(
    c: Ctx,
    layer: Int32,
    it: Int32,
    rO: cute.Tensor,
    y: Any,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
    nx: Any = None,
):
    """The box attn (and y, where given) = bf(bf(x W_o^T) + the others' partials) of this CTA's rows; with nx box dots,
    and the half is closed."""
    d = op.d
    turn = turn_of(c, layer, LAYERS)
    first, n = share(d.hidden, c.cta, op.ctas)
    if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
        remote = field(c, layer, F["remote_attn"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, most(d.hidden, op.ctas), op)
    if cutlass.const_expr(nx is not None):
        sSum = sums_at(c, op)
        cols = ask_columns(c, nx, (first, n), None, op)
    it = drain(c, it, n, Int32(0), rO, g, op)
    consumers(op)
    for k in cutlass.range_constexpr(-(-most(d.hidden, op.ctas) // op.threads)):
        i = c.tid + k * op.threads
        if i < n:
            total = gathered(c, i, g.width)
            if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
                total = round_bf16(total) + rRemote[k]
            if cutlass.const_expr(d.gpus > 1):
                tell_rank(c, "attn", layer, first + i, total)
            post(c, "attn", turn, first + i, total, op)
            if cutlass.const_expr(y is not None):
                y[first + i] = total.to(BFloat16)
            if cutlass.const_expr(nx is not None):
                sSum[i] = total
    if cutlass.const_expr(nx is not None):
        close_half(c, nx, (layer, Int32(0), n, n), cols, op)
    return it
