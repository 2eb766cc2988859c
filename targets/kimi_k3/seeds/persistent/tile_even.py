"""Experts' work of several tokens dealt to the four schedulers of an SM instead of to warps: warps 0, 4, 8, .. share
one, so of 14 warps four take turns on two of them and three on the others. Where instructions are the limit, the fuller
ones would be waited for.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from targets.kimi_k3.seeds.persistent.tile_codes import codes_times, group_of
from targets.kimi_k3.seeds.persistent.tile_plan import CODE_TILE


@cute.jit
def even_columns(c: Any, op: cutlass.Constexpr):
    """(first, how many) times 128 columns of the latent of this warp."""
    each, full = op.latent_chunks // 4, op.warps % 4
    many, few = op.warps // 4 + 1, op.warps // 4
    line, k = c.warp % 4, c.warp // 4
    base, more = Int32(each // few), Int32(each % few)
    if line < full:
        base, more = Int32(each // many), Int32(each % many)
    return each * line + k * base + (k if k < more else more), base + (
        Int32(1) if k < more else Int32(0)
    )


@cute.jit
def even_place(c: Any, k: cutlass.Constexpr, op: cutlass.Constexpr):
    """As `latent_place`; of a chunk that this warp does not have, its last one."""
    first, count = even_columns(c, op)
    chunk = Int32(k // 4) if k // 4 < count else count - 1
    return ((first + chunk) * 4 + c.lane % 4) * 4 + k % 4


@cute.jit
def even_times(c: Any, slot: Int32, rL: cute.Tensor, op: cutlass.Constexpr):
    """As `unit_times`: this warp's chunks, each a chain of its own. Codes of the first two are asked for at once."""
    g = op.up
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.up_most)), Float32)
    rC.fill(0.0)
    first, count = even_columns(c, op)
    half, i = c.lane // 4 % 2, c.lane // 8
    code = (slot * op.stage + half * op.up_block) // 16 + i * (g.code_bytes // 16)
    scale = slot * op.stage + op.up_scales + (half * CODE_TILE + i) * g.scale_bytes
    far, beside = 4 * (g.code_bytes // 16), 4 * g.scale_bytes
    early = []
    for v in cutlass.range_constexpr(min(2, op.up_most)):
        j = (first + (Int32(v) if v < count else count - 1)) * 4 + c.lane % 4
        early.append(
            (group_of(c, code + j, scale + j), group_of(c, code + far + j, scale + beside + j))
        )
    for v in cutlass.range_constexpr(op.up_most):
        if v < count:
            if cutlass.const_expr(v < 2):
                codes_times(rC[None, v], early[v][0], early[v][1], rL[None, None, v])
            else:
                j = (first + v) * 4 + c.lane % 4
                a = group_of(c, code + j, scale + j)
                b = group_of(c, code + far + j, scale + beside + j)
                codes_times(rC[None, v], a, b, rL[None, None, v])
    for v in cutlass.range_constexpr(1, op.up_most):
        for e in cutlass.range_constexpr(4):
            rC[e, 0] = rC[e, 0] + rC[e, v]
    return rC


@cute.jit
def even_experts(c: Any, op: cutlass.Constexpr):
    """(first, step) of this warp's experts: even ones of a tile are one scheduler's, odd ones another's."""
    k, upper = c.warp // 4, c.warp % 4 // 2
    step = Int32(2 * (op.warps // 4 + 1))
    if upper == 1:
        step = Int32(2 * (op.warps // 4))
    return 2 * k + upper, step
