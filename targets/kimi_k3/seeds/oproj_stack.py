"""The chain of o_proj, all-reduce between two GPUs, AttnRes and norm in one launch per rank, columns staying in place.

A CTA makes some columns of the product, takes the other rank's partials of the same columns, and keeps the prefix and
the bank of these columns in registers for the whole chain. A row is never in one place: what CTAs tell each other are
sums (squares and scores of the sources, then the square of the mix) and those columns of the mix that the next product
reads, in words that say themselves which step they are of. Weights come through a ring of column groups meanwhile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.allreduce_attn_res import check
from targets.kimi_k3.seeds.common import divisor_below, smem
from targets.kimi_k3.seeds.parity import post_word
from targets.kimi_k3.seeds.stack_parts import (
    BANK,
    FIELDS,
    Ahead,
    Ctx,
    Row,
    Stack,
    consumers,
    pair_of,
    word_into,
    words_at,
)
from targets.kimi_k3.seeds.stack_product import bring_x, look_ahead, multiply, produce, write_y
from targets.kimi_k3.seeds.stack_row import exchange_row, keep, post_bank

TUNABLES = {
    "ctas": (128, 64, 6),
    "warps": (16, 12, 8),
    "eager": (False, True),
    "paired": (True, False),
    "spin_limit": (0, 200_000),
}
SHARED_MEMORY = 232448
"""Of a CTA on sm_90a, sm_100a and sm_103a."""


@cute.jit
def rows_of(op: cutlass.Constexpr):
    """Registers of a row and of what is loaded ahead, all zero."""
    word = lambda *shape: cute.make_rmem_tensor(cute.make_layout(shape), Uint32)  # noqa: E731
    real = lambda *shape: cute.make_rmem_tensor(cute.make_layout(shape), Float32)  # noqa: E731
    row = Row(
        word(op.turns), word(op.turns, op.bank), real(2, op.turns), real(1), real(2, op.turns)
    )
    a = Ahead(word(2, op.units), word(2, op.units), word(op.turns), word(op.turns), word(op.turns))
    for r in (row.prefix, row.bank, *a):
        r.fill(0)
    for r in (row.mix, row.square, row.weight):
        r.fill(0.0)
    return row, a


@cute.jit
def consume(c: Ctx, cta: Int32, ends: tuple, op: cutlass.Constexpr):
    """All instances. ends: addresses of x0, and of the bank and the prefix that are put out."""
    x0, bank_out, prefix_out = ends
    row, a = rows_of(op)
    look_ahead(c, Int32(0), a, op)
    if c.warp < op.rows:
        for t in cutlass.range_constexpr(op.turns):
            _, i, there = pair_of(c, t)
            if there:
                word = cute.make_tensor(row.prefix.iterator + t, cute.make_layout((1,)))
                words_at(x0, c.row * (op.hidden // 2) + i, word, 1)
        keep(c, Int32(-1), row, a, op)
        post_bank(c, Int32(0), cta, row, op)
    for n in cutlass.range(op.layers, unroll=1):
        bring_x(c, n, a, op)
        consumers(op)
        multiply(c, n, op)
        look_ahead(c, n + 1, a, op)
        consumers(op)
        if c.warp < op.rows:
            exchange_row(c, n, cta, row, a, bank_out, op)
            write_y(c, n, row, a, op)
    if c.warp < op.rows:
        for t in cutlass.range_constexpr(op.turns):
            _, i, there = pair_of(c, t)
            if there:
                word_into(prefix_out, c.row * (op.hidden // 2) + i, row.prefix[t])


class Boxes(NamedTuple):
    """Persistent memory. own, peer: mailboxes u32 [instances, M, hidden / 2, 2]; scores f32 [instances, M, bank + 2,
    CTAs]; squares f32 [instances, M, CTAs]; mixed f32 [instances, M, k]; epochs i32 [1]: steps so far."""

    own: Any
    peer: Any
    scores: Any
    squares: Any
    mixed: Any
    epochs: Any


@cute.jit
def open_cta(layers: tuple, boxes: Boxes, op: cutlass.Constexpr):
    """The context of a thread; ends with a barrier of the CTA."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    first = cta * op.per
    left = Int32(op.hidden // 8) - first
    count = left if left < op.per else Int32(op.per)
    bars = smem(Int64, (2 * op.per,), (1,)).iterator
    words = cutlass.memory.SmemAllocator().allocate_tensor(
        Uint32, cute.make_layout((op.width * op.pitch // 4,)), byte_alignment=128
    )
    c = Ctx(
        tid % 32, warp, first, count, warp % op.rows, warp // op.rows,
        smem(Int64, (op.layers * len(FIELDS),), (1,)), bars, bars + op.per, words,
        smem(Uint32, (op.rows * (op.k // 2 + 4),), (1,)), smem(Float32, (op.split * op.rows * op.width,), (1,)),
        smem(Float32, (op.rows,), (1,)), boxes.own.iterator.toint(),
        boxes.peer.iterator.toint(), boxes.scores.iterator.toint(), boxes.squares.iterator.toint(),
        boxes.mixed.iterator.toint(),
        Uint32(cute.arch.load(boxes.epochs.iterator, Int32, sem="relaxed", scope="gpu") + 1),
    )  # fmt: skip
    if tid == 0:
        for g in cutlass.range_constexpr(op.per):
            cute.arch.mbarrier_init(c.full + g, 1)
            cute.arch.mbarrier_init(c.empty + g, op.split)
    for n in cutlass.range_constexpr(op.layers):
        if tid == 32 * (n % op.warps):
            for f in cutlass.range_constexpr(len(FIELDS)):
                c.table[n * len(FIELDS) + f] = layers[f][n].iterator.toint()
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return c


@cute.kernel
def stack_kernel(layers: tuple, ends: tuple, boxes: Boxes, op: cutlass.Constexpr):
    """Grid (ctas), cooperative; a warp more than op.warps brings the weights. layers: tensors by field."""
    cta, _, _ = cute.arch.block_idx()
    c = open_cta(layers, boxes, op)
    if c.warp == op.warps:
        produce(c, op)
    else:
        consume(c, cta, tuple(x.iterator.toint() for x in ends), op)
        if cta == 0 and c.warp == 0 and c.lane == 0:
            # every CTA has posted by now, so every CTA has read the number
            post_word(boxes.epochs.iterator.toint(), c.flag)


def stack_shape(dims, cfg):
    check(dims)
    if dims.rows > 8 or dims.bank_rows > BANK or dims.kda_dim > dims.hidden:
        raise ValueError("the stack has at most eight rows, and eight rows of the bank")
    groups = dims.hidden // 8
    per = -(-groups // cfg.ctas)
    split = divisor_below(dims.kda_dim // 32, cfg.warps)
    op = Stack(
        dims.layers, dims.rows, dims.hidden, dims.kda_dim, -(-groups // per), per, max(split, dims.rows), split,
        dims.bank_rows, dims.eps, cfg.eager, cfg.paired, cfg.spin_limit,
    )  # fmt: skip
    if op.shared > SHARED_MEMORY:
        raise ValueError(f"{op.shared} bytes of shared memory: too many columns of k a CTA")
    return op


def workspace(dims, cfg):
    op = stack_shape(dims, cfg)
    n, m = op.layers, op.rows
    return {
        "mail": ("u32", (n, m, op.hidden // 2, 2), "zero", "persistent"),
        "scores": ("f32", (n, m, op.bank + 2, op.ctas4), "zero", "persistent"),
        "squares": ("f32", (n, m, op.ctas4), "zero", "persistent"),
        "mixed": ("f32", (n, m, op.k), "zero", "persistent"),
        "epochs": ("i32", (1,), "zero", "persistent"),
    }


@cute.jit
def step(t, cfg, stream):
    """As the chain of launches in oproj_allreduce."""
    op = stack_shape(cfg.dims, cfg)
    w = t.workspace
    names = ("o_proj", "res_norm", "res_proj", "out_norm")
    layers = tuple(tuple(getattr(x, n) for x in t.weights.layers) for n in names)
    layers = (*layers, tuple(t.inputs.x), tuple(t.outputs.y))
    boxes = Boxes(w.mail, t.peers[0].workspace.mail, w.scores, w.squares, w.mixed, w.epochs)
    ends = (t.inputs.x0, t.outputs.bank, t.outputs.prefix)
    stack_kernel(layers, ends, boxes, op).launch(
        grid=(op.ctas, 1, 1), block=((op.warps + 1) * 32, 1, 1), stream=stream, cooperative=True, min_blocks_per_mp=1
    )  # fmt: skip
