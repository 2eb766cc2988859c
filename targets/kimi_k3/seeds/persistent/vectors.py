"""Vectors in the registers of the consumers: loaded from buffers and boxes, normalised, two rows joined."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import high, low, pack_bf16, round_bf16, situ
from targets.kimi_k3.seeds.persistent.boxes import box, insist, peek
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, vector, words_at
from targets.kimi_k3.seeds.persistent.products import gathered
from targets.kimi_k3.seeds.persistent.sums import put, take


@cute.jit
def situ_pair(c: Ctx, row: Int32, width: cutlass.Constexpr):
    """SiTU(bf(gate), bf(up)) of the pair whose gate row is `row`."""
    gate = round_bf16(gathered(c, row, width))
    up = round_bf16(gathered(c, row + 1, width))
    return situ(gate, up)


@cute.jit
def load_x(c: Ctx, mX: cute.Tensor, rX: cute.Tensor, g: cutlass.Constexpr):
    """rX words [4, per]: this thread's columns of a bf16 vector."""
    for v in cutlass.range_constexpr(g.per):
        rX[None, v].fill(0)
        i = vector(c, v, g)
        if i < g.vecs:
            words_at(mX.iterator.toint(), i, rX[None, v])


@cute.jit
def load_box(
    c: Ctx, name: cutlass.Constexpr, turn: Int32, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """As `load_x` from a box: all loads before the first look at one."""
    start = box(c, name, turn, op)
    for v in cutlass.range_constexpr(g.per):
        rX[None, v].fill(0)
        i = vector(c, v, g)
        if i < g.vecs:
            peek(start + Int64(i) * 16, rX[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            insist(start + Int64(i) * 16, rX[None, v], 2, op)


@cute.jit
def load_norm(c: Ctx, norm: Int64, g: cutlass.Constexpr):
    """This thread's words [4, per] of a norm's weights."""
    rN = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rN.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(norm, vector(c, v, g), rN[None, v])
    return rN


@cute.jit
def normalise(
    c: Ctx, rX: cute.Tensor, rN: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """rX words [4, per] <- bf(RMS(x; norm)); a barrier inside."""
    square = Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            a, b = low(rX[e, v]), high(rX[e, v])
            square += a * a + b * b
    put(c, 0, square)
    consumers(op)
    scale = cute.math.rsqrt(take(c, 0, g.width) / g.k + op.d.eps)
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            a = low(rX[e, v]) * scale * low(rN[e, v])
            rX[e, v] = pack_bf16(a, high(rX[e, v]) * scale * high(rN[e, v]))
