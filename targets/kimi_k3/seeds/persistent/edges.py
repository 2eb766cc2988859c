"""Edges between CTAs: counters that all add to and wait for, one line each; what the next launch counts on from."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from targets.kimi_k3.seeds.persistent.device import Ctx, consumers

ALL, ROUTE = 0, 32
"""Lines of the counters: edges that every CTA waits for in turn; the router's edge, which is waited for later."""


@cute.jit
def dawdle(c: Ctx, op: cutlass.Constexpr):
    """One arrival in sixteen is late by up to `jitter` ns, by a hash of arrivals so far; nothing in a normal build."""
    if cutlass.const_expr(getattr(op, "jitter", 0) > 0):
        if c.tid == 0:
            mixed = (Uint32(counter(c, ALL, False)) + Uint32(c.cta * 7919)) * Uint32(0x9E3779B1)
            if mixed >> 28 == Uint32(0):
                late = (mixed >> 8) & Uint32(op.jitter - 1)
                cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[late])


@cute.jit
def arrive(c: Ctx, op: cutlass.Constexpr):
    """All that this CTA's consumers wrote is visible to who waits for this edge."""
    dawdle(c, op)
    consumers(op)
    if c.tid == 0:
        cute.arch.red(c.sync, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")


@cute.jit
def hint(c: Ctx, op: cutlass.Constexpr, line: cutlass.Constexpr = ALL):
    """This CTA's consumers have posted: it is worth looking into the boxes. Orders nothing; what is in a box says so.

    A release here would first drain all that the CTA wrote, about a microsecond under load.
    """
    dawdle(c, op)
    consumers(op)
    if c.tid == 0:
        cute.arch.red(c.sync + line, Int32(1), op="add", dtype="u32", sem="relaxed", scope="gpu")


@cute.jit
def counter(c: Ctx, line: cutlass.Constexpr, acquire: cutlass.Constexpr):
    seen = Int32(0)
    if cutlass.const_expr(acquire):
        seen = cute.arch.load(c.sync + line, Int32, sem="acquire", scope="gpu")
    else:
        seen = cute.arch.load(c.sync + line, Int32, sem="relaxed", scope="gpu")
    return seen


@cute.jit
def wait(
    c: Ctx,
    edge: Int32,
    op: cutlass.Constexpr,
    line: cutlass.Constexpr = ALL,
    acquire: cutlass.Constexpr = True,
    missing: cutlass.Constexpr = 0,
):
    """Until every CTA (but `missing`) arrived at edge number `edge` (counted from 1) of this launch on this line.

    `acquire`: what they wrote before an `arrive` can be read then. After a `hint` there is nothing to acquire.
    """
    if c.tid == 0:
        await_line(c, edge, op, line, acquire, missing)
    consumers(op)


@cute.jit
def await_line(
    c: Ctx,
    edge: Int32,
    op: cutlass.Constexpr,
    line: cutlass.Constexpr,
    acquire: cutlass.Constexpr,
    missing: cutlass.Constexpr,
):
    """As `wait`, by one thread."""
    base = c.base[line // 32]
    target = base + edge * op.ctas - missing
    seen = counter(c, line, acquire)
    if cutlass.const_expr(op.spin == 0):
        while seen - target < 0:
            seen = counter(c, line, acquire)
    else:
        turns = Int32(0)
        while seen - target < 0 and turns < op.spin:
            seen = counter(c, line, acquire)
            turns += 1
        if seen - target < 0:
            record = cute.make_tensor(c.sync + 64, cute.make_layout((4,)))
            record[0], record[1], record[2], record[3] = (
                c.cta + 1,
                edge,
                seen - base,
                target - base,
            )


@cute.jit
def leave(c: Ctx, edge: Int32, counts: tuple, op: cutlass.Constexpr):
    """The next launch counts on from here. After the last edge, when every CTA has read where this one began.

    counts: FFNs with experts, KDAs, layers and MLAs, those that the kernel has.
    """
    if c.tid == 0 and c.cta == 0:
        state = cute.make_tensor(c.sync + 96, cute.make_layout((6,)))
        state[0] = c.base[0] + edge * op.ctas
        state[1] = c.base[1] + counts[0] * op.ctas
        for k in cutlass.range_constexpr(len(counts)):
            state[2 + k] = c.base[2 + k] + counts[k]
