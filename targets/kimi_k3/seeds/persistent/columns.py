"""Who makes columns of a half's result posts their parts of the sums of the AttnRes that comes (box dots, `dots`)."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2, high, pack_bf16
from targets.kimi_k3.seeds.persistent.boxes import LAYERS, post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, within
from targets.kimi_k3.seeds.persistent.edges import arrive, hint
from targets.kimi_k3.seeds.persistent.mix import again
from targets.kimi_k3.seeds.persistent.stages import STRIDE

VALUES = 8


class Next(NamedTuple):
    """The half that comes: address of its norm x projection, rows in the bank, whether the prefix starts anew; and
    whether this half's end releases what was written."""

    banks: Any
    weight: Any
    sources: Any
    anew: Any
    releases: Any


class Columns(NamedTuple):
    """Of a thread's columns, one a turn, as they were loaded: weight f32 [turns]; bits of bf16 [turns] of the prefix
    and of what other ranks add where this one makes nothing, and of bank rows [2, turns]; which rows are there [2]."""

    weight: Any
    prefix: Any
    others: Any
    bank: Any
    there: Any


def dot_turns(op):
    """Columns of a thread that posts sums."""
    return -(-op.dot_columns // (32 * op.dot_warps))


@cute.jit
def eight_sums(c: Ctx, r: cute.Tensor):
    """Sums over the warp of r[8]; lane 4 k and the three behind it have the k-th."""
    values = [r[k] for k in range(VALUES)]
    for offset in cutlass.range_constexpr(3):
        many, apart = (4, 2, 1)[offset], (16, 8, 4)[offset]
        upper = c.lane & apart != 0
        kept = []
        for k in cutlass.range_constexpr(many):
            x, y = values[k], values[k + many]
            other = cute.arch.shuffle_sync_bfly(x if upper else y, offset=apart)
            kept.append((y if upper else x) + other)
        values = kept
    x = values[0]
    for offset in cutlass.range_constexpr(2):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=2 - offset)
    return x


@cute.jit
def half_bits(address: Int64):
    """The bits of the bf16 at an address, on their way: nothing is done with them that would wait for them."""
    return cute.arch.inline_ptx(
        "ld.global.u16 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


@cute.jit
def dot_index(c: Ctx, k: cutlass.Constexpr, op: cutlass.Constexpr):
    """Which of the CTA's columns a thread of the last warps has as its k-th; less than zero in those before them."""
    return (c.warp - (op.warps - op.dot_warps)) * 32 + c.lane + k * 32 * op.dot_warps


@cute.jit
def ask_columns(c: Ctx, nx: Next, own: tuple, others: tuple, op: cutlass.Constexpr):
    """This thread's columns on their way, long before they are wanted; all warps ask, so that loads stand in no branch.
    own = (first, number) of the columns that this CTA makes, others = (address, first, number) of those that only
    other ranks make, None where there are none."""
    d, turns = op.d, dot_turns(op)
    rW = cute.make_rmem_tensor(cute.make_layout((turns,)), Float32)
    rP = cute.make_rmem_tensor(cute.make_layout((turns,)), Uint32)
    rOthers = cute.make_rmem_tensor(cute.make_layout((turns,)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((2, turns)), Uint32)
    rB.fill(0)
    rOthers.fill(0)
    there = tuple(s < nx.sources for s in range(d.bank_rows))
    here = again(c)
    for k in cutlass.range_constexpr(turns):
        i = dot_index(here, k, op)
        i = i if i > 0 else Int32(0)
        column = own[0] + within(i, own[1])
        if cutlass.const_expr(others is not None):
            place = within(i - own[1], others[2])
            place = others[1] + (place if place > 0 else Int32(0))
            column = column if i < own[1] else d.hidden_local + place
            rOthers[k] = half_bits(others[0] + Int64(place) * 2)
        pointer = cute.make_ptr(
            Float32, nx.weight + Int64(column) * 4, cute.AddressSpace.gmem, assumed_align=4
        )
        rW[k] = cute.make_tensor(pointer, cute.make_layout((1,)))[0]
        for s in cutlass.range_constexpr(d.bank_rows):
            start = nx.banks.old + s * d.hidden * 2
            if cutlass.const_expr(s >= d.bank_old):
                start = nx.banks.new + (s - d.bank_old) * d.hidden * 2
            # any memory will do for a row that is not there
            rB[s, k] = half_bits((start if there[s] else nx.weight) + Int64(column) * 2)
        rP[k] = prefix_at(c, column, op)
    return Columns(rW, rP, rOthers, rB, there)


@cute.jit
def prefix_at(c: Ctx, column: Int32, op: cutlass.Constexpr):
    """A column of the prefix, from where the thread that has it keeps it, as the bits of a bf16."""
    g = op.wide
    i = column // 8
    place = (i // (32 * g.width) * op.threads + i % (32 * g.width)) * 8 + column % 8
    kept = cute.make_tensor(
        cute.recast_ptr(c.kept.iterator, dtype=Uint16), cute.make_layout((2 * op.kept_row,))
    )
    return kept[place].to(Uint32)


@cute.jit
def sums_at(c: Ctx, op: cutlass.Constexpr):
    """Where those who make columns leave them for those who post sums, f32."""
    start = op.plain_reductions * STRIDE + VALUES * op.warps + 4
    return cute.make_tensor(c.red.iterator + start, cute.make_layout((op.dot_columns,)))


@cute.jit
def close_half(c: Ctx, nx: Next, place: tuple, cols: Columns, op: cutlass.Constexpr):
    """This CTA's columns are posted, and in `sums_at`: says so, then the last warps post their sums, which say
    themselves that they are there. place = (layer, whether its FFN made them, how many this CTA made, how many in all).
    """
    # ptxas takes the lanes of a warp to be together at the end of the loop over halves, and counts it in registers of
    # the warp; where lanes had parted in the loop over columns they were not, and the loop was counted twice
    cute.arch.sync_warp()
    if nx.releases:
        arrive(c, op)
    else:
        hint(c, op)
    layer, second, own, n = place
    if c.warp >= op.warps - op.dot_warps:
        sSum = sums_at(c, op)
        rV = cute.make_rmem_tensor(cute.make_layout((VALUES,)), Float32)
        rV.fill(0.0)
        for k in cutlass.range_constexpr(dot_turns(op)):
            i = dot_index(c, k, op)
            x = pack_bf16(Float32(0.0), sSum[within(i, own)])
            x = x if i < own else cols.others[k] << 16
            p = add_bf16x2(cols.prefix[k] << 16, x)
            p = x if nx.anew else p
            p = high(p) if i < n else Float32(0.0)
            w = cols.weight[k] if i < n else Float32(0.0)
            rV[0] = rV[0] + p * p
            rV[1] = rV[1] + p * w
            for s in cutlass.range_constexpr(op.d.bank_rows):
                b = (cols.bank[s, k] << 16).bitcast(Float32)
                b = b if cols.there[s] else Float32(0.0)
                rV[2 + s] = rV[2 + s] + p * b
                rV[4 + s] = rV[4 + s] + b * w
        x = eight_sums(c, rV)
        if c.lane % 4 == 0:
            entry = (second * op.ctas + c.cta) * op.dot_warps + c.warp - (op.warps - op.dot_warps)
            post(c, "dots", turn_of(c, layer, LAYERS), entry * VALUES + c.lane // 4, x, op)
    cute.arch.sync_warp()
