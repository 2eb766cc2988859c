"""Absorbed MLA attention of one layer over the paged latent cache.

Projections are plain products. The core splits the context over CTAs (flash decoding): scores and latent sums on bf16
tensor cores with up to 16 heads as rows, softmax in f32, then one launch that joins the splits and applies W_UV.
With several tokens a request each row attends by itself, to as many tokens as it sees. An E4M3 cache is widened to
bf16, exactly, on its way to shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32

from targets.kimi_k3.seeds.common import (
    begin,
    block_sum,
    high,
    lanes_max,
    lanes_sum,
    low,
    pick,
    pick_layer,
    round_bf16,
    sigmoid,
    smem,
)
from targets.kimi_k3.seeds.gemv import Extra, gemv, gemv_normed, gemv_of_sum

TUNABLES = {
    "kv_splits": (64, 32, 16, 128),
    "mla_warps": (8, 4),
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "fuse_norm": (True, False),
    "fuse_add": (True, False),
    "pdl": (False, True),
}
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


@cute.jit
def insert(
    mA: cute.Tensor,
    mNorm: cute.Tensor,
    mSlots: cute.Tensor,
    mKv: cute.Tensor,
    mScale: cute.Tensor,
    op: cutlass.Constexpr,
):
    """Cache row of this row's new token: [bf(RMS(kv_c; norm)) | k_pe], as E4M3 over mScale with `fp8`; a negative slot
    inserts nothing."""
    tid, _, _ = cute.arch.thread_idx()
    _, m, _ = cute.arch.block_idx()
    square = Float32(0.0)
    for i in cutlass.range(tid, op.lora, 256, unroll=1):
        x = mA[m, op.q_lora + i].to(Float32)
        square += x * x
    scale = cute.math.rsqrt(block_sum(square, 8) / op.lora + op.eps)
    slot = mSlots[m]
    if slot >= 0:
        where = mKv.iterator
        if cutlass.const_expr(op.fp8):
            where = cute.recast_ptr(where, dtype=Uint8)
        flat = cute.make_tensor(where + slot * op.width, cute.make_layout((op.width,)))
        for i in cutlass.range(tid, op.width, 256, unroll=1):
            x = mA[m, op.q_lora + i]
            if i < op.lora:
                x = (x.to(Float32) * scale * mNorm[i].to(Float32)).to(BFloat16)
            if cutlass.const_expr(op.fp8):
                x = to_e4m3(x.to(Float32) / mScale[0]).to(Uint8)
            flat[i] = x


@cute.jit
def absorb(mQ: cute.Tensor, mUk: cute.Tensor, mQuery: cute.Tensor, op: cutlass.Constexpr):
    """query[:lora] = bf(Q_nope W_UK[h]); query[lora:] = Q_pe. The CTA's threads share columns, then rows of W_UK."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    columns = op.lora // 8
    parts = 256 // columns
    part, column = tid // columns, tid % columns
    gUk = cute.logical_divide(mUk[h, None, None], (None, 8))
    sPart = smem(Float32, (8, columns, parts), (1, 8, op.lora))
    first = h * (op.nope + op.rope)
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rSum = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rSum.fill(0.0)
    for i in cutlass.range(op.nope // parts, unroll=8):
        row = i * parts + part
        cute.autovec_copy(gUk[row, (None, column)], rW)
        rSum.store(rSum.load() + rW.load().to(Float32) * mQ[m, first + row].to(Float32))
    cute.autovec_copy(rSum, sPart[None, column, part])
    cute.arch.sync_threads()
    for c in cutlass.range(tid, op.lora, 256, unroll=1):
        total = Float32(0.0)
        for p in cutlass.range(parts, unroll_full=True):
            total += sPart[c % 8, c // 8, p]
        mQuery[m, h, c] = total.to(BFloat16)
    if tid < op.rope:
        mQuery[m, h, op.lora + tid] = mQ[m, first + op.nope + tid]


@cute.jit
def spread_lengths(mLengths: cute.Tensor, mSeen: cute.Tensor, op: cutlass.Constexpr):
    """mSeen[m]: how many tokens row m sees, its own the last of them; mLengths i32 [B] counts all of its request."""
    tid, _, _ = cute.arch.thread_idx()
    _, m, _ = cute.arch.block_idx()
    if tid == 0:
        total = mLengths[m // op.tokens]
        mSeen[m] = total - (op.tokens - 1) + m % op.tokens if total > 0 else Int32(0)


@cute.kernel
def absorb_kernel(
    mA: cute.Tensor, mQ: cute.Tensor, w: tuple, mSlots: cute.Tensor, mKv: cute.Tensor, lengths: tuple,
    mQuery: cute.Tensor, op: cutlass.Constexpr,
):  # fmt: skip
    """mA bf16 [M, q_c | kv_c | k_pe | gate], mQ bf16 [M, H x (nope | rope)], w = (w_uk, kv_a_norm, k_scale or None);
    grid (H + 1, M).

    mQuery bf16 [M, H, lora + rope]; the last CTA of a row inserts the new token into the cache, and with several tokens
    a request writes how many the row sees: lengths = (of the requests, of the rows). 256 threads.
    """
    h, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    if h < op.heads:
        absorb(mQ, w[0], mQuery, op)
    else:
        insert(mA, w[1], mSlots, mKv, w[2], op)
        if cutlass.const_expr(op.tokens > 1):
            spread_lengths(lengths[0], lengths[1], op)


@cute.jit
def mma_16x32(rC: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor):
    """rC[4] += A[16, 32] B[32, 8]: as mma_k32, with rA[None, 0] of row g and rA[None, 1] of row g + 8."""
    c = cute.arch.inline_ptx(
        """{
        .reg .f32 c0, c1, c2, c3;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3},
            {{$r0}, {$r4}, {$r1}, {$r5}}, {{$r8}, {$r9}}, {{$r12}, {$r13}, {$r14}, {$r15}};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r2}, {$r6}, {$r3}, {$r7}}, {{$r10}, {$r11}}, {c0, c1, c2, c3};
        }""",
        write_only_types=[Float32] * 4,
        read_only_args=[
            *(rA[i, 0] for i in range(4)), *(rA[i, 1] for i in range(4)), *(rB[i] for i in range(4)),
            *(rC[i] for i in range(4)),
        ],
    )  # fmt: skip
    for i in cutlass.range_constexpr(4):
        rC[i] = c[i]


@cute.jit
def load_query(mQuery: cute.Tensor, sQ: cute.Tensor, scales: tuple, op: cutlass.Constexpr):
    """sQ[head, (4 words, vector)]: this CTA's heads, zero where there is none."""
    tid, _, _ = cute.arch.thread_idx()
    _, m, block = cute.arch.block_idx()
    vectors = op.width // 8
    gQ = cute.logical_divide(cute.recast_tensor(mQuery, Uint32), (None, None, 4))
    rQ = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(tid, HEADS * vectors, op.warps * 32, unroll=1):
        row, v = i // vectors, i % vectors
        rQ.fill(0)
        if block * HEADS + row < op.heads:
            cute.autovec_copy(gQ[m, block * HEADS + row, (None, v)], rQ)
            if cutlass.const_expr(op.fp8):
                narrow_query(rQ, scales[1][0])
        cute.autovec_copy(rQ, sQ[row, (None, v)])


@cute.jit
def load_tile(
    mKv: cute.Tensor, mTable: cute.Tensor, sK: cute.Tensor, span: tuple, op: cutlass.Constexpr
):
    """sK[token, (4 words, vector)]: cache rows of tokens span = (first, end); rows beyond the end are zero.

    All loads of a thread are issued before its first store.
    """
    tid, _, _ = cute.arch.thread_idx()
    _, m, _ = cute.arch.block_idx()
    first, end = span
    vectors = op.width // 8
    count = -(-op.tile * vectors // (op.warps * 32))
    rK = cute.make_rmem_tensor(cute.make_layout((4, count)), Uint32)
    rK.fill(0)
    for n in cutlass.range(count, unroll_full=True):
        i = n * op.warps * 32 + tid
        token = first + i // vectors
        if i < op.tile * vectors and token < end:
            gRow = cache_row(mKv, mTable[m, token // op.page], token % op.page)
            if cutlass.const_expr(op.fp8):
                rNarrow = cute.make_rmem_tensor(cute.make_layout((2,)), Uint32)
                cute.autovec_copy(gRow[0, (None, i % vectors)], rNarrow)
                rK[0, n], rK[1, n] = widen(rNarrow[0])
                rK[2, n], rK[3, n] = widen(rNarrow[1])
            else:
                cute.autovec_copy(gRow[0, (None, i % vectors)], rK[None, n])
    for n in cutlass.range(count, unroll_full=True):
        i = n * op.warps * 32 + tid
        if i < op.tile * vectors:
            cute.autovec_copy(rK[None, n], sK[i // vectors, (None, i % vectors)])


@cute.jit
def score_tile(
    sQ: cute.Tensor, sK: cute.Tensor, sS: cute.Tensor, factor: Float32, op: cutlass.Constexpr
):
    """sS[head, token] = scaled scores, times `factor`; a warp has eight tokens."""
    tid, _, _ = cute.arch.thread_idx()
    warp, g, q = tid // 32, tid % 32 // 4, tid % 4
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC.fill(0.0)
    for k in cutlass.range(op.width // 32, unroll=2):
        cute.autovec_copy(sQ[g, (None, k * 4 + q)], rA[None, 0])
        cute.autovec_copy(sQ[g + 8, (None, k * 4 + q)], rA[None, 1])
        cute.autovec_copy(sK[warp * 8 + g, (None, k * 4 + q)], rB)
        mma_16x32(rC, rA, rB)
    scale = (op.nope + op.rope) ** -0.5
    for i in cutlass.range_constexpr(4):
        sS[g + i // 2 * 8, warp * 8 + 2 * q + i % 2] = rC[i] * (scale * factor)


@cute.jit
def soften(
    sS: cute.Tensor,
    sP: cute.Tensor,
    sAlpha: cute.Tensor,
    rState: cute.Tensor,
    left: Int32,
    op: cutlass.Constexpr,
):
    """Online softmax: sP[token, head, hi or lo] = exp(score - new maximum) as the sum of two bf16.

    A warp has whole heads. rState[max or sum, head of the warp]; sAlpha[head] is the factor of all summed before.
    """
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid // 32, tid % 32
    per = HEADS // op.warps
    for j in cutlass.range_constexpr(per):
        h = warp * per + j
        top = rState[0, j]
        for t in cutlass.range_constexpr(op.tile // 32):
            top = cute.arch.fmax(
                top, sS[h, t * 32 + lane] if t * 32 + lane < left else -Float32.inf
            )
        top = lanes_max(top)
        total = Float32(0.0)
        for t in cutlass.range_constexpr(op.tile // 32):
            token = t * 32 + lane
            p = cute.math.exp(sS[h, token] - top) if token < left else Float32(0.0)
            total += p
            hi = p.to(BFloat16)
            sP[token, h, 0] = hi
            sP[token, h, 1] = (p - hi.to(Float32)).to(BFloat16)
        alpha = cute.math.exp(rState[0, j] - top)
        if lane == 0:
            sAlpha[h] = alpha
        rState[1, j] = rState[1, j] * alpha + lanes_sum(total, 32)
        rState[0, j] = top


@cute.jit
def sum_tile(
    sP: cute.Tensor, sK: cute.Tensor, sAlpha: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr
):
    """rC[4, n] = alpha rC + P C: a warp makes lora / warps columns, lane g the columns g * each .. of them.

    P arrives as two bf16 summands; a k16 step of each is one half of mma_16x32, with the same B twice.
    """
    tid, _, _ = cute.arch.thread_idx()
    warp, g, q = tid // 32, tid % 32 // 4, tid % 4
    half = op.each // 2
    sWord = cute.recast_tensor(sP, Uint32)
    sColumn = cute.logical_divide(sK, (None, half))
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rRow = cute.make_rmem_tensor(cute.make_layout((half, 4)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for n in cutlass.range(op.each, unroll_full=True):
        for i in cutlass.range_constexpr(4):
            rC[i, n] = rC[i, n] * sAlpha[g + i // 2 * 8]
    for k in cutlass.range(op.tile // 16, unroll=1):
        for part in cutlass.range_constexpr(2):
            for row in cutlass.range_constexpr(2):
                rA[2 * part, row] = sWord[k * 8 + q, g + 8 * row, part]
                rA[2 * part + 1, row] = sWord[k * 8 + q + 4, g + 8 * row, part]
        for i in cutlass.range_constexpr(4):
            token = k * 16 + 2 * q + i % 2 + i // 2 * 8
            cute.autovec_copy(sColumn[token, (None, warp * 8 + g)], rRow[None, i])
        for n in cutlass.range(half, unroll_full=True):
            for odd in cutlass.range_constexpr(2):
                select = Uint32(0x7632 if odd else 0x5410)
                for i in cutlass.range_constexpr(2):
                    rB[i] = cute.arch.prmt(rRow[n, 2 * i], rRow[n, 2 * i + 1], select)
                    rB[i + 2] = rB[i]
                mma_16x32(rC[None, 2 * n + odd], rA, rB)


@cute.kernel
def attention_kernel(
    mQuery: cute.Tensor,
    mKv: cute.Tensor,
    where: tuple,
    scales: tuple,
    mSum: cute.Tensor,
    mStat: cute.Tensor,
    op: cutlass.Constexpr,
):
    """mQuery bf16 [M, H, lora + rope], mKv bf16 or e4m3 [pages, page, lora + rope], where = (block_table, lengths) by
    row, scales = (k_scale, q_scale) or Nones.

    Grid (splits, M, H / 16): this split's share of the context, whole tiles. mSum f32 [M, splits, H, lora] = sum of
    exp(s - max) c; mStat f32 [M, splits, H, 2] = (max, sum of exp); an empty share gives (-inf, 0).
    """
    tid, _, _ = cute.arch.thread_idx()
    split, m, block = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    mTable, mLengths = where
    begin(op.pdl)
    words = op.width // 2
    # rows of sQ are 64 bytes apart modulo 128, rows of sK 16 modulo 64: fragments of both products miss conflicts
    sQ = cute.logical_divide(
        smem(Uint32, (HEADS, words), (words + (16 - words % 32) % 32, 1)), (None, 4)
    )
    sTile = smem(Uint32, (op.tile, words), (words + (4 - words % 16) % 16, 1))
    sK = cute.logical_divide(sTile, (None, 4))
    sS = smem(Float32, (HEADS, op.tile), (op.tile + 4, 1))
    sP = smem(BFloat16, (op.tile, HEADS, 2), (1, op.tile + 8, HEADS * (op.tile + 8)))
    sAlpha = smem(Float32, (HEADS,), (1,))
    load_query(mQuery, sQ, scales, op)
    factor = scales[0][0] * scales[1][0] if cutlass.const_expr(op.fp8) else Float32(1.0)
    length = mLengths[m]
    share = cute.ceil_div(cute.ceil_div(length, op.tile), op.splits) * op.tile
    first = split * share
    end = first + share if first + share < length else length
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.each)), Float32)
    rC.fill(0.0)
    rState = cute.make_rmem_tensor(cute.make_layout((2, HEADS // op.warps)), Float32)
    for j in cutlass.range_constexpr(HEADS // op.warps):
        rState[0, j], rState[1, j] = -Float32.inf, Float32(0.0)
    for start in cutlass.range(first, end, op.tile, unroll=1):
        load_tile(mKv, mTable, sK, (start, end), op)
        cute.arch.sync_threads()
        score_tile(sQ, sK, sS, factor, op)
        cute.arch.sync_threads()
        soften(sS, sP, sAlpha, rState, end - start, op)
        cute.arch.sync_threads()
        sum_tile(sP, sTile, sAlpha, rC, op)
        cute.arch.sync_threads()
    for j in cutlass.range_constexpr(HEADS // op.warps):
        h = block * HEADS + warp * (HEADS // op.warps) + j
        if lane == 0 and h < op.heads:
            mStat[m, split, h, 0], mStat[m, split, h, 1] = rState[0, j], rState[1, j]
    store_sums(rC, mSum, op)


@cute.jit
def store_sums(rC: cute.Tensor, mSum: cute.Tensor, op: cutlass.Constexpr):
    """rC[i, n] is head g + 8 (i / 2), column (2 q + i % 2) * each + n of the warp's share."""
    tid, _, _ = cute.arch.thread_idx()
    split, m, block = cute.arch.block_idx()
    warp, g, q = tid // 32, tid % 32 // 4, tid % 4
    gSum = cute.logical_divide(mSum, (None, None, None, op.each))
    rOut = cute.make_rmem_tensor(cute.make_layout((op.each,)), Float32)
    for i in cutlass.range_constexpr(4):
        h = block * HEADS + g + i // 2 * 8
        if h < op.heads:
            for n in cutlass.range_constexpr(op.each):
                rOut[n] = rC[i, n]
            cute.autovec_copy(rOut, gSum[m, split, h, (None, warp * 8 + 2 * q + i % 2)])


@cute.jit
def split_weights(
    mStat: cute.Tensor, sWeight: cute.Tensor, mScale: cute.Tensor, op: cutlass.Constexpr
):
    """sWeight[split] = exp(max_split - max) / total, of e4m3 times mScale, by the first warp; zero without tokens."""
    lane, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    top = -Float32.inf
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        top = cute.arch.fmax(top, mStat[m, s, h, 0])
    top = lanes_max(top)
    total = Float32(0.0)
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        if mStat[m, s, h, 1] > 0.0:
            total += cute.math.exp(mStat[m, s, h, 0] - top) * mStat[m, s, h, 1]
    total = lanes_sum(total, 32)
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        weight = Float32(0.0)
        if mStat[m, s, h, 1] > 0.0:
            weight = cute.math.exp(mStat[m, s, h, 0] - top) / total
            if cutlass.const_expr(op.fp8):
                weight *= mScale[0]
        sWeight[s] = weight


@cute.jit
def join_splits(mSum: cute.Tensor, sWeight: cute.Tensor, sLat: cute.Tensor, op: cutlass.Constexpr):
    """sLat = bf(sum over splits of weight * sum): threads share columns in vectors of four, then the splits."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    vectors = op.lora // 4
    groups = 256 // vectors
    group, vector = tid // vectors, tid % vectors
    gSum = cute.logical_divide(mSum, (None, None, None, 4))
    sPart = smem(Float32, (4, vectors, groups), (1, 4, op.lora))
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rSum = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rSum.fill(0.0)
    for s in cutlass.range(group, op.splits, groups, unroll=16):
        cute.autovec_copy(gSum[m, s, h, (None, vector)], rX)
        rSum.store(rSum.load() + rX.load() * sWeight[s])
    cute.autovec_copy(rSum, sPart[None, vector, group])
    cute.arch.sync_threads()
    for c in cutlass.range(tid, op.lora, 256, unroll=1):
        total = Float32(0.0)
        for g in cutlass.range(groups, unroll_full=True):
            total += sPart[c % 4, c // 4, g]
        sLat[c] = total.to(BFloat16)
    cute.arch.sync_threads()


@cute.kernel
def combine_kernel(
    mSum: cute.Tensor, mStat: cute.Tensor, mA: cute.Tensor, mUv: cute.Tensor, mLengths: cute.Tensor, mOut: cute.Tensor,
    mScale: cute.Tensor, op: cutlass.Constexpr,
):  # fmt: skip
    """Joins the splits: lat = bf(sum p c); y = bf(bf(lat W_UV[h]) * sg(gate)), mOut bf16 [M, H v]; grid (H, M).

    mA holds the gate in its last H v columns, mUv bf16 [H, v, lora]; length 0 gives zeros. 256 threads.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    lane = tid % 32
    begin(op.pdl)
    sWeight = smem(Float32, (op.splits,), (1,))
    sLat = smem(BFloat16, (op.lora,), (1,))
    if tid < 32:
        split_weights(mStat, sWeight, mScale, op)
    cute.arch.sync_threads()
    join_splits(mSum, sWeight, sLat, op)
    gUv = cute.logical_divide(mUv, (None, None, 8))
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    for j in cutlass.range(tid // 32, op.v, 8, unroll=8):
        dot = Float32(0.0)
        for i in cutlass.range(lane, op.lora // 8, 32, unroll=2):
            cute.autovec_copy(gUv[h, j, (None, i)], rW)
            cute.autovec_copy(cute.local_tile(sLat, (8,), (i,)), rX)
            product = rX.load().to(Float32) * rW.load().to(Float32)
            dot += product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        dot = lanes_sum(dot, 32)
        if lane == 0:
            gate = sigmoid(mA[m, op.q_lora + op.width + h * op.v + j].to(Float32))
            y = round_bf16(dot) * gate
            mOut[m, h * op.v + j] = (y if mLengths[m] > 0 else Float32(0.0)).to(BFloat16)


@cute.jit
def mla_core(w, mKv, inputs, space, cfg: cutlass.Constexpr, stream):
    """From space.mla_proj [M, a_proj_rows] to space.mla_out [M, H v]: four launches (five without the fused norm)."""
    op = mla_shape(cfg.dims, cfg)
    rows = space.mla_proj.shape[0]
    blocks = cute.ceil_div(op.heads, HEADS)
    a = space.mla_proj
    scales = (w.k_scale, w.q_scale) if op.fp8 else (None, None)
    table, lengths = inputs.block_table, inputs.lengths
    if cutlass.const_expr(op.tokens > 1):
        pages = table.shape[1]
        by_row = cute.make_layout(((op.tokens, rows // op.tokens), pages), stride=((0, pages), 1))
        table, lengths = cute.make_tensor(table.iterator, by_row), space.mla_seen
    gemv_normed(a, w.q_b, space.mla_q, Extra(norm=w.q_a_norm), space, cfg, stream)
    absorb_kernel(
        a,
        space.mla_q,
        (w.w_uk, w.kv_a_norm, scales[0]),
        inputs.slot_mapping,
        mKv,
        (inputs.lengths, lengths),
        space.mla_query,
        op,
    ).launch(
        grid=(op.heads + 1, rows, 1),
        block=(256, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )
    attention_kernel(
        space.mla_query, mKv, (table, lengths), scales, space.mla_sums, space.mla_stats, op
    ).launch(
        grid=(op.splits, rows, blocks), block=(op.warps * 32, 1, 1), stream=stream, use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )  # fmt: skip
    combine_kernel(
        space.mla_sums, space.mla_stats, a, w.w_uv, lengths, space.mla_out, scales[0], op
    ).launch(
        grid=(op.heads, rows, 1),
        block=(256, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


def mla_workspace(dims, cfg):
    m, h, op = dims.rows, dims.mla_heads, mla_shape(dims, cfg)
    found = {
        "mla_proj": ("bf16", (m, dims.a_proj_rows), "undefined", "step"),
        "mla_q": ("bf16", (m, h * (dims.qk_nope + dims.qk_rope)), "undefined", "step"),
        "mla_query": ("bf16", (m, h, dims.kv_dim), "undefined", "step"),
        "mla_sums": ("f32", (m, op.splits, h, dims.kv_lora), "undefined", "step"),
        "mla_stats": ("f32", (m, op.splits, h, 2), "undefined", "step"),
        "mla_out": ("bf16", (m, dims.mla_dim), "undefined", "step"),
    }
    if op.tokens > 1:
        found["mla_seen"] = ("i32", (m,), "undefined", "step")
    if not cfg.fuse_norm:
        found["normed"] = ("bf16", (m, max(dims.latent, dims.q_lora)), "undefined", "step")
    return found


def workspace(dims, cfg):
    total = {} if cfg.fuse_add else {"sum": ("bf16", (dims.rows, dims.hidden), "undefined", "step")}
    return {**mla_workspace(dims, cfg), **total}


@cute.jit
def step(t, cfg, stream):
    """y_i = a of the MLA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    x, y, space = t.inputs.x, t.outputs.y, t.workspace
    mSum = None if cfg.fuse_add else space.sum
    kv = [s.kv for s in t.states.layers]
    remote = [r.attn for r in t.inputs.remote.layers] if cfg.dims.ranks > 1 else None
    gemv(x[0], t.weights.layers[0].a_proj, space.mla_proj, Extra(), cfg, stream)
    for i in cutlass.range(len(x), unroll=1):
        w = pick_layer(t.weights.layers, i, mla_weights(cfg.dims))
        if i > 0:
            gemv_of_sum(pick(x, i), pick(y, i - 1), mSum, w.a_proj, space.mla_proj, cfg, stream)
        mla_core(w, pick(kv, i), t.inputs, space, cfg, stream)
        extra = Extra() if remote is None else Extra(remote=pick(remote, i))
        gemv(space.mla_out, w.o_proj, pick(y, i), extra, cfg, stream)
