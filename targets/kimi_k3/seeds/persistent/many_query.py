"""The queries of MLA for several tokens, W_UK absorbed: a CTA makes columns of one head, token after token."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.persistent.boxes import box, insist, peek, post
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, unpack, view
from targets.kimi_k3.seeds.persistent.stages import most, share


@cute.jit
def load_heads(c: Ctx, turn: Int32, op: cutlass.Constexpr):
    """The pool's first values, bf16 [token, nope | rope]: the queries of this CTA's head, which the CTAs of the head
    have just posted. Ends with a barrier."""
    d = op.d
    each = (d.qk_nope + d.qk_rope) // 8
    head = c.cta // op.slices
    sWord = view(c, Uint32, 0, 4 * d.rows * each)
    rQ = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    if head < d.mla_heads:
        for i in cutlass.range(c.tid, d.rows * each, op.threads, unroll=1):
            place = i // each * op.pitch(8 * each * d.mla_heads) + (head * each + i % each) * 8
            start = box(c, "q", turn, op) + Int64(place) * 2
            peek(start, rQ)
            insist(start, rQ, 2, op)
            cute.autovec_copy(rQ, cute.local_tile(sWord, (4,), (i,)))
    consumers(op)


@cute.jit
def absorb_tokens(c: Ctx, rW: cute.Tensor, turn: Int32, op: cutlass.Constexpr):
    """Box query [token, head, kv_dim]: bf(Q_nope W_UK[h]) of this CTA's columns; the first of a head copies Q_pe."""
    d = op.d
    vectors = most(d.kv_lora // 8, op.slices)
    groups = op.threads // vectors
    wide = d.qk_nope + d.qk_rope
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 8, c.cta % op.slices, op.slices)
    v, group = c.tid % vectors, c.tid // vectors
    sHead = view(c, BFloat16, 0, d.rows * wide)
    sPart = view(c, Float32, op.heads_bytes, groups * vectors * 8)
    if head < d.mla_heads:
        rF = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rS = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        for m in cutlass.range(d.rows, unroll=1):
            rS.fill(0.0)
            if group < groups:
                for j in cutlass.range_constexpr(-(-d.qk_nope // groups)):
                    row = group + j * groups
                    if row < d.qk_nope:
                        x = sHead[m * wide + row].to(Float32)
                        unpack(rW[None, j], rF)
                        for e in cutlass.range_constexpr(8):
                            rS[e] = rS[e] + x * rF[e]
                for e in cutlass.range_constexpr(8):
                    sPart[(group * vectors + v) * 8 + e] = rS[e]
            consumers(op)
            start = m * op.pitch(d.mla_heads * d.kv_dim) + head * d.kv_dim
            for i in cutlass.range(c.tid, 8 * n, op.threads, unroll=1):
                total = Float32(0.0)
                for k in cutlass.range(groups, unroll=8):
                    total += sPart[k * vectors * 8 + i]
                post(c, "query", turn, start + 8 * first + i, total, op)
            if c.cta % op.slices == 0 and c.tid < d.qk_rope:
                pe = sHead[m * wide + d.qk_nope + c.tid].to(Float32)
                post(c, "query", turn, start + d.kv_lora + c.tid, pe, op)
            consumers(op)


@cute.jit
def load_query_of(c: Ctx, m: Int32, turn: Int32, sQ: cute.Tensor, op: cutlass.Constexpr):
    """sQ = the queries of all heads of token m, `query_words` apart."""
    d = op.d
    words, vecs = op.query_words, d.kv_dim // 8
    turns = -(-d.mla_heads * vecs // op.threads)
    start = box(c, "query", turn, op) + Int64(m * op.pitch(d.mla_heads * d.kv_dim)) * 2
    rW = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < d.mla_heads * vecs:
            peek(start + Int64(i) * 16, rW[None, k])
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < d.mla_heads * vecs:
            insist(start + Int64(i) * 16, rW[None, k], 2, op)
            place = i // vecs * (words // 4) + i % vecs
            cute.autovec_copy(rW[None, k], cute.local_tile(sQ, (4,), (place,)))
