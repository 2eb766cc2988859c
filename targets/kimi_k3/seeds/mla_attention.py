"""Part of MLA: attention of up to 16 heads to one split of the context, with an online softmax (flash decoding).

It leaves sums and statistics by split; `mla_combine` joins them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import begin, lanes_max, lanes_sum, smem
from targets.kimi_k3.seeds.mla_layout import HEADS, cache_row, narrow_query, widen


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
