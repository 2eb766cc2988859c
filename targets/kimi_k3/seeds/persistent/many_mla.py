"""MLA as half a layer of the decode step for several tokens of different requests.

As in `mla` a CTA has a share of the heads' columns; the pages of all requests are one row of pages, of which every CTA
has a stretch. Its sums go into a piece of their own for every request in the stretch; only these are fenced, since
which CTA has a piece changes as contexts grow.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import lanes_max, lanes_sum, round_bf16, sigmoid
from targets.kimi_k3.seeds.persistent.boxes import (  # fmt: skip
    MLAS,
    box,
    insist_half,
    peek,
    peek_half,
    post,
    turn_of,
)
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, field, view, within
from targets.kimi_k3.seeds.persistent.edges import arrive, hint, wait
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.many_attend import attend_tokens
from targets.kimi_k3.seeds.persistent.many_cache import orphans, owner_of
from targets.kimi_k3.seeds.persistent.many_query import absorb_tokens, load_heads
from targets.kimi_k3.seeds.persistent.many_rows import (
    norm_of,
    post_rows,
    take_tokens,
    times,
    total_of,
)
from targets.kimi_k3.seeds.persistent.many_setup import Requests, behind_slots
from targets.kimi_k3.seeds.persistent.mla_query import load_uk
from targets.kimi_k3.seeds.persistent.stages import most, share
from targets.kimi_k3.seeds.persistent.tensor import anew
from targets.kimi_k3.seeds.persistent.tile_back import tile_norm
from targets.kimi_k3.seeds.persistent.tile_device import Tiles
from targets.kimi_k3.seeds.persistent.tile_route import load_logit


@cute.jit
def stretch_of(r: Requests, m: Int32, op: cutlass.Constexpr):
    """(first piece, pieces) of a token's request."""
    first, end = r.first[m], r.first[m + 1]
    begin_, many = Int32(0), Int32(0)
    if end > first:
        begin_ = owner_of(first, r, op)
        many = owner_of(end - 1, r, op) - begin_ + 1
    return begin_ + m, many


