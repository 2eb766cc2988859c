"""The chain of o_proj, all-reduce between two GPUs, AttnRes and norm in one launch per rank for all instances.

Every CTA keeps the next instance's share of the weights in shared memory while it waits: for the other rank's partials
(mailboxes), and for the mix of its own rank (a box of y beside the output). The last CTAs mix a row each.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.allreduce_attn_res import (
    check,
    finish_mix,
    from_mail,
    load_bank,
    receive,
    receive_shape,
    score_bank,
    update_prefix,
)
from targets.kimi_k3.seeds.attn_res import Mix, MixState, by_eight, eight
from targets.kimi_k3.seeds.common import add_bf16x2, divisor_below, mma_k32, pack_bf16, pick, smem
from targets.kimi_k3.seeds.exchange import (
    Link,
    Wire,
    empty_mail,
    look,
    mailbox,
    new_flag,
    put,
    take,
)
from targets.kimi_k3.seeds.oproj_allreduce import send_both

TUNABLES = {
    "ctas": (132, 128, 6),
    "attn_res_vectors": (2, 1, 4),
    "protocol": ("flag", "sentinel"),
    "shots": (1, 2),
    "pdl": (False,),
    "paired": (True, False),
    "spin_limit": (0, 200_000),
}


class Io(NamedTuple):
    """Tensors of all instances, and the box of y: u32 [instances, M, k / 8, 8]."""

    x0: Any
    x: tuple
    w: tuple
    norm: tuple
    proj: tuple
    out_norm: tuple
    y: tuple
    prefix: Any
    bank: Any
    box: Any


@dataclass(frozen=True)
class Stack:
    """Compile-time sizes. A CTA has `per` groups of eight columns of the product; `warps` share k."""

    layers: int
    k: int
    ctas: int
    per: int
    warps: int
    bank_rows: int
    mix: Any
    wire: Any
    box: Any

    @property
    def groups(self):
        return self.mix.hidden // 8

    @property
    def pitch(self):
        """Words of a row of weights in shared memory: 64 bytes more than it has, so that rows lie in other banks."""
        return self.k // 2 + 16


@cute.jit
def fill(mW: cute.Tensor, sW: cute.Tensor, span: tuple, op: cutlass.Constexpr):
    """Begin to copy the CTA's rows of the weights; span = (first group, groups)."""
    first, count = span
    tid, _, _ = cute.arch.thread_idx()
    source = mW.iterator.toint() + Int64(first) * (16 * op.k)
    target = Int32(sW.iterator.toint())
    each = op.k // 8
    for v in cutlass.range(tid, count * 8 * each, op.mix.threads, unroll=4):
        row, i = v // each, v % each
        cute.arch.inline_ptx(
            "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
            read_only_args=[target + row * (4 * op.pitch) + i * 16, source + Int64(v) * 16],
        )
    cute.arch.inline_ptx("cp.async.commit_group;")


@cute.jit
def box_at(io: Io, at: tuple, op: cutlass.Constexpr):
    """Address of vector i of row m of y of an instance, in the box: at = (instance, m, i)."""
    n, m, i = at
    number = (n * op.box.rows + m) * op.box.vectors + i
    return io.box.iterator.toint() + Int64(number) * 32


@cute.jit
def load_x(io: Io, n: Int32, sX: cute.Tensor, flag: Uint32, op: cutlass.Constexpr):
    """sX[row, k / 2 words] = bf(x_n + y_{n-1}), as soon as y is there."""
    tid, _, _ = cute.arch.thread_idx()
    gX = cute.logical_divide(cute.recast_tensor(pick(io.x, n), Uint32), (None, 4))
    sV = cute.logical_divide(sX, (None, 4))
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rY = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rSeen = cute.make_rmem_tensor(cute.make_layout((8,)), Uint32)
    for v in cutlass.range(tid, op.box.rows * op.box.vectors, op.mix.threads, unroll=1):
        m, i = v // op.box.vectors, v % op.box.vectors
        cute.autovec_copy(gX[m, (None, i)], rX)
        if n > 0:
            address = box_at(io, (n - 1, m, i), op)
            look(address, rSeen, op.box)
            take(address, rSeen, rY, flag, op.box)
            for e in cutlass.range_constexpr(4):
                rX[e] = add_bf16x2(rX[e], rY[e])
        cute.autovec_copy(rX, sV[m, (None, i)])


