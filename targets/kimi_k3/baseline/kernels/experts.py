"""The routed experts on MXFP4 weights, one (row, slot) pair at a time: codes become float32 in registers.

Codes are read as int32 words of eight; their operand lies in eight planes, so that a word's nibbles meet contiguous
values. Pairs that share an expert read it again: made for few rows.
"""

import triton
import triton.language as tl

from targets.kimi_k3.baseline.kernels.common import (
    SHIFT,
    begin,
    bf,
    decode,
    group_scale,
    situ,
)


@triton.jit
def dot_words(words, x, PLANE: tl.constexpr):
    """[R, BW] f32: each word's eight codes times x[plane, word], x a pointer tensor of the first plane."""
    total = decode(words, 0) * (tl.load(x).to(tl.float32) * SHIFT)
    for i in tl.static_range(1, 8):
        total += decode(words, i) * (tl.load(x + i * PLANE).to(tl.float32) * SHIFT)
    return total


@triton.jit
def scaled(total, scale, R: tl.constexpr, BW: tl.constexpr):
    """[R]: groups of four words summed, scaled, and added up. scale: pointer tensor [R, BW / 4]."""
    groups = tl.sum(tl.reshape(total, [R, BW // 4, 4]), 2)
    return tl.sum(groups * group_scale(tl.load(scale)), 1)


@triton.jit
def up_kernel(
    latent, ids, w1, s1, w3, s3, hidden,
    TOPK: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden bf16 [M, TOPK, 8 planes of ROWS / 8] = bf(SiTU(w1 l, w3 l)); latent bf16 [M, 8 planes of K / 8].

    w1, w3 i32 [experts, ROWS, K / 8]; s1, s3 u8 [experts, ROWS, K / 32]. Grid (ROWS / BN, TOPK, M)."""
    slot = tl.program_id(1)
    m = tl.program_id(2)
    WORDS: tl.constexpr = K // 8
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, BW)
    g = tl.arange(0, BW // 4)
    begin(PDL)
    row = tl.load(ids + m * TOPK + slot) * ROWS + n
    gate = tl.zeros([BN], dtype=tl.float32)
    up = tl.zeros([BN], dtype=tl.float32)
    for k in range(0, WORDS, BW):
        at = row[:, None] * WORDS + (k + j)[None, :]
        first = tl.load(w1 + at, eviction_policy="evict_first")
        third = tl.load(w3 + at, eviction_policy="evict_first")
        scale = row[:, None] * (WORDS // 4) + (k // 4 + g)[None, :]
        x = latent + m * K + (k + j)[None, :]
        gate += scaled(dot_words(first, x, WORDS), s1 + scale, BN, BW)
        up += scaled(dot_words(third, x, WORDS), s3 + scale, BN, BW)
    to = hidden + (m * TOPK + slot) * ROWS + n % 8 * (ROWS // 8) + n // 8
    tl.store(to, situ(gate, up).to(tl.bfloat16))


@triton.jit
def down_kernel(
    hidden, ids, weights, w2, s2, remote, z,
    TOPK: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    REMOTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z bf16 [M, ROWS] = bf(bf(sum over slots of weight * bf(w2 h)) + remote f32); hidden as `up_kernel` leaves it.

    The TOPK slots are part of the tile: TOPK * BN rows of w2 i32 [experts, ROWS, K / 8]. Grid (ROWS / BN, M)."""
    m = tl.program_id(1)
    R: tl.constexpr = TOPK * BN
    WORDS: tl.constexpr = K // 8
    r = tl.arange(0, R)
    slot = r // BN
    n = tl.program_id(0) * BN + r % BN
    j = tl.arange(0, BW)
    g = tl.arange(0, BW // 4)
    begin(PDL)
    row = tl.load(ids + m * TOPK + slot) * ROWS + n
    x = hidden + ((m * TOPK + slot) * K)[:, None]
    f = tl.zeros([R], dtype=tl.float32)
    for k in range(0, WORDS, BW):
        words = tl.load(w2 + row[:, None] * WORDS + (k + j)[None, :], eviction_policy="evict_first")
        scale = s2 + row[:, None] * (WORDS // 4) + (k // 4 + g)[None, :]
        f += scaled(dot_words(words, x + (k + j)[None, :], WORDS), scale, R, BW)
    share = bf(f) * tl.load(weights + m * TOPK + slot).to(tl.float32)
    total = tl.sum(tl.reshape(share, [TOPK, BN]), 0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if REMOTE:
        total = bf(total) + tl.load(remote + m * ROWS + n)
    tl.store(z + m * ROWS + n, total.to(tl.bfloat16))
