"""All-reduce between two GPUs fused into AttnRes: partials go straight into the other rank's mailbox.

A row's sources are in the registers of a few CTAs, which sum over shared memory of their cluster; what does not depend
on the exchange (the bank's scores) is done before the wait. Both ranks add in FP32 in rank order, so they hold the same
bits.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from targets.kimi_k3.seeds.attn_res import Mix, MixShape, MixState, by_eight, eight
from targets.kimi_k3.seeds.common import add_bf16x2, divisor_below, pick, smem
from targets.kimi_k3.seeds.exchange import (
    SUMS,
    Link,
    empty_mail,
    link_of,
    look,
    mailbox,
    new_flag,
    owner,
    place,
    put,
    take,
    wire_of,
)
from targets.kimi_k3.seeds.row_team import open_team
from targets.kimi_k3.seeds.spread_mix import (
    Receive,
    finish_mix,
    load_bank,
    score_bank,
    vector_of,
    weigh,
)

TUNABLES = {
    "spread": (7, 4, 2, 1),
    "attn_res_vectors": (1, 2, 4),
    "protocol": ("flag", "sentinel"),
    "shots": (1, 2),
    "pdl": (True, False),
    "paired": (True, False),
    "spin_limit": (0, 200_000),
}


class Given(NamedTuple):
    """A rank's partial bf16 [M, hidden], plus what is added to it first (None: nothing); both None: it comes through
    the rank's own mailbox."""

    partial: Any = None
    plus: Any = None


@cute.jit
def add_words(rA: cute.Tensor, rB: cute.Tensor, rC: cute.Tensor):
    """rC[4 words] = bf(a + b), pair by pair: with two ranks the order of the sum makes no difference."""
    for e in cutlass.range_constexpr(4):
        rC[e] = add_bf16x2(rA[e], rB[e])


@cute.jit
def own_partial(given: Given, at: tuple, rP: cute.Tensor):
    """rP[4 words] = bf(partial + plus) of at = (row, vector)."""
    m, i = at
    cute.autovec_copy(by_words(given.partial)[m, (None, i)], rP)
    if cutlass.const_expr(given.plus is not None):
        rPlus = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        cute.autovec_copy(by_words(given.plus)[m, (None, i)], rPlus)
        add_words(rP, rPlus, rP)


@cute.jit
def by_words(mT: cute.Tensor):
    """bf16 [M, n] as words in vectors of four (16 bytes)."""
    return cute.logical_divide(cute.recast_tensor(mT, Uint32), (None, 4))


@cute.jit
def send(rP: cute.Tensor, at: tuple, flag: Uint32, link: Link, op: cutlass.Constexpr):
    """A vector of this rank's partial to whoever sums it."""
    m, i = at
    if cutlass.const_expr(op.paired):
        where = (link.rank, m, i)
        if cutlass.const_expr(not op.two_shot):
            put(place(link.peer, link, where, op), rP, flag, op)
        elif owner(i, op) != link.rank:
            put(place(link.peer, link, where, op), rP, flag, op)


@cute.jit
def receive(rP: cute.Tensor, at: tuple, flag: Uint32, link: Link, op: cutlass.Constexpr):
    """rP[4 words], this rank's partial, becomes the sum over the ranks."""
    m, i = at
    rSeen = cute.make_rmem_tensor(cute.make_layout((op.words,)), Uint32)
    rIn = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    if cutlass.const_expr(op.paired):
        other = 1 - link.rank
        if cutlass.const_expr(not op.two_shot):
            address = place(link.own, link, (other, m, i), op)
            look(address, rSeen, op)
            take(address, rSeen, rIn, flag, op)
            add_words(rP, rIn, rP)
        elif owner(i, op) == link.rank:
            address = place(link.own, link, (other, m, i), op)
            look(address, rSeen, op)
            take(address, rSeen, rIn, flag, op)
            add_words(rP, rIn, rP)
            put(place(link.peer, link, (Int32(SUMS), m, i), op), rP, flag, op)
        else:
            address = place(link.own, link, (Int32(SUMS), m, i), op)
            look(address, rSeen, op)
            take(address, rSeen, rP, flag, op)