@cute.jit
def multiply(
    sX: cute.Tensor, sW: cute.Tensor, sC: cute.Tensor, count: Int32, op: cutlass.Constexpr
):
    """sC[row, column, warp] = this warp's share of k of the CTA's products."""
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid // 32, tid % 32
    sV = cute.logical_divide(sX, (None, 4))
    sU = cute.logical_divide(sW, (None, 4))
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.per)), Float32)
    rC.fill(0.0)
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    if warp < op.warps:
        for b in cutlass.range(op.k // 32 // op.warps, unroll=1):
            i = (b * op.warps + warp) * 4 + lane % 4
            cute.autovec_copy(sV[lane // 4, (None, i)], rX)
            for g in cutlass.range_constexpr(op.per):
                if g < count:
                    cute.autovec_copy(sU[g * 8 + lane // 4, (None, i)], rW)
                    mma_k32(rC[None, g], rX, tuple(rW[e] for e in range(4)))
        for g in cutlass.range_constexpr(op.per):
            for e in cutlass.range_constexpr(2):
                sC[lane // 4, g * 8 + lane % 4 * 2 + e, warp] = rC[e, g]


@cute.jit
def send_sums(sC: cute.Tensor, span: tuple, flag: Uint32, link: Link, op: cutlass.Constexpr):
    """Add the warps' shares in their order, round, and send whole vectors: eight lanes have one."""
    first, count = span
    tid, _, _ = cute.arch.thread_idx()
    width = op.per * 8
    rP = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for item in cutlass.range(tid, 8 * width, op.mix.threads, unroll=1):
        r, c = item // width, item % width
        acc = Float32(0.0)
        for w in cutlass.range(op.warps, unroll_full=True):
            acc += sC[r, c, w]
        word = pack_bf16(acc, cute.arch.shuffle_sync_down(acc, offset=1))
        for e in cutlass.range_constexpr(4):
            rP[e] = cute.arch.shuffle_sync_down(word, offset=2 * e) if e > 0 else word
        if c % 8 == 0 and r < op.wire.rows and c // 8 < count:
            send_both(rP, (Int32(r), first + c // 8), flag, link, op.wire)


@cute.jit
def mix_row(io: Io, n: Int32, m: Int32, flag: Uint32, link: Link, op: cutlass.Constexpr):
    """Row m of instance n: the ranks' sum, the prefix, the mix; y also into the box."""
    tid, _, _ = cute.arch.thread_idx()
    shape, rows = op.mix, op.bank_rows
    prefix = pick([io.x0, io.prefix], Int32(1) if n > 0 else Int32(0))
    mix = Mix(
        prefix, io.prefix, None, None, io.bank, pick(io.norm, n), pick(io.proj, n), pick(io.out_norm, n),
        pick(io.y, n),
    )  # fmt: skip
    sources = n if n < rows else Int32(rows)
    row = n if n < rows else Int32(-1)
    state = MixState(sources, row, Int32(1), Int32(0))
    rV = cute.make_rmem_tensor(cute.make_layout((8, shape.vectors, shape.bank + 1)), BFloat16)
    rV.fill(0.0)
    load_bank(mix, state, rV, m, shape)
    rW = cute.make_rmem_tensor(cute.make_layout((8, shape.vectors)), Float32)
    for v in cutlass.range_constexpr(shape.vectors):
        i = v * shape.threads + tid
        rW[None, v].store(eight(mix.norm, i) * eight(mix.proj, i))
    total, warps = shape.bank + 1, shape.threads // 32
    sPart = smem(Float32, (2, total, warps), (1, 2, 2 * total))
    sScore = smem(Float32, (total,), (1,))
    score_bank(state, rV, rW, (sPart, sScore), shape)
    rOwn = cute.make_rmem_tensor(cute.make_layout((4, shape.vectors)), Uint32)
    rOwn.fill(0)
    for v in cutlass.range_constexpr(shape.vectors):
        at = (m, v * shape.threads + tid)
        from_mail(rOwn[None, v], at, flag, link, op.wire)
        receive(rOwn[None, v], at, flag, link, op.wire)
    for v in cutlass.range_constexpr(shape.vectors):
        at = (m, v * shape.threads + tid)
        update_prefix(mix, state, rV[None, v, shape.bank], rOwn[None, v], at)
    finish_mix(mix, rV, rW, (sPart, sScore), (m, state.closing), shape)
    rY = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rWord = cute.recast_tensor(rY, Uint32)
    for v in cutlass.range_constexpr(shape.vectors):
        i = v * shape.threads + tid
        if i < op.box.vectors:
            cute.autovec_copy(by_eight(mix.y)[m, (None, i)], rY)
            put(box_at(io, (n, m, i), op), rWord, flag, op.box)


@cute.kernel
def stack_kernel(io: Io, link: Link, op: cutlass.Constexpr):
    """Grid (ctas), cooperative. CTA c has groups c per ... of the product's columns; CTA ctas - 1 - m mixes row m."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    flag = new_flag(link, Int32(0))
    first = cta * op.per
    left = op.groups - first
    count = Int32(0)
    if left > 0:
        count = left if left < op.per else Int32(op.per)
    row = op.ctas - 1 - cta
    sW = smem(Uint32, (op.per * 8, op.pitch), (op.pitch, 1))
    sX = smem(Uint32, (8, op.k // 2), (op.k // 2 + 4, 1))
    sC = smem(Float32, (8, op.per * 8, op.warps), (1, 8, op.per * 64))
    for i in cutlass.range(tid, 8 * (op.k // 2), op.mix.threads, unroll=1):
        sX[i // (op.k // 2), i % (op.k // 2)] = Uint32(0)
    fill(io.w[0], sW, (first, count), op)
    cute.arch.sync_threads()
    for n in cutlass.range(op.layers, unroll=1):
        here = Link(link.own, link.peer, link.epochs, link.rank, n)
        if count > 0:
            load_x(io, n, sX, flag, op)
        cute.arch.inline_ptx("cp.async.wait_all;")
        cute.arch.sync_threads()
        if count > 0:
            multiply(sX, sW, sC, count, op)
        cute.arch.sync_threads()
        if n + 1 < op.layers:
            fill(pick(io.w, n + 1), sW, (first, count), op)
        if count > 0:
            send_sums(sC, (first, count), flag, here, op)
        if row < op.wire.rows:
            mix_row(io, n, row, flag, here, op)
    if row == 0 and tid == 0:
        link.epochs[0, 0] = Int32(flag)


def stack_shape(t, cfg):
    d = cfg.dims
    if d.rows > 8:
        raise ValueError("the stack has at most eight rows")
    mix = Mix(None, None, None, None, t.outputs.bank, None, None, None, t.outputs.y[0])
    shape = receive_shape(mix, cfg)
    groups, spare = d.hidden // 8, min(4, cfg.ctas // 2)
    per = -(-groups // (cfg.ctas - spare))
    warps = divisor_below(d.kda_dim // 32, shape.mix.threads // 32)
    box = Wire(d.rows, d.kda_dim // 8, True, False, cfg.spin_limit, True)
    return Stack(d.layers, d.kda_dim, cfg.ctas, per, warps, d.bank_rows, shape.mix, shape.wire, box)


def workspace(dims, cfg):
    check(dims)
    box = (dims.layers, dims.rows, dims.kda_dim // 8, 8)
    return {
        **mailbox(dims.layers, dims.rows, dims.hidden, cfg),
        "box": ("u32", box, "zero", "persistent"),
    }


@cute.jit
def prepare(t, cfg, stream):
    empty_mail(t.workspace.mail, cfg, stream)


@cute.jit
def step(t, cfg, stream):
    """As the chain of launches in oproj_allreduce."""
    layers = t.weights.layers
    op = stack_shape(t, cfg)
    names = ("o_proj", "res_norm", "res_proj", "out_norm")
    w, norm, proj, out_norm = (tuple(getattr(x, n) for x in layers) for n in names)
    io = Io(
        t.inputs.x0, tuple(t.inputs.x), w, norm, proj, out_norm, tuple(t.outputs.y), t.outputs.prefix,
        t.outputs.bank, t.workspace.box,
    )  # fmt: skip
    link = Link(t.workspace.mail, t.peers[0].workspace.mail, t.workspace.epochs, t.rank, Int32(0))
    stack_kernel(io, link, op).launch(
        grid=(op.ctas, 1, 1), block=(op.mix.threads, 1, 1), stream=stream, cooperative=True, min_blocks_per_mp=1
    )  # fmt: skip
