"""Native runtime: a block is put into its slot, its threads at their first instruction.

Which block starts when is the scheduler's affair. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.rt_race import rt_race_start
from sandbox.devices.cpu.rt_unset import rt_noise_local, rt_noise_shared
from sandbox.devices.cpu.words import *


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
