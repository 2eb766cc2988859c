"""Native runtime: asynchronous copies, of threads (`cp.async`) and in bulk, done late or at once.

What waits for them by mbarrier is in `rt_mbarrier`. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_faults import rt_fault
from sandbox.devices.cpu.rt_mbarrier import rt_mbar_turn, rt_mbar_tx, rt_mbar_word
from sandbox.devices.cpu.rt_memory import rt_access, rt_peer
from sandbox.devices.cpu.rt_race import rt_race, rt_race_release
from sandbox.devices.cpu.rt_reduce import rt_bulk_reduce
from sandbox.devices.cpu.words import *

K_IN, K_OUT, K_SHARED, K_REDUCE = range(4)
"""Kinds of bulk copies. Their queue, one a block, has records of: dst, src, size, mbarrier word, thread, site, group,
kind, mbarrier address."""


def rt_copy_flush(ctx: i64, b: i64, t: i64, group: i64) -> i64:
    """Complete the thread's copies of groups before `group`."""
    queue = t + T_FRAME + ld64(ctx + C_FRAMEBYTES) + ld64(ctx + C_LOCAL)
    n = ld64(t + T_NCOPY)
    kept = 0
    for i in range(n):
        p = queue + i * COPY_BYTES
        if ld64(p + 24) & 0xFFFFFFFF < group:
            size = lshr(ld64(p + 24), 32) & 0xFFFF
            used = lshr(ld64(p + 24), 48)
            copy(ld64(p), ld64(p + 8), used)
            fill(ld64(p) + used, 0, size - used)
            fill(ld64(p + 16), WRITTEN, size)
        else:
            copy(queue + kept * COPY_BYTES, p, COPY_BYTES)
            kept = kept + 1
    st64(t + T_NCOPY, kept)
    return 0


def rt_copy(ctx: i64, b: i64, t: i64, site: i64, dst: i64, src: i64, size: i64, used: i64) -> i64:
    """Queue a cp.async of `size` bytes, the last `size - used` zero. Returns 0 after a fault."""
    if used > size:
        return rt_fault(ctx, b, t, F_BULK, site, dst, used)
    d = rt_access(ctx, b, t, site, dst, size, size, STORE | SHARED | ASYNC)
    if d == 0:
        return 0
    s = src
    if used:
        s = rt_access(ctx, b, t, site, src, used, size, LOAD | GLOBAL | ASYNC)
        if s == 0:
            return 0
    if ld64(t + T_NCOPY) == COPY_CAPACITY:
        rt_copy_flush(ctx, b, t, 0xFFFFFFFF)
    shadow = ld64(b + B_SHADOW) + d - ld64(b + B_SMEM)
    fill(shadow, UNWRITTEN, size)
    n = ld64(t + T_NCOPY)
    p = t + T_FRAME + ld64(ctx + C_FRAMEBYTES) + ld64(ctx + C_LOCAL) + n * COPY_BYTES
    st64(p, d)
    st64(p + 8, s)
    st64(p + 16, shadow)
    st64(p + 24, ld64(t + T_COMMITTED) | (size << 32) | (used << 48))
    st64(t + T_NCOPY, n + 1)
    if ld64(ctx + C_LAZY) == 0:
        rt_copy_flush(ctx, b, t, 0xFFFFFFFF)
    return 1


