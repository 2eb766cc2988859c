"""Part of MLA: what its kernels agree on: sizes known when compiling, rows of the paged latent cache, E4M3 and bf16.

Which page a token lies in is the caller's affair; nothing is written here.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import high, low

MLA_WEIGHTS = ("a_proj", "q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv", "o_proj")

HEADS = 16
"""Heads per CTA: the rows of one MMA; missing heads are zero rows."""


@dataclass(frozen=True)
class Mla:
    """Compile-time sizes. A tile of the context is 8 tokens per warp."""

    heads: int
    q_lora: int
    lora: int
    nope: int
    rope: int
    v: int
    page: int
    splits: int
    warps: int
    eps: float
    pdl: bool
    tokens: int = 1
    fp8: bool = False

    @property
    def width(self):
        return self.lora + self.rope

    @property
    def tile(self):
        return 8 * self.warps

    @property
    def each(self):
        """Columns of the latent that one lane group makes in a warp's share: n-tiles of eight columns."""
        return self.lora // self.warps // 8


def mla_shape(dims, cfg):
    tokens = dims.pages_per_request * dims.page
    tile = 8 * cfg.mla_warps
    busy = max(1, 2 * cfg.sms // dims.rows)
    splits = min(cfg.kv_splits, busy, -(-tokens // tile))
    return Mla(
        dims.mla_heads, dims.q_lora, dims.kv_lora, dims.qk_nope, dims.qk_rope, dims.v_dim, dims.page, splits,
        cfg.mla_warps, dims.eps, cfg.pdl, dims.q, dims.kv == "fp8",
    )  # fmt: skip


def mla_weights(dims):
    """The names of a layer's weights."""
    return (*MLA_WEIGHTS, "k_scale", "q_scale") if dims.kv == "fp8" else MLA_WEIGHTS


@cute.jit
def cache_row(mKv: cute.Tensor, page: Int32, offset: Int32):
    """One token's row of the cache as vectors of eight columns, in words; 64-bit offsets, as caches pass 2^31 bytes."""
    _, size, width = mKv.shape
    row = Int64(page) * size + offset
    pointer = mKv.iterator + cute.assume(row * width, divby=8)
    gRow = cute.make_tensor(pointer, cute.make_layout((1, width), stride=(width, 1)))
    words = mKv.element_type.width // 4
    return cute.logical_divide(cute.recast_tensor(gRow, Uint32), (None, words))


@cute.jit
def to_e4m3(x: Float32):
    """The byte of x rounded to nearest even E4M3, saturating, in bits 0..7."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 pair;
        cvt.rn.satfinite.e4m3x2.f32 pair, {$r0}, {$r1};
        cvt.u32.u16 {$w0}, pair;
        }""",
        write_only_types=[Uint32],
        read_only_args=[Float32(0.0), x],
    )


@cute.jit
def widen(word: Uint32):
    """Four E4M3 as two words of two bf16 each, exactly."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 low, high;
        .reg .b32 x, y;
        .reg .f16 a, b;
        .reg .f32 c, d;
        mov.b32 {low, high}, {$r0};
        cvt.rn.f16x2.e4m3x2 x, low;
        cvt.rn.f16x2.e4m3x2 y, high;
        mov.b32 {a, b}, x;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        cvt.rn.bf16x2.f32 {$w0}, d, c;
        mov.b32 {a, b}, y;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        cvt.rn.bf16x2.f32 {$w1}, d, c;
        }""",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )


@cute.jit
def narrow_query(rQ: cute.Tensor, scale: Float32):
    """Eight bf16 become f8(x / scale), still as bf16."""
    for i in cutlass.range_constexpr(2):
        word = Uint32(0)
        for j in cutlass.range_constexpr(2):
            pair = rQ[2 * i + j]
            word |= to_e4m3(low(pair) / scale) << (16 * j)
            word |= to_e4m3(high(pair) / scale) << (16 * j + 8)
        rQ[2 * i], rQ[2 * i + 1] = widen(word)
