"""Native runtime: instructions that a warp executes together (shfl, vote, redux, match, elect, matrix moves).

Threads wait at such an instruction with their operands in exchange slots; when all members of the mask have
come, one of the functions here computes every lane's result. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_faults import rt_fault, rt_found
from sandbox.devices.cpu.rt_memory import rt_access
from sandbox.devices.cpu.rt_mma import rt_mma
from sandbox.devices.cpu.words import *


def rt_x(ctx: i64, w: i64, lane: i64, k: i64) -> i64:
    """Address of exchange slot k of a lane; `w` is the warp's first thread."""
    return w + lane * ld64(ctx + C_TSTRIDE) + T_X + k * 8


def rt_shfl(ctx: i64, b: i64, w: i64, mask: i64, op: i64, site: i64) -> i64:
    """Slots: 0 value, 1 lane or offset, 2 clamp and segment, 3 the result and 4 its predicate."""
    for lane in range(32):
        if (mask >> lane) & 1:
            n = ld32(rt_x(ctx, w, lane, 1)) & 31
            c = ld32(rt_x(ctx, w, lane, 2))
            segment = (c >> 8) & 31
            top = (lane & segment) | (c & 31 & ~segment)
            bottom = lane & segment
            j = lane
            p = 0
            if op == O_SHFL_IDX:
                j = bottom | (n & ~segment & 31)
                p = j <= top
            if op == O_SHFL_UP:
                j = lane - n
                p = j >= top
            if op == O_SHFL_DOWN:
                j = lane + n
                p = j <= top
            if op == O_SHFL_BFLY:
                j = lane ^ n
                p = j <= top
            if p == 0:
                j = lane
            if (mask >> j) & 1:
                st64(rt_x(ctx, w, lane, 3), ld32(rt_x(ctx, w, j, 0)))
            else:
                rt_found(ctx, b, w + lane * ld64(ctx + C_TSTRIDE), N_SHFL, site, j, 4)
                st64(rt_x(ctx, w, lane, 3), 0xFFFFFFFF)
            st64(rt_x(ctx, w, lane, 4), p)
    return 0


def rt_vote(ctx: i64, w: i64, mask: i64, op: i64) -> i64:
    """Slots: 0 predicate, 3 result."""
    ballot = 0
    for lane in range(32):
        if (mask >> lane) & 1:
            ballot = ballot | ((ld64(rt_x(ctx, w, lane, 0)) & 1) << lane)
    result = ballot
    if op == O_VOTE_ALL:
        result = ballot == mask
    if op == O_VOTE_ANY:
        result = ballot != 0
    if op == O_VOTE_UNI:
        result = (ballot == mask) + (ballot == 0)
    for lane in range(32):
        if (mask >> lane) & 1:
            st64(rt_x(ctx, w, lane, 3), result)
    return 0


def rt_redux(ctx: i64, w: i64, mask: i64, op: i64) -> i64:
    """Slots: 0 value, 3 result."""
    first = low_bit(mask)
    acc = ld32(rt_x(ctx, w, first, 0))
    for lane in range(first + 1, 32):
        if (mask >> lane) & 1:
            v = ld32(rt_x(ctx, w, lane, 0))
            if op == O_REDUX_ADD:
                acc = (acc + v) & 0xFFFFFFFF
            if op == O_REDUX_AND:
                acc = acc & v
            if op == O_REDUX_OR:
                acc = acc | v
            if op == O_REDUX_XOR:
                acc = acc ^ v
            if op == O_REDUX_UMIN and v < acc:
                acc = v
            if op == O_REDUX_UMAX and v > acc:
                acc = v
            if op == O_REDUX_MIN and sext32(v) < sext32(acc):
                acc = v
            if op == O_REDUX_MAX and sext32(v) > sext32(acc):
                acc = v
    for lane in range(32):
        if (mask >> lane) & 1:
            st64(rt_x(ctx, w, lane, 3), acc)
    return 0


def rt_match(ctx: i64, w: i64, mask: i64, op: i64) -> i64:
    """Slots: 0 value, 3 mask of equal lanes, 4 predicate (all)."""
    same = 1
    first = ld64(rt_x(ctx, w, low_bit(mask), 0))
    for lane in range(32):
        if (mask >> lane) & 1:
            mine = ld64(rt_x(ctx, w, lane, 0))
            equal = 0
            for other in range(32):
                if (mask >> other) & 1 and ld64(rt_x(ctx, w, other, 0)) == mine:
                    equal = equal | (1 << other)
            st64(rt_x(ctx, w, lane, 3), equal)
            if mine != first:
                same = 0
    if op == O_MATCH_ALL:
        for lane in range(32):
            if (mask >> lane) & 1:
                st64(rt_x(ctx, w, lane, 3), mask if same else 0)
                st64(rt_x(ctx, w, lane, 4), same)
    return 0


