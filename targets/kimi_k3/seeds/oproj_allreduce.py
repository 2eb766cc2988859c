"""o_proj, all-reduce between two GPUs, AttnRes and norm in two launches: the product's epilogue stores each partial
straight into both mailboxes, and the mix waits for it there.

The receiving launch starts while the product still runs and has its bank and scores ready when the first vectors come;
the weights of the next instance are loaded meanwhile.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from targets.kimi_k3.seeds.allreduce_attn_res import Given, check, reduced_instance
from targets.kimi_k3.seeds.common import begin, mma_k32, pick
from targets.kimi_k3.seeds.exchange import Link, empty_mail, link_of, mailbox, new_flag, wire_of
from targets.kimi_k3.seeds.gemv import gemv_shape
from targets.kimi_k3.seeds.gemv_kernel import load_rows, load_weights
from targets.kimi_k3.seeds.oproj_ahead import ahead_shape, launch_ahead
from targets.kimi_k3.seeds.send_sums import sum_and_send

TUNABLES = {
    "spread": (7, 4, 2, 1),
    "attn_res_vectors": (1, 2, 4),
    "ahead": (True, False),
    "ahead_warps": (16, 8, 12),
    "ahead_l2": (False, True),
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
def oproj(mX, plus, weights, link: Link, cfg: cutlass.Constexpr, stream):
    """weights: all instances' W; link.slot: which instance."""
    mW = pick(weights, link.slot)
    wire = wire_of(mX.shape[0], mW.shape[0], cfg)
    ahead = None
    if cutlass.const_expr(cfg.ahead and mX.shape[0] <= 8):
        ahead = ahead_shape(mW.shape[0], mW.shape[1], cfg)
    if cutlass.const_expr(ahead is not None):
        then = None
        if cutlass.const_expr(cfg.ahead_l2):
            more = Int32(1) if link.slot + 1 < len(weights) else Int32(0)
            then = (pick(weights, link.slot + more), more)
        launch_ahead((mX, plus, mW, then), link, (ahead, wire), stream)
    else:
        op = gemv_shape(mW.shape[0], mW.shape[1], cfg, False)
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
    oproj(x[0], None, w, link_of(t, Int32(0)), cfg, stream)
    reduced_instance(t, Int32(0), Given(), cfg, stream)
    for i in cutlass.range(1, len(w), unroll=1):
        oproj(pick(x, i), pick(y, i - 1), w, link_of(t, i), cfg, stream)
        reduced_instance(t, i, Given(), cfg, stream)
