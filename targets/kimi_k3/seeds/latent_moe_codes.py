"""Part of the latent MoE: 4-bit expert matrices (MXFP4, NVFP4), their codes as bf16, and products with them.

Which expert, row and group is the caller's affair; nothing is written to memory here.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Uint16, Uint32

from targets.kimi_k3.seeds.common import mma_k32

CODE_SCALE = 2.0**62
"""Expanded weights are 2^-62 of their value (see `expand`); sums are multiplied back in f32, exactly."""


@dataclass(frozen=True)
class Experts:
    """Compile-time sizes of one expert product: `groups` of 32 codes along k, four of them (a step) per warp load."""

    topk: int
    rows: int
    groups: int
    warps: int
    unroll: int
    pdl: bool
    nv: bool = False

    @property
    def steps(self):
        return -(-self.groups // 4)


class Codes(NamedTuple):
    """One expert matrix of every expert: codes u8 [experts, rows, k / 2], scales u8 [experts, rows, k / 32]. NVFP4:
    scales e4m3 [experts, rows, k / 16] and factor f32 [experts]."""

    codes: Any
    scales: Any
    factor: Any = None


@cute.jit
def scale_word(byte: Uint32):
    """UE8M0 byte -> 2^(byte - 127 + 64) in both halves of a bf16 pair."""
    half = (byte + Uint32(64)) << 7
    return half | (half << 16)


@cute.jit
def scale_words(pair: Uint32):
    """Two E4M3 of NVFP4 in bits 0..15 -> each times 2^64 in both halves of a bf16 pair, exact; zero becomes 2^-63, with
    which every product vanishes."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 two;
        .reg .b32 x;
        .reg .f16 a, b;
        .reg .f32 c, d;
        cvt.u16.u32 two, {$r0};
        cvt.rn.f16x2.e4m3x2 x, two;
        mov.b32 {a, b}, x;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        cvt.rn.bf16x2.f32 x, c, c;
        add.u32 {$w0}, x, 0x20002000;
        cvt.rn.bf16x2.f32 x, d, d;
        add.u32 {$w1}, x, 0x20002000;
        }""",
        write_only_types=[Uint32, Uint32],
        read_only_args=[pair],
    )


@cute.jit
def expand(word: Uint32, scale: Uint32):
    """Eight codes -> four bf16 pairs, codes (j, j + 4) in pair j: value x 2^-62 x group scale, exact.

    The three low bits of E2M1 land on bf16's lowest exponent bits and highest mantissa bit: value x 2^-126 (0.5 is a
    subnormal there). The factor in `scale` is 2^64 too large. One block of PTX, because it is repeated so often that
    tracing it operation by operation would dominate compile time. lop3 0xEA is (a & b) | c.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 m, s;
        shl.b32 m, {$r0}, 6;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 12;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w0}, m, {$r1};
        shl.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 8;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w1}, m, {$r1};
        shr.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 4;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w2}, m, {$r1};
        shr.b32 m, {$r0}, 6;  and.b32 m, m, 0x01C001C0;
        lop3.b32 m, {$r0}, 0x80008000, m, 0xEA;          mul.rn.bf16x2 {$w3}, m, {$r1};
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word, scale],
    )


@cute.jit
def pair_up(rX: cute.Tensor):
    """Reorder eight bf16 in four words from (0 1)(2 3)(4 5)(6 7) to (0 4)(1 5)(2 6)(3 7), as `expand` makes them."""
    even = cute.arch.prmt(rX[0], rX[2], Uint32(0x5410))
    odd = cute.arch.prmt(rX[0], rX[2], Uint32(0x7632))
    rX[2], rX[3] = (
        cute.arch.prmt(rX[1], rX[3], Uint32(0x5410)),
        cute.arch.prmt(rX[1], rX[3], Uint32(0x7632)),
    )
    rX[0], rX[1] = even, odd


@cute.jit
def load_codes(
    w: Codes, at: tuple, rCode: cute.Tensor, rScale: cute.Tensor, groups: cutlass.Constexpr
):
    """32 codes (16 bytes) and their one or two scales, of at = (expert, row, group); scale 0 beyond the last group."""
    expert, row, group = at
    stream = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), Uint32, num_bits_per_copy=128,
        load_cache_mode=cute.nvgpu.LoadCacheMode.STREAMING,
    )  # fmt: skip
    gCode = cute.logical_divide(cute.recast_tensor(w.codes, Uint32), (None, None, 4))
    if group < groups:
        cute.copy(stream, gCode[expert, row, (None, group)], rCode)
        if cutlass.const_expr(w.factor is None):
            rScale[0] = w.scales[expert, row, group].to(Uint32)
        else:
            rScale[0] = cute.recast_tensor(w.scales, Uint16)[expert, row, group].to(Uint32)
    else:
        rCode.fill(0)


@cute.jit
def accumulate(
    rC: cute.Tensor, rX: cute.Tensor, rCode: cute.Tensor, rScale: cute.Tensor, nv: cutlass.Constexpr
):
    """rC[4] += this lane's 32 columns of x (rX[4, 4], paired up) times its 32 codes: eight MMAs."""
    if cutlass.const_expr(nv):
        scales = scale_words(rScale[0])
        for i in cutlass.range_constexpr(4):
            mma_k32(rC, rX[None, i], expand(rCode[i], scales[i // 2]))
    else:
        scale = scale_word(rScale[0])
        for i in cutlass.range(4, unroll_full=True):
            mma_k32(rC, rX[None, i], expand(rCode[i], scale))
