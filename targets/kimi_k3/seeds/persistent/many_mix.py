"""AttnRes of several tokens: a CTA has one token, its row of the prefix and of the bank, as with one token alone.

All CTAs of a token make its whole x, as `mix` does, so nothing of what is summed up over columns has to be exchanged;
each sends its share of the columns. An edge and 114 KB of x a CTA (eight tokens of 7168) follow, which every CTA needs
as an operand in any case; eight rows of three sources in every CTA would be three times as much in every half.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2
from targets.kimi_k3.seeds.persistent.boxes import LAYERS, box, empty_some, insist, peek, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, field, vector, words_at
from targets.kimi_k3.seeds.persistent.fields import COUNT, IS_DENSE, F
from targets.kimi_k3.seeds.persistent.halves import Half, Io, store_wide
from targets.kimi_k3.seeds.persistent.mix import Banks
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_boxes import store16


@cute.jit
def token_of(c: Ctx, op: cutlass.Constexpr):
    """(token of this CTA, which of the token's CTAs it is)."""
    return c.cta % op.d.rows, c.cta // op.d.rows


@cute.jit
def banks_of(c: Ctx, io: Io, own: Int64, op: cutlass.Constexpr):
    """The bank's rows of this CTA's token; own: where it keeps the prefix, and behind it those written here."""
    old = Int64(0)
    if cutlass.const_expr(io.bank_old is not None):
        row = Int64(token_of(c, op)[0]) * (2 * op.d.bank_old * op.d.hidden)
        old = io.bank_old.iterator.toint() + row
    return Banks(old, own + 2 * op.d.hidden, None)


@cute.jit
def first_row(c: Ctx, io: Io, own: Int64, op: cutlass.Constexpr):
    """The prefix on entry where this CTA keeps it, at `own`."""
    g = op.wide
    start = io.x0.iterator.toint() + Int64(token_of(c, op)[0]) * (2 * op.d.hidden)
    rP = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rP.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(start, vector(c, v, g), rP[None, v])
    store_wide(c, rP, own, op)
    consumers(op)


@cute.jit
def load_prefix(c: Ctx, own: Int64, op: cutlass.Constexpr):
    """Words [4, per] of the prefix as it was before this half; on their way before its edge."""
    g = op.wide
    rP = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rP.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(own, vector(c, v, g), rP[None, v])
    return rP


@cute.jit
def add_token(
    c: Ctx, h: Half, routed: Int32, rP: cute.Tensor, io: Io, own: Int64, op: cutlass.Constexpr
):
    """As `halves.add`, of this CTA's token; the new prefix at `own` too."""
    d, g = op.d, op.wide
    token = token_of(c, op)[0]
    rD = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rD.fill(0)
    start = box(c, "attn", turn_of(c, h.layer, LAYERS), op) + Int64(token) * (
        2 * op.pitch(d.hidden)
    )
    near, others = Int32(g.vecs), Int64(0)
    if not h.second:
        before = h.layer - 1 if h.layer > 0 else Int32(0)
        what = Int32(field(c, before, F["kind"], COUNT))
        if cutlass.const_expr("E" in d.ffn):
            start = box(c, "delta", turn_of(c, routed - 1), op)
            start += Int64(token) * (2 * op.pitch(d.hidden_local))
        near = Int32(d.hidden_local // 8)
        if cutlass.const_expr(d.hidden_local < d.hidden and "E" in d.ffn):
            if h.step > 0 and what & IS_DENSE == 0:
                others = field(c, before, F["remote_delta"], COUNT)
                others += Int64(token) * (2 * (d.hidden - d.hidden_local))
        if cutlass.const_expr("D" in d.ffn):
            if what & IS_DENSE != 0:
                start = box(c, "dense", Int32(0), op) + Int64(token) * (2 * op.pitch(d.hidden))
                near = Int32(g.vecs)
    if h.step == 0:
        near = Int32(0)
        if cutlass.const_expr(d.first > 0):
            others = io.delta.iterator.toint() + Int64(token) * (2 * d.hidden)
    there = h.step + d.first > 0
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs and there:
            peek((start if i < near else others - Int64(near) * 16) + Int64(i) * 16, rD[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < near:
            insist(start + Int64(i) * 16, rD[None, v], 2, op)
    anew = h.second and h.opens
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            sum = add_bf16x2(rP[e, v], rD[e, v])
            if cutlass.const_expr(d.first == 0):
                sum = rP[e, v] if h.step == 0 else sum
            rP[e, v] = rD[e, v] if anew else sum
    store_wide(c, rP, own, op)


@cute.jit
def keep_token(c: Ctx, h: Half, rP: cute.Tensor, banks: Banks, io: Io, op: cutlass.Constexpr):
    """As `halves.keep`; the first CTA of a token writes its outputs."""
    d = op.d
    token, part = token_of(c, op)
    target = io.prefix.iterator.toint() + Int64(token) * (2 * d.hidden)
    wanted = h.closing
    if cutlass.const_expr(d.bank_rows > d.bank_old):
        if h.opens and not h.second:
            number = (h.layer + d.first) // d.block - d.bank_old
            row = Int64(number) * (2 * d.hidden)
            new = Int64(token) * (2 * d.hidden * (d.bank_rows - d.bank_old))
            target = io.bank.iterator.toint() + new + row
            wanted = h.step >= 0
            store_wide(c, rP, banks.new + row, op)
    if wanted and part == 0:
        store_wide(c, rP, target, op)


@cute.jit
def store_out(c: Ctx, rX: cute.Tensor, io: Io, op: cutlass.Constexpr):
    token, part = token_of(c, op)
    if part == 0:
        store_wide(c, rX, io.out.iterator.toint() + Int64(token) * (2 * op.d.hidden), op)


@cute.jit
def post_x(c: Ctx, rX: cute.Tensor, turn: Int32, op: cutlass.Constexpr):
    """This CTA's columns of its token's x into their box; the place for the other half of a layer is emptied."""
    d, g = op.d, op.wide
    token, part = token_of(c, op)
    first, n = share(g.vecs, part, (op.ctas - token + d.rows - 1) // d.rows)
    start = Int64(token) * (2 * op.pitch(d.hidden))
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i >= first and i < first + n and c.warp < g.width:
            store16(box(c, "x", turn, op) + start + Int64(i) * 16, rX[None, v])
            empty_some(box(c, "x", 1 - turn, op) + start + Int64(i) * 16, 4)
