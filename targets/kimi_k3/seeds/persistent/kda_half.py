"""KDA as half a layer of the decode step: the pieces of `kda`, with nothing awaited before the products that is loaded.

State, taps and vectors are on their way while the rows of the in-projection are multiplied; a first use before them
would make all warps wait for memory in front of a full ring.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.persistent.boxes import KDAS, post, turn_of
from targets.kimi_k3.seeds.persistent.device import Ctx, consumers, view
from targets.kimi_k3.seeds.persistent.edges import hint, wait
from targets.kimi_k3.seeds.persistent.kda import (
    Place,
    State,
    load_early,
    place,
    tap_sum,
    update,
)
from targets.kimi_k3.seeds.persistent.kda_out import gated, out_projection
from targets.kimi_k3.seeds.persistent.kda_sizes import HEAD
from targets.kimi_k3.seeds.persistent.products import drain, gathered
from targets.kimi_k3.seeds.persistent.stages import share


@cute.jit
def use_taps(c: Ctx, p: Place, s: State, op: cutlass.Constexpr):
    """What the taps add to this thread's channel, where `update` looks."""
    sU = view(c, Float32, 0, 3 * HEAD)
    if p.head >= 0 and c.tid < 2 * HEAD + p.count:
        sU[c.tid] = tap_sum(s.taps, s.conv)


@cute.jit
def kda_half(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    slots: cute.Tensor,
    op: cutlass.Constexpr,
    nx: Any = None,
    held: Any = None,
):
    """The box attn of a KDA layer, number `number` of the launch; not hinted at yet."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, KDAS)
    p = place(c, slots, op)
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    s = load_early(c, layer, p, False, op)
    it = drain(c, it, n, Int32(0), rX, op.wide, op, held)
    use_taps(c, p, s, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "proj", turn, first + i, gathered(c, i, op.wide.width), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge proj", layer, kind="edge")
    s = State(s.rows, s.f_b, s.conv, s.taps, s.bias, cute.math.exp(s.rate))
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "update", layer)
    update(c, layer, p, s, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge o", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "o_proj", layer)
    g = op.rows(d.kda_dim)
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    gated(c, layer, p.slot, turn, rO, op)
    it = out_projection(c, layer, it, rO, None, g, op, nx)
    return it, edge
