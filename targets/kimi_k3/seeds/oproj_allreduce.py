"""o_proj, all-reduce between two GPUs, AttnRes and norm in two launches: the product's epilogue stores each partial
straight into both mailboxes, and the mix waits for it there.

The receiving launch starts while the product still runs and has its bank and scores ready when the first vectors come;
the weights of the next instance are loaded meanwhile.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from targets.kimi_k3.seeds.allreduce_attn_res import Given, check, reduced_instance, send
from targets.kimi_k3.seeds.common import begin, mma_k32, pack_bf16, pick, smem
from targets.kimi_k3.seeds.exchange import (
    Link,
    empty_mail,
    link_of,
    mailbox,
    new_flag,
    owner,
    place,
    put,
    wire_of,
)
from targets.kimi_k3.seeds.gemv import gemv_shape
from targets.kimi_k3.seeds.gemv_kernel import load_rows, load_weights

TUNABLES = {
    "spread": (7, 4, 2, 1),
    "attn_res_vectors": (1, 2, 4),
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (4, 2, 1),
    "gemv_unroll": (4, 2, 6),
    "protocol": ("flag", "sentinel"),
    "shots": (1, 2),
    "pdl": (True, False),
    "paired": (True, False),
    "spin_limit": (0, 200_000),
}


@cute.kernel
def oproj_kernel(
    mX: cute.Tensor,
    plus: Any,
    mW: cute.Tensor,
    link: Link,
    op: cutlass.Constexpr,
    wire: cutlass.Constexpr,
):
    """Partial of bf(x + plus) W^T into the mailboxes: mX bf16 [M, k], plus [M, >= k] or None, mW bf16 [n, k]; grid
    (n / 8 tile, M / 8). As `gemv_kernel`, but for the epilogue."""
    tid, _, _ = cute.arch.thread_idx()
    tile, group, _ = cute.arch.block_idx()
    m0 = group * 8
    gW = cute.logical_divide(cute.recast_tensor(mW, Uint32), (None, 4))
    rW = cute.make_rmem_tensor(cute.make_layout((4, op.parts, op.unroll)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.unroll)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.parts)), Float32)
    rX.fill(0)
    rC.fill(0.0)
    load_weights(gW, rW, tile, Int32(0), op)
    begin(op.pdl)
    flag = new_flag(link, m0)
    gX = cute.logical_divide(cute.recast_tensor(mX, Uint32), (None, 4))
    gPlus = None
    if cutlass.const_expr(plus is not None):
        gPlus = cute.logical_divide(cute.recast_tensor(plus, Uint32), (None, 4))
    span = (m0, Int32(mX.shape[0]))
    for turn in cutlass.range(op.rounds, unroll=1):
        load_rows(gX, gPlus, rX, span, turn, op)
        for u in cutlass.range(op.unroll, unroll_full=True):
            for j in cutlass.range_constexpr(op.parts):
                mma_k32(rC[None, j], rX[None, u], tuple(rW[i, j, u] for i in range(4)))
        if turn + 1 < op.rounds:
            load_weights(gW, rW, tile, turn + 1, op)
    sum_and_send(rC, (tile, m0), flag, link, (op, wire))


@cute.jit
def sum_and_send(rC: cute.Tensor, at: tuple, flag: Uint32, link: Link, ops: cutlass.Constexpr):
    """Add the warps' shares of K in warp order, round, and send whole vectors: eight lanes have one."""
    op, wire = ops
    tile, m0 = at
    tid, _, _ = cute.arch.thread_idx()
    lane, width = tid % 32, op.tile * 8
    sC = smem(Float32, (8, op.parts * 8, op.warps), (1, 8, op.parts * 64))
    for j in cutlass.range_constexpr(op.parts):
        for i in cutlass.range_constexpr(2):
            sC[lane // 4, j * 8 + lane % 4 * 2 + i, tid // 32] = rC[i, j]
    cute.arch.sync_threads()
    rP = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for item in cutlass.range(tid, 8 * width, op.warps * 32, unroll=1):
        r, c = item // width, item % width
        acc = Float32(0.0)
        for w in cutlass.range(op.warps, unroll_full=True):
            acc += sC[r, c, w]
        word = pack_bf16(acc, cute.arch.shuffle_sync_down(acc, offset=1))
        for e in cutlass.range_constexpr(4):
            rP[e] = cute.arch.shuffle_sync_down(word, offset=2 * e) if e > 0 else word
        if c % 8 == 0 and m0 + r < wire.rows:
            send_both(rP, (m0 + r, tile * op.tile + c // 8), flag, link, wire)


@cute.jit
def send_both(rP: cute.Tensor, at: tuple, flag: Uint32, link: Link, op: cutlass.Constexpr):
    """To the other rank, and into this rank's own mailbox where it sums the vector itself."""
    m, i = at
    send(rP, at, flag, link, op)
    if cutlass.const_expr(op.two_shot and op.paired):
        if owner(i, op) == link.rank:
            put(place(link.own, link, (link.rank, m, i), op), rP, flag, op)
    else:
        put(place(link.own, link, (link.rank, m, i), op), rP, flag, op)


@cute.jit
def oproj(mX, plus, mW, link: Link, cfg: cutlass.Constexpr, stream):
    op = gemv_shape(mW.shape[0], mW.shape[1], cfg, False)
    wire = wire_of(mX.shape[0], mW.shape[0], cfg)
    oproj_kernel(mX, plus, mW, link, op, wire).launch(
        grid=(op.n // (8 * op.tile), cute.ceil_div(mX.shape[0], 8), 1), block=(op.warps * 32, 1, 1), stream=stream,
        use_pdl=op.pdl, min_blocks_per_mp=1,
    )  # fmt: skip


def workspace(dims, cfg):
    check(dims)
    return mailbox(dims.layers, dims.rows, dims.hidden, cfg)


@cute.jit
def prepare(t, cfg, stream):
    empty_mail(t.workspace.mail, cfg, stream)


@cute.jit
def step(t, cfg, stream):
    """Instance i: x_i = bf(inputs.x[i] + y_{i-1}); P <- bf(P + the ranks' sum of bf(x_i W_i^T)); the mix into y_i."""
    x, y, w = t.inputs.x, t.outputs.y, [layer.o_proj for layer in t.weights.layers]
    oproj(x[0], None, w[0], link_of(t, Int32(0)), cfg, stream)
    reduced_instance(t, Int32(0), Given(), cfg, stream)
    for i in cutlass.range(1, len(w), unroll=1):
        oproj(pick(x, i), pick(y, i - 1), pick(w, i), link_of(t, i), cfg, stream)
        reduced_instance(t, i, Given(), cfg, stream)
