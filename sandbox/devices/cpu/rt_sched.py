"""Native runtime: the scheduler. It runs the threads of all resident blocks until they end, fault or can never
go on.

A thread runs until it suspends: at a barrier, at an instruction of its whole warp, at an mbarrier, at a poll
that saw the same value again, or when its slice is used up. Blocks start in a seeded order; a block that
cannot advance keeps its slot while others run. When nothing advances, polls are let through once (a forced
round); if that changes neither memory nor any waiting thread, the launch can never end. Written in the
language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_faults import rt_fault
from sandbox.devices.cpu.rt_race import (
    rt_race_acquire,
    rt_race_barrier,
    rt_race_release,
    rt_race_start,
    rt_race_warp,
)
from sandbox.devices.cpu.rt_sync import rt_bar_arrive, rt_bulk_drain, rt_copy_flush
from sandbox.devices.cpu.rt_unset import rt_noise_local, rt_noise_shared
from sandbox.devices.cpu.rt_warp import rt_together
from sandbox.devices.cpu.words import *

RUN_COST = 16
TURN = 10000  # rounds after which a warp or block lets others run, even if it could go on


def rt_start_block(ctx: i64, b: i64, cluster: i64, rank: i64) -> i64:
    """Put a block into its slot: coordinates, poisoned shared and local memory, threads at their first instruction."""
    gx = ld64(ctx + C_GRID)
    gy = ld64(ctx + C_GRID + 8)
    cx = ld64(ctx + C_CLUSTER)
    cy = ld64(ctx + C_CLUSTER + 8)
    cz = ld64(ctx + C_CLUSTER + 16)
    nx = gx // cx
    ny = gy // cy
    x = (cluster % nx) * cx + rank % cx
    y = (cluster // nx % ny) * cy + rank // cx % cy
    z = (cluster // (nx * ny)) * cz + rank // (cx * cy)
    st64(b + B_STATE, 1)
    st64(b + B_CTAID, x)
    st64(b + B_CTAID + 8, y)
    st64(b + B_CTAID + 16, z)
    st64(b + B_LINEAR, x + gx * (y + gy * z))
    st64(b + B_RANK, rank)
    st64(b + B_BASE, b - rank * ld64(ctx + C_BSTRIDE))
    st64(b + B_CLUSTER, cluster)
    st64(b + B_LO, (rank << RANK_SHIFT) + SMEM_START)
    n = ld64(ctx + C_THREADS)
    st64(b + B_LIVE, n)
    st64(b + B_CARRIVED, 0)
    st64(b + B_CPHASE, 0)
    st64(b + B_CLIVE, n * ld64(ctx + C_CLUSTERSIZE))
    st64(b + B_NBULK, 0)
    st64(b + B_SEQ, (ld64(ctx + C_NEXT) - 1) * ld64(ctx + C_CLUSTERSIZE) + rank)
    if ld64(ctx + C_EXACT):
        rt_race_start(ctx, b)
    fill(b + B_BARS, 0, 16 * BAR_BYTES)
    rt_noise_shared(ctx, b)
    st64(b + B_ORDER, (ld64(ctx + C_SEED) * 0x9E3779B9 + cluster * 40503 + rank * 977) & 0x7FFFFFFF)
    bx = ld64(ctx + C_NTID)
    by = ld64(ctx + C_NTID + 8)
    t = ld64(b + B_THREADS)
    stride = ld64(ctx + C_TSTRIDE)
    used = T_FRAME + ld64(ctx + C_FRAMEBYTES)
    for i in range(n):
        fill(t, 0, used)
        st64(t + T_TID, i % bx)
        st64(t + T_TID + 8, i // bx % by)
        st64(t + T_TID + 16, i // (bx * by))
        st64(t + T_LINEAR, i)
        st64(t + T_LANE, i & 31)
        st64(t + T_BACKOFF, 4)
        rt_noise_local(ctx, b, t)
        t = t + stride
    return 0


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


def rt_meet(ctx: i64, b: i64, w: i64, waiting: i64, done: i64) -> i64:
    """Carry out one warp-wide instruction whose members have all come. Returns 1 if there was one."""
    stride = ld64(ctx + C_TSTRIDE)
    rest = waiting
    while rest:
        lane = low_bit(rest)
        t = w + lane * stride
        op = ld64(t + T_OP)
        pc = ld64(t + T_PC)
        raw = ld64(t + T_MASK)
        mask = raw & ~done
        if (raw >> lane) & 1 == 0:
            return rt_fault(ctx, b, t, F_WARP, ld64(t + T_SITE), raw, op)
        together = 0
        for other in range(32):
            if (waiting >> other) & 1:
                u = w + other * stride
                if (
                    ld64(u + T_OP) == op
                    and (ld64(u + T_PC) == pc or op == O_SYNC)
                    and ld64(u + T_MASK) == raw
                ):
                    together = together | (1 << other)
        if op == O_ACTIVE:
            mask = together
        if together == mask:
            if op == O_ACTIVE:
                for other in range(32):
                    if (mask >> other) & 1:
                        st64(w + other * stride + T_X + 24, mask)
            elif rt_together(ctx, b, w, mask, t) == 0:
                return 0
            if ld64(ctx + C_EXACT):
                rt_race_warp(ctx, b, w, mask)
            for other in range(32):
                if (mask >> other) & 1:
                    st64(w + other * stride + T_STATE, READY)
            return 1
        rest = rest & ~together
    return 0


def rt_warp(ctx: i64, b: i64, first: i64, lanes: i64) -> i64:
    """Run a warp as far as it goes. Returns 1 if anything advanced."""
    stride = ld64(ctx + C_TSTRIDE)
    w = ld64(b + B_THREADS) + first * stride
    flip = (ld64(b + B_ORDER) >> 8) & 31
    if lanes < 32:
        flip = 0
    advanced = 0
    again = 1
    rounds = 0
    while again and rounds < TURN:
        rounds = rounds + 1
        again = 0
        waiting = 0
        done = 0
        for i in range(lanes):
            lane = i ^ flip
            t = w + lane * stride
            state = ld64(t + T_STATE)
            if state == READY:
                rt_step(ctx, b, t)
                advanced = 1
                state = ld64(t + T_STATE)
            elif state >= CLUSTER:
                awake = rt_awake(ctx, b, t, state)
                if awake:
                    rt_step(ctx, b, t)
                    state = ld64(t + T_STATE)
                    if awake == 1 or state < CLUSTER:
                        advanced = 1
            if ld64(ctx + C_STATUS):
                return 0
            if state == MEET:
                waiting = waiting | (1 << lane)
            if state == DONE:
                done = done | (1 << lane)
        if waiting:
            again = rt_meet(ctx, b, w, waiting, done | (-1 << lanes & 0xFFFFFFFF))
            if again:
                advanced = 1
            if ld64(ctx + C_STATUS):
                return 0
    return advanced


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


def rt_block(ctx: i64, b: i64) -> i64:
    """Run a block as far as it goes. Returns 1 if anything advanced."""
    n = ld64(ctx + C_THREADS)
    warps = (n + 31) >> 5
    order = ld64(b + B_ORDER)
    start = order % warps
    advanced = 0
    again = 1
    rounds = 0
    while again and rounds < TURN:
        rounds = rounds + 1
        again = 0
        for i in range(warps):
            k = i + start
            if k >= warps:
                k = k - warps
            if order & 0x10000:
                k = warps - 1 - k
            lanes = n - k * 32
            if lanes > 32:
                lanes = 32
            if rt_warp(ctx, b, k * 32, lanes):
                again = 1
            if ld64(ctx + C_STATUS):
                return 0
        if rt_barriers(ctx, b):
            again = 1
        if ld64(ctx + C_STATUS):
            return 0
        if again == 0 and ld64(b + B_NBULK):
            rt_bulk_drain(ctx, b)
            again = 1
        if again:
            advanced = 1
        if ld64(b + B_LIVE) == 0:
            again = 0
        if ld64(ctx + C_FORCE):
            again = 0
    return advanced


def rt_finish(ctx: i64, slot: i64) -> i64:
    """Free a cluster's slots if all its blocks have ended. Returns 1 if so."""
    size = ld64(ctx + C_CLUSTERSIZE)
    stride = ld64(ctx + C_BSTRIDE)
    for r in range(size):
        if ld64(slot + r * stride + B_LIVE) or ld64(slot + r * stride + B_NBULK):
            return 0
    for r in range(size):
        st64(slot + r * stride + B_STATE, 0)
    return 1


