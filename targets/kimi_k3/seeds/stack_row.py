"""A row of the one-launch chain in one warp of each CTA: the exchange with the other rank, the scores, the mix."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2, high, lanes_sum, low, pack_bf16
from targets.kimi_k3.seeds.exchange import store_pair, take_pair
from targets.kimi_k3.seeds.parity import (
    fold_eight,
    marked,
    peek_row,
    post_pair,
    post_word,
    row_share,
    sum_two,
    value_of,
)
from targets.kimi_k3.seeds.stack_parts import (
    BANK,
    FIELDS,
    OUT,
    Ahead,
    Ctx,
    Row,
    pair_of,
    word_into,
    words_at,
)


@cute.jit
def partials(c: Ctx, rOwn: cute.Tensor, op: cutlass.Constexpr):
    """rOwn[turns] = this rank's partial of this lane's pairs: the warps' shares in their order, rounded."""
    rTwo = cute.make_rmem_tensor(cute.make_layout((2,)), Float32)
    for t in cutlass.range_constexpr(op.turns):
        j, _, there = pair_of(c, t)
        if there:
            a, b = Float32(0.0), Float32(0.0)
            for w in cutlass.range_constexpr(op.split):
                at = ((w * op.rows + c.row) * op.width) // 2 + j
                cute.autovec_copy(cute.local_tile(c.sums, (2,), (at,)), rTwo)
                a += rTwo[0]
                b += rTwo[1]
            rOwn[t] = pack_bf16(a, b)


