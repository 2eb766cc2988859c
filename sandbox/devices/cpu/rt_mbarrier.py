"""Native runtime: mbarriers. Written in the language of `subset`.

An mbarrier is one word: bits 0-19 pending arrivals, 20-39 arrivals a phase expects, 40-61 bytes still to come (biased),
63 the parity of the phase. Its eight shadow bytes mark it, so that using a word that was never initialised, or that
plain stores overwrote, is a fault. The copies that it counts the bytes of are in `rt_copy`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_faults import rt_fault
from sandbox.devices.cpu.rt_memory import rt_peer
from sandbox.devices.cpu.rt_race import rt_race_acquire, rt_race_release, rt_race_reset
from sandbox.devices.cpu.words import *

COUNT = (1 << 20) - 1
BIAS = 1 << 21
TX_MASK = (1 << 22) - 1
M_INIT, M_INVAL, M_ARRIVE, M_EXPECT, M_COMPLETE, M_DROP, M_ARRIVE_EXPECT, M_DROP_EXPECT = range(8)


def rt_mbar_word(ctx: i64, b: i64, t: i64, site: i64, addr: i64, fresh: i64) -> i64:
    """Host address of the mbarrier at a shared address, or 0 after recording a fault."""
    peer = rt_peer(ctx, b, addr)
    if peer == 0:
        return rt_fault(ctx, b, t, F_BOUNDS, site, addr, 8)
    off = addr - ld64(peer + B_LO)
    if off < 0 or off + 8 > ld64(ctx + C_SMEM):
        return rt_fault(ctx, b, t, F_BOUNDS, site, addr, 8)
    if ld64(peer + B_STATE) != 1:
        return rt_fault(ctx, b, t, F_TRAP, site, addr, 8)
    if addr & 7:
        return rt_fault(ctx, b, t, F_ALIGN, site, addr, 8)
    shadow = ld64(peer + B_SHADOW) + off
    if fresh:
        fill(shadow, MBARRIER, 8)
    else:
        for i in range(8):
            if ld8(shadow + i) != MBARRIER:
                return rt_fault(ctx, b, t, F_MBAR, site, addr, 8)
    return ld64(peer + B_SMEM) + off


def rt_mbar_turn(p: i64) -> i64:
    """Complete the phase if nothing is pending."""
    w = ld64(p)
    if w & COUNT == 0 and (w >> 40) & TX_MASK == BIAS:
        expected = (w >> 20) & COUNT
        flip = lshr(w, 63) ^ 1
        st64(p, expected | (expected << 20) | (BIAS << 40) | (flip << 63))
    return 0


def rt_mbar_tx(ctx: i64, b: i64, t: i64, site: i64, addr: i64, p: i64, change: i64) -> i64:
    w = ld64(p)
    tx = ((w >> 40) & TX_MASK) + change
    if tx <= BIAS - (1 << 20) or tx >= BIAS + (1 << 20):
        rt_fault(ctx, b, t, F_MBAR_COUNT, site, addr, change)
        return 0
    st64(p, (w & ~(TX_MASK << 40)) | (tx << 40))
    return 1


def rt_mbar(ctx: i64, b: i64, t: i64, site: i64, addr: i64, op: i64, n: i64) -> i64:
    """An operation other than a test; gives the state before it. `n`: count, bytes, or count << 32 | bytes."""
    p = rt_mbar_word(ctx, b, t, site, addr, op == M_INIT)
    if p == 0:
        return 0
    old = ld64(p)
    if op == M_INIT:
        if n < 1 or n > COUNT:
            return rt_fault(ctx, b, t, F_MBAR_COUNT, site, addr, n)
        st64(p, n | (n << 20) | (BIAS << 40))
        if ld64(ctx + C_EXACT):
            rt_race_reset(ctx, p)
            rt_race_reset(ctx, p + 1)
        return 0
    if op == M_INVAL:
        peer = rt_peer(ctx, b, addr)
        fill(ld64(peer + B_SHADOW) + addr - ld64(peer + B_LO), UNWRITTEN, 8)
        return 0
    if ld64(ctx + C_EXACT):
        # an object per parity, so that arrivals for the next phase are not taken for those of this one
        rt_race_release(ctx, b, t, p + lshr(old, 63))
    if op == M_COMPLETE:
        if rt_mbar_tx(ctx, b, t, site, addr, p, 0 - n):
            rt_mbar_turn(p)
        return old
    if op == M_EXPECT or op == M_ARRIVE_EXPECT or op == M_DROP_EXPECT:
        if rt_mbar_tx(ctx, b, t, site, addr, p, n & 0xFFFFFFFF) == 0:
            return 0
    if op == M_EXPECT:
        return old
    count = n
    if op == M_ARRIVE_EXPECT or op == M_DROP_EXPECT:
        count = n >> 32
    w = ld64(p)
    if count < 1 or count > w & COUNT:
        return rt_fault(ctx, b, t, F_MBAR_COUNT, site, addr, count)
    w = w - count
    if op == M_DROP or op == M_DROP_EXPECT:
        w = w - (count << 20)
    st64(p, w)
    rt_mbar_turn(p)
    return old


def rt_mbar_test(ctx: i64, b: i64, t: i64, site: i64, addr: i64, parity: i64) -> i64:
    """1 if the phase of that parity is complete. Leaves the host address for the scheduler in the thread."""
    p = rt_mbar_word(ctx, b, t, site, addr, 0)
    if p == 0:
        return 0
    st64(t + T_A, p)
    st64(t + T_B, parity & 1)
    if lshr(ld64(p), 63) != parity & 1:
        if ld64(ctx + C_EXACT):
            rt_race_acquire(ctx, b, t, p + (parity & 1))
        return 1
    return 0