@cute.jit
def piece_weights(c: Ctx, r: Requests, sW: cute.Tensor, turn: Int32, op: cutlass.Constexpr):
    """sW[token, piece of its request] = the weight of that piece's sums of this CTA's head; a warp a token."""
    d = op.d
    head = c.cta // op.slices
    turns = -(-op.ctas // 32)
    if c.warp < d.rows:
        begin_, many = stretch_of(r, c.warp, op)
        stats = box(c, "stats", turn, op) + Int64(begin_ * d.mla_heads + head) * 8
        rS = cute.make_rmem_tensor(cute.make_layout((2, turns)), Float32)
        top = -Float32.inf
        for k in cutlass.range_constexpr(turns):
            s = c.lane + 32 * k
            rS[0, k], rS[1, k] = -Float32.inf, Float32(0.0)
            if s < many:
                rS[0, k] = load_logit(stats + Int64(s) * (8 * d.mla_heads))
                rS[1, k] = load_logit(stats + Int64(s) * (8 * d.mla_heads) + 4)
            top = cute.arch.fmax(top, rS[0, k])
        top = lanes_max(top)
        total = Float32(0.0)
        for k in cutlass.range_constexpr(turns):
            if c.lane + 32 * k < many:
                rS[0, k] = cute.math.exp(rS[0, k] - top)
                total += rS[0, k] * rS[1, k]
        total = lanes_sum(total, 32)
        for k in cutlass.range_constexpr(turns):
            if c.lane + 32 * k < many:
                sW[c.warp * op.ctas + c.lane + 32 * k] = rS[0, k] / total


@cute.jit
def join_tokens(c: Ctx, r: Requests, turn: Int32, op: cutlass.Constexpr):
    """Box lat = bf(sum over pieces of weight * sum) of this CTA's head and columns, of every token."""
    d = op.d
    items, groups = op.join_items, op.join_groups
    vectors = items // d.rows
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 4, c.cta % op.slices, op.slices)
    sW = view(c, Float32, 0, d.rows * op.ctas)
    sPart = view(c, Float32, op.weights_bytes, 4 * groups * items)
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rS = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    if head < d.mla_heads:
        piece_weights(c, r, sW, turn, op)
        consumers(op)
        for k in cutlass.range_constexpr(-(-items * groups // op.threads)):
            i = c.tid + k * op.threads
            group, m, v = i // items, i % items // vectors, i % vectors
            if group < groups and v < n:
                begin_, many = stretch_of(r, m, op)
                place = (begin_ * d.mla_heads + head) * (d.kv_lora // 4) + first + v
                sums = box(c, "sums", turn, op) + Int64(place) * 16
                rS.fill(0.0)
                for s in cutlass.range(group, many, groups, unroll=4):
                    peek(sums + Int64(s) * (4 * d.mla_heads * d.kv_lora), rX)
                    for e in cutlass.range_constexpr(4):
                        rS[e] = rS[e] + rX[e].bitcast(Float32) * sW[m * op.ctas + s]
                cute.autovec_copy(rS, cute.local_tile(sPart, (4,), (i,)))
        consumers(op)
        for i in cutlass.range(c.tid, 4 * items, op.threads, unroll=1):
            m, column = i // (4 * vectors), i % (4 * vectors)
            if column < 4 * n:
                total = Float32(0.0)
                for k in cutlass.range(groups, unroll=4):
                    total += sPart[4 * k * items + i]
                place = m * op.pitch(d.mla_heads * d.kv_lora) + head * d.kv_lora + 4 * first
                post(c, "lat", turn, place + column, total, op)


@cute.jit
def value_tokens(c: Ctx, it: Int32, r: Requests, turn: Int32, op: cutlass.Constexpr):
    """Box out = bf(bf(lat W_UV[h]) * sg(gate)) of this CTA's rows of its head, of every token."""
    d = op.d
    head = c.cta // op.slices
    if head < d.mla_heads:
        first, n = share(d.v_dim, c.cta % op.slices, op.slices)
        many = -(-most(d.v_dim, op.slices) * d.rows // op.threads)
        gates = box(c, "a", turn, op) + Int64(2 * (d.q_lora + d.kv_dim + head * d.v_dim + first))
        rG = cute.make_rmem_tensor(cute.make_layout((many,)), Uint32)
        for j in cutlass.range_constexpr(many):
            i = within(c.tid + j * op.threads, n * d.rows)
            rG[j] = peek_half(gates + gate_at(i, op))
        lat = box(c, "lat", turn, op) + Int64(head * d.kv_lora) * 2
        rX = take_tokens(c, lat, op.pitch(d.mla_heads * d.kv_lora), d.kv_lora, op)
        it = times(c, it, n, rX, d.kv_lora, op)
        for j in cutlass.range_constexpr(many):
            i = c.tid + j * op.threads
            if i < n * d.rows:
                gate = sigmoid(insist_half(gates + gate_at(i, op), rG[j], op))
                y = round_bf16(total_of(c, i, d.kv_lora, op)) * gate
                y = y if r.length[i % d.rows] > 0 else Float32(0.0)
                place = i % d.rows * op.pitch(d.mla_dim) + head * d.v_dim + first + i // d.rows
                post(c, "out", turn, place, y, op)
    return it


@cute.jit
def gate_at(i: Int32, op: cutlass.Constexpr):
    """Bytes to the gate of sum i = row * tokens + token."""
    return Int64(i % op.d.rows * op.pitch(op.d.a_proj_rows) + i // op.d.rows) * 2


@cute.jit
def query_part(
    c: Ctx, t: Tiles, layer: Int32, turn: Int32, at_: tuple, rX: cute.Tensor, op: cutlass.Constexpr
):
    """Up to the box query; not hinted at yet."""
    it, edge = at_
    d = op.d
    timeline.mark(c.track, "a_proj", layer)
    it = times(c, it, share(d.a_proj_rows, c.cta, op.ctas)[1], rX, d.hidden, op)
    c = anew(c)
    post_rows(c, "a", turn, d.a_proj_rows, d.hidden, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge a", layer, kind="edge")
    rUk = load_uk(c, layer, op)
    rN = norm_of(c, field(c, layer, F["q_a_norm"], COUNT), d.q_lora, op)
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "q_b", layer)
    rQ = take_tokens(c, box(c, "a", turn, op), op.pitch(d.a_proj_rows), d.q_lora, op)
    tile_norm(t, rQ, rN, op.tiles_op.tile(d.q_lora, 8), op.tiles_op)
    rows = d.mla_heads * (d.qk_nope + d.qk_rope)
    it = times(c, it, share(rows, c.cta, op.ctas)[1], rQ, d.q_lora, op)
    post_rows(c, "q", turn, rows, d.q_lora, op)
    timeline.mark(c.track, "absorb", layer)
    load_heads(c, turn, op)
    absorb_tokens(c, rUk, turn, op)
    return it, edge


@cute.jit
def mla_tokens(
    c: Ctx, t: Tiles, layer: Int32, number: Int32, at_: tuple, rX: cute.Tensor, r: Requests, op: cutlass.Constexpr
):  # fmt: skip
    """(Words of the gated values of this lane's token, (stage, edge)) of MLA `number` of the launch."""
    turn = turn_of(c, number, MLAS)
    c = behind_slots(c, op)
    it, edge = query_part(c, t, layer, turn, at_, rX, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge query", layer, kind="edge")
    orphans(c, layer, r, turn, op)
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "attend", layer)
    it = attend_tokens(c, layer, it, r, turn, op)
    arrive(c, op)
    edge += 1
    timeline.mark(c.track, "edge sums", layer, kind="edge")
    wait(c, edge, op)
    timeline.mark(c.track, "join", layer)
    join_tokens(c, r, turn, op)
    timeline.mark(c.track, "values", layer)
    it = value_tokens(c, it, r, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge out", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "o_proj", layer)
    rO = take_tokens(c, box(c, "out", turn, op), op.pitch(op.d.mla_dim), op.d.mla_dim, op)
    return rO, it, edge
