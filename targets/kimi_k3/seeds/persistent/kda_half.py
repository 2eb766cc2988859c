"""KDA as half a layer of the decode step: the pieces of `kda`, with nothing awaited before the products that is loaded.

State, taps and vectors are on their way while the rows of the in-projection are multiplied; a first use before them
would make all warps wait for memory in front of a full ring.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.device import (
    KDAS,
    Ctx,
    at,
    consumers,
    drain,
    field,
    gathered,
    hint,
    post,
    turn_of,
    view,
    wait,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda import (
    HEAD,
    Place,
    State,
    channel,
    gated,
    out_projection,
    place,
    update,
)
from targets.kimi_k3.seeds.persistent.plan import share


@cute.jit
def load_ahead(c: Ctx, layer: Int32, p: Place, op: cutlass.Constexpr):
    """As `kda.load_early`, but for what is made of taps and of A_log: `rate` is A_log itself."""
    d = op.d
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
            ch = channel(c, p, c.tid, op)
            taps = field(c, layer, F["state_conv"], COUNT) + Int64(safe) * (18 * d.kda_dim)
            gTap = at(BFloat16, taps, 9 * d.kda_dim)
            for k in cutlass.range_constexpr(3):
                rT[k] = gTap[3 * d.kda_dim * k + ch]
            gConv = at(Float32, field(c, layer, F["conv"], COUNT), 12 * d.kda_dim)
            cute.autovec_copy(cute.local_tile(gConv, (4,), (ch,)), rC)
        rate = at(Float32, field(c, layer, F["A_log"], COUNT), d.kda_heads)[p.head]
        if c.tid < HEAD:
            gBias = at(Float32, field(c, layer, F["dt_bias"], COUNT), d.kda_dim)
            bias = gBias[p.head * HEAD + c.tid]
    return State(rS, rF, rC, rT, bias, rate)


@cute.jit
def use_taps(c: Ctx, p: Place, s: State, op: cutlass.Constexpr):
    """What the taps add to this thread's channel, where `update` looks."""
    sU = view(c, Float32, 0, 3 * HEAD)
    if p.head >= 0 and c.tid < 2 * HEAD + p.count:
        u = s.taps[0].to(Float32) * s.conv[0] + s.taps[1].to(Float32) * s.conv[1]
        sU[c.tid] = u + s.taps[2].to(Float32) * s.conv[2]


@cute.jit
def kda_half(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    slots: cute.Tensor,
    op: cutlass.Constexpr,
):
    """The box attn of a KDA layer, number `number` of the launch; not hinted at yet."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, KDAS)
    p = place(c, slots, op)
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    s = load_ahead(c, layer, p, op)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    use_taps(c, p, s, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "proj", turn, first + i, gathered(c, i, op.wide.width), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge proj", layer, kind="edge")
    s = State(s.rows, s.f_b, s.conv, s.taps, s.bias, cute.math.exp(s.rate))
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "update", layer)
    update(c, layer, p, s, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge o", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "o_proj", layer)
    g = op.rows(d.kda_dim)
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    gated(c, layer, p.slot, turn, rO, op)
    it = out_projection(c, layer, it, rO, None, g, op)
    return it, edge