def rt_group(ctx: i64, slot: i64) -> i64:
    """Run the blocks of one cluster as far as they go. Returns 1 if anything advanced."""
    size = ld64(ctx + C_CLUSTERSIZE)
    stride = ld64(ctx + C_BSTRIDE)
    advanced = 0
    again = 1
    while again:
        again = 0
        for r in range(size):
            if rt_block(ctx, slot + r * stride):
                again = 1
                advanced = 1
            if ld64(ctx + C_STATUS):
                return 0
        if size == 1 or ld64(ctx + C_FORCE):
            again = 0
    return advanced


def rt_waiting_hash(ctx: i64) -> i64:
    """A hash over the saved state of every live thread."""
    h = 0x51ED270B
    n = ld64(ctx + C_THREADS)
    stride = ld64(ctx + C_TSTRIDE)
    words = (ld64(ctx + C_FRAMEBYTES) + ld64(ctx + C_LOCAL)) >> 3
    for s in range(ld64(ctx + C_NSLOTS)):
        b = ld64(ctx + C_SLOTS) + s * ld64(ctx + C_BSTRIDE)
        if ld64(b + B_STATE):
            t = ld64(b + B_THREADS)
            for _i in range(n):
                h = (h ^ ld64(t + T_STATE)) * 0x100000001B3 + ld64(t + T_PC)
                if ld64(t + T_STATE) != DONE:
                    p = t + T_FRAME
                    for _k in range(words):
                        h = (h ^ ld64(p)) * 0x100000001B3
                        h = h ^ lshr(h, 29)
                        p = p + 8
                t = t + stride
    return h