def rt_elect(ctx: i64, w: i64, mask: i64) -> i64:
    """Slots: 3 leader, 4 predicate."""
    leader = low_bit(mask)
    for lane in range(32):
        if (mask >> lane) & 1:
            st64(rt_x(ctx, w, lane, 3), leader)
            st64(rt_x(ctx, w, lane, 4), lane == leader)
    return 0


def rt_ldmatrix(ctx: i64, b: i64, w: i64, site: i64, variant: i64) -> i64:
    """8x8 matrices of 16 bits. Slots: 0 row address, 3.. results; variant: count | trans << 8 | space << 16."""
    count = variant & 255
    trans = (variant >> 8) & 1
    stride = ld64(ctx + C_TSTRIDE)
    for i in range(count):
        for row in range(8):
            giver = i * 8 + row
            p = rt_access(
                ctx,
                b,
                w + giver * stride,
                site,
                ld64(rt_x(ctx, w, giver, 0)),
                16,
                16,
                LOAD | (variant >> 16),
            )
            if p == 0:
                return 0
            for col in range(8):
                lane = row * 4 + (col >> 1)
                half = col & 1
                if trans:
                    lane = col * 4 + (row >> 1)
                    half = row & 1
                st16(rt_x(ctx, w, lane, 3 + i) + half * 2, ld16(p + col * 2))
    return 0


def rt_stmatrix(ctx: i64, b: i64, w: i64, site: i64, variant: i64) -> i64:
    """The inverse of ldmatrix. Slots: 0 row address, 3.. values."""
    count = variant & 255
    trans = (variant >> 8) & 1
    stride = ld64(ctx + C_TSTRIDE)
    for i in range(count):
        for row in range(8):
            giver = i * 8 + row
            p = rt_access(
                ctx,
                b,
                w + giver * stride,
                site,
                ld64(rt_x(ctx, w, giver, 0)),
                16,
                16,
                STORE | (variant >> 16),
            )
            if p == 0:
                return 0
            for col in range(8):
                lane = row * 4 + (col >> 1)
                half = col & 1
                if trans:
                    lane = col * 4 + (row >> 1)
                    half = row & 1
                st16(p + col * 2, ld16(rt_x(ctx, w, lane, 3 + i) + half * 2))
    return 0


def rt_movmatrix(ctx: i64, w: i64) -> i64:
    """Transpose one 8x8 matrix. Slots: 0 value, 3 result."""
    for row in range(8):
        for col in range(8):
            v = ld16(rt_x(ctx, w, row * 4 + (col >> 1), 0) + (col & 1) * 2)
            st16(rt_x(ctx, w, col * 4 + (row >> 1), 3) + (row & 1) * 2, v)
    return 0


def rt_together(ctx: i64, b: i64, w: i64, mask: i64, leader: i64) -> i64:
    """Carry out the instruction at which the lanes of `mask` wait. Returns 0 after a fault."""
    op = ld64(leader + T_OP)
    site = ld64(leader + T_SITE)
    if op >= O_LDMATRIX and mask != 0xFFFFFFFF:
        return rt_fault(ctx, b, leader, F_WARP, site, mask, op)
    if op >= O_SHFL_IDX and op <= O_SHFL_BFLY:
        rt_shfl(ctx, b, w, mask, op, site)
    if op >= O_VOTE_ALL and op <= O_BALLOT:
        rt_vote(ctx, w, mask, op)
    if op >= O_REDUX_ADD and op <= O_REDUX_XOR:
        rt_redux(ctx, w, mask, op)
    if op == O_MATCH_ANY or op == O_MATCH_ALL:
        rt_match(ctx, w, mask, op)
    if op == O_ELECT:
        rt_elect(ctx, w, mask)
    if op == O_LDMATRIX:
        rt_ldmatrix(ctx, b, w, site, ld64(leader + T_A))
    if op == O_STMATRIX:
        rt_stmatrix(ctx, b, w, site, ld64(leader + T_A))
    if op == O_MOVMATRIX:
        rt_movmatrix(ctx, w)
    if op == O_MMA:
        rt_mma(ctx, w, ld64(leader + T_A))
    if ld64(ctx + C_STATUS):
        return 0
    return 1
