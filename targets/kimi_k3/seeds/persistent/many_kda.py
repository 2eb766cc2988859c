"""KDA as half a layer of the decode step for several tokens: its products through the tile kernel's tiles, what is
between them as in `kda_rows`."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import pack_bf16, round_bf16
from targets.kimi_k3.seeds.persistent.boxes import KDAS, LAYERS, box, insist, peek, post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, at, consumers, field, view, within
from targets.kimi_k3.seeds.persistent.edges import hint, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda_bring import Taps
from targets.kimi_k3.seeds.persistent.kda_places import projected
from targets.kimi_k3.seeds.persistent.kda_rows_out import head_scales
from targets.kimi_k3.seeds.persistent.kda_seat import seat
from targets.kimi_k3.seeds.persistent.kda_update import load_late, update_rows
from targets.kimi_k3.seeds.persistent.many_rows import post_rows, times, total_of
from targets.kimi_k3.seeds.persistent.stages import most, share
from targets.kimi_k3.seeds.persistent.tensor import TOKENS, anew
from targets.kimi_k3.seeds.persistent.tile_rows import columns_of


@cute.jit
def gated_tokens(c: Ctx, layer: Int32, turn: Int32, op: cutlass.Constexpr):
    """Words [4, steps] = bf(o times its head's scale) of this lane's columns of its token, as `take_tokens` deals them.
    What comes as o has its norm's weight and its gate in it.
    """
    d = op.d
    g = op.tiles_op.tile(d.kda_dim, 8)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.spans)), Uint32)
    rO = cute.make_rmem_tensor(cute.make_layout((4, 2, 2 * g.spans)), Uint32)
    rX.fill(0)
    rO.fill(0)
    token = c.lane // 4
    here = c.warp < g.active and token < d.rows
    sScale = view(c, Float32, 4 * TOKENS, TOKENS * d.kda_heads)
    o = box(c, "o", turn, op) + Int64(token * op.pitch(d.kda_dim)) * 4
    if here:
        for v in cutlass.range_constexpr(2 * g.spans):
            peek(o + Int64(columns_of(c, v, g)) * 32, rO[None, 0, v])
            peek(o + Int64(columns_of(c, v, g)) * 32 + 16, rO[None, 1, v])
    cute.arch.sync_warp()
    head_scales(c, turn, sScale, op)
    if here:
        for v in cutlass.range_constexpr(2 * g.spans):
            insist(o + Int64(columns_of(c, v, g)) * 32, rO[None, 0, v], 4, op)
            insist(o + Int64(columns_of(c, v, g)) * 32 + 16, rO[None, 1, v], 4, op)
    consumers(op)
    if here:
        for v in cutlass.range_constexpr(2 * g.spans):
            scale = sScale[token * d.kda_heads + columns_of(c, v, g) // 16]
            for e in cutlass.range_constexpr(4):
                pair = []
                for f in cutlass.range_constexpr(2):
                    n = 2 * e + f
                    pair.append(rO[n % 4, n // 4, v].bitcast(Float32) * scale)
                rX[e, v] = pack_bf16(pair[0], pair[1])
    return rX


@cute.jit
def far_attn(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """This thread's sums of the other ranks for `out_tokens`, on their way before they are wanted."""
    d = op.d
    first, n = share(d.hidden, c.cta, op.ctas)
    many = -(-most(d.hidden, op.ctas) * d.rows // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((many,)), Float32)
    r.fill(0.0)
    if cutlass.const_expr(d.ranks > 1):
        gFar = at(Float32, field(c, layer, F["remote_attn"], COUNT), d.rows * d.hidden)
        for k in cutlass.range_constexpr(many):
            i = within(c.tid + k * op.threads, n * d.rows)
            r[k] = gFar[i % d.rows * d.hidden + first + i // d.rows]
    return r


@cute.jit
def out_tokens(
    c: Ctx, layer: Int32, it: Int32, rX: cute.Tensor, k: cutlass.Constexpr, op: cutlass.Constexpr
):
    """The box attn = bf(bf(x W_o^T) + the others' partials) of this CTA's columns of every token; x has k columns."""
    d = op.d
    first, n = share(d.hidden, c.cta, op.ctas)
    turn = turn_of(c, layer, LAYERS)
    c = anew(c)
    rFar = far_attn(c, layer, op)
    it = times(c, it, n, rX, k, op)
    for j in cutlass.range_constexpr(cute.size(rFar)):
        i = c.tid + j * op.threads
        if i < n * d.rows:
            total = total_of(c, i, k, op)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rFar[j]
            place = i % d.rows * op.pitch(d.hidden) + first + i // d.rows
            post(c, "attn", turn, place, total, op)
    return it


@cute.jit
def kda_tokens(
    c: Ctx, layer: Int32, number: Int32, at_: tuple, rX: cute.Tensor, taps: Any, op: cutlass.Constexpr
):  # fmt: skip
    """The box attn of a KDA layer, number `number` of the launch; not hinted at yet."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, KDAS)
    rows = projected(d)
    timeline.mark(c.track, "in_proj", layer)
    it = times(c, it, share(rows, c.cta, op.ctas)[1], rX, d.hidden, op)
    c = anew(c)
    s = seat(c, op)
    late = load_late(c, layer, s, op)
    post_rows(c, "proj", turn, rows, d.hidden, op)
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
    rO = gated_tokens(c, layer, turn, op)
    it = out_tokens(c, layer, it, rO, d.kda_dim, op)
    return it, edge


@cute.jit
def pass_taps(c: Ctx, layer: Int32, taps: Taps, op: cutlass.Constexpr):
    """A layer without KDA: whoever brings taps has turned the page, so do the consumers."""
    if seat(c, op).head >= 0:
        cute.arch.mbarrier_wait(taps.full, layer & 1)
        cute.arch.sync_warp()
        if c.lane == 0:
            cute.arch.mbarrier_arrive(taps.empty)
