"""The queries of MLA, W_UK absorbed: a CTA makes columns of one head, all CTAs need all heads."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import lanes_sum
from targets.kimi_k3.seeds.persistent.boxes import box, insist, peek, post
from targets.kimi_k3.seeds.persistent.device import (
    Ctx,
    consumers,
    field,
    unpack,
    view,
    within,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.stages import most, share


@cute.jit
def load_uk(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """This thread's part of W_UK: eight columns, every `groups`-th row of the head; words [4, turns]."""
    d = op.d
    vectors = most(d.kv_lora // 8, op.slices)
    groups = op.threads // vectors
    turns = -(-d.qk_nope // groups)
    rW = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    rW.fill(0)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 8, c.cta % op.slices, op.slices)
    v, group = c.tid % vectors, c.tid // vectors
    if head < d.mla_heads and v < n and group < groups:
        base = field(c, layer, F["w_uk"], COUNT) + Int64(head * d.qk_nope * d.kv_lora * 2)
        for j in cutlass.range_constexpr(turns):
            row = group + j * groups
            if row < d.qk_nope:
                words_at(base, row * (d.kv_lora // 8) + first + v, rW[None, j])
    return rW


@cute.jit
def load_head(c: Ctx, turn: Int32, op: cutlass.Constexpr):
    """The pool behind the new row: the query of this CTA's head, which the CTAs of the head have just posted."""
    d = op.d
    many = (d.qk_nope + d.qk_rope) // 8
    head = c.cta // op.slices
    sWord = view(c, Uint32, op.new_bytes, 4 * many)
    rQ = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    if c.tid < many and head < d.mla_heads:
        start = box(c, "q", turn, op) + Int64(head * many + c.tid) * 16
        peek(start, rQ)
        insist(start, rQ, 2, op)
        cute.autovec_copy(rQ, cute.local_tile(sWord, (4,), (c.tid,)))
    consumers(op)


@cute.jit
def absorb(c: Ctx, rW: cute.Tensor, turn: Int32, op: cutlass.Constexpr):
    """Box query [head, kv_dim]: bf(Q_nope W_UK[h]) of this CTA's columns; the first of a head copies Q_pe."""
    d = op.d
    vectors, groups, pitch = op.groups_of(8)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 8, c.cta % op.slices, op.slices)
    v, group = c.tid % vectors, c.tid // vectors
    sHead = view(c, BFloat16, op.new_bytes, d.qk_nope + d.qk_rope)
    sPart = view(c, Float32, op.new_bytes + op.head_bytes, groups * pitch)
    if head < d.mla_heads:
        rF = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rS = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rS.fill(0.0)
        if group < groups:
            for j in cutlass.range_constexpr(-(-d.qk_nope // groups)):
                row = group + j * groups
                if row < d.qk_nope:
                    x = sHead[row].to(Float32)
                    unpack(rW[None, j], rF)
                    for e in cutlass.range_constexpr(8):
                        rS[e] = rS[e] + x * rF[e]
            place = (group * pitch + v * 8) // 4
            for k in cutlass.range_constexpr(2):
                part = cute.local_tile(rS, (4,), (k,))
                cute.autovec_copy(part, cute.local_tile(sPart, (4,), (place + k,)))
        consumers(op)
        post_sums(
            c, "query", turn, (head * d.kv_dim + 8 * first, 8 * n), sPart, (groups, pitch), op
        )
        if c.cta % op.slices == 0 and c.tid < d.qk_rope:
            pe = sHead[d.qk_nope + c.tid].to(Float32)
            post(c, "query", turn, head * d.kv_dim + d.kv_lora + c.tid, pe, op)


@cute.jit
def post_sums(
    c: Ctx, name: cutlass.Constexpr, turn: Int32, place: tuple, sPart: cute.Tensor, shape: cutlass.Constexpr,
    op: cutlass.Constexpr,
):  # fmt: skip
    """Elements of a box, place = (first, number, whole eights or fours): sums of columns of sPart over groups; shape =
    (groups, floats from one to the next)."""
    first, n = place
    groups, pitch = shape
    if cutlass.const_expr(op.spread):
        for i in cutlass.range(c.tid // 8, n, op.threads // 8, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range_constexpr(-(-groups // 8)):
                row = c.lane % 8 + 8 * k
                x = sPart[within(row, groups) * pitch + i]
                total += x if row < groups else Float32(0.0)
            total = lanes_sum(total, 8)
            if c.lane % 8 == 0:
                post(c, name, turn, first + i, total, op)
    else:
        for i in cutlass.range(c.tid, n, op.threads, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range(groups, unroll=8):
                total += sPart[k * pitch + i]
            post(c, name, turn, first + i, total, op)


@cute.jit
def load_query(c: Ctx, turn: Int32, sQ: cute.Tensor, op: cutlass.Constexpr):
    """sQ = the queries of all heads, `query_words` apart."""
    d = op.d
    words, vecs = op.query_words, d.kv_dim // 8
    turns = -(-d.mla_heads * vecs // op.threads)
    start = box(c, "query", turn, op)
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
