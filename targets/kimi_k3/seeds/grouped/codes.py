"""An expert's codes as bf16, sixteen rows at a time, and their product with up to eight pairs."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from targets.kimi_k3.seeds.latent_moe_codes import scale_word, scale_words
from targets.kimi_k3.seeds.persistent.row_products import mma_rows
from targets.kimi_k3.seeds.persistent.tile_codes import spread


@dataclass(frozen=True)
class Tiling:
    """Compile-time sizes of one expert product: `rows` of a matrix, `groups` of 32 codes along k, four to a step.

    A warp multiplies `tile` x 16 rows at a time and has `ring` pieces in registers: up, steps along k, which the warps
    of a CTA share; down, tiles of all k, of which it makes `turns` rings.
    """

    topk: int
    rows: int
    groups: int
    warps: int
    tile: int
    ring: int
    turns: int
    pdl: bool
    nv: bool

    @property
    def steps(self):
        return -(-self.groups // 4)

    @property
    def height(self):
        """Rows of each matrix that a CTA of the up product makes."""
        return 16 * self.tile


@cute.jit
def times(
    rC: cute.Tensor, rCode: cute.Tensor, rScale: cute.Tensor, rX: cute.Tensor, nv: cutlass.Constexpr
):
    """rC[4] += this lane's 32 codes of two rows, rCode[4, 2], times its 32 columns of x, rX[4, 4]."""
    if cutlass.const_expr(nv):
        a, b = scale_words(rScale[0, 0]), scale_words(rScale[0, 1])
        for i in cutlass.range_constexpr(4):
            two = tuple(spread(rCode[i, r], (a, b)[r][i // 2]) for r in range(2))
            mma_rows(rC, *two, rX[None, i])
    else:
        a, b = scale_word(rScale[0, 0]), scale_word(rScale[0, 1])
        for i in cutlass.range(4, unroll_full=True):
            mma_rows(rC, spread(rCode[i, 0], a), spread(rCode[i, 1], b), rX[None, i])


@cute.jit
def load_columns(
    gX: cute.Tensor, row: Int32, group: Int32, there: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):
    """rX[4, 4] = 32 columns of a row of x, in the order of `expand`; unchanged where there = 0 or k ends."""
    if there == 1 and group < op.groups:
        for i in cutlass.range_constexpr(4):
            cute.autovec_copy(gX[row, (None, group * 4 + i)], rX[None, i])
