"""Routed experts of the decode step as the tile kernel has them, and a warp of its own that chooses them.

Eight rows of w1 and of w3 are a stage (a unit), of which every warp has the same columns, so that its part of the
latent stays in registers and all warps are done with a stage at once. h is sent in the order in which codes become
operands. Consumers hear of the choice from an mbarrier, with the producer.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from targets.kimi_k3.seeds.common import lanes_sum, round_bf16, sigmoid, situ
from targets.kimi_k3.seeds.latent_moe_codes import pair_up
from targets.kimi_k3.seeds.persistent.boxes import box, insist, peek, post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, ahead, at, consumers, field, view, within
from targets.kimi_k3.seeds.persistent.edges import ROUTE, await_line
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.moe_route import insist_word, logit_at, peek_word
from targets.kimi_k3.seeds.persistent.products import gathered
from targets.kimi_k3.seeds.persistent.ring import bulk, stage_done, stage_free, stage_full
from targets.kimi_k3.seeds.persistent.stages import STRIDE, share
from targets.kimi_k3.seeds.persistent.tile_codes import (
    CODE_SCALE_T,
    codes_times,
    group_of,
    piece_times,
)
from targets.kimi_k3.seeds.persistent.tile_plan import CODE_TILE
from targets.kimi_k3.seeds.persistent.tile_rank import bound_alone
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
        slot = stage_free(c, it, op, Int32(op.stages if op.burst_up else -1))
        row = Int64(c.ids[u // t.up_units] * d.expert_dim + u % t.up_units * CODE_TILE)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * (codes + scales))
        for half in cutlass.range_constexpr(2):
            name = "w3" if half else "w1"
            w = field(c, layer, F[name], COUNT) + row * g.code_bytes
            s = field(c, layer, F[name + "_scale"], COUNT) + row * g.scale_bytes
            bulk(c, slot, Int32(half * t.up_block), w, Int32(codes), op)
            bulk(c, slot, Int32(t.up_scales + half * scales), s, Int32(scales), op)
        it += 1
    return it


# ---- the warp that chooses
class Ranking(NamedTuple):
    """Scratch in the pool: of every expert its key (at first its bias) and score (at first its logit), those that reach
    the bound, the largest key of each lane's experts."""

    lane: Any
    key: Any
    score: Any
    found: Any
    best: Any


