"""Native runtime: happens-before between warps, for the exact mode. Written in the language of `subset`.

Every warp is an agent with a vector clock; barriers, mbarriers, release and acquire operations and fences
carry clocks from one to another through objects named by address. Each byte of shared memory and of buffers
that may be written remembers its last writer and two readers; an access that is not ordered after a
conflicting one is a race, unless both are atomic or strong. Lanes of a warp are ordered by the warp-wide
instructions between their accesses. Missed: readers beyond two, wrong scopes, proxies.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_faults import rt_found
from sandbox.devices.cpu.words import *


def rt_agent(ctx: i64, b: i64, t: i64) -> i64:
    return ld64(b + B_SEQ) * ld64(ctx + C_WARPS) + (ld64(t + T_LINEAR) >> 5)


def rt_clock(ctx: i64, agent: i64) -> i64:
    """Address of an agent's vector clock."""
    return ld64(ctx + C_VC) + agent * ld64(ctx + C_AGENTS) * 4


def rt_join(ctx: i64, to: i64, source: i64) -> i64:
    """to = max(to, source), over the agents that have started."""
    n = ld64(ctx + C_NEXT) * ld64(ctx + C_CLUSTERSIZE) * ld64(ctx + C_WARPS)
    for i in range(n):
        v = ld32(source + i * 4)
        if v > ld32(to + i * 4):
            st32(to + i * 4, v)
    return 0


def rt_race_start(ctx: i64, b: i64) -> i64:
    """A block starts: each of its warps has clock one."""
    warps = ld64(ctx + C_WARPS)
    for w in range(warps):
        agent = ld64(b + B_SEQ) * warps + w
        st32(rt_clock(ctx, agent) + agent * 4, 1)
    return 0


def rt_object(ctx: i64, key: i64, make: i64) -> i64:
    """Clock of a synchronisation object, by address; 0 if there is none, or no room: then C_USED says so, and what the
    check finds is worth nothing."""
    table = ld64(ctx + C_OBJECTS)
    room = ld64(ctx + C_ROOM)
    h = lshr(key * 0x9E3779B97F4A7C15, 32)
    for i in range(room):
        slot = (h + i) & (room - 1)
        have = ld64(table + slot * 8)
        if have == 0:
            if make == 0:
                return 0
            used = ld64(ctx + C_USED) + 1
            st64(ctx + C_USED, used)
            if used * 4 > room * 3:
                return 0
            st64(table + slot * 8, key)
            have = key
        if have == key:
            return ld64(ctx + C_OBJECTVC) + slot * ld64(ctx + C_AGENTS) * 4
    return 0


def rt_race_release(ctx: i64, b: i64, t: i64, obj: i64) -> i64:
    """All that the warp has done so far is before whoever acquires the object from now on."""
    agent = rt_agent(ctx, b, t)
    mine = rt_clock(ctx, agent)
    vc = rt_object(ctx, obj, 1)
    if vc:
        rt_join(ctx, vc, mine)
    st32(mine + agent * 4, ld32(mine + agent * 4) + 1)
    return 0


def rt_race_acquire(ctx: i64, b: i64, t: i64, obj: i64) -> i64:
    vc = rt_object(ctx, obj, 0)
    if vc:
        rt_join(ctx, rt_clock(ctx, rt_agent(ctx, b, t)), vc)
        rt_race_warp(ctx, b, t, 0)
    return 0


def rt_race_reset(ctx: i64, obj: i64) -> i64:
    """The object begins anew."""
    vc = rt_object(ctx, obj, 0)
    if vc:
        fill(vc, 0, ld64(ctx + C_AGENTS) * 4)
    return 0


def rt_race_fence(ctx: i64, b: i64, t: i64) -> i64:
    """Later relaxed writes release what is done by now; earlier relaxed reads acquire."""
    agent = rt_agent(ctx, b, t)
    mine = rt_clock(ctx, agent)
    step = agent * ld64(ctx + C_AGENTS) * 4
    rt_join(ctx, mine, ld64(ctx + C_READVC) + step)
    rt_join(ctx, ld64(ctx + C_FENCEVC) + step, mine)
    st32(mine + agent * 4, ld32(mine + agent * 4) + 1)
    return 0


def rt_race_load(ctx: i64, b: i64, t: i64, p: i64, acquire: i64) -> i64:
    """A strong load."""
    vc = rt_object(ctx, p, 0)
    if vc:
        agent = rt_agent(ctx, b, t)
        if acquire:
            rt_join(ctx, rt_clock(ctx, agent), vc)
            rt_race_warp(ctx, b, t, 0)  # the release may have been another lane's
        else:
            rt_join(ctx, ld64(ctx + C_READVC) + agent * ld64(ctx + C_AGENTS) * 4, vc)
    return 0


def rt_race_store(ctx: i64, b: i64, t: i64, p: i64, release: i64) -> i64:
    """A strong store or the write of an atomic."""
    if release:
        return rt_race_release(ctx, b, t, p)
    agent = rt_agent(ctx, b, t)
    fenced = ld64(ctx + C_FENCEVC) + agent * ld64(ctx + C_AGENTS) * 4
    vc = rt_object(ctx, p, ld32(fenced + agent * 4) != 0)  # without a fence it releases nothing
    if vc:
        rt_join(ctx, vc, fenced)
    return 0


