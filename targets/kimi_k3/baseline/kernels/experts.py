"""The routed experts on MXFP4 weights, one (row, slot) pair at a time: codes become float32 in registers.

Codes are read as int32 words of eight; their operand lies in eight planes, so that a word's nibbles meet contiguous
values: bf16 values as float32 times SHIFT, as wide as the words, so that no thread has to move any. Pairs that share an
expert read it again: made for few rows; `grouped` is for more.
"""

import triton
import triton.language as tl

from targets.kimi_k3.baseline.kernels.common import (
    SHIFT,
    begin,
    bf,
    decode,
    fetch,
    group_scale,
    situ,
)
from targets.kimi_k3.baseline.kernels.products import linear_rows


@triton.jit
def dot_words(words, x, PLANE: tl.constexpr):
    """Each word's eight codes times x[plane, word], in the shape of `words`; x points at the first plane's values."""
    total = decode(words, 0) * tl.load(x)
    for i in tl.static_range(1, 8):
        total += decode(words, i) * tl.load(x + i * PLANE)
    return total


@triton.jit
def dot_both(first, second, x, PLANE: tl.constexpr):
    """`dot_words` of two matrices with one x."""
    v = tl.load(x)
    a = decode(first, 0) * v
    b = decode(second, 0) * v
    for i in tl.static_range(1, 8):
        v = tl.load(x + i * PLANE)
        a += decode(first, i) * v
        b += decode(second, i) * v
    return a, b


