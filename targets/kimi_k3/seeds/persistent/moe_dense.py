"""The FFN of a layer without experts in the persistent kernel."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import round_bf16
from targets.kimi_k3.seeds.persistent.columns import ask_columns, close_half, sums_at
from targets.kimi_k3.seeds.persistent.device import Ctx, at, consumers, field
from targets.kimi_k3.seeds.persistent.edges import arrive, wait
from targets.kimi_k3.seeds.persistent.exchange import tell_rank
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.products import drain, gathered
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.vectors import load_x, situ_pair


class Space(NamedTuple):
    """Plain buffers between CTAs, bf16, global: proj of MLA, hs and delta of dense FFNs; mla: MlaSpace."""

    proj: Any
    hs: Any
    delta: Any
    mla: Any


@cute.jit
def dense(
    c: Ctx, layer: Int32, it: Int32, edge: Int32, rX: cute.Tensor, ws: Space, op: cutlass.Constexpr,
    nx: Any = None, held: Any = None,
):  # fmt: skip
    """The FFN of a layer without experts; ws.delta, and with nx box dots, is complete at the next edge."""
    d = op.d
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op, held)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        ws.hs[first + i] = situ_pair(c, 2 * i, g.width).to(BFloat16)
    arrive(c, op)
    edge += 1
    wait(c, edge, op)
    g = op.rows(d.dense_dim)
    rH = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    load_x(c, ws.hs, rH, g)
    first, n = share(d.hidden, c.cta, op.ctas)
    if cutlass.const_expr(nx is not None):
        sSum = sums_at(c, op)
        cols = ask_columns(c, nx, (first, n), None, op)
    it = drain(c, it, n, Int32(0), rH, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        y = gathered(c, i, g.width)
        if cutlass.const_expr(d.gpus > 1):
            tell_rank(c, "dense", layer, first + i, y)
        if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
            y = (
                round_bf16(y)
                + at(Float32, field(c, layer, F["remote_dense"], COUNT), d.hidden)[first + i]
            )
        ws.delta[first + i] = y.to(BFloat16)
        if cutlass.const_expr(nx is not None):
            sSum[i] = y
    if cutlass.const_expr(nx is not None):
        close_half(c, nx, (layer, Int32(1), n, n), cols, op)
    return it, edge
