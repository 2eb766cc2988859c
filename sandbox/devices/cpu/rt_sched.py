"""Native runtime: the scheduler. It runs the threads of all resident blocks as far as they go, warp by warp.

A thread runs until it suspends: at a barrier, at an instruction of its whole warp, at an mbarrier, at a poll
that saw the same value again, or when its slice is used up. Blocks start in a seeded order; a block that
cannot advance keeps its slot while others run. When nothing advances any more is for `rt_launch` to say.
Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_barrier import rt_barriers
from sandbox.devices.cpu.rt_copy import rt_bulk_drain
from sandbox.devices.cpu.rt_faults import rt_fault
from sandbox.devices.cpu.rt_race import rt_race_warp
from sandbox.devices.cpu.rt_start import rt_start_block
from sandbox.devices.cpu.rt_thread import rt_awake, rt_step
from sandbox.devices.cpu.rt_warp import rt_together
from sandbox.devices.cpu.words import *

TURN = 10000  # rounds after which a warp or block lets others run, even if it could go on


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