@cute.jit
def from_mail(rP: cute.Tensor, at: tuple, flag: Uint32, link: Link, op: cutlass.Constexpr):
    """rP[4 words] = this rank's own partial out of its own mailbox, where it is needed here."""
    m, i = at
    rSeen = cute.make_rmem_tensor(cute.make_layout((op.words,)), Uint32)
    here = owner(i, op) == link.rank
    if cutlass.const_expr(not (op.two_shot and op.paired)):
        here = True
    if here:
        address = place(link.own, link, (link.rank, m, i), op)
        look(address, rSeen, op)
        take(address, rSeen, rP, flag, op)


@cute.kernel
def receive_kernel(mix: Mix, state: MixState, given: Given, link: Link, op: cutlass.Constexpr):
    """A row on `spread` CTAs, grid (spread, M): a = the sum of the ranks' partials, P <- bf(prefix + a) (or a, without
    add), then y = bf(RMS(sum_s p_s v_s; out_norm)). See `Given` for where this rank's own partial comes from."""
    tid, _, _ = cute.arch.thread_idx()
    number, m, _ = cute.arch.block_idx()
    shape, wire = op.mix, op.wire
    team = open_team(op.rounds, op.spread, op.warps)
    through_mail = given.partial is None
    if cutlass.const_expr(shape.pdl):
        if cutlass.const_expr(not through_mail):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    flag = new_flag(link, m)
    rOwn = cute.make_rmem_tensor(cute.make_layout((4, shape.vectors)), Uint32)
    rOwn.fill(0)
    if cutlass.const_expr(not through_mail):
        for v in cutlass.range_constexpr(shape.vectors):
            at = (m, vector_of(v, number, op))
            own_partial(given, at, rOwn[None, v])
            send(rOwn[None, v], at, flag, link, wire)
    rV = cute.make_rmem_tensor(cute.make_layout((8, shape.vectors, shape.bank + 1)), BFloat16)
    rV.fill(0.0)
    load_bank(mix, state, rV, (m, number), op)
    rW = cute.make_rmem_tensor(cute.make_layout((8, shape.vectors)), Float32)
    for v in cutlass.range_constexpr(shape.vectors):
        i = vector_of(v, number, op)
        rW[None, v].store(eight(mix.norm, i) * eight(mix.proj, i))
    sScore = smem(Float32, (op.scores,), (1,))
    score_bank(state, rV, rW, team, sScore, op)
    for v in cutlass.range_constexpr(shape.vectors):
        at = (m, vector_of(v, number, op))
        if cutlass.const_expr(through_mail):
            from_mail(rOwn[None, v], at, flag, link, wire)
        receive(rOwn[None, v], at, flag, link, wire)
    for v in cutlass.range_constexpr(shape.vectors):
        at = (m, vector_of(v, number, op))
        update_prefix(mix, state, rV[None, v, shape.bank], rOwn[None, v], at)
    rP = weigh(rV, rW, team, sScore, op)
    finish_mix(mix, rV, rP, team, (m, state.closing), op)
    if tid == 0 and number == 0:
        # the row's other CTAs have read it: they have told their last sums
        link.epochs[link.slot, m] = Int32(flag)
    if cutlass.const_expr(shape.pdl and through_mail):
        cute.arch.griddepcontrol_wait()


@cute.jit
def update_prefix(mix: Mix, state: MixState, rP: cute.Tensor, rA: cute.Tensor, at: tuple):
    """rP[8] = bf(P + a) or a, stored as the prefix and, with a row, in the bank."""
    m, i = at
    rWord = cute.recast_tensor(rP, Uint32)
    for e in cutlass.range_constexpr(4):
        if state.add == 1:
            rWord[e] = add_bf16x2(rWord[e], rA[e])
        else:
            rWord[e] = rA[e]
    cute.autovec_copy(rP, by_eight(mix.out_prefix)[m, (None, i)])
    if cutlass.const_expr(mix.new is not None):
        if state.row >= 0:
            cute.autovec_copy(rP, by_eight(mix.new)[m, state.row, (None, i)])


