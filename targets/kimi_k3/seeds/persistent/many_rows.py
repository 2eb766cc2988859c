"""Products of the decode step for several tokens: tiles of a matrix through the ring, tokens in and out of boxes."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from targets.kimi_k3.seeds.persistent.boxes import insist, peek, post
from targets.kimi_k3.seeds.persistent.device import Ctx, words_at
from targets.kimi_k3.seeds.persistent.stages import most, share
from targets.kimi_k3.seeds.persistent.tile_rows import (
    columns_of,
    drain_tiles,
    fill_blocks,
    fill_tiles,
    sum_of,
)


@cute.jit
def fill_matrix(c: Ctx, it: Int32, start: Int64, n: Int32, k: cutlass.Constexpr, op: cutlass.Constexpr):  # fmt: skip
    """Stages of n rows of k columns that lie together; by all lanes of the producer."""
    top = op.tiles_op
    g = top.tile(k, 8)
    if cutlass.const_expr(g.slices == 1):
        it = fill_blocks(c, it, start, n, g, top)
    else:
        it = fill_tiles(c, it, ((start, Int64(2 * k), Int32(0), 1),), n, g, top)
    return it


@cute.jit
def take_tokens(
    c: Ctx, start: Int64, pitch: cutlass.Constexpr, k: cutlass.Constexpr, op: cutlass.Constexpr
):
    """Words [4, steps]: this lane's columns of its token, zeros for tokens that are none; of bf16 in a box, k a token,
    tokens `pitch` elements apart."""
    g = op.tiles_op.tile(k, 8)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.spans)), Uint32)
    rX.fill(0)
    token = c.lane // 4
    if token < op.d.rows and c.warp < g.active:
        mine = start + Int64(token) * (2 * pitch)
        for v in cutlass.range_constexpr(2 * g.spans):
            peek(mine + Int64(columns_of(c, v, g)) * 16, rX[None, v])
        for v in cutlass.range_constexpr(2 * g.spans):
            insist(mine + Int64(columns_of(c, v, g)) * 16, rX[None, v], 2, op)
    cute.arch.sync_warp()
    return rX


@cute.jit
def norm_of(c: Ctx, address: Int64, k: cutlass.Constexpr, op: cutlass.Constexpr):
    """This lane's words of a norm's weights, as `take_tokens` deals columns."""
    g = op.tiles_op.tile(k, 8)
    rN = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.spans)), Uint32)
    rN.fill(0)
    if c.warp < g.active:
        for v in cutlass.range_constexpr(2 * g.spans):
            words_at(address, columns_of(c, v, g), rN[None, v])
    return rN


@cute.jit
def times(c: Ctx, it: Int32, n: Int32, rX: cute.Tensor, k: cutlass.Constexpr, op: cutlass.Constexpr):  # fmt: skip
    """The sums of n rows of k columns and all tokens, for `total_of`. Ends with a barrier of the consumers."""
    top = op.tiles_op
    it = drain_tiles(c, it, (Int32(0), n), rX, top.tile(k, 8), top)
    cute.arch.barrier(barrier_id=1, number_of_threads=op.threads)
    return it


@cute.jit
def total_of(c: Ctx, i: Int32, k: cutlass.Constexpr, op: cutlass.Constexpr):
    """Sum number i = row * tokens + token of `times`."""
    top = op.tiles_op
    return sum_of(c, i, top.tile(k, 8).active, top)


@cute.jit
def post_rows(
    c: Ctx, name: cutlass.Constexpr, turn: Int32, rows: cutlass.Constexpr, k: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """This CTA's share of `rows` sums of every token into a box."""
    first, n = share(rows, c.cta, op.ctas)
    tokens = op.d.rows
    for j in cutlass.range_constexpr(-(-most(rows, op.ctas) * tokens // op.threads)):
        i = c.tid + j * op.threads
        if i < n * tokens:
            place = i % tokens * op.pitch(rows) + first + i // tokens
            post(c, name, turn, place, total_of(c, i, k, op), op)
