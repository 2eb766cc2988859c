"""Routed experts of the decode step as the tile kernel has them, and a warp of its own that chooses them.

Eight rows of w1 and of w3 are a stage (a unit), of which every warp has the same columns, so that its part of the
latent stays in registers and all warps are done with a stage at once. h is sent in the order in which codes become
operands. Consumers hear of the choice from an mbarrier, with the producer.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from targets.kimi_k3.seeds.common import round_bf16, sigmoid, situ
from targets.kimi_k3.seeds.latent_moe_codes import pair_up
from targets.kimi_k3.seeds.persistent.boxes import box, insist, peek, post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, ahead, at, consumers, field, view, within
from targets.kimi_k3.seeds.persistent.edges import ROUTE, await_line
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.moe_route import insist_word, logit_at, peek_word
from targets.kimi_k3.seeds.persistent.products import gathered
from targets.kimi_k3.seeds.persistent.ring import (
    at_hand_address,
    bulk,
    stage_done,
    stage_free,
    stage_full,
)
from targets.kimi_k3.seeds.persistent.stages import STRIDE, share
from targets.kimi_k3.seeds.persistent.tile_codes import (
    CODE_SCALE_T,
    join_columns,
    piece_times,
    sum_columns,
    sums_of,
    unit_times,
)
from targets.kimi_k3.seeds.persistent.tile_plan import CODE_TILE
from targets.kimi_k3.seeds.persistent.tile_rank import rank_alone
from targets.kimi_k3.seeds.router import order_key


# ---- producer
@cute.jit
def fill_experts(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """This CTA's units: [8 rows of w1 | 8 of w3, shifted | scales of both], of experts in the order of the choice."""
    d, t = op.d, op.tile
    g = t.up
    first, n = share(d.topk * t.up_units, c.cta, op.ctas)
    codes, scales = CODE_TILE * g.code_bytes, CODE_TILE * g.scale_bytes
    for u in cutlass.range(first, first + n, unroll=1):
        row = Int64(c.ids[u // t.up_units] * d.expert_dim + u % t.up_units * CODE_TILE)
        found = []
        for half in cutlass.range_constexpr(2):
            name = "w3" if half else "w1"
            w = field(c, layer, F[name], COUNT) + row * g.code_bytes
            s = field(c, layer, F[name + "_scale"], COUNT) + row * g.scale_bytes
            found += [at_hand_address(w), at_hand_address(s)]
        slot = stage_free(c, it, op, u > first)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * (codes + scales))
        for half in cutlass.range_constexpr(2):
            bulk(c, slot, Int32(half * t.up_block), found[2 * half], Int32(codes), op)
            place = Int32(t.up_scales + half * scales)
            bulk(c, slot, place, found[2 * half + 1], Int32(scales), op)
        it += 1
    return it


# ---- the warp that chooses
class Ranking(NamedTuple):
    """What `rank_alone` wants of a context; score, key, found and best are scratch in the pool."""

    lane: Any
    cta: Any
    key: Any
    found: Any
    score: Any
    best: Any
    ids: Any
    share: Any
    routed: Any


@cute.jit
def choose_alone(c: Ctx, layer: Int32, number: Int32, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.weights of FFN `number` of the launch, by this warp; no load stands in a branch."""
    d = op.d
    each = -(-d.experts // 32)
    at_ = op.choice_at
    r = Ranking(
        c.lane, c.cta, view(c, Uint32, at_ + 128, d.experts), view(c, Uint16, at_ + 128 + 8 * d.experts, d.experts),
        view(c, Float32, at_ + 128 + 4 * d.experts, d.experts), view(c, Uint32, at_, 32), c.ids, c.weights, c.routed,
    )  # fmt: skip
    turn = turn_of(c, number)
    gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), d.experts)
    rKey = cute.make_rmem_tensor(cute.make_layout((each,)), Uint32)
    rScore = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    rBias = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    rKey.fill(0)
    for j in cutlass.range_constexpr(each):
        rBias[j] = gBias[within(c.lane + 32 * j, d.experts)]
    # in the order of this CTA's consumers first: what they had in the pool is over
    cute.arch.mbarrier_wait(c.routed + 1, number & 1)
    await_line(c, number + 1, op, ROUTE, False, 0)
    for j in cutlass.range_constexpr(each):
        rScore[j] = peek_word(logit_at(c, layer, within(c.lane + 32 * j, d.experts), turn, op))
    top = Uint32(0)
    for j in cutlass.range_constexpr(each):
        if c.lane + 32 * j < d.experts:
            x = insist_word(logit_at(c, layer, c.lane + 32 * j, turn, op), rScore[j], op)
            rScore[j] = sigmoid(x)
            rKey[j] = order_key(rScore[j] + rBias[j])
            top = rKey[j] if rKey[j] > top else top
    rank_alone(r, (rKey, rScore, top), mIds, op)


# ---- consumers
@cute.jit
def ask_latent(c: Ctx, layer: Int32, turn: Int32, op: cutlass.Constexpr):
    """This thread's 16 bytes each of the latent, own and gathered, on their way."""
    vecs, own = op.d.latent // 8, op.d.latent_rows // 8
    many = -(-vecs // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((4, many)), Uint32)
    for v in cutlass.range_constexpr(many):
        i = within(c.tid + v * op.threads, vecs)
        address = box(c, "latent", turn, op) + Int64(i) * 16
        if cutlass.const_expr(op.d.latent_rows < op.d.latent):
            other = field(c, layer, F["remote_latent"], COUNT) + Int64(i - own) * 16
            address = address if i < own else other
        peek(address, r[None, v])
    return r


@cute.jit
def keep_latent(c: Ctx, turn: Int32, r: cute.Tensor, op: cutlass.Constexpr):
    """The pool's first words = the latent that was asked for, pairs in the order of codes. Ends with a barrier."""
    vecs, own = op.d.latent // 8, op.d.latent_rows // 8
    sX = view(c, Uint32, 0, op.d.latent // 2)
    for v in cutlass.range_constexpr(r.shape[1]):
        i = within(c.tid + v * op.threads, vecs)
        if i < own:
            insist(box(c, "latent", turn, op) + Int64(i) * 16, r[None, v], 2, op)
        pair_up(r[None, v])
        if c.tid + v * op.threads < vecs:
            cute.autovec_copy(r[None, v], cute.local_tile(sX, (4,), (i,)))
    consumers(op)


@cute.jit
def units_up(c: Ctx, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """h [slot, row] = bf(SiTU(w1 latent, w3 latent)) of this CTA's units; the latent is in the pool."""
    t = op.tile
    sX = view(c, Uint32, 0, op.d.latent // 2)
    rL = cute.make_rmem_tensor(cute.make_layout((4, 4, t.up_chunks)), Uint32)
    rL.fill(0)
    if c.lane < 4 and c.warp < t.up_active:
        for k in cutlass.range_constexpr(4 * t.up_chunks):
            i = ((c.warp * t.up_chunks + k // 4) * 4 + c.lane % 4) * 4 + k % 4
            cute.autovec_copy(cute.local_tile(sX, (4,), (i,)), rL[None, k % 4, k // 4])
    first, n = share(op.d.topk * t.up_units, c.cta, op.ctas)
    for u in cutlass.range(n, unroll=1):
        slot = stage_full(c, it, op)
        if c.warp < t.up_active:
            rC = unit_times(c, slot, rL, t)
            if c.lane % 4 == 0:
                row = (16 * u + c.lane // 4) * STRIDE + c.warp
                c.part[row], c.part[row + 8 * STRIDE] = rC[0, 0], rC[2, 0]
        stage_done(c, slot)
        it += 1
    consumers(op)
    for i in cutlass.range(c.tid, CODE_TILE * n, op.threads, unroll=1):
        gate = gathered(c, 2 * i, t.up_active) * CODE_SCALE_T
        up = gathered(c, 2 * i + 1, t.up_active) * CODE_SCALE_T
        r = i % CODE_TILE
        place = CODE_TILE * first + i - r + r % 4 * 2 + r // 4
        post(c, "h", turn, place, situ(gate, up), op)
    return it


@cute.jit
def keep_hidden(c: Ctx, turn: Int32, op: cutlass.Constexpr):
    """The pool's first words = h of all experts as it was sent. Ends with a barrier."""
    vecs = op.d.topk * op.d.expert_dim // 8
    many = -(-vecs // op.threads)
    sH = view(c, Uint32, 0, 4 * vecs)
    start = box(c, "h", turn, op)
    r = cute.make_rmem_tensor(cute.make_layout((4, many)), Uint32)
    for v in cutlass.range_constexpr(many):
        peek(start + Int64(within(c.tid + v * op.threads, vecs)) * 16, r[None, v])
    for v in cutlass.range_constexpr(many):
        i = within(c.tid + v * op.threads, vecs)
        insist(start + Int64(i) * 16, r[None, v], 2, op)
        if c.tid + v * op.threads < vecs:
            cute.autovec_copy(r[None, v], cute.local_tile(sH, (4,), (i,)))
    consumers(op)


@cute.jit
def sixteen_times(
    c: Ctx, piece: Int32, tile: Int32, expert: Int32, n: Int32, chunks: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """(row g, row g + 8) of sixteen rows of w2 times these chunks of the expert's h, in every fourth lane."""
    t = op.tile
    groups = op.d.expert_dim // 32
    sH = view(c, Uint32, 0, op.d.topk * op.d.expert_dim // 2)
    rC = cute.make_rmem_tensor(cute.make_layout((4, sums_of(len(chunks), t))), Float32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rC.fill(0.0)
    for v in chunks:
        group = 4 * v + c.lane % 4
        rX.fill(0)
        if c.lane < 4 and group < groups:
            for k in cutlass.range_constexpr(4):
                i = (expert * groups + group) * 4 + k
                cute.autovec_copy(cute.local_tile(sH, (4,), (i,)), rX[None, k])
        piece_times(c, piece, tile, v, (rC, sum_columns(v, t), rX, n), t)
    join_columns(rC)
    return rC[0, 0] * CODE_SCALE_T, rC[2, 0] * CODE_SCALE_T


@cute.jit
def units_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has one tile of sixteen rows and every `down_share`-th expert.
    """
    d, t = op.d, op.tile
    first, n = share(d.latent, c.cta, op.ctas, t.down.unit)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_moe"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, op.down_rows, op)
    keep_hidden(c, turn, op)
    tile, turn_ = c.warp % t.down_tiles, c.warp // t.down_tiles
    expert = turn_ if turn_ < t.down_share else Int32(d.topk)
    a, b = Float32(0.0), Float32(0.0)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        end = start + op.down_slots if start + op.down_slots < d.topk else Int32(d.topk)
        while expert < end:
            piece = slot * op.stage + (expert - start) * t.down_piece
            x, y = sixteen_times(c, piece, tile, expert, n, tuple(range(t.down_chunks)), op)
            a += c.weights[expert] * round_bf16(x)
            b += c.weights[expert] * round_bf16(y)
            expert += t.down_share
        stage_done(c, slot)
        it += 1
    if turn_ < t.down_share and c.lane % 4 == 0:
        row = tile * 16 + c.lane // 4
        if row < n:
            c.part[row * STRIDE + turn_] = a
        if row + 8 < n:
            c.part[(row + 8) * STRIDE + turn_] = b
    consumers(op)
    for k in cutlass.range_constexpr(-(-op.down_rows // op.threads)):
        i = c.tid + k * op.threads
        if i < n:
            total = gathered(c, i, t.down_share)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k]
            post(c, "z", turn, first + i, total, op)
    return it