def receive_shape(mix, cfg):
    """The row's vectors over CTAs of one cluster, whole warps each."""
    rows, hidden = mix.y.shape
    bank = sum(t.shape[1] for t in (mix.old, mix.new) if t is not None)
    warps = hidden // 256
    spread = divisor_below(warps, max(1, min(cfg.spread, 128 // rows)))
    fits = [v for v in (1, 2, 4, 8) if warps % (spread * v) == 0 and warps // (spread * v) <= 32]
    vectors = max([v for v in fits if v <= cfg.attn_res_vectors] or fits[:1])
    threads = 32 * (warps // (spread * vectors))
    shape = MixShape(threads, vectors, bank, hidden, cfg.dims.eps, cfg.pdl)
    return Receive(shape, wire_of(rows, hidden, cfg), spread)


@cute.jit
def reduced_mix(
    mix: Mix, state: MixState, given: Given, link: Link, cfg: cutlass.Constexpr, stream
):
    """One launch of the receiving kernel. Its CTAs wait, so all must come to be resident. With programmatic launches,
    up to eight rows, they are so few that they fit at once: the launches before end without them, and the launch after
    begins only when all have begun. Else the grid is cooperative."""
    rows = mix.y.shape[0]
    op = receive_shape(mix, cfg)
    if cutlass.const_expr(rows <= 8 and op.mix.pdl):
        receive_kernel(mix, state, given, link, op).launch(
            grid=(op.spread, rows, 1), block=(op.mix.threads, 1, 1), cluster=(op.spread, 1, 1), stream=stream,
            use_pdl=True, min_blocks_per_mp=1,
        )  # fmt: skip
    else:
        receive_kernel(mix, state, given, link, op).launch(
            grid=(op.spread, rows, 1), block=(op.mix.threads, 1, 1), cluster=(op.spread, 1, 1), stream=stream,
            cooperative=True, min_blocks_per_mp=1,
        )  # fmt: skip


def check(dims):
    if dims.gpus != 2 or dims.layers < 2:
        raise ValueError("this exchange is for two GPUs and at least two instances a step")


@cute.jit
def reduced_instance(t, i, given: Given, cfg: cutlass.Constexpr, stream):
    """The mix of instance i of a chain."""
    layers, rows = t.weights.layers, cfg.dims.bank_rows
    norm, proj, out_norm = (
        [getattr(x, n) for x in layers] for n in ("res_norm", "res_proj", "out_norm")
    )
    prefix = pick([t.inputs.x0, t.outputs.prefix], Int32(1) if i > 0 else Int32(0))
    mix = Mix(
        prefix, t.outputs.prefix, None, None, t.outputs.bank, pick(norm, i), pick(proj, i), pick(out_norm, i),
        pick(t.outputs.y, i),
    )  # fmt: skip
    sources = i if i < rows else rows
    row = i if i < rows else -1
    state = MixState(Int32(sources), Int32(row), Int32(1), Int32(0))
    reduced_mix(mix, state, given, link_of(t, i), cfg, stream)


def workspace(dims, cfg):
    check(dims)
    return mailbox(dims.layers, dims.rows, dims.hidden, cfg)


@cute.jit
def prepare(t, cfg, stream):
    empty_mail(t.workspace.mail, cfg, stream)


@cute.jit
def step(t, cfg, stream):
    """Instance i: partial = bf(inputs.partial[i] + y_{i-1}); P <- bf(P + the ranks' sum); the mix into y_i."""
    reduced_instance(t, Int32(0), Given(t.inputs.partial[0]), cfg, stream)
    for i in cutlass.range(1, cfg.dims.layers, unroll=1):
        given = Given(pick(t.inputs.partial, i), pick(t.outputs.y, i - 1))
        reduced_instance(t, i, given, cfg, stream)
