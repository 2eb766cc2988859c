"""The FFN with experts in the persistent kernel: router, shared expert, routed experts, up-projection, in order."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import round_bf16
from targets.kimi_k3.seeds.persistent.boxes import post, turn_of
from targets.kimi_k3.seeds.persistent.columns import ask_columns, close_half, sums_at
from targets.kimi_k3.seeds.persistent.device import Ctx, ahead, at, consumers, field
from targets.kimi_k3.seeds.persistent.edges import ROUTE, hint, wait
from targets.kimi_k3.seeds.persistent.exchange import join_ranks, sum_shared, tell_rank
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.moe_experts import experts_down, experts_up
from targets.kimi_k3.seeds.persistent.moe_route import choose, load_bias
from targets.kimi_k3.seeds.persistent.products import drain, gathered
from targets.kimi_k3.seeds.persistent.stages import most, share
from targets.kimi_k3.seeds.persistent.vectors import load_box, load_norm, normalise, situ_pair


@cute.jit
def router(c: Ctx, turn: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """This CTA's logits."""
    first, n = share(op.d.router_rows, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "logits", turn, first + i, gathered(c, i, op.wide.width), op)
    return it


@cute.jit
def front(c: Ctx, turn: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """Latent and the shared expert's hidden vector, this CTA's share. Starts behind a `hint`, which is a barrier."""
    d, g = op.d, op.wide
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    it = drain(c, it, n_l, Int32(0), rX, g, op)
    it = drain(c, it, n_s, n_l, rX, op.rows(d.hidden, pair=True), op)
    consumers(op)
    for i in cutlass.range(c.tid, n_l + n_s, op.threads, unroll=1):
        if i < n_l:
            post(c, "latent", turn, first_l + i, gathered(c, i, g.width), op)
        else:
            j = i - n_l
            post(c, "hs", turn, first_s + j, situ_pair(c, n_l + 2 * j, g.width), op)
    return it


@cute.jit
def shared_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """c.own = bf(shared partial + the others') of the columns whose up-projection this CTA makes; the rest is sent.

    Ends with a barrier: the experts' sums go where these were.
    """
    d = op.d
    g = op.rows(d.shared_dim)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    sends = d.hidden > d.hidden_local
    if cutlass.const_expr(sends and d.gpus == 1):
        remote = field(c, layer, F["remote_shared"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, most(d.hidden_local, op.ctas), op)
    load_box(c, "hs", turn, rX, g, op)
    it = drain(c, it, n, Int32(0), rX, g, op)
    if cutlass.const_expr(sends):
        first_s, n_s = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = drain(c, it, n_s, n, rX, g, op)
        consumers(op)
        if cutlass.const_expr(d.gpus == 1):
            gSend = at(BFloat16, field(c, layer, F["send"], COUNT), d.hidden - d.hidden_local)
        for k in cutlass.range_constexpr(-(-most(d.hidden_local, op.ctas) // op.threads)):
            i = c.tid + k * op.threads
            if i < n:
                own = round_bf16(gathered(c, i, g.width))
                if cutlass.const_expr(d.gpus == 1):
                    own = round_bf16(own + rRemote[k])
                c.own[i] = own
        for i in cutlass.range(c.tid, n_s, op.threads, unroll=1):
            if cutlass.const_expr(d.gpus > 1):
                tell_rank(c, "shared", layer, first_s + i, gathered(c, n + i, g.width))
            else:
                gSend[first_s + i] = gathered(c, n + i, g.width).to(BFloat16)
    else:
        consumers(op)
        for i in cutlass.range(c.tid, n, op.threads, unroll=1):
            c.own[i] = round_bf16(gathered(c, i, g.width))
    consumers(op)
    return it


@cute.jit
def up_projection(
    c: Ctx, layer: Int32, rN: cute.Tensor, turn: Int32, it: Int32, y: Any, op: cutlass.Constexpr,
    nx: Any = None,
):  # fmt: skip
    """delta (and y, where given) = bf(bf(bf(RMS(z; latent_norm)) W_up^T) + shared) of this CTA's columns; with nx box
    dots of them and of a share of those that only other ranks make, and the half is closed."""
    d = op.d
    g = op.rows(d.latent)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    if cutlass.const_expr(nx is not None):
        sSum, others, all_ = sums_at(c, op), None, n
        if cutlass.const_expr(d.hidden_local < d.hidden):
            first_o, n_o = share(d.hidden - d.hidden_local, c.cta, op.ctas)
            others, all_ = (field(c, layer, F["remote_delta"], COUNT), first_o, n_o), n + n_o
        cols = ask_columns(c, nx, (first, n), others, op)
    load_box(c, "z", turn, rX, g, op)
    if cutlass.const_expr(d.gpus > 1):
        join_ranks(c, "moe", layer, rX, g, op)
    normalise(c, rX, rN, g, op)
    it = drain(c, it, n, Int32(0), rX, g, op)
    consumers(op)
    if cutlass.const_expr(d.gpus > 1):
        sum_shared(c, layer, op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        u = round_bf16(gathered(c, i, g.width))
        if cutlass.const_expr(d.gpus > 1):
            tell_rank(c, "delta", layer, first + i, u + c.own[i])
        post(c, "delta", turn, first + i, u + c.own[i], op)
        if cutlass.const_expr(y is not None):
            y[first + i] = (u + c.own[i]).to(BFloat16)
        if cutlass.const_expr(nx is not None):
            sSum[i] = u + c.own[i]
    if cutlass.const_expr(nx is not None):
        close_half(c, nx, (layer, Int32(1), n, all_), cols, op)
    return it


@cute.jit
def moe(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    out: tuple,
    op: cutlass.Constexpr,
):
    """The FFN of a layer with experts, number `number` of the launch; delta is posted when its edge is hinted at.

    out = (ids, y or None). The router goes first and has an edge of its own: its logits travel while the rest of the
    front is drained.
    """
    it, edge = at_
    mIds, y = out
    turn = turn_of(c, number)
    timeline.mark(c.track, "router", layer)
    it = router(c, turn, it, rX, op)
    hint(c, op, ROUTE)
    timeline.mark(c.track, "front", layer)
    it = front(c, turn, it, rX, op)
    hint(c, op)
    timeline.mark(c.track, "edge logits", layer, kind="edge")
    rBias = load_bias(c, layer, op)
    wait(c, number + 1, op, ROUTE, False)
    timeline.mark(c.track, "choose", layer)
    choose(c, layer, turn, rBias, mIds, op)
    edge += 1
    timeline.mark(c.track, "edge front", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "shared down", layer)
    it = shared_down(c, layer, turn, it, op)
    timeline.mark(c.track, "experts up", layer)
    it = experts_up(c, layer, turn, it, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "experts down", layer)
    it = experts_down(c, layer, turn, it, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge z", layer, kind="edge")
    rN = load_norm(c, field(c, layer, F["latent_norm"], COUNT), op.rows(op.d.latent))
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "up projection", layer)
    it = up_projection(c, layer, rN, turn, it, y, op)
    return it, edge