def rt_force(ctx: i64) -> i64:
    """Let every poll through once. Returns 1 if the launch is proven, or must be assumed, to hang."""
    polls = 0
    n = ld64(ctx + C_THREADS)
    stride = ld64(ctx + C_TSTRIDE)
    for s in range(ld64(ctx + C_NSLOTS)):
        b = ld64(ctx + C_SLOTS) + s * ld64(ctx + C_BSTRIDE)
        if ld64(b + B_STATE):
            t = ld64(b + B_THREADS)
            for _i in range(n):
                state = ld64(t + T_STATE)
                if state == WATCH or state == MBAR:
                    polls = polls + 1
                t = t + stride
    slot = ld64(ctx + C_SLOTS)
    if polls == 0:
        return rt_fault(ctx, slot, ld64(slot + B_THREADS), H_DEADLOCK, -1, 0, 0) + 1
    before = rt_effects(ctx)
    st64(ctx + C_FORCE, 1)
    advanced = rt_pass(ctx)
    st64(ctx + C_FORCE, 0)
    if ld64(ctx + C_STATUS):
        return 1
    h = rt_waiting_hash(ctx)
    effects = rt_effects(ctx)
    still = before == effects
    # a loop with several polls comes back to a state after several rounds: keep one and see whether it returns
    same = h == ld64(ctx + C_HASH) and effects == ld64(ctx + C_SAVEDEFF)
    st64(ctx + C_SINCE, ld64(ctx + C_SINCE) + 1)
    if advanced:
        st64(ctx + C_HASH, 0)
        st64(ctx + C_FORCED, 0)
        st64(ctx + C_SINCE, 0)
        st64(ctx + C_SPAN, 0)
        return 0
    if same == 0 and ld64(ctx + C_SINCE) > ld64(ctx + C_SPAN):
        st64(ctx + C_HASH, h)
        st64(ctx + C_SAVEDEFF, effects)
        st64(ctx + C_SPAN, ld64(ctx + C_SPAN) * 2 + 1)
        st64(ctx + C_SINCE, 0)
    if same:
        return rt_fault(ctx, slot, ld64(slot + B_THREADS), H_DEADLOCK, -1, polls, 0) + 1
    # polls between which memory changes may be part of real work: they get more patience
    st64(ctx + C_FORCED, ld64(ctx + C_FORCED) + (10 if still else 1))
    if ld64(ctx + C_FORCED) > ld64(ctx + C_MAXFORCED):
        return rt_fault(ctx, slot, ld64(slot + B_THREADS), H_LIVELOCK, -1, polls, 0) + 1
    return 0


def rt_pass(ctx: i64) -> i64:
    """Run every resident cluster as far as it goes and start waiting ones in free slots."""
    size = ld64(ctx + C_CLUSTERSIZE)
    stride = ld64(ctx + C_BSTRIDE)
    groups = ld64(ctx + C_NSLOTS) // size
    advanced = 0
    for g in range(groups):
        slot = ld64(ctx + C_SLOTS) + g * size * stride
        more = 1
        while more:
            more = 0
            if ld64(slot + B_STATE) == 0:
                k = ld64(ctx + C_NEXT)
                if k < ld64(ctx + C_NCLUSTERS):
                    st64(ctx + C_NEXT, k + 1)
                    cluster = ld32(ld64(ctx + C_ORDER) + k * 4)
                    for r in range(size):
                        rt_start_block(ctx, slot + r * stride, cluster, r)
                    advanced = 1
            if ld64(slot + B_STATE):
                if rt_group(ctx, slot):
                    advanced = 1
                if ld64(ctx + C_STATUS):
                    return 0
                if rt_finish(ctx, slot):
                    st64(ctx + C_ACTIVE, ld64(ctx + C_ACTIVE) - 1)
                    advanced = 1
                    more = 1
    return advanced


def rt_run(ctx: i64) -> i64:
    """Run a launch to its end. The result is the status."""
    st64(ctx + C_ACTIVE, ld64(ctx + C_NCLUSTERS))
    while ld64(ctx + C_ACTIVE) > 0:
        if rt_pass(ctx) == 0:
            if ld64(ctx + C_STATUS) == 0:
                rt_force(ctx)
        if ld64(ctx + C_STATUS):
            return ld64(ctx + C_STATUS)
    return 0
