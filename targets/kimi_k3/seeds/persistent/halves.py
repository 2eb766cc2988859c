"""Halves of layers: which one it is, and the prefix as it goes on from one to the next."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2
from targets.kimi_k3.seeds.persistent.boxes import LAYERS, box, insist, peek, turn_of
from targets.kimi_k3.seeds.persistent.columns import Next
from targets.kimi_k3.seeds.persistent.device import Ctx, field, vector, within
from targets.kimi_k3.seeds.persistent.exchange import gather_wide, join_ranks
from targets.kimi_k3.seeds.persistent.fields import COUNT, IS_DENSE, IS_MLA, F
from targets.kimi_k3.seeds.persistent.mix import Banks, kept_at
from targets.kimi_k3.seeds.persistent.moe_dense import Space
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.vectors import load_x


class Io(NamedTuple):
    """Inputs and outputs that are not of one layer; None where there is none."""

    x0: Any
    delta: Any
    bank_old: Any
    slots: Any
    lengths: Any
    table: Any
    mapping: Any
    bank: Any
    ids: Any
    prefix: Any
    out: Any
    norm: Any
    weigh: Any


class Half(NamedTuple):
    """Half a layer, or the end of the run: step, its layer, whether it is the second half, the end, and whether the
    prefix starts anew in this layer; sources in the bank, and the addresses of the mix's vectors."""

    step: Any
    layer: Any
    second: Any
    closing: Any
    opens: Any
    sources: Any
    weight: Any
    out: Any


@cute.jit
def half(c: Ctx, step: Int32, io: Io, op: cutlass.Constexpr):
    d = op.d
    layer = step // 2
    second = step % 2 == 1
    closing = step == 2 * d.layers
    depth = layer + d.first
    opens = depth % d.block == 0 and not closing
    sources = (depth + d.block - 1) // d.block
    weight = io.weigh.iterator.toint() + Int64(step) * (4 * d.hidden)
    out = io.norm.iterator.toint()
    if closing:
        sources = Int32(d.bank_rows)
    else:
        out = field(c, layer, F["attn_norm"], COUNT)
        if second:
            sources += Int32(1) if opens else Int32(0)
            out = field(c, layer, F["mlp_norm"], COUNT)
    return Half(step, layer, second, closing, opens, sources, weight, out)


