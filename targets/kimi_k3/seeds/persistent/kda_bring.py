"""What KDA of several tokens brings besides weights, past all registers: states as stages of the ring, taps and the
convolution's weights by a warp of their own into shared memory that they share with nothing.

Taps are read where the last launch left them; those of this one are written when it ends (`kda_taps`). No arithmetic
here.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from targets.kimi_k3.seeds.common import smem
from targets.kimi_k3.seeds.persistent.device import Ctx, at, field, view
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.kda_seat import Seat, seat
from targets.kimi_k3.seeds.persistent.kda_sizes import (
    HEAD,
    ROW,
    channels_of,
    pitch_of,
    state_stages,
    window,
)
from targets.kimi_k3.seeds.persistent.ring import bulk, stage_free
from targets.kimi_k3.seeds.persistent.tensor import TOKENS


class Taps(NamedTuple):
    """Of one instance, in shared memory. taps: bf16 [token, tap, channel]; weights: f32 [channel, 4]; mbarriers: they
    are there, nobody needs them any more.
    """

    taps: Any
    weights: Any
    full: Any
    empty: Any


@cute.jit
def slot_of(c: Ctx, token: Int32):
    """State slot of a token, 0 if there is none; first in the pool, for all phases."""
    return view(c, Int32, 0, TOKENS)[token]


@cute.jit
def window_first(s: Seat, op: cutlass.Constexpr):
    """The first channel of v that is copied, within its head."""
    first = s.first // 8 * 8
    return first if first < HEAD - window(op) else Int32(HEAD - window(op))


@cute.jit
def taps_at(c: Ctx, layer: Int32, slot: Int32, op: cutlass.Constexpr):
    """Where a slot's taps begin: bf16 [3, q | k | v]; of slot 0, which is read and not used, for tokens without."""
    known = slot if slot > 0 else Int32(0)
    return field(c, layer, F["state_conv"], COUNT) + Int64(known) * (18 * op.d.kda_dim)


@cute.jit
def states_at(c: Ctx, layer: Int32, slot: Int32, s: Seat, op: cutlass.Constexpr):
    """Where this CTA's rows of a slot's state begin, of slot 0 for tokens without."""
    known = slot if slot > 0 else Int32(0)
    start = field(c, layer, F["state_S"], COUNT)
    start += Int64(known) * (4 * op.d.kda_heads * HEAD * HEAD)
    return start + Int64((s.head * HEAD + s.first) * ROW)


@cute.jit
def state_row(c: Ctx, layer: Int32, slot: Int32, s: Seat, row: Int32, op: cutlass.Constexpr):
    """A row of the state: f32 [128]."""
    return at(Float32, states_at(c, layer, slot, s, op) + Int64(row * ROW), HEAD)


# ---- what is brought
@cute.jit
def open_rows(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    """Shared memory and slots of all warps; ends with a barrier of the CTA."""
    bars = smem(Int64, (2,), (1,)).iterator
    taps = Taps(
        smem(BFloat16, (op.d.rows * 3 * pitch_of(op),), (1,)),
        smem(Float32, (channels_of(op) * 4,), (1,)),
        bars,
        bars + 1,
    )
    if c.tid < TOKENS:
        slot = Int32(0)
        if c.tid < op.d.rows:
            slot = slots[c.tid]
        view(c, Int32, 0, TOKENS)[c.tid] = slot
    if c.tid == 0:
        cute.arch.mbarrier_init(taps.full, 1)
        cute.arch.mbarrier_init(taps.empty, op.warps)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return taps


@cute.jit
def copy(target: Int32, source: Int64, size: Int32, bar: cute.Pointer):
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, Int32(bar.toint())],
    )


@cute.jit
def bring_taps(c: Ctx, taps: Taps, op: cutlass.Constexpr):
    """By a warp of its own: taps and weights of instance after instance, each as soon as the last ones are used up."""
    s = seat(c, op)
    if s.head >= 0:
        for layer in cutlass.range(op.d.layers, unroll=1):
            if layer > 0:
                cute.arch.mbarrier_wait(taps.empty, (layer - 1) & 1)
            copy_taps(c, taps, layer, s, op)


@cute.jit
def copy_taps(c: Ctx, taps: Taps, layer: Int32, s: Seat, op: cutlass.Constexpr):
    """A copy is a part (q, k, v) of a tap of a token; the last three are weights."""
    d, pitch = op.d, pitch_of(op)
    wide, base = Int32(2 * window(op)), window_first(s, op)
    size = d.rows * 3 * pitch * 2 + (2 * HEAD + s.count) * 16
    if c.lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(taps.full, size)
    cute.arch.sync_warp()
    for i in cutlass.range(c.lane, 9 * d.rows, 32, unroll=1):
        row, part = i // 3, i % 3
        channel = part * d.kda_dim + s.head * HEAD + (base if part == 2 else Int32(0))
        source = taps_at(c, layer, slot_of(c, row // 3), op)
        source += Int64(2 * (row % 3 * (3 * d.kda_dim) + channel))
        target = Int32(taps.taps.iterator.toint()) + 2 * (row * pitch + part * HEAD)
        copy(target, source, wide if part == 2 else Int32(2 * HEAD), taps.full)
    if c.lane < 3:
        channel = c.lane * d.kda_dim + s.head * HEAD
        channel += s.first if c.lane == 2 else Int32(0)
        source = field(c, layer, F["conv"], COUNT) + Int64(16 * channel)
        target = Int32(taps.weights.iterator.toint()) + c.lane * (16 * HEAD)
        copy(target, source, 16 * s.count if c.lane == 2 else Int32(16 * HEAD), taps.full)


@cute.jit
def fill_states(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """Stages of this CTA's rows of all tokens' states, token by token."""
    rows, cuts, tokens, stages = state_stages(op)
    s = seat(c, op)
    if s.head >= 0:
        for n in cutlass.range(stages, unroll=1):
            slot = stage_free(c, it, op)
            first = n // cuts * tokens
            many = op.d.rows - first if op.d.rows - first < tokens else Int32(tokens)
            above = n % cuts * rows
            left = s.count - above if s.count > above else Int32(0)
            left = left if left < rows else Int32(rows)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, many * left * ROW)
            if left > 0:
                for k in cutlass.range(many, unroll=1):
                    source = states_at(c, layer, slot_of(c, first + k), s, op) + Int64(above * ROW)
                    bulk(c, slot, k * (rows * ROW), source, left * ROW, op)
            it += 1
    return it
