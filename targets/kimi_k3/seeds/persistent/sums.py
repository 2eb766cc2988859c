"""Sums over the consumer warps of a CTA."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from targets.kimi_k3.seeds.common import lanes_sum
from targets.kimi_k3.seeds.persistent.device import Ctx
from targets.kimi_k3.seeds.persistent.stages import STRIDE


@cute.jit
def put(c: Ctx, slot: cutlass.Constexpr, x: Float32):
    """This warp's part of reduction `slot`."""
    x = lanes_sum(x, 32)
    if c.lane == 0:
        c.red[slot * STRIDE + c.warp] = x


@cute.jit
def put_two(c: Ctx, slot: cutlass.Constexpr, x: Float32, y: Float32):
    """This warp's parts of the reductions `slot` and `slot` + 1: half of the lanes go on with either."""
    upper = c.lane >= 16
    sum = (y if upper else x) + cute.arch.shuffle_sync_bfly(x if upper else y, offset=16)
    sum = lanes_sum(sum, 16)
    if c.lane % 16 == 0:
        c.red[(slot + c.lane // 16) * STRIDE + c.warp] = sum


@cute.jit
def take_two(c: Ctx, slot: cutlass.Constexpr, width: cutlass.Constexpr):
    """Both sums of the first `width` (at most 16) warps' parts, after a barrier."""
    x = Float32(0.0)
    if c.lane % 16 < width:
        x = c.red[(slot + c.lane // 16) * STRIDE + c.lane % 16]
    x = lanes_sum(x, 16)
    return cute.arch.shuffle_sync(x, 0), cute.arch.shuffle_sync(x, 16)


@cute.jit
def take(c: Ctx, slot: cutlass.Constexpr, width: cutlass.Constexpr):
    """Sum of the first `width` warps' parts, after a barrier."""
    x = Float32(0.0)
    if c.lane % 16 < width:
        x = c.red[slot * STRIDE + c.lane % 16]
    return lanes_sum(x, 16)
