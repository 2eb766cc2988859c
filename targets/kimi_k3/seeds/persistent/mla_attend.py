"""Attention of all heads over a CTA's pages in the ring: scores, online softmax, weighted sums."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import lanes_max, lanes_sum
from targets.kimi_k3.seeds.mla_attention import mma_16x32
from targets.kimi_k3.seeds.persistent.boxes import box, empty_some, send_some, send_words
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, view, within
from targets.kimi_k3.seeds.persistent.mla_cache import Cache, entry, patch, token_at
from targets.kimi_k3.seeds.persistent.mla_query import load_query
from targets.kimi_k3.seeds.persistent.ring import stage_done, stage_full


@cute.jit
def mma_k16(rC: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor):
    """rC[4] += A[16, 16] B[16, 8]; rA: rows g, g + 8, then the same eight columns on."""
    out = cute.arch.inline_ptx(
        """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};""",
        write_only_types=[Float32] * 4,
        read_only_args=[
            *(rA[i] for i in range(4)),
            *(rB[i] for i in range(2)),
            *(rC[i] for i in range(4)),
        ],
    )
    for i in cutlass.range_constexpr(4):
        rC[i] = out[i]


@cute.jit
def two_chains(
    c: Ctx, row: Int32, sQ: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """rC[4] = the queries with eight tokens, of which this lane's starts at `row` in the ring: products of even and of
    odd blocks of 32 columns are two chains, each of which waits for itself. Heads that do not exist repeat the last."""
    d, q = op.d, c.lane % 4
    g = within(c.lane // 4, d.mla_heads)
    h = within(c.lane // 4 + 8, d.mla_heads)
    pitch, many = op.query_words // 4, d.kv_dim // 32
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rD = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rD.fill(0.0)
    for pair in cutlass.range(many // 2, unroll=1):
        for e in cutlass.range_constexpr(2):
            k = (2 * pair + e) * 4 + q
            cute.autovec_copy(cute.local_tile(c.ring, (4,), (row + k,)), rB[None, e])
            cute.autovec_copy(cute.local_tile(sQ, (4,), (g * pitch + k,)), rA[None, 0, e])
            cute.autovec_copy(cute.local_tile(sQ, (4,), (h * pitch + k,)), rA[None, 1, e])
        mma_16x32(rC, rA[None, None, 0], rB[None, 0])
        mma_16x32(rD, rA[None, None, 1], rB[None, 1])
    if cutlass.const_expr(many % 2):
        k = (many - 1) * 4 + q
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (row + k,)), rB[None, 0])
        cute.autovec_copy(cute.local_tile(sQ, (4,), (g * pitch + k,)), rA[None, 0, 0])
        cute.autovec_copy(cute.local_tile(sQ, (4,), (h * pitch + k,)), rA[None, 1, 0])
        mma_16x32(rC, rA[None, None, 0], rB[None, 0])
    for i in cutlass.range_constexpr(4):
        rC[i] = rC[i] + rD[i]


@cute.jit
def scores(c: Ctx, it: Int32, sQ: cute.Tensor, op: cutlass.Constexpr):
    """part[head, token]: scaled scores of a page; a warp has eight tokens."""
    d = op.d
    g, q = c.lane // 4, c.lane % 4
    words = op.query_words
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA.fill(0)
    for octet in cutlass.range(c.warp, d.page // 8, op.warps, unroll=1):
        rC.fill(0.0)
        row = token_at(c, it, octet * 8 + g, op)
        if cutlass.const_expr(op.brisk):
            two_chains(c, row, sQ, rC, op)
        else:
            for k in cutlass.range(d.kv_dim // 32, unroll=2):
                cute.autovec_copy(cute.local_tile(c.ring, (4,), (row + k * 4 + q,)), rB)
                if g < d.mla_heads:
                    cute.autovec_copy(
                        cute.local_tile(sQ, (4,), (g * (words // 4) + k * 4 + q,)), rA[None, 0]
                    )
                if g + 8 < d.mla_heads:
                    cute.autovec_copy(
                        cute.local_tile(sQ, (4,), ((g + 8) * (words // 4) + k * 4 + q,)),
                        rA[None, 1],
                    )
                mma_16x32(rC, rA, rB)
        scale = (d.qk_nope + d.qk_rope) ** -0.5
        for i in cutlass.range_constexpr(4):
            c.part[(g + i // 2 * 8) * (d.page + 4) + octet * 8 + 2 * q + i % 2] = rC[i] * scale


@cute.jit
def soften(c: Ctx, left: Int32, sP: cute.Tensor, sState: cute.Tensor, op: cutlass.Constexpr):
    """Online softmax of a page: sP[head, token] bf16; sState[max | sum | factor of all before] of sixteen heads."""
    d = op.d
    turns = -(-d.page // 32)
    for h in cutlass.range(c.warp, d.mla_heads, op.warps, unroll=1):
        before = sState[h]
        top = before
        for t in cutlass.range_constexpr(turns):
            token = t * 32 + c.lane
            if token < d.page and token < left:
                top = cute.arch.fmax(top, c.part[h * (d.page + 4) + token])
        top = lanes_max(top)
        total = Float32(0.0)
        for t in cutlass.range_constexpr(turns):
            token = t * 32 + c.lane
            if token < d.page:
                p = Float32(0.0)
                if token < left:
                    p = cute.math.exp(c.part[h * (d.page + 4) + token] - top)
                total += p
                sP[h * (d.page + 8) + token] = p.to(BFloat16)
        total = lanes_sum(total, 32)
        cute.arch.sync_warp()
        if c.lane == 0:
            factor = cute.math.exp(before - top)
            sState[h] = top
            sState[16 + h] = sState[16 + h] * factor + total
            sState[32 + h] = factor


@cute.jit
def weigh(
    c: Ctx, it: Int32, sP: cute.Tensor, sState: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr
):
    """rC[4, n] = factor rC + P C: a warp makes 8 `each` columns, lane g the columns g * each .. of them."""
    d = op.d
    each, half = op.value_each, op.value_each // 2
    g, q = c.lane // 4, c.lane % 4
    sWord = cute.recast_tensor(sP, Uint32)
    rA = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((2,)), Uint32)
    rRow = cute.make_rmem_tensor(cute.make_layout((half, 4)), Uint32)
    pitch = (d.page + 8) // 2
    for n in cutlass.range_constexpr(each):
        for i in cutlass.range_constexpr(4):
            rC[i, n] = rC[i, n] * sState[32 + g + i // 2 * 8]
    for k in cutlass.range(d.page // 16, unroll=1):
        for i in cutlass.range_constexpr(4):
            rA[i] = sWord[(g + i % 2 * 8) * pitch + k * 8 + q + i // 2 * 4]
            token = k * 16 + 2 * q + i % 2 + i // 2 * 8
            place = token_at(c, it, token, op) * 4 + (c.warp * 8 + g) * half
            cute.autovec_copy(cute.local_tile(c.ring, (half,), (place // half,)), rRow[None, i])
        for n in cutlass.range_constexpr(half):
            for odd in cutlass.range_constexpr(2):
                select = Uint32(0x7632 if odd else 0x5410)
                for i in cutlass.range_constexpr(2):
                    rB[i] = cute.arch.prmt(rRow[n, 2 * i], rRow[n, 2 * i + 1], select)
                mma_k16(rC[None, 2 * n + odd], rA, rB)


@cute.jit
def attend(
    c: Ctx, layer: Int32, it: Int32, cache: Cache, physical: Int32, turn: Int32, op: cutlass.Constexpr
):  # fmt: skip
    """Boxes sums and stats of this CTA's pages for all heads, the first of them at `physical`; not even a maximum of
    -inf is an empty element. `empty_sums` comes behind the hint."""
    d = op.d
    each = op.value_each
    words = op.query_words
    sQ = view(c, Uint32, op.new_bytes, d.mla_heads * words)
    sP = view(c, BFloat16, op.new_bytes + 4 * d.mla_heads * words, 16 * (d.page + 8))
    sState = view(c, Float32, op.new_bytes + 4 * d.mla_heads * words + 32 * (d.page + 8), 48)
    if c.cta < cache.pages:
        load_query(c, turn, sQ, op)
    sWord = cute.recast_tensor(sP, Uint32)
    used = d.mla_heads * (d.page + 8) // 2
    for i in cutlass.range(used + c.tid, 8 * (d.page + 8), op.threads, unroll=1):
        # rows of heads that do not exist, which products read
        sWord[i] = Uint32(0)
    if c.tid < 16:
        sState[c.tid], sState[16 + c.tid], sState[32 + c.tid] = (
            -Float32.inf,
            Float32(0.0),
            Float32(0.0),
        )
    consumers(op)
    rC = cute.make_rmem_tensor(cute.make_layout((4, each)), Float32)
    rC.fill(0.0)
    for p in cutlass.range(c.cta, cache.pages, op.ctas, unroll=1):
        for j in cutlass.range_constexpr(op.cache_stages):
            stage_full(c, it + j, op)
        left = cache.length - p * d.page
        patch(c, layer, it, physical, left, cache, op)
        physical = entry(c, p + op.ctas, cache)
        scores(c, it, sQ, op)
        consumers(op)
        soften(c, left, sP, sState, op)
        consumers(op)
        if c.warp < op.value_warps:
            weigh(c, it, sP, sState, rC, op)
        for j in cutlass.range_constexpr(op.cache_stages):
            stage_done(c, (it + j) % op.stages)
        it += op.cache_stages
        if cutlass.const_expr(not op.brisk):
            # `patch` has a barrier before the next page's weights
            consumers(op)
    send_sums(c, c.cta < cache.pages, sState, rC, turn, op)
    return it


@cute.jit
def send_sums(
    c: Ctx, any: Boolean, sState: cute.Tensor, rC: cute.Tensor, turn: Int32, op: cutlass.Constexpr
):
    """rC [4, each] of the value warps and the statistics of each head into their boxes, if there are any; with `narrow`
    what these pages alone attend to, in f16. `empty_sums` empties their places for the other turn behind the hint."""
    d = op.d
    if c.tid < d.mla_heads and any:
        i = (c.cta * d.mla_heads + c.tid) * 2
        here = box(c, "stats", turn, op) + Int64(i) * 4
        rTwo = cute.make_rmem_tensor(cute.make_layout((2,)), Float32)
        rTwo[0], rTwo[1] = sState[c.tid], sState[16 + c.tid]
        send_some(here, rTwo, 2)
    here = box(c, "sums", turn, op)
    if cutlass.const_expr(op.narrow):
        if c.warp < op.value_warps and any:
            send_narrow(c, here, sState, rC, op)
    elif c.warp < op.value_warps and any:
        size = min(4, op.value_each)
        rOut = cute.make_rmem_tensor(cute.make_layout((size,)), Float32)
        for i in cutlass.range_constexpr(4):
            first = sum_place(c, i, op)
            if c.lane // 4 + i // 2 * 8 < d.mla_heads:
                for part in cutlass.range_constexpr(op.value_each // size):
                    for n in cutlass.range_constexpr(size):
                        rOut[n] = rC[i, size * part + n]
                    send_some(here + Int64(first + size * part) * 4, rOut, size)


@cute.jit
def send_narrow(c: Ctx, here: Int64, sState: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr):
    """Pairs of columns of rC over the sum of their head's weights, into the box at `here`."""
    size = min(4, op.value_each // 2)
    rOut = cute.make_rmem_tensor(cute.make_layout((size,)), Uint32)
    for i in cutlass.range_constexpr(4):
        head = c.lane // 4 + i // 2 * 8
        if head < op.d.mla_heads:
            share = cute.arch.rcp_approx(sState[16 + head])
            first = sum_place(c, i, op)
            for part in cutlass.range_constexpr(op.value_each // 2 // size):
                for n in cutlass.range_constexpr(size):
                    k = 2 * (size * part + n)
                    rOut[n] = pack_f16(rC[i, k] * share, rC[i, k + 1] * share)
                send_words(here + Int64(first + 2 * size * part) * 2, rOut, size)


@cute.jit
def pack_f16(x: Float32, y: Float32):
    """x rounded to f16 in bits 0..15, y in bits 16..31; not even NaN has all bits set."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[y, x]
    )


@cute.jit
def sum_place(c: Ctx, i: cutlass.Constexpr, op: cutlass.Constexpr):
    """Which element of the box a lane's i-th row of sums starts at."""
    d, g, q = op.d, c.lane // 4, c.lane % 4
    head = c.cta * d.mla_heads + g + i // 2 * 8
    return head * d.kv_lora + (c.warp * 8 + 2 * q + i % 2) * op.value_each


@cute.jit
def empty_sums(c: Ctx, turn: Int32, op: cutlass.Constexpr):
    """The places of `send_sums` for the other turn, which all have read by now, each by the thread that fills it."""
    d = op.d
    if c.tid < d.mla_heads:
        i = (c.cta * d.mla_heads + c.tid) * 2
        empty_some(box(c, "stats", 1 - turn, op) + Int64(i) * 4, 2)
    there = box(c, "sums", 1 - turn, op)
    if c.warp < op.value_warps:
        words = op.value_each * op.sums_size // 4
        size = min(4, words)
        for i in cutlass.range_constexpr(4):
            first = sum_place(c, i, op)
            if c.lane // 4 + i // 2 * 8 < d.mla_heads:
                for part in cutlass.range_constexpr(words // size):
                    empty_some(there + Int64(first * op.sums_size + 4 * size * part), size)
