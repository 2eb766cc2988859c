"""Native runtime: barriers of blocks and clusters: threads arrive, and go on when one completes.

mbarriers are in `rt_mbarrier`. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_faults import rt_fault
from sandbox.devices.cpu.rt_race import rt_race_barrier, rt_race_release
from sandbox.devices.cpu.words import *


def rt_bar_arrive(ctx: i64, b: i64, t: i64, site: i64, number: i64, count: i64) -> i64:
    """Count one thread at a barrier; `count` -1 means all live threads. Returns 0 after a fault."""
    if ult(15, number) or count == 0 or count > 1024 or (count > 0 and count & 31):
        return rt_fault(ctx, b, t, F_BARRIER, site, number, count)
    bar = b + B_BARS + number * BAR_BYTES
    if ld64(bar) and ld64(bar + 8) != count:
        return rt_fault(ctx, b, t, F_BARRIER, site, number, count)
    st64(bar, ld64(bar) + 1)
    st64(bar + 8, count)
    if ld64(ctx + C_EXACT) and ld64(t + T_STATE) != BAR:
        rt_race_release(ctx, b, t, bar)
    return 1


def rt_release(ctx: i64, b: i64, number: i64) -> i64:
    """Let the threads at a completed barrier go on. The red slot gives bar.red its result."""
    n = ld64(ctx + C_THREADS)
    stride = ld64(ctx + C_TSTRIDE)
    if ld64(ctx + C_EXACT):
        rt_race_barrier(ctx, b, number)
    t = ld64(b + B_THREADS)
    votes = 0
    members = 0
    for _i in range(n):
        if ld64(t + T_STATE) == BAR and ld64(t + T_A) == number:
            members = members + 1
            votes = votes + (ld64(t + T_X) & 1)
        t = t + stride
    t = ld64(b + B_THREADS)
    bar = b + B_BARS + number * BAR_BYTES
    for _i in range(n):
        if ld64(t + T_STATE) == BAR and ld64(t + T_A) == number:
            st64(t + T_STATE, READY)
            st64(t + T_X + 24, votes)
            st64(t + T_X + 32, votes == members)
        t = t + stride
    st64(bar, 0)
    st64(bar + 16, ld64(bar + 16) + 1)
    st64(ctx + C_BARRIERS, ld64(ctx + C_BARRIERS) + 1)
    return 0


def rt_barriers(ctx: i64, b: i64) -> i64:
    """Complete barriers whose threads have come. Returns 1 if one was."""
    any = 0
    live = ld64(b + B_LIVE)
    for number in range(16):
        bar = b + B_BARS + number * BAR_BYTES
        arrived = ld64(bar)
        if arrived:
            expected = ld64(bar + 8)
            if expected < 0:
                expected = live
            if arrived > expected:
                t = ld64(b + B_THREADS)
                return rt_fault(ctx, b, t, F_BARRIER, -1, number, arrived)
            if arrived == expected:
                rt_release(ctx, b, number)
                any = 1
    base = ld64(b + B_BASE)
    arrived = ld64(base + B_CARRIVED)
    if arrived and arrived >= ld64(base + B_CLIVE):
        st64(base + B_CARRIVED, 0)
        st64(base + B_CPHASE, ld64(base + B_CPHASE) + 1)
        st64(ctx + C_CLUSTERPHASES, ld64(ctx + C_CLUSTERPHASES) + 1)
        any = 1
    return any


def rt_cluster_arrive(ctx: i64, b: i64, t: i64) -> i64:
    base = ld64(b + B_BASE)
    st64(t + T_CPHASE, ld64(base + B_CPHASE))
    st64(base + B_CARRIVED, ld64(base + B_CARRIVED) + 1)
    if ld64(ctx + C_EXACT):
        rt_race_release(ctx, b, t, base + B_CARRIVED + (ld64(t + T_CPHASE) & 1))
    return 0