@cute.jit
def mail_at(box: Int64, c: Ctx, n: Int32, i: Int32, op: cutlass.Constexpr):
    """Address of pair i of the row, of instance n."""
    return box + (Int64(n * op.rows + c.row) * (op.hidden // 2) + i) * 8


@cute.jit
def score_at(c: Ctx, n: Int32, what: Int32, op: cutlass.Constexpr):
    """What all CTAs say of a row in instance n: `what` is a row of the bank (its score), then the prefix's square and
    score."""
    number = (n * op.rows + c.row) * (op.bank + 2) + what
    return c.scores + Int64(number) * (4 * op.ctas4)


@cute.jit
def reduced(c: Ctx, n: Int32, row: Row, bank_out: Int64, op: cutlass.Constexpr):
    """The prefix: bf(before + the ranks' sum), and as a row of the bank."""
    rOwn = cute.make_rmem_tensor(cute.make_layout((op.turns,)), Uint32)
    rOwn.fill(0)
    partials(c, rOwn, op)
    if cutlass.const_expr(op.paired):
        for t in cutlass.range_constexpr(op.turns):
            _, i, there = pair_of(c, t)
            if there:
                store_pair(mail_at(c.peer, c, n, i, op), rOwn[t], c.flag)
        for t in cutlass.range_constexpr(op.turns):
            _, i, there = pair_of(c, t)
            if there:
                theirs = take_pair(mail_at(c.own, c, n, i, op), c.flag, op.spin)
                rOwn[t] = add_bf16x2(rOwn[t], theirs)
    for t in cutlass.range_constexpr(op.turns):
        _, i, there = pair_of(c, t)
        row.prefix[t] = add_bf16x2(row.prefix[t], rOwn[t])
        if there and n < op.bank:
            at = (c.row * op.bank + n) * (op.hidden // 2) + i
            word_into(bank_out, at, row.prefix[t])


@cute.jit
def post_prefix(c: Ctx, n: Int32, cta: Int32, row: Row, op: cutlass.Constexpr):
    """This CTA's share of the prefix's square and score."""
    square, dot = Float32(0.0), Float32(0.0)
    for t in cutlass.range_constexpr(op.turns):
        a, b = low(row.prefix[t]), high(row.prefix[t])
        square += a * a + b * b
        dot += a * row.weight[0, t] + b * row.weight[1, t]
    square, dot = sum_two(square, dot)
    if c.lane < 2:
        x = dot if c.lane == 1 else square
        post_word(score_at(c, n, op.bank + c.lane, op) + Int64(cta) * 4, marked(x, c.flag))


@cute.jit
def post_bank(c: Ctx, n: Int32, cta: Int32, row: Row, op: cutlass.Constexpr):
    """This CTA's shares of the scores of the bank's rows in instance n."""
    r = cute.make_rmem_tensor(cute.make_layout((BANK,)), Float32)
    r.fill(0.0)
    for s in cutlass.range_constexpr(op.bank):
        for t in cutlass.range_constexpr(op.turns):
            word = row.bank[t, s]
            r[s] = r[s] + low(word) * row.weight[0, t] + high(word) * row.weight[1, t]
    share = fold_eight(r)
    if c.lane % 4 == 0 and c.lane // 4 < op.bank:
        post_word(score_at(c, n, c.lane // 4, op) + Int64(cta) * 4, marked(share, c.flag))


@cute.jit
def weights_of(
    c: Ctx, n: Int32, row: Row, rSeen: cute.Tensor, rP: cute.Tensor, op: cutlass.Constexpr
):
    """rP[bank + 1] = softmax of the scores, the prefix's last; rSeen: what was there of the bank's. The prefix's square
    is kept with the bank's where it becomes one of its rows."""
    source = c.lane // 4
    sources = n if n < op.bank else Int32(op.bank)
    r = cute.make_rmem_tensor(cute.make_layout((BANK,)), Float32)
    r.fill(0.0)
    rNew = cute.make_rmem_tensor(cute.make_layout((4, -(-op.ctas // 128), 2)), Uint32)
    for k in cutlass.range_constexpr(2):
        peek_row(score_at(c, n, Int32(op.bank + k), op), rNew[None, None, k], op.ctas)
    for s in cutlass.range_constexpr(op.bank):
        r[s] = row_share(
            score_at(c, n, Int32(s), op), rSeen[None, None, s], c.flag, op.ctas, op.spin
        )
    dots = fold_eight(r)
    square = row_share(
        score_at(c, n, Int32(op.bank), op), rNew[None, None, 0], c.flag, op.ctas, op.spin
    )
    dot = row_share(
        score_at(c, n, Int32(op.bank + 1), op), rNew[None, None, 1], c.flag, op.ctas, op.spin
    )
    square, dot = sum_two(square, dot)
    mine = cute.math.rsqrt(square / op.hidden + op.eps) * dot
    score = cute.math.rsqrt(row.square[0] / op.hidden + op.eps) * dots
    score = score if source < sources else -Float32.inf
    top = cute.arch.fmax(mine, score)
    for k in cutlass.range_constexpr(3):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=16 >> k))
    last, part = cute.math.exp(mine - top), cute.math.exp(score - top)
    total = part
    for k in cutlass.range_constexpr(3):
        total += cute.arch.shuffle_sync_bfly(total, offset=16 >> k)
    total += last
    rP[op.bank] = last / total
    part = part / total
    for s in cutlass.range_constexpr(op.bank):
        rP[s] = cute.arch.shuffle_sync(part, 4 * s)
    if source == n:
        row.square[0] = square


@cute.jit
def mix(c: Ctx, n: Int32, cta: Int32, row: Row, rP: cute.Tensor, op: cutlass.Constexpr):
    """The mix of this lane's columns; what the next product reads of it, and its square, go to all CTAs."""
    square = Float32(0.0)
    for t in cutlass.range_constexpr(op.turns):
        a, b = low(row.prefix[t]) * rP[op.bank], high(row.prefix[t]) * rP[op.bank]
        for s in cutlass.range_constexpr(op.bank):
            a += low(row.bank[t, s]) * rP[s]
            b += high(row.bank[t, s]) * rP[s]
        wa, wb = marked(a, c.flag), marked(b, c.flag)
        _, i, there = pair_of(c, t)
        if there and 2 * i < op.k:
            start = c.mixed + Int64(n * op.rows + c.row) * (4 * op.k)
            post_pair(start + Int64(i) * 8, wa, wb)
        a, b = value_of(wa), value_of(wb)
        row.mix[0, t], row.mix[1, t] = a, b
        if there:
            square += a * a + b * b
    square = lanes_sum(square, 32)
    if c.lane == 0:
        start = c.squares + Int64(n * op.rows + c.row) * (4 * op.ctas4)
        post_word(start + Int64(cta) * 4, marked(square, c.flag))


@cute.jit
def keep(c: Ctx, n: Int32, row: Row, a: Ahead, op: cutlass.Constexpr):
    """The prefix becomes a row of the bank; the next instance's vector of scores."""
    for t in cutlass.range_constexpr(op.turns):
        for s in cutlass.range_constexpr(op.bank):
            row.bank[t, s] = row.prefix[t] if n == s else row.bank[t, s]
        row.weight[0, t] = low(a.norm[t]) * low(a.proj[t])
        row.weight[1, t] = high(a.norm[t]) * high(a.proj[t])


@cute.jit
def exchange_row(
    c: Ctx, n: Int32, cta: Int32, row: Row, a: Ahead, bank_out: Int64, op: cutlass.Constexpr
):
    """One row of instance n, from the product to the mix."""
    rSeen = cute.make_rmem_tensor(cute.make_layout((4, -(-op.ctas // 128), op.bank)), Uint32)
    for s in cutlass.range_constexpr(op.bank):
        peek_row(score_at(c, n, Int32(s), op), rSeen[None, None, s], op.ctas)
    reduced(c, n, row, bank_out, op)
    post_prefix(c, n, cta, row, op)
    for t in cutlass.range_constexpr(op.turns):
        _, i, there = pair_of(c, t)
        if there:
            out = cute.make_tensor(a.out.iterator + t, cute.make_layout((1,)))
            words_at(c.table[n * len(FIELDS) + OUT], i, out, 1)
    rP = cute.make_rmem_tensor(cute.make_layout((op.bank + 1,)), Float32)
    weights_of(c, n, row, rSeen, rP, op)
    mix(c, n, cta, row, rP, op)
    keep(c, n, row, a, op)
    if n + 1 < op.layers:
        post_bank(c, n + 1, cta, row, op)
