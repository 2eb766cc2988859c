"""The exchanges of a layer between two ranks as launches of their own: one-shot all-reduce, all-gather, reduce-scatter.

A thread stores its vectors into the other rank's mailbox, then takes that rank's from its own; every eight bytes carry
the number of the step. One kernel for all; a slot of the mailbox for each exchange of a step.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2, begin
from targets.kimi_k3.seeds.exchange import Link, Wire, look, new_flag, place, put, take
from targets.kimi_k3.seeds.gemv import gemv, gemv_normed, gemv_situ
from targets.kimi_k3.seeds.gemv_kernel import Extra
from targets.kimi_k3.seeds.latent_moe import expert_down, expert_up, nv_of
from targets.kimi_k3.seeds.latent_moe_codes import Codes
from targets.kimi_k3.seeds.router import route

ATTN = 0
LATENT = 1
MOE = 2
SHARED = 3
DELTA = 4
SITES = 5
"""Exchanges of a layer; the dense FFN has MOE's place."""
REDUCE = 0
GATHER = 1
SCATTER = 2


@dataclass(frozen=True)
class Swap:
    """Compile-time form of an exchange: `vectors` of eight that cross each way, threads, and what is made of them."""

    kind: int
    vectors: int
    threads: int
    wire: Any
    pdl: bool


@cute.jit
def vectors_of(mT: cute.Tensor):
    """bf16 [M, n] as words in vectors of four."""
    return cute.logical_divide(cute.recast_tensor(mT, Uint32), (None, 4))


@cute.kernel
def swap_kernel(mX: cute.Tensor, mY: cute.Tensor, link: Link, op: cutlass.Constexpr):
    """Grid (M). mX bf16 [M, n]; REDUCE: mY = bf(sum over ranks); GATHER: mY [M, 2 n] = rank 0's, then rank 1's columns;
    SCATTER: mY [M, n / 2] = this rank's columns of the sum."""
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    flag = new_flag(link, m)
    gX, gY = vectors_of(mX), vectors_of(mY)
    other = 1 - link.rank
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rIn = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rSeen = cute.make_rmem_tensor(cute.make_layout((op.wire.words,)), Uint32)
    for i in cutlass.range(tid, op.vectors, op.threads, unroll=1):
        theirs = i + other * op.vectors if cutlass.const_expr(op.kind == SCATTER) else i
        cute.autovec_copy(gX[m, (None, theirs)], rX)
        put(place(link.peer, link, (link.rank, m, i), op.wire), rX, flag, op.wire)
    for i in cutlass.range(tid, op.vectors, op.threads, unroll=1):
        address = place(link.own, link, (other, m, i), op.wire)
        look(address, rSeen, op.wire)
        take(address, rSeen, rIn, flag, op.wire)
        mine = i + link.rank * op.vectors if cutlass.const_expr(op.kind == SCATTER) else i
        cute.autovec_copy(gX[m, (None, mine)], rX)
        if cutlass.const_expr(op.kind == GATHER):
            cute.autovec_copy(rX, gY[m, (None, i + link.rank * op.vectors)])
            cute.autovec_copy(rIn, gY[m, (None, i + other * op.vectors)])
        else:
            for e in cutlass.range_constexpr(4):
                rX[e] = add_bf16x2(rX[e], rIn[e])
            cute.autovec_copy(rX, gY[m, (None, i)])
    cute.arch.sync_threads()
    if tid == 0:
        link.epochs[link.slot, m] = Int32(flag)


@cute.jit
def swap(mX, mY, link: Link, kind: cutlass.Constexpr, cfg: cutlass.Constexpr, stream):
    """One exchange. Its CTAs wait, so they are one cluster or, from nine rows on, a cooperative grid."""
    rows, columns = mX.shape
    vectors = columns // 16 if cutlass.const_expr(kind == SCATTER) else columns // 8
    wire = Wire(rows, cfg.dims.hidden // 8, True, False, 0, True)
    threads = min(512, -(-vectors // 32) * 32)
    if cutlass.const_expr(rows <= 8):
        op = Swap(kind, vectors, threads, wire, cfg.pdl)
        swap_kernel(mX, mY, link, op).launch(
            grid=(rows, 1, 1), block=(threads, 1, 1), cluster=(rows, 1, 1), stream=stream, use_pdl=cfg.pdl
        )  # fmt: skip
    else:
        op = Swap(kind, vectors, threads, wire, False)
        swap_kernel(mX, mY, link, op).launch(
            grid=(rows, 1, 1), block=(threads, 1, 1), stream=stream, cooperative=True
        )


def site(t, n, which):
    """The link of one of the exchanges of layer n."""
    return Link(
        t.workspace.mail, t.peers[0].workspace.mail, t.workspace.epochs, t.rank, n * SITES + which
    )


def collectives_workspace(dims):
    """Mailboxes, and what is exchanged."""
    if dims.router_sharded:
        raise ValueError("a sharded router's logits are f32: this seed exchanges bf16 alone")
    slots, m = SITES * dims.layers, dims.rows

    def wide(n):
        return ("bf16", (m, n), "undefined", "step")

    return {
        "mail": ("u32", (slots, 3, m, dims.hidden // 8, 8), "zero", "persistent"),
        "epochs": ("i32", (slots, m), "zero", "persistent"),
        "partial": wide(dims.hidden), "latent_all": wide(dims.latent), "moe_partial": wide(dims.latent),
        "delta_own": wide(dims.hidden_local),
    }  # fmt: skip


@cute.jit
def moe_between(n, t, w, mIds, cfg: cutlass.Constexpr, stream):
    """space.delta = the FFN's output of layer n on space.x, with the other rank."""
    d, space = cfg.dims, t.workspace
    mX = space.x
    route(mX, (w.router, w.router_bias), space.logits, None, mIds, space.routed, cfg, stream)
    gemv(mX, w.latent_down, space.latent, Extra(), cfg, stream)
    latent = space.latent
    if cutlass.const_expr(d.latent_sharded):
        latent = space.latent_all
        swap(space.latent, latent, site(t, n, LATENT), GATHER, cfg, stream)
    nv = nv_of(d)
    up = (Codes(w.w1, w.w1_scale), Codes(w.w3, w.w3_scale))
    if cutlass.const_expr(nv):
        up = (Codes(w.w1, w.w1_scale, w.w1_factor), Codes(w.w3, w.w3_scale, w.w3_factor))
    expert_up(latent, None, up, mIds, space.expert_hidden, cfg, stream)
    down = Codes(w.w2, w.w2_scale, w.w2_factor if nv else None)
    expert_down(
        space.expert_hidden, down, (mIds, space.routed), None, space.moe_partial, cfg, stream
    )
    swap(space.moe_partial, space.experts_sum, site(t, n, MOE), REDUCE, cfg, stream)
    gemv_situ(mX, w.shared_gate_up, space.shared_hidden, cfg, stream)
    gemv(space.shared_hidden, w.shared_down, space.partial, Extra(), cfg, stream)
    swap(space.partial, space.shared, site(t, n, SHARED), SCATTER, cfg, stream)
    joined = Extra(norm=w.latent_norm, addend=space.shared)
    gemv_normed(space.experts_sum, w.latent_up, space.delta_own, joined, space, cfg, stream)
    swap(space.delta_own, space.delta, site(t, n, DELTA), GATHER, cfg, stream)
