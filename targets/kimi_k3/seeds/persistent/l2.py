"""The stream of weights beyond the ring: a producer asks L2 for the stages after those that it brings.

A ring holds some 180 KB of a CTA's stream, five or six microseconds; an edge that takes longer leaves memory idle. What
L2 has fetched meanwhile comes faster afterwards. Hints only: nothing depends on them.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from targets.kimi_k3.seeds.persistent.device import Ctx, bulk, stage_free


class Piece(NamedTuple):
    """A CTA's rows of a matrix: where they start, how many (0: there is no such matrix)."""

    source: Any
    rows: Any


@cute.jit
def fetch(source: Int64, size: Int32):
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[source, size]
    )


@cute.jit
def fetch_rows(p: Piece, stage: Int32, g: cutlass.Constexpr):
    """The stage-th stage of whole rows."""
    first = stage * g.chunk
    if first < p.rows:
        n = p.rows - first if p.rows - first < g.chunk else Int32(g.chunk)
        fetch(p.source + Int64(first) * g.row_bytes, n * g.row_bytes)


@cute.jit
def fetch_tile(p: Piece, stage: Int32, g: cutlass.Constexpr):
    """The stage-th stage of tiles."""
    first = stage // g.slices * g.chunk
    if first < p.rows:
        n = p.rows - first if p.rows - first < g.chunk else Int32(g.chunk)
        start = p.source + Int64(first) * g.row_bytes + Int64(stage % g.slices) * g.piece_bytes
        for r in cutlass.range(n, unroll=1):
            fetch(start + Int64(r) * g.row_bytes, Int32(g.piece_bytes))


@cute.jit
def fill_on(c: Ctx, it: Int32, here: tuple, later: tuple, op: cutlass.Constexpr):
    """Stages of a matrix of whole rows; here and later = (Piece, its plan): after the last stages of this one L2 is
    asked for the first of the later one.
    """
    p, g = here
    after, h = later
    count = (p.rows + g.chunk - 1) // g.chunk
    for s in cutlass.range(count, unroll=1):
        first = s * g.chunk
        slot = stage_free(c, it, op)
        n = p.rows - first if p.rows - first < g.chunk else Int32(g.chunk)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, n * g.row_bytes)
        bulk(c, slot, Int32(0), p.source + Int64(first) * g.row_bytes, n * g.row_bytes, op)
        if s + op.ahead < count:
            fetch_rows(p, s + op.ahead, g)
        else:
            fetch_rows(after, s + op.ahead - count, h)
        it += 1
    return it


@cute.jit
def fill_tiles_on(c: Ctx, it: Int32, here: tuple, later: tuple, op: cutlass.Constexpr):
    """As `fill_on` for tiles."""
    p, g = here
    after, h = later
    count = (p.rows + g.chunk - 1) // g.chunk * g.slices
    for s in cutlass.range(count, unroll=1):
        first = s // g.slices * g.chunk
        slot = stage_free(c, it, op)
        n = p.rows - first if p.rows - first < g.chunk else Int32(g.chunk)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, n * g.piece_bytes)
        start = p.source + Int64(first) * g.row_bytes + Int64(s % g.slices) * g.piece_bytes
        for r in cutlass.range(n, unroll=1):
            bulk(c, slot, r * g.pitch, start + Int64(r) * g.row_bytes, Int32(g.piece_bytes), op)
        if s + op.ahead < count:
            fetch_tile(p, s + op.ahead, g)
        else:
            fetch_tile(after, s + op.ahead - count, h)
        it += 1
    return it
