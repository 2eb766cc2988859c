"""MXFP4 codes of the tile kernel: from the ring to bf16 operands of an MMA, exactly, and products of sixteen rows.

`c` is any context with a ring, a warp and a lane: of the tile kernel or of the decode step.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32

from targets.kimi_k3.seeds.persistent.row_products import mma_rows
from targets.kimi_k3.seeds.persistent.tile_plan import CODE_TILE

CODE_SCALE_T = 2.0**62
"""Expanded codes are 2^-62 of their value."""


@cute.jit
def spread(word: Uint32, scale: Uint32):
    """As `latent_moe.expand`, two instructions in seven cheaper: a product makes two copies of a nibble, 6 and 12 bits
    up, of which one gives the magnitude and the other the sign. Multiplications run beside the logic, which is scarce.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 m, y;
        and.b32 m, {$r0}, 0x000F000F;  mul.lo.u32 m, m, 0x1040;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w0}, m, {$r1};
        and.b32 m, {$r0}, 0x00F000F0;  mul.lo.u32 m, m, 0x104;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w1}, m, {$r1};
        shr.b32 y, {$r0}, 8;
        and.b32 m, y, 0x000F000F;      mul.lo.u32 m, m, 0x1040;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w2}, m, {$r1};
        and.b32 m, y, 0x00F000F0;      mul.lo.u32 m, m, 0x104;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w3}, m, {$r1};
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word, scale],
    )


@cute.jit
def spread_packed(word: Uint32, scale: Uint32):
    """`spread` of a word of `tile_pack`: twelve instructions for eight codes instead of seventeen, and five instead of
    nine that are logic or shifts. A product moves the word up; bit 31 of the factor adds a bit where nothing is
    carried, and keeps ptxas from making a shift of the product. lop3 0x28 is (a ^ b) & c.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 a, b, c, d;
        shf.r.wrap.b32 b, {$r0}, {$r0}, 6;
        mul.lo.u32 a, {$r0}, 0x80000100;        lop3.b32 a, a, {$r0}, 0x81C081C0, 0x28;
        mul.lo.u32 c, {$r0}, 0x80000010;        mul.lo.u32 d, b, 0x80000010;
        and.b32 b, b, 0x81C081C0;               and.b32 c, c, 0x81C081C0;
        and.b32 d, d, 0x81C081C0;               mul.rn.bf16x2 {$w0}, a, {$r1};
        mul.rn.bf16x2 {$w1}, b, {$r1};          mul.rn.bf16x2 {$w2}, c, {$r1};
        mul.rn.bf16x2 {$w3}, d, {$r1};
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word, scale],
    )


@cute.jit
def operands(word: Uint32, scale: Uint32, op: cutlass.Constexpr):
    """Four bf16 pairs of a word of the ring, codes (j, j + 4) in pair j."""
    if cutlass.const_expr(op.packed):
        found = spread_packed(word, scale)
    else:
        found = spread(word, scale)
    return found


@cute.jit
def scale_of(byte: Uint32):
    """As `scale_word`, a multiplication instead of three instructions of logic."""
    return byte * Uint32(0x00800080) + Uint32(0x20002000)


@cute.jit
def group_of(c: Any, at_code: Int32, at_scale: Int32):
    """(codes, factor) of one group of 32: four words from the ring, 16 bytes times `at_code` in."""
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    cute.autovec_copy(cute.local_tile(c.ring, (4,), (at_code,)), rW)
    byte = cute.recast_tensor(c.ring, Uint8)[at_scale]
    return rW, scale_of(Uint32(byte) & Uint32(0xFF))


@cute.jit
def codes_times(
    rC: cute.Tensor, columns: tuple, a: tuple, b: tuple, rX: cute.Tensor, op: cutlass.Constexpr
):
    """rC[4, columns] += a group of row g and one of row g + 8 times the same 32 columns of x, rX words [4, 4]; times
    2^-62. Products on one column wait for each other, some 35 cycles each, those on several do not."""
    for i in cutlass.range_constexpr(4):
        mma_rows(
            rC[None, columns[i % len(columns)]], operands(a[0][i], a[1], op), operands(b[0][i], b[1], op),
            rX[None, i],
        )  # fmt: skip


def sum_columns(v, op):
    """Columns of sums that chunk v adds to: two of its own for one token, whose kernels have the registers."""
    return (2 * v, 2 * v + 1) if op.tokens == 1 else (0,)


def sums_of(chunks, op):
    """How many columns chunks add to."""
    return 1 + max(max(sum_columns(v, op)) for v in range(chunks))


@cute.jit
def join_columns(rC: cute.Tensor):
    """Column 0 of rC[4, columns] = the sum of all."""
    for v in cutlass.range_constexpr(1, rC.shape[1]):
        for e in cutlass.range_constexpr(4):
            rC[e, 0] = rC[e, 0] + rC[e, v]


@cute.jit
def wanted(c: Any, op: cutlass.Constexpr):
    """How many experts the tokens want."""
    found = Int32(op.d.topk)
    if cutlass.const_expr(op.tokens > 1):
        found = c.count[0]
    return found


@cute.jit
def unit_times(c: Any, slot: Int32, rL: cute.Tensor, op: cutlass.Constexpr):
    """rC[4] of sixteen rows, even ones of w1 and odd ones of w3; this warp's columns."""
    g = op.up
    each = 2 if op.tokens == 1 else 1
    rC = cute.make_rmem_tensor(cute.make_layout((4, each * op.up_chunks)), Float32)
    rC.fill(0.0)
    half, i = c.lane // 4 % 2, c.lane // 8
    code = (slot * op.stage + half * op.up_block) // 16 + i * (g.code_bytes // 16)
    scale = slot * op.stage + op.up_scales + (half * CODE_TILE + i) * g.scale_bytes
    for v in cutlass.range_constexpr(op.up_chunks):
        j = (c.warp * op.up_chunks + v) * 4 + c.lane % 4
        codes_times(
            rC, tuple(range(each * v, each * v + each)), group_of(c, code + j, scale + j),
            group_of(c, code + 4 * (g.code_bytes // 16) + j, scale + 4 * g.scale_bytes + j), rL[None, None, v],
            op,
        )  # fmt: skip
    join_columns(rC)
    return rC


@cute.jit
def piece_times(
    c: Any, piece: Int32, tile: Int32, v: Any, given: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """rC += chunk v of the rows 16 tile .. of the piece at byte `piece` of the ring times rX; given = (rC, its columns,
    rX, rows)."""
    rC, columns, rX, n = given
    g = op.down
    groups = op.d.expert_dim // 32
    a = tile * 16 + c.lane // 4
    b = a + 8 if a + 8 < n else n - 1
    a = a if a < n else n - 1
    scales = piece + op.down_rows * g.code_bytes
    j = 4 * v + c.lane % 4
    j = j if j < groups else groups - 1
    codes_times(
        rC, columns, group_of(c, piece // 16 + a * (g.code_bytes // 16) + j, scales + a * g.scale_bytes + j),
        group_of(c, piece // 16 + b * (g.code_bytes // 16) + j, scales + b * g.scale_bytes + j), rX, op,
    )  # fmt: skip
