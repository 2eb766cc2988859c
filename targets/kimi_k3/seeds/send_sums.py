"""The end of a product that is exchanged: the warps' shares are added and whole vectors go into the mailboxes."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from targets.kimi_k3.seeds.allreduce_attn_res import send
from targets.kimi_k3.seeds.common import pack_bf16, smem
from targets.kimi_k3.seeds.exchange import Link, owner, place, put


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