def rt_bulk(
    ctx: i64, b: i64, t: i64, site: i64, kind: i64, dst: i64, src: i64, size: i64, bar: i64
) -> i64:
    """Queue a bulk copy. `dst` and `src` are addresses of their spaces, `bar` a shared address (0 for group copies)."""
    if size & 15 or size < 0 or size > (1 << 24):
        return rt_fault(ctx, b, t, F_BULK, site, dst, size)
    if size == 0 and bar == 0:
        return 1
    way = kind & 15
    d = 0
    s = 0
    if way == K_IN:
        d = rt_access(ctx, b, t, site, dst, size, 16, ASYNC | SHARED)
        s = rt_access(ctx, b, t, site, src, size, 16, LOAD | GENERIC | ASYNC)
        st64(ctx + C_BULKBYTES, ld64(ctx + C_BULKBYTES) + size)
    elif way == K_SHARED:
        d = rt_access(ctx, b, t, site, dst, size, 16, ASYNC | SHARED)
        s = rt_access(ctx, b, t, site, src, size, 16, LOAD | SHARED | ASYNC)
    else:
        d = rt_access(ctx, b, t, site, dst, size, 16, STORE | GENERIC | ASYNC)
        s = rt_access(ctx, b, t, site, src, size, 16, LOAD | SHARED | ASYNC)
        st64(ctx + C_BULKWRITTEN, ld64(ctx + C_BULKWRITTEN) + size)
    if d == 0 or s == 0:
        return 0
    word = 0
    owner = b
    if way == K_IN or way == K_SHARED:
        word = rt_mbar_word(ctx, b, t, site, bar, 0)
        if word == 0:
            return 0
        owner = rt_peer(ctx, b, dst)
        off = dst - ld64(owner + B_LO)
        fill(ld64(owner + B_SHADOW) + off, UNWRITTEN, size)
        if ld64(ctx + C_EXACT):
            rt_race(ctx, b, t, site, dst, size, STORE | SHARED, ld64(owner + B_CELLS) + off * CELL)
            rt_race_release(ctx, b, t, word + lshr(ld64(word), 63))
    n = ld64(b + B_NBULK)
    if n == BULK_CAPACITY:
        rt_bulk_drain(ctx, b)
        n = 0
    p = ld64(b + B_BULK) + n * BULK_BYTES
    st64(p, d)
    st64(p + 8, s)
    st64(p + 16, size)
    st64(p + 24, word)
    st64(p + 32, t)
    st64(p + 40, site)
    st64(p + 48, ld64(t + T_BCOMMITTED))
    st64(p + 56, kind)
    st64(p + 64, bar)
    st64(p + 72, owner)
    st64(b + B_NBULK, n + 1)
    if ld64(ctx + C_LAZY) == 0:
        rt_bulk_drain(ctx, b)
    return 1


def rt_multicast(
    ctx: i64,
    b: i64,
    t: i64,
    site: i64,
    kind: i64,
    dst: i64,
    src: i64,
    size: i64,
    bar: i64,
    mask: i64,
) -> i64:
    """One bulk copy per block of the mask, to the same offsets of destination and mbarrier."""
    low = (1 << RANK_SHIFT) - 1
    for rank in range(16):
        if (mask >> rank) & 1:
            there = rank << RANK_SHIFT
            if (
                rt_bulk(ctx, b, t, site, kind, (dst & low) | there, src, size, (bar & low) | there)
                == 0
            ):
                return 0
    return 1


def rt_bulk_one(ctx: i64, b: i64, p: i64) -> i64:
    """Carry out one queued copy."""
    d = ld64(p)
    s = ld64(p + 8)
    size = ld64(p + 16)
    word = ld64(p + 24)
    t = ld64(p + 32)
    site = ld64(p + 40)
    kind = ld64(p + 56)
    way = kind & 15
    if way == K_REDUCE:
        rt_bulk_reduce(d, s, size, kind >> 4)
    else:
        copy(d, s, size)
    if word:
        owner = ld64(p + 72)
        fill(ld64(owner + B_SHADOW) + d - ld64(owner + B_SMEM), WRITTEN, size)
        if rt_mbar_tx(ctx, b, t, site, ld64(p + 64), word, 0 - size):
            rt_mbar_turn(word)
    return 0


def rt_bulk_drain(ctx: i64, b: i64) -> i64:
    """Carry out all queued copies of a block, newest first when the seed says so. Returns how many."""
    n = ld64(b + B_NBULK)
    base = ld64(b + B_BULK)
    backwards = (ld64(ctx + C_SEED) >> 1) & 1
    for i in range(n):
        k = n - 1 - i if backwards else i
        rt_bulk_one(ctx, b, base + k * BULK_BYTES)
    st64(b + B_NBULK, 0)
    return n


def rt_bulk_wait(ctx: i64, b: i64, t: i64, pending: i64) -> i64:
    """Carry out the thread's bulk-group copies of all but its last `pending` groups."""
    n = ld64(b + B_NBULK)
    base = ld64(b + B_BULK)
    limit = ld64(t + T_BCOMMITTED) - pending
    kept = 0
    for i in range(n):
        p = base + i * BULK_BYTES
        if ld64(p + 32) == t and ld64(p + 24) == 0 and ld64(p + 48) < limit:
            rt_bulk_one(ctx, b, p)
        else:
            copy(base + kept * BULK_BYTES, p, BULK_BYTES)
            kept = kept + 1
    st64(b + B_NBULK, kept)
    return 0
