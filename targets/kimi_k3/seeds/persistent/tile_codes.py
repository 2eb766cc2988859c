"""MXFP4 codes of the tile kernel: from the ring to bf16 operands of an MMA, exactly."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32

from targets.kimi_k3.seeds.latent_moe import scale_word
from targets.kimi_k3.seeds.persistent.device import mma_rows
from targets.kimi_k3.seeds.persistent.tile_device import Tiles

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
def group_of(c: Tiles, at_code: Int32, at_scale: Int32):
    """(codes, factor) of one group of 32: four words from the ring, 16 bytes times `at_code` in."""
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    cute.autovec_copy(cute.local_tile(c.ring, (4,), (at_code,)), rW)
    byte = cute.recast_tensor(c.ring, Uint8)[at_scale]
    return rW, scale_word(Uint32(byte) & Uint32(0xFF))


@cute.jit
def codes_times(rC: cute.Tensor, a: tuple, b: tuple, rX: cute.Tensor):
    """rC += a group of row g and one of row g + 8 times the same 32 columns of x, rX words [4, 4]; times 2^-62."""
    for i in cutlass.range_constexpr(4):
        mma_rows(rC, spread(a[0][i], a[1]), spread(b[0][i], b[1]), rX[None, i])


@cute.jit
def wanted(c: Tiles, op: cutlass.Constexpr):
    """How many experts the tokens want."""
    found = Int32(op.d.topk)
    if cutlass.const_expr(op.tokens > 1):
        found = c.count[0]
    return found
