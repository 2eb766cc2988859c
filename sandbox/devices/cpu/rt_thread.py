"""Native runtime: one thread runs until it suspends; whether one that waits may go on.

What a whole warp or block waits for is decided in `rt_sched` and `rt_barrier`. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_barrier import rt_bar_arrive
from sandbox.devices.cpu.rt_copy import rt_copy_flush
from sandbox.devices.cpu.rt_faults import rt_fault
from sandbox.devices.cpu.rt_race import rt_race_acquire
from sandbox.devices.cpu.words import *

RUN_COST = 16


def rt_read(p: i64, size: i64) -> i64:
    """A word to compare polls with: all bytes of up to 16 folded into 64 bits."""
    if size == 1:
        return ld8(p)
    if size == 2:
        return ld16(p)
    if size == 4:
        return ld32(p)
    if size == 8:
        return ld64(p)
    return ld64(p) ^ (ld64(p + 8) * 0x9E3779B9)


def rt_awake(ctx: i64, b: i64, t: i64, state: i64) -> i64:
    """0 while a waiting thread must wait; 1 if what it waits for came; 2 if it may look again."""
    if state == MBAR:
        if lshr(ld64(ld64(t + T_A)), 63) != ld64(t + T_B):
            return 1
    if state == CLUSTER:
        if ld64(ld64(b + B_BASE) + B_CPHASE) != ld64(t + T_CPHASE):
            if ld64(ctx + C_EXACT):
                rt_race_acquire(ctx, b, t, ld64(b + B_BASE) + B_CARRIVED + (ld64(t + T_CPHASE) & 1))
            return 1
        return 0
    if state == YIELD:
        return 1
    if state == WATCH:
        if rt_read(ld64(t + T_A), ld64(t + T_MASK)) != ld64(t + T_B):
            st64(t + T_BACKOFF, 4)
            return 1
        skip = ld64(t + T_SKIP) + 1
        if skip > ld64(t + T_BACKOFF):
            st64(t + T_SKIP, 0)
            if skip < 1024:
                st64(t + T_BACKOFF, skip * 2)
            return 2
        st64(t + T_SKIP, skip)
    if ld64(ctx + C_FORCE):
        return 2
    return 0


def rt_exit(ctx: i64, b: i64, t: i64) -> i64:
    """A thread has ended: barriers of all threads expect one less."""
    rt_copy_flush(ctx, b, t, 0xFFFFFFFF)
    st64(b + B_LIVE, ld64(b + B_LIVE) - 1)
    base = ld64(b + B_BASE)
    st64(base + B_CLIVE, ld64(base + B_CLIVE) - 1)
    return 0


def rt_effects(ctx: i64) -> i64:
    """How often code that changes memory has run."""
    n = ld64(ctx + C_NBB)
    flags = ld64(ctx + C_EFFECTS)
    counters = ld64(ctx + C_COUNTERS)
    total = ld64(ctx + C_EFFSUM)
    for i in range(n):
        if ld8(flags + i):
            total = total + ld64(counters + i * 8)
    return total


def rt_enter(ctx: i64, b: i64, t: i64) -> i64:
    """Run a thread until it suspends. Threads of a sampled block count in a row of their own."""
    rows = ld64(ctx + C_PROFILE)
    if rows:
        row = ld64(rows + ld64(b + B_LINEAR) * 8)
        if row:
            shared = ld64(ctx + C_COUNTERS)
            st64(ctx + C_COUNTERS, row + ld64(t + T_LINEAR) * ld64(ctx + C_NBB) * 8)
            before = 0
            if ld64(ctx + C_FORCE):
                before = rt_effects(ctx)
            enter(ld64(ctx + C_KERNEL), t, b, ctx)
            if ld64(ctx + C_FORCE):
                st64(ctx + C_EFFSUM, ld64(ctx + C_EFFSUM) + rt_effects(ctx) - before)
            st64(ctx + C_COUNTERS, shared)
            return 0
    enter(ld64(ctx + C_KERNEL), t, b, ctx)
    return 0


def rt_step(ctx: i64, b: i64, t: i64) -> i64:
    """Run a thread until it suspends and do what its new state asks for."""
    st64(t + T_STATE, READY)
    st64(ctx + C_BUDGET, ld64(ctx + C_BUDGET) - RUN_COST)
    st64(ctx + C_ENTERS, ld64(ctx + C_ENTERS) + 1)
    rt_enter(ctx, b, t)
    if ld64(ctx + C_STATUS):
        return 0
    state = ld64(t + T_STATE)
    if state == DONE:
        rt_exit(ctx, b, t)
    if state == BAR:
        rt_bar_arrive(ctx, b, t, ld64(t + T_SITE), ld64(t + T_A), ld64(t + T_B))
    if state == YIELD:
        st64(ctx + C_BUDGET, ld64(ctx + C_BUDGET) - SLICE)
    if ld64(ctx + C_BUDGET) < 0:
        rt_fault(ctx, b, t, H_BUDGET, ld64(t + T_SITE), 0, 0)
    return 0
