"""Products of many rows: y = x W^T on tensor cores, a tile of W times all tokens of a CTA.

How its sizes are chosen, and its launches, are in `product`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import begin, smem
from targets.kimi_k3.seeds.gemv_kernel import Extra, finish
from targets.kimi_k3.seeds.persistent.row_products import mma_rows


class Output(NamedTuple):
    """One product of an x: its weights, where it goes, and the extras of its epilogue, `plus` and `norm` not among
    them."""

    w: Any
    y: Any
    ex: Extra


@dataclass(frozen=True)
class Product:
    """Compile-time shape of one product: y has `n` columns, `k` columns of x are used.

    `situ`: W holds n gate rows, then n up rows, and y = bf(SiTU(bf(gate), bf(up))). A CTA makes `tile` x 16 columns of
    `tokens` x 8 rows; its warps share k in blocks of 32 columns, of which each has `ring` in registers.
    """

    n: int
    k: int
    warps: int
    tile: int
    tokens: int
    ring: int
    situ: bool
    alone: bool
    pdl: bool

    @property
    def blocks(self):
        return self.k // 32

    @property
    def width(self):
        return self.tile * 16

    @property
    def parts(self):
        """Rows of W, in units of sixteen, that a CTA reads."""
        return self.tile * (2 if self.situ else 1)

    @property
    def ctas(self):
        """Of every group of tokens."""
        return -(-self.n // self.width)

    @property
    def pitch(self):
        """Words from token to token of a warp's sums: four of padding keep a store's lanes in different banks."""
        return self.parts * 16 + 4

    @property
    def sums(self):
        return self.pitch * self.tokens * 8 * self.warps

    @property
    def whole(self):
        return self.n % self.width == 0


@cute.jit
def load_weight(gW: cute.Tensor, row: Int32, at: Int32, rW: cute.Tensor, alone: cutlass.Constexpr):
    """Sixteen bytes of a row that only this CTA reads (`alone`), or others at about the same time."""
    if cutlass.const_expr(alone):
        stream = cute.make_copy_atom(
            cute.nvgpu.CopyG2ROp(), Uint32, num_bits_per_copy=128,
            load_cache_mode=cute.nvgpu.LoadCacheMode.STREAMING,
        )  # fmt: skip
        cute.copy(stream, gW[row, (None, at)], rW)
    else:
        cute.autovec_copy(gW[row, (None, at)], rW)


@cute.jit
def load_tiles(gW: cute.Tensor, cta: Int32, block: Int32, rW: cute.Tensor, op: cutlass.Constexpr):
    """16 bytes of rows g and g + 8 of each tile of W, rW[4, 2, part], of a block of columns."""
    tid, _, _ = cute.arch.thread_idx()
    for p in cutlass.range_constexpr(op.parts):
        for r in cutlass.range_constexpr(2):
            row = (cta * op.tile + p % op.tile) * 16 + 8 * r + tid % 32 // 4
            if cutlass.const_expr(not op.whole):
                row = row if row < op.n else Int32(op.n - 1)
            row += p // op.tile * op.n
            load_weight(gW, row, block * 4 + tid % 4, rW[None, r, p], op.alone)


@cute.jit
def load_tokens(gX: cute.Tensor, block: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """The same columns of row g of each eight tokens, rX[4, tokens]; absent rows keep the zeros that rX starts with."""
    tid, _, _ = cute.arch.thread_idx()
    _, group, _ = cute.arch.block_idx()
    at, rows = block * 4 + tid % 4, gX.shape[0]
    for j in cutlass.range_constexpr(op.tokens):
        m = (group * op.tokens + j) * 8 + tid % 32 // 4
        if cutlass.const_expr(rows % (8 * op.tokens) == 0):
            cute.autovec_copy(gX[m, (None, at)], rX[None, j])
        elif m < rows:
            cute.autovec_copy(gX[m, (None, at)], rX[None, j])


@cute.jit
def multiply(gW: cute.Tensor, gX: cute.Tensor, cta: Int32, rC: cute.Tensor, op: cutlass.Constexpr):
    """rC[4, tokens, part] = this warp's blocks of k. The first weights are asked for before x is waited for."""
    tid, _, _ = cute.arch.thread_idx()
    rW = cute.make_rmem_tensor(cute.make_layout((4, 2, op.parts, op.ring)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.tokens, op.ring)), Uint32)
    rC.fill(0.0)
    rX.fill(0)
    for u in cutlass.range_constexpr(op.ring):
        if u * op.warps + tid // 32 < op.blocks:
            load_tiles(gW, cta, u * op.warps + tid // 32, rW[None, None, None, u], op)
    begin(op.pdl)
    for u in cutlass.range_constexpr(op.ring):
        if u * op.warps + tid // 32 < op.blocks:
            load_tokens(gX, u * op.warps + tid // 32, rX[None, None, u], op)
    for turn in cutlass.range(0, op.blocks, op.warps * op.ring, unroll=1):
        for u in cutlass.range_constexpr(op.ring):
            block = turn + u * op.warps + tid // 32
            if block < op.blocks:
                for p in cutlass.range_constexpr(op.parts):
                    for j in cutlass.range_constexpr(op.tokens):
                        mma_rows(rC[None, j, p], rW[None, 0, p, u], rW[None, 1, p, u], rX[None, j, u])  # fmt: skip
            block += op.warps * op.ring
            if block < op.blocks:
                load_tiles(gW, cta, block, rW[None, None, None, u], op)
                load_tokens(gX, block, rX[None, None, u], op)


@cute.jit
def copy_tail(mY: cute.Tensor, mTail: cute.Tensor, op: cutlass.Constexpr):
    """Columns of y beyond the product, eight at a time, shared by all threads of the launch."""
    tid, _, _ = cute.arch.thread_idx()
    cta, group, _ = cute.arch.block_idx()
    ctas, groups, _ = cute.arch.grid_dim()
    rows, columns = mTail.shape
    gY = cute.logical_divide(cute.recast_tensor(mY, Uint32), (None, 4))
    gTail = cute.logical_divide(cute.recast_tensor(mTail, Uint32), (None, 4))
    rT = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    each, threads = columns // 8, op.warps * 32
    first = (group * ctas + cta) * threads + tid
    for i in cutlass.range(first, rows * each, ctas * groups * threads, unroll=1):
        cute.autovec_copy(gTail[i // each, (None, i % each)], rT)
        cute.autovec_copy(rT, gY[i // each, (None, op.n // 8 + i % each)])


@cute.jit
def tile_product(mX: cute.Tensor, y: Output, cta: Int32, sums: cute.Tensor, op: cutlass.Constexpr):
    """The cta-th tile of a product, for the tokens of this CTA's group."""
    tid, _, _ = cute.arch.thread_idx()
    _, group, _ = cute.arch.block_idx()
    g, q = tid % 32 // 4, tid % 4
    gW = cute.logical_divide(cute.recast_tensor(y.w, Uint32), (None, 4))
    gX = cute.logical_divide(cute.recast_tensor(mX, Uint32), (None, 4))
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.tokens, op.parts)), Float32)
    multiply(gW, gX, cta, rC, op)
    shape, stride = (op.parts * 16, op.tokens * 8, op.warps), (1, op.pitch, op.pitch * op.tokens * 8)  # fmt: skip
    sC = cute.make_tensor(sums.iterator, cute.make_layout(shape, stride=stride))
    for p in cutlass.range_constexpr(op.parts):
        for j in cutlass.range_constexpr(op.tokens):
            for i in cutlass.range_constexpr(4):
                sC[p * 16 + i // 2 * 8 + g, j * 8 + 2 * q + i % 2, tid // 32] = rC[i, j, p]
    cute.arch.sync_threads()
    for item in cutlass.range(tid, op.tokens * 8 * op.width, op.warps * 32, unroll=1):
        r, c = item // op.width, item % op.width
        m, n = group * op.tokens * 8 + r, cta * op.width + c
        if m < mX.shape[0] and n < op.n:
            acc, up = Float32(0.0), Float32(0.0)
            for w in cutlass.range(op.warps, unroll_full=True):
                acc += sC[c, r, w]
                if cutlass.const_expr(op.situ):
                    up += sC[op.width + c, r, w]
            finish(acc, up, (m, n), y.y, y.ex, op)


@cute.kernel
def product_kernel(mX: cute.Tensor, outputs: tuple, ops: cutlass.Constexpr):
    """mX bf16 [M, >= k]; of each `Output` w bf16 [n or 2n, k], y bf16 or f32 [M, >= n]; grid (sum of n / 16 tile, M / 8
    tokens).

    The weights are the A operand (16 rows), x is B (8 columns). Each lane takes 16 contiguous bytes of a row, so k is
    permuted alike in A and B. f32 sums, warps added in order, rounded as `Extra` says.
    """
    cta, _, _ = cute.arch.block_idx()
    sums = smem(Float32, (max(op.sums for op in ops),), (1,))
    for i in cutlass.range_constexpr(len(ops)):
        first = sum(op.ctas for op in ops[:i])
        if cutlass.const_expr(len(ops) == 1):
            tile_product(mX, outputs[i], cta, sums, ops[i])
        elif cta >= first and cta < first + ops[i].ctas:
            tile_product(mX, outputs[i], cta - first, sums, ops[i])
        if cutlass.const_expr(outputs[i].ex.tail is not None):
            copy_tail(outputs[i].y, outputs[i].ex.tail, ops[i])
