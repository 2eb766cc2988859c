"""Which head of KDA a CTA has, which rows of its state, and which channels go with them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from targets.kimi_k3.seeds.persistent.device import Ctx
from targets.kimi_k3.seeds.persistent.kda_sizes import HEAD


class Seat(NamedTuple):
    """head (-1: this CTA has none), which slice of its state rows, the first of them and how many."""

    head: Any
    slice: Any
    first: Any
    count: Any


# ---- who has what
@cute.jit
def seat(c: Ctx, op: cutlass.Constexpr):
    per = op.slices
    head = c.cta // per
    part = c.cta % per
    first = HEAD * part // per
    count = HEAD * (part + 1) // per - first
    if head >= op.d.kda_heads:
        head, count = Int32(-1), Int32(0)
    return Seat(head, part, first, count)


@cute.jit
def channel_of(s: Seat, i: Int32, op: cutlass.Constexpr):
    """i-th channel of this CTA: 128 of q, 128 of k, then its own of v."""
    width = op.d.kda_dim
    found = s.head * HEAD + i % HEAD
    if i >= HEAD:
        found += width
    if i >= 2 * HEAD:
        found = 2 * width + s.head * HEAD + s.first + i - 2 * HEAD
    return found
