"""Native runtime: a launch is run to its end, or shown never to end.

When nothing advances, polls are let through once (a forced round); if that changes neither memory nor any waiting
thread, the launch can never end. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_faults import rt_fault
from sandbox.devices.cpu.rt_sched import rt_pass
from sandbox.devices.cpu.rt_thread import rt_effects
from sandbox.devices.cpu.words import *


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
