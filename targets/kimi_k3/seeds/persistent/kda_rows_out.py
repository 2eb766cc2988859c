"""The output of KDA for several tokens: o under its head's scale, o_proj, the input of the next instance."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, pack_bf16, round_bf16
from targets.kimi_k3.seeds.persistent.boxes import LAYERS, box, insist, peek, post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, field, view
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda_places import owned, row_token, squares
from targets.kimi_k3.seeds.persistent.kda_sizes import HEAD
from targets.kimi_k3.seeds.persistent.stages import most, share
from targets.kimi_k3.seeds.persistent.tensor import (
    TOKENS,
    anew,
    column,
    drain_tiles,
    further,
    tile_sum,
)


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
def rows_ahead(
    c: Ctx, dtype: cutlass.Constexpr, address: Int64, n: Int32, widest: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """This thread's f32 of a [tokens, hidden] tensor of `dtype` from a column on, as `owned` deals them; loaded in no
    branch."""
    r = cute.make_rmem_tensor(cute.make_layout((-(-op.d.rows * widest // op.threads),)), Float32)
    r.fill(0.0)
    for k in cutlass.range_constexpr(cute.size(r)):
        token, row = owned(c, k, widest, op)
        there = token < op.d.rows and row < n
        i = token * op.d.hidden + row if there else Int32(0)
        r[k] = one(dtype, address + Int64(i) * (dtype.width // 8)).to(Float32)
    return r


@cute.jit
def one(dtype: cutlass.Constexpr, address: Int64):
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout((1,)))[0]


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
    x = field(c, later, F["x"], COUNT) + Int64(first) * 2
    rNext = rows_ahead(c, BFloat16, x, n, widest, op)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_attn"], COUNT) + Int64(first) * 4
        rRemote = rows_ahead(c, Float32, remote, n, widest, op)
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