@triton.jit
def middle_kernel(
    latent, ids, w1, s1, w3, s3, hidden, x, w, y, remote, send,
    M: tl.constexpr, MP: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
    BW: tl.constexpr, EARLY: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The experts' first half, and beside it the shared expert's second half y = W x as `linear_kernel` has it; with
    N = 0 the experts alone, whose programs then pay for no registers and shared memory of the other half.

    Grid (M * TOPK * ROWS / BN + N / BR): the experts' programs first.
    """
    pid = tl.program_id(0)
    parts: tl.constexpr = ROWS // BN
    if pid < parts * TOPK * M:
        pair = pid // parts
        up_rows(
            latent,
            ids,
            w1,
            s1,
            w3,
            s3,
            hidden,
            pid % parts,
            pair,
            TOPK,
            ROWS,
            K,
            BN,
            BW,
            EARLY,
            PDL,
        )
    else:
        if N > 0:
            block = pid - parts * TOPK * M
            linear_rows(
                x, SHARED, x, 0.0, w, y, N if MODE == "plain" else OWN, remote, send, x, block, M, MP, N, SHARED, BR,
                BK, False, MODE, OWN, PDL,
            )  # fmt: skip


@triton.jit
def up_rows(
    latent, ids, w1, s1, w3, s3, hidden, block, pair,
    TOPK: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden f32 [M, TOPK, 8 planes of ROWS / 8] = bf(SiTU(w1 l, w3 l)) SHIFT; latent f32 [M, 8 planes of K / 8].

    w1, w3 i32 [experts, ROWS, K / 8]; s1, s3 u8 [experts, ROWS, K / 32]. EARLY: the next tile is on its way while one
    is multiplied, in registers that other programs do without. This is a block of BN rows of one pair (row m, slot).
    """
    m = pair // TOPK
    WORDS: tl.constexpr = K // 8
    n = block * BN + tl.arange(0, BN)
    j = tl.arange(0, BW)
    g = tl.arange(0, BW // 4)
    begin(PDL)
    row = tl.load(ids + pair) * ROWS + n
    at = row[:, None] * WORDS + j[None, :]
    scale = row[:, None] * (WORDS // 4) + g[None, :]
    gate = tl.zeros([BN, BW // 4], dtype=tl.float32)
    up = tl.zeros([BN, BW // 4], dtype=tl.float32)
    values = latent + m * K + j[None, :]
    if EARLY:
        first = tl.load(w1 + at, eviction_policy="evict_first")
        third = tl.load(w3 + at, eviction_policy="evict_first")
        scale1 = tl.load(s1 + scale)
        scale3 = tl.load(s3 + scale)
        for k in range(0, WORDS, BW):
            now1 = first
            now3 = third
            by1 = group_scale(scale1)
            by3 = group_scale(scale3)
            there = (k + BW + j < WORDS)[None, :]
            first = tl.load(w1 + at + k + BW, mask=there, other=0, eviction_policy="evict_first")
            third = tl.load(w3 + at + k + BW, mask=there, other=0, eviction_policy="evict_first")
            inside = (k // 4 + BW // 4 + g < WORDS // 4)[None, :]
            scale1 = tl.load(s1 + scale + k // 4 + BW // 4, mask=inside, other=0)
            scale3 = tl.load(s3 + scale + k // 4 + BW // 4, mask=inside, other=0)
            a, b = dot_both(now1, now3, values + k, WORDS)
            gate += tl.sum(tl.reshape(a, [BN, BW // 4, 4]), 2) * by1
            up += tl.sum(tl.reshape(b, [BN, BW // 4, 4]), 2) * by3
    else:
        for k in range(0, WORDS, BW):
            one = tl.load(w1 + at + k, eviction_policy="evict_first")
            other = tl.load(w3 + at + k, eviction_policy="evict_first")
            scale_one = group_scale(tl.load(s1 + scale + k // 4))
            scale_other = group_scale(tl.load(s3 + scale + k // 4))
            c, d = dot_both(one, other, values + k, WORDS)
            gate += tl.sum(tl.reshape(c, [BN, BW // 4, 4]), 2) * scale_one
            up += tl.sum(tl.reshape(d, [BN, BW // 4, 4]), 2) * scale_other
    to = hidden + pair * ROWS + n % 8 * (ROWS // 8) + n // 8
    tl.store(to, bf(situ(tl.sum(gate, 1), tl.sum(up, 1))) * SHIFT)


@triton.jit
def down_kernel(
    hidden, ids, scores, w2, s2, remote, z, ahead,
    TOPK: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    REMOTE: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """z bf16 [M, ROWS] = bf(bf(sum over slots of weight * bf(w2 h)) + remote f32); hidden as `up_rows` leaves it,
    weight = bf(score / sum of scores).

    A tile is [BN, TOPK, BW] words of w2 i32 [experts, ROWS, K / 8]: rows outside, so that a thread meets one slot's
    values with several of them. Grid (BLOCKS, M), BLOCKS of ROWS / BN, with CHUNKS > 0 more that fetch `ahead`."""
    m = tl.program_id(1)
    if CHUNKS > 0:
        if tl.program_id(0) >= BLOCKS:
            if m == 0:
                fetch(ahead, tl.program_id(0) - BLOCKS, CHUNKS, STRIDE, LANES)
            return
    WORDS: tl.constexpr = K // 8
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    slot = tl.arange(0, TOPK)
    j = tl.arange(0, BW)
    g = tl.arange(0, BW // 4)
    begin(PDL)
    row = tl.load(ids + m * TOPK + slot)[None, :] * ROWS + n[:, None]
    # as many pointers as words: one load for all rows would lie in other threads and be moved through shared memory
    spread = tl.zeros([BN, 1, 1], dtype=tl.int32)
    x = hidden + (m * TOPK + slot)[None, :, None] * K + j[None, None, :] + spread
    at = row[:, :, None] * WORDS + j[None, None, :]
    scale = row[:, :, None] * (WORDS // 4) + g[None, None, :]
    total = tl.zeros([BN, TOPK, BW // 4], dtype=tl.float32)
    for k in tl.static_range(0, WORDS, BW):
        words = tl.load(w2 + at + k, eviction_policy="evict_first")
        by = group_scale(tl.load(s2 + scale + k // 4))
        f = dot_words(words, x + k, WORDS)
        total += tl.sum(tl.reshape(f, [BN, TOPK, BW // 4, 4]), 3) * by
    score = tl.load(scores + m * TOPK + slot)
    share = bf(score / (tl.sum(score, 0) + 1e-20))
    y = tl.sum(bf(tl.sum(total, 2)) * share[None, :], 1)
    if REMOTE:
        y = bf(y) + tl.load(remote + m * ROWS + n)
    tl.store(z + m * ROWS + n, y.to(tl.bfloat16))