@cute.jit
def choose_alone(c: Ctx, layer: Int32, number: Int32, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.weights of FFN `number` of the launch, by this warp; no load stands in a branch.

    No loop but those of loads is unrolled over all experts: what a warp alone runs once a layer pushes instructions of
    others out of their cache.
    """
    d = op.d
    each = -(-d.experts // 32)
    at_ = op.choice_at
    r = Ranking(
        c.lane, view(c, Uint32, at_ + 128, d.experts), view(c, Float32, at_ + 128 + 4 * d.experts, d.experts),
        view(c, Uint16, at_ + 128 + 8 * d.experts, d.experts), view(c, Uint32, at_, 32),
    )  # fmt: skip
    turn = turn_of(c, number)
    gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), d.experts)
    rWord = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    for j in cutlass.range_constexpr(each):
        rWord[j] = gBias[within(c.lane + 32 * j, d.experts)]
    # in the order of this CTA's consumers first: what they had in the pool is over
    cute.arch.mbarrier_wait(c.routed + 1, number & 1)
    for j in cutlass.range_constexpr(each):
        r.key[within(c.lane + 32 * j, d.experts)] = rWord[j].bitcast(Uint32)
    await_line(c, number + 1, op, ROUTE, False, 0)
    for j in cutlass.range_constexpr(each):
        rWord[j] = peek_word(logit_at(c, layer, within(c.lane + 32 * j, d.experts), turn, op))
    for j in cutlass.range_constexpr(each):
        if c.lane + 32 * j < d.experts:
            r.score[c.lane + 32 * j] = rWord[j]
    top = Uint32(0)
    for e in cutlass.range(c.lane, d.experts, 32, unroll=4):
        x = insist_word(logit_at(c, layer, e, turn, op), r.score[e], op)
        bias = Uint32(r.key[e]).bitcast(Float32)
        score = sigmoid(x)
        key = order_key(score + bias)
        r.key[e], r.score[e] = key, score
        top = key if key > top else top
    rank_few(c, r, top, mIds, op)


@cute.jit
def reach(r: Ranking, bound: Uint32, op: cutlass.Constexpr):
    """Experts whose key reaches the bound into r.found: how many. Each lane's lie together."""
    mine = Int32(0)
    for e in cutlass.range(r.lane, op.d.experts, 32, unroll=4):
        key = Uint32(r.key[e])
        mine += Int32(1) if key >= bound and key > Uint32(0) else Int32(0)
    end = mine
    for k in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync(end, (r.lane - (1 << k)) & 31)
        end += below if r.lane >= (1 << k) else Int32(0)
    at_ = end - mine
    for e in cutlass.range(r.lane, op.d.experts, 32, unroll=4):
        key = Uint32(r.key[e])
        if key >= bound and key > Uint32(0):
            r.found[at_] = Uint16(e)
            at_ += 1
    cute.arch.sync_warp()
    return cute.arch.shuffle_sync(end, 31)


@cute.jit
def rank_few(c: Ctx, r: Ranking, top: Uint32, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.weights from the keys and scores; producer and consumers are told."""
    d = op.d
    count = reach(r, bound_alone(r, top, d.topk), op)
    for i in cutlass.range(c.lane, count, 32, unroll=1):
        e = Int32(r.found[i])
        key, s, rank = Uint32(r.key[e]), r.score[e], Int32(0)
        for k in cutlass.range(count, unroll=4):
            other = Int32(r.found[k])
            rival = Uint32(r.key[other])
            rank += Int32(1) if rival > key or (rival == key and other < e) else Int32(0)
        if rank < d.topk:
            c.ids[rank] = e
            # of a score that is no number the key is 1, below all others
            c.weights[rank] = Float32(0.0) if key == Uint32(1) else s
    cute.arch.sync_warp()
    s = Float32(0.0)
    if c.lane < d.topk:
        s = c.weights[c.lane]
    total = lanes_sum(s, 32) + Float32(1e-20)
    if c.lane < d.topk:
        c.weights[c.lane] = round_bf16(s / total)
        if c.cta == 0:
            mIds[c.lane] = c.ids[c.lane]
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(c.routed)


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
def unit_sums(c: Ctx, slot: Int32, op: cutlass.Constexpr):
    """(row g, row g + 8) of a unit's sixteen, even ones of w1 and odd ones of w3, in every fourth lane; this warp's
    columns."""
    t = op.tile
    g = t.up
    sX = view(c, Uint32, 0, op.d.latent // 2)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rC.fill(0.0)
    half, i = c.lane // 4 % 2, c.lane // 8
    code = (slot * t.stage + half * t.up_block) // 16 + i * (g.code_bytes // 16)
    scale = slot * t.stage + t.up_scales + (half * CODE_TILE + i) * g.scale_bytes
    for v in cutlass.range(t.up_chunks, unroll=1):
        j = (c.warp * t.up_chunks + v) * 4 + c.lane % 4
        group_words(sX, j, rX)
        codes_times(
            rC, group_of(c, code + j, scale + j),
            group_of(c, code + 4 * (g.code_bytes // 16) + j, scale + 4 * g.scale_bytes + j), rX,
        )  # fmt: skip
    return rC[0], rC[2]


@cute.jit
def units_up(c: Ctx, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """h [slot, row] = bf(SiTU(w1 latent, w3 latent)) of this CTA's units; the latent is in the pool."""
    t = op.tile
    first, n = share(op.d.topk * t.up_units, c.cta, op.ctas)
    for u in cutlass.range(n, unroll=1):
        slot = stage_full(c, it, op)
        if c.warp < t.up_active:
            x, y = unit_sums(c, slot, op)
            if c.lane % 4 == 0:
                row = (16 * u + c.lane // 4) * STRIDE + c.warp
                c.part[row], c.part[row + 8 * STRIDE] = x, y
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
def group_words(s: cute.Tensor, group: Int32, rX: cute.Tensor):
    """rX words [4, 4]: 32 columns. Lanes beyond the fourth have columns of the product that nobody reads."""
    for k in cutlass.range_constexpr(4):
        cute.autovec_copy(cute.local_tile(s, (4,), (4 * group + k,)), rX[None, k])


@cute.jit
def sixteen_times(c: Ctx, piece: Int32, at_: tuple, chunks: tuple, n: Int32, op: cutlass.Constexpr):
    """(row g, row g + 8) of sixteen rows of w2 times chunks of the expert's h, in every fourth lane. at_: tile, expert;
    chunks: first, end."""
    t = op.tile
    tile, expert = at_
    groups = op.d.expert_dim // 32
    sH = view(c, Uint32, 0, op.d.topk * op.d.expert_dim // 2)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rC.fill(0.0)
    for v in cutlass.range(chunks[0], chunks[1], unroll=1):
        group = 4 * v + c.lane % 4
        if cutlass.const_expr(groups % 4 > 0):
            rX.fill(0)
            if group < groups:
                group_words(sH, expert * groups + group, rX)
        else:
            group_words(sH, expert * groups + group, rX)
        piece_times(c, piece, tile, v, (rC, rX, n), t)
    return rC[0] * CODE_SCALE_T, rC[2] * CODE_SCALE_T


def spare_experts(op):
    """Experts beyond whole turns of the warps of a tile, if a chunk of each is work for one warp at most."""
    t, rest = op.tile, op.d.topk % op.tile.down_share
    whole = (
        rest * t.down_tiles * t.down_chunks <= op.warps
        and t.down_share + rest * t.down_chunks < STRIDE
    )
    return rest if op.spread and whole else 0


@cute.jit
def keep_two(c: Ctx, tile: Int32, place: Int32, two: tuple, n: Int32):
    """Sums of rows g and g + 8 of a tile as part `place` of theirs."""
    row = tile * 16 + c.lane // 4
    if c.lane % 4 == 0 and row < n:
        c.part[row * STRIDE + place] = two[0]
    if c.lane % 4 == 0 and row + 8 < n:
        c.part[(row + 8) * STRIDE + place] = two[1]


@cute.jit
def spare_sum(c: Ctx, i: Int32, total: Float32, op: cutlass.Constexpr):
    """total + what the spare experts give to row i."""
    t, rest = op.tile, spare_experts(op)
    for k in cutlass.range_constexpr(rest):
        x = Float32(0.0)
        for v in cutlass.range_constexpr(t.down_chunks):
            x += c.part[i * STRIDE + t.down_share + k * t.down_chunks + v]
        total += c.weights[op.d.topk - rest + k] * round_bf16(x)
    return total


@cute.jit
def units_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has one tile of sixteen rows and every `down_share`-th expert; what would be a turn of a few warps only is
    dealt to all of them in chunks (`spare_experts`).
    """
    d, t = op.d, op.tile
    first, n = share(d.latent, c.cta, op.ctas, t.down.unit)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_moe"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, op.down_rows, op)
    keep_hidden(c, turn, op)
    rest = spare_experts(op)
    whole = d.topk - rest
    tile, turn_ = c.warp % t.down_tiles, c.warp // t.down_tiles
    expert = turn_ if turn_ < t.down_share else Int32(d.topk)
    a, b = Float32(0.0), Float32(0.0)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        end = start + op.down_slots if start + op.down_slots < d.topk else Int32(d.topk)
        while expert < end:
            piece = slot * op.stage + (expert - start) * t.down_piece
            chunks = (Int32(0), Int32(t.down_chunks))
            if cutlass.const_expr(rest > 0):
                if expert >= whole:
                    chunks = (turn_ % t.down_chunks, turn_ % t.down_chunks + 1)
            x, y = sixteen_times(c, piece, (tile, expert), chunks, n, op)
            if expert < whole:
                a += c.weights[expert] * round_bf16(x)
                b += c.weights[expert] * round_bf16(y)
            else:
                keep_two(c, tile, t.down_share + turn_, (x, y), n)
            if cutlass.const_expr(rest > 0):
                after = expert + t.down_share
                if after >= whole:
                    after = whole + turn_ // t.down_chunks if expert < whole else Int32(d.topk)
                expert = after
            else:
                expert += t.down_share
        stage_done(c, slot)
        it += 1
    if turn_ < t.down_share:
        keep_two(c, tile, turn_, (a, b), n)
    consumers(op)
    for k in cutlass.range_constexpr(-(-op.down_rows // op.threads)):
        i = c.tid + k * op.threads
        if i < n:
            total = spare_sum(c, i, gathered(c, i, t.down_share), op)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k]
            post(c, "z", turn, first + i, total, op)
    return it
