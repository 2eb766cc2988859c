"""Native runtime: where an address leads. Called when an access misses the check that generated code makes inline.

Every address is looked up in the table of this launch's buffers or in the shared memory of the thread's cluster; what
lies outside, or is not aligned, stops the launch with the address. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_faults import rt_fault, rt_found
from sandbox.devices.cpu.rt_race import rt_race
from sandbox.devices.cpu.words import *


def rt_buffer(ctx: i64, addr: i64) -> i64:
    """Row of the last buffer that begins at or before the address, or 0."""
    table = ld64(ctx + C_TABLE)
    low = 0
    high = ld64(ctx + C_NBUF)
    while low < high:
        mid = (low + high) >> 1
        if ule(ld64(table + mid * 32), addr):
            low = mid + 1
        else:
            high = mid
    if low == 0:
        return 0
    return table + (low - 1) * 32


def rt_marked(p: i64, size: i64) -> i64:
    """1 if all shadow bytes say written."""
    for i in range(size):
        if ld8(p + i) != WRITTEN:
            return 0
    return 1


def rt_shadow(
    ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, flags: i64, shadow: i64
) -> i64:
    """Check or mark the shadow bytes of an access."""
    if flags & LOAD:
        if rt_marked(shadow, size) == 0:
            rt_found(ctx, b, t, N_UNWRITTEN, site, addr, size)
    if flags & STORE:
        fill(shadow, WRITTEN, size)
    return 0


def rt_log2(size: i64) -> i64:
    return low_bit(size)


def rt_global(
    ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, align: i64, flags: i64
) -> i64:
    """Host address of a global access, or 0 after recording a fault."""
    row = rt_buffer(ctx, addr)
    if row == 0:
        return rt_fault(ctx, b, t, F_BOUNDS, site, addr, size)
    lo = ld64(row)
    hi = ld64(row + 8)
    if ult(hi - lo, addr - lo + size):
        return rt_fault(ctx, b, t, F_BOUNDS, site, addr, size)
    if addr & (align - 1):
        return rt_fault(ctx, b, t, F_ALIGN, site, addr, align)
    shadow = ld64(row + 16)
    if shadow:
        rt_shadow(ctx, b, t, site, addr, size, flags, shadow + (addr - lo))
    if ld64(ctx + C_EXACT):
        cells = ld64(row + 24)
        if cells:
            rt_race(ctx, b, t, site, addr, size, flags, cells + (addr - lo) * CELL)
    if flags & ASYNC:
        # no inline check looks here; the model asks which buffer this was
        st64(ld64(ctx + C_SITES) + site * 16, addr)
        st64(ld64(ctx + C_SITES) + site * 16 + 8, 1)
    elif shadow == 0 and ld64(ctx + C_EXACT) == 0 and size == align:
        first = (lo + size - 1) & -size
        if ult(first + size - 1, hi):
            cell = ld64(ctx + C_SITES) + site * 16
            st64(cell, first)
            st64(cell + 8, lshr(hi - first, rt_log2(size)))
    return addr


def rt_peer(ctx: i64, b: i64, addr: i64) -> i64:
    """Block whose shared memory an address of the cluster window is in, or 0."""
    rank = addr >> RANK_SHIFT
    if rank == ld64(b + B_RANK):
        return b
    if rank < 0 or rank >= ld64(ctx + C_CLUSTERSIZE):
        return 0
    return ld64(b + B_BASE) + rank * ld64(ctx + C_BSTRIDE)


def rt_shared(
    ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, align: i64, flags: i64
) -> i64:
    """Host address of an access to shared memory of the cluster, or 0 after recording a fault."""
    peer = rt_peer(ctx, b, addr)
    if peer == 0:
        return rt_fault(ctx, b, t, F_BOUNDS, site, addr, size)
    off = addr - ld64(peer + B_LO)
    if off < 0 or off + size > ld64(ctx + C_SMEM):
        return rt_fault(ctx, b, t, F_BOUNDS, site, addr, size)
    if ld64(peer + B_STATE) != 1:
        return rt_fault(ctx, b, t, F_TRAP, site, addr, size)
    if addr & (align - 1):
        return rt_fault(ctx, b, t, F_ALIGN, site, addr, align)
    rt_shadow(ctx, b, t, site, addr, size, flags, ld64(peer + B_SHADOW) + off)
    host = ld64(peer + B_SMEM) + off
    if ld64(ctx + C_EXACT):
        rt_race(ctx, b, t, site, addr, size, flags | SHARED, ld64(peer + B_CELLS) + off * CELL)
    return host


def rt_access(
    ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, align: i64, flags: i64
) -> i64:
    """Host address of any access, by the space in `flags`; 0 after recording a fault."""
    space = flags & SPACE_MASK
    if space == SHARED:
        return rt_shared(ctx, b, t, site, addr & 0xFFFFFFFF, size, align, flags)
    tag = lshr(addr, 32)
    if space == GENERIC and tag == SHARED_TAG:
        return rt_shared(ctx, b, t, site, addr & 0xFFFFFFFF, size, align, flags)
    if space == LOCAL or space == GENERIC and tag == LOCAL_TAG:
        off = addr & 0xFFFFFFFF
        if off + size > ld64(ctx + C_LOCAL):
            return rt_fault(ctx, b, t, F_BOUNDS, site, addr, size)
        if addr & (align - 1):
            return rt_fault(ctx, b, t, F_ALIGN, site, addr, align)
        return t + T_FRAME + ld64(ctx + C_FRAMEBYTES) + off
    if space == PARAM or space == GENERIC and tag == PARAM_TAG:
        off = addr & 0xFFFFFFFF
        if off + size > ld64(ctx + C_STATIC) or flags & STORE:
            return rt_fault(ctx, b, t, F_BOUNDS, site, addr, size)
        if addr & (align - 1):
            return rt_fault(ctx, b, t, F_ALIGN, site, addr, align)
        return ld64(ctx + C_PARAMS) + off
    return rt_global(ctx, b, t, site, addr, size, align, flags)


def rt_place(ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, flags: i64) -> i64:
    """Host address of an access of `size` aligned bytes; spare bytes after a fault, so that the kernel need not ask."""
    p = rt_access(ctx, b, t, site, addr, size, size, flags)
    if p == 0:
        return ld64(ctx + C_SCRATCH) + SPARE
    return p


def rt_global_place(ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, flags: i64) -> i64:
    """The same, asking for the buffer hit last first."""
    cell = ld64(ctx + C_SITES) + site * 16
    off = addr - ld64(cell)
    if off & (size - 1) == 0:
        if ult(lshr(off, rt_log2(size)), ld64(cell + 8)):
            return addr
    return rt_place(ctx, b, t, site, addr, size, flags)


def rt_shared_place(ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, flags: i64) -> i64:
    """The same for shared memory, trying the own block first."""
    off = (addr & 0xFFFFFFFF) - ld64(b + B_LO)
    if off >= 0 and off + size <= ld64(ctx + C_SMEM) and addr & (size - 1) == 0:
        shadow = ld64(b + B_SHADOW) + off
        if flags & LOAD == 0:
            fill(shadow, WRITTEN, size)
            return ld64(b + B_SMEM) + off
    return rt_place(ctx, b, t, site, addr, size, flags)