def rt_race_atomic(ctx: i64, b: i64, t: i64, p: i64, order: i64) -> i64:
    rt_race_load(ctx, b, t, p, order & 1)
    rt_race_store(ctx, b, t, p, order & 2)
    return 0


def rt_race_warp(ctx: i64, b: i64, w: i64, mask: i64) -> i64:
    """A warp-wide instruction: its lanes are ordered."""
    p = ld64(ctx + C_LANESYNC) + rt_agent(ctx, b, w) * 4
    st32(p, ld32(p) + 1)
    return 0


def rt_race_barrier(ctx: i64, b: i64, number: i64) -> i64:
    """The threads at a completed barrier are ordered after all who arrived."""
    n = ld64(ctx + C_THREADS)
    stride = ld64(ctx + C_TSTRIDE)
    bar = b + B_BARS + number * BAR_BYTES
    rt_race_reset(ctx, bar + 8)
    vc = rt_object(ctx, bar + 8, 1)
    early = rt_object(ctx, bar, 0)
    if vc == 0:
        return 0
    if early:
        rt_join(ctx, vc, early)
    for round in range(2):
        last = -1
        t = ld64(b + B_THREADS)
        for i in range(n):
            if ld64(t + T_STATE) == BAR and ld64(t + T_A) == number and i >> 5 != last:
                last = i >> 5
                agent = rt_agent(ctx, b, t)
                if round == 0:
                    rt_join(ctx, vc, rt_clock(ctx, agent))
                else:
                    mine = rt_clock(ctx, agent)
                    rt_join(ctx, mine, vc)
                    st32(mine + agent * 4, ld32(mine + agent * 4) + 1)
                    rt_race_warp(ctx, b, t, 0)
            t = t + stride
    rt_race_reset(ctx, bar)
    return 0


# --- cells: writer, first reader, last reader;
# each {agent + 1 | strong << 31 | lane << 32 | site << 40, clock | lane sync << 32}


def rt_ordered(ctx: i64, cell: i64, agent: i64, lane: i64, strong: i64) -> i64:
    """1 if the access in the cell is before this one, or harmless beside it."""
    who = ld64(cell)
    if who == 0:
        return 1
    other = (who & 0x7FFFFFFF) - 1
    if strong and (who >> 31) & 1:
        return 1
    when = ld64(cell + 8)
    if other == agent:
        if (who >> 32) & 31 == lane:
            return 1
        return ult(lshr(when, 32), ld32(ld64(ctx + C_LANESYNC) + agent * 4))
    return (when & 0xFFFFFFFF) <= ld32(rt_clock(ctx, agent) + other * 4)


def rt_race_found(ctx: i64, b: i64, t: i64, site: i64, addr: i64, cell: i64) -> i64:
    before = ld64(ctx + C_NFOUND)
    rt_found(ctx, b, t, N_RACE, site, addr, 0)
    if ld64(ctx + C_NFOUND) > before:
        st64(ld64(ctx + C_FOUND) + before * 64 + 48, lshr(ld64(cell), 40))
        st64(ld64(ctx + C_FOUND) + before * 64 + 56, (ld64(cell) & 0x7FFFFFFF) - 1)
    return 0


def rt_race(
    ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, flags: i64, cells: i64
) -> i64:
    """Check an access of `size` bytes whose cells begin at `cells`, and remember it."""
    if cells == 0 or flags & (LOAD | STORE) == 0:
        return 0
    agent = rt_agent(ctx, b, t)
    lane = ld64(t + T_LANE)
    strong = flags & (ATOMIC | STRONG) != 0
    clock = ld32(rt_clock(ctx, agent) + agent * 4) | (
        ld32(ld64(ctx + C_LANESYNC) + agent * 4) << 32
    )
    who = (agent + 1) | (strong << 31) | (lane << 32) | (site << 40)
    group = ld64(ctx + C_WARPS) * ld64(ctx + C_CLUSTERSIZE)
    for i in range(size):
        cell = cells + i * CELL
        if flags & SHARED:
            # a slot's cells outlive its blocks: those of another cluster mean nothing
            seen = ld64(cell) & 0x7FFFFFFF
            if seen and (seen - 1) // group != agent // group:
                fill(cell, 0, CELL)
            seen = ld64(cell + 16) & 0x7FFFFFFF
            if seen and (seen - 1) // group != agent // group:
                fill(cell, 0, CELL)
        if rt_ordered(ctx, cell, agent, lane, strong) == 0:
            rt_race_found(ctx, b, t, site, addr + i, cell)
        if flags & STORE:
            if rt_ordered(ctx, cell + 16, agent, lane, strong) == 0:
                rt_race_found(ctx, b, t, site, addr + i, cell + 16)
            if rt_ordered(ctx, cell + 32, agent, lane, strong) == 0:
                rt_race_found(ctx, b, t, site, addr + i, cell + 32)
            st64(cell, who)
            st64(cell + 8, clock)
            fill(cell + 16, 0, 32)
        else:
            first = cell + 16
            if ld64(first) != 0 and (
                ld64(first) & 0x7FFFFFFF != agent + 1 or (ld64(first) >> 32) & 31 != lane
            ):
                first = cell + 32
            st64(first, who)
            st64(first + 8, clock)
    return 0