@cute.jit
def add(c: Ctx, h: Half, routed: Int32, sP: cute.Tensor, io: Io, ws: Space, op: cutlass.Constexpr):
    """The prefix, words [4, per]: bf(before + what the half before made), or only that where it starts anew; sP too."""
    d, g = op.d, op.wide
    rD = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rD.fill(0)
    boxed = h.second
    start, others = box(c, "attn", turn_of(c, h.layer, LAYERS), op), Int64(0)
    own = Int32(g.vecs)
    if h.step == 0:
        if cutlass.const_expr(d.first > 0):
            load_x(c, io.delta, rD, g)
    elif not h.second:
        what = Int32(field(c, h.layer - 1, F["kind"], COUNT))
        if cutlass.const_expr("D" in d.ffn):
            if what & IS_DENSE != 0:
                load_x(c, ws.delta, rD, g)
                if cutlass.const_expr(d.gpus > 1):
                    join_ranks(c, "dense", h.layer - 1, rD, g, op)
        if cutlass.const_expr("E" in d.ffn and d.gpus > 1):
            if what & IS_DENSE == 0:
                start = box(c, "delta", turn_of(c, routed - 1), op)
                gather_wide(c, "delta", h.layer - 1, start, d.hidden_local // 8, rD, op)
        elif cutlass.const_expr("E" in d.ffn):
            if what & IS_DENSE == 0:
                boxed = h.step > 0
                start, own = box(c, "delta", turn_of(c, routed - 1), op), Int32(d.hidden_local // 8)
                if cutlass.const_expr(d.hidden_local < d.hidden):
                    others = field(c, h.layer - 1, F["remote_delta"], COUNT)
    if boxed:
        for v in cutlass.range_constexpr(g.per):
            i = vector(c, v, g)
            if i < g.vecs:
                peek((start if i < own else others - Int64(own) * 16) + Int64(i) * 16, rD[None, v])
        for v in cutlass.range_constexpr(g.per):
            i = vector(c, v, g)
            if i < own:
                insist(start + Int64(i) * 16, rD[None, v], 2, op)
        if cutlass.const_expr(d.gpus > 1):
            join_ranks(c, "attn", h.layer, rD, g, op)
    anew = h.second and h.opens
    rP = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for v in cutlass.range_constexpr(g.per):
        cute.autovec_copy(kept_at(c, sP, Int32(0), v, op), rP[None, v])
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            sum = add_bf16x2(rP[e, v], rD[e, v])
            if cutlass.const_expr(d.first == 0):
                sum = rP[e, v] if h.step == 0 else sum
            rP[e, v] = rD[e, v] if anew else sum
    keep_row(c, rP, sP, Int32(0), op)
    return rP


@cute.jit
def store_wide(c: Ctx, r: cute.Tensor, address: Int64, op: cutlass.Constexpr):
    """This thread's words of a vector of `hidden`; one replica of the warps."""
    for v in cutlass.range_constexpr(op.wide.per):
        i = vector(c, v, op.wide)
        if i < op.wide.vecs and c.warp < op.wide.width:
            pointer = cute.make_ptr(
                Uint32, address + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
            )
            cute.autovec_copy(r[None, v], cute.make_tensor(pointer, cute.make_layout((4,))))


@cute.jit
def keep_row(c: Ctx, r: cute.Tensor, sKept: cute.Tensor, row: Int32, op: cutlass.Constexpr):
    """This thread's columns of a vector of `hidden` as a row in shared memory, where only the same thread looks."""
    for v in cutlass.range_constexpr(op.wide.per):
        cute.autovec_copy(r[None, v], kept_at(c, sKept, row, v, op))


@cute.jit
def keep(c: Ctx, h: Half, rP: cute.Tensor, banks: Banks, io: Io, op: cutlass.Constexpr):
    """The prefix where it is wanted later: as a row of the bank, of this CTA's own for its own use and of the output
    by the first CTA, and at the end of the run."""
    d = op.d
    target = io.prefix.iterator.toint()
    wanted = h.closing
    if cutlass.const_expr(d.bank_rows > d.bank_old):
        if h.opens and not h.second:
            number = (h.layer + d.first) // d.block
            row = Int64((number - d.bank_old) * d.hidden * 2)
            target = io.bank.iterator.toint() + row
            wanted = h.step >= 0
            if cutlass.const_expr(banks.kept is None):
                store_wide(c, rP, banks.new + row, op)
            else:
                keep_row(c, rP, banks.kept, number, op)
    if wanted and c.cta == 0:
        store_wide(c, rP, target, op)


@cute.jit
def releases(c: Ctx, h: Half, op: cutlass.Constexpr):
    """Whether the end of a half releases what was written: behind a dense FFN, whose result lies in a plain buffer, and
    at the last edge."""
    found = h.step + 1 == 2 * op.d.layers
    if cutlass.const_expr("D" in op.d.ffn):
        dense = field(c, within(h.layer, op.d.layers), F["kind"], COUNT) & IS_DENSE != 0
        found = found or (h.second and dense)
    return found


@cute.jit
def next_half(c: Ctx, h: Half, banks: Banks, op: cutlass.Constexpr):
    """What the end of half `h` has to know of the one behind it."""
    opens = h.opens and not h.second
    sources = h.sources + (Int32(1) if opens else Int32(0))
    return Next(banks, h.weight + 4 * op.d.hidden, sources, opens, releases(c, h, op))


@cute.jit
def coming(c: Ctx, h: Any, op: cutlass.Constexpr):
    """(rows, whether they are pairs) of what a half begins with in the ring."""
    d = op.d
    what = Int32(field(c, within(h.layer, d.layers), F["kind"], COUNT))
    rows, pairs = Int32(0), Boolean(False)
    if not h.closing:
        if not h.second:
            if cutlass.const_expr("K" in d.attn):
                _, rows = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
            if cutlass.const_expr("M" in d.attn):
                _, n = share(d.a_proj_rows, c.cta, op.ctas)
                rows = n if what & IS_MLA != 0 else rows
        else:
            if cutlass.const_expr("E" in d.ffn):
                _, rows = share(d.router_rows, c.cta, op.ctas)
                if cutlass.const_expr(not op.router_first):
                    _, n = share(d.latent_rows, c.cta, op.ctas)
                    rows += n
            if cutlass.const_expr("D" in d.ffn):
                pairs = what & IS_DENSE != 0
                _, n = share(d.dense_dim, c.cta, op.ctas)
                rows = n if pairs else rows
    return rows, pairs
