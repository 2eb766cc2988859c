"""Native runtime: what a launch finds in registers, shared and local memory that it has not written. On a GPU that is
what ran there before; here it is noise of the launch's secret, so that a kernel that relies on it ends wrong.

Half of all words are ones throughout: NaN in every float format, -1 as an integer, true as a predicate. The others are
random, for what NaN passes by (a maximum). It notes nothing; reads of unwritten shared memory are findings of
`rt_memory`. Written in the language of `subset`.
"""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.words import *


def rt_mix(x: i64) -> i64:
    """A word that depends on every bit of x."""
    h = x * 0x9E3779B97F4A7C15
    h = (h ^ lshr(h, 29)) * 0xBF58476D1CE4E5B9
    h = (h ^ lshr(h, 32)) * 0x94D049BB133111EB
    return h ^ lshr(h, 31)


def rt_noise(ctx: i64, b: i64, number: i64) -> i64:
    """Word of that number in the block."""
    h = rt_mix(rt_mix(ld64(ctx + C_UNSET) + ld64(b + B_LINEAR)) + number)
    if rt_mix(h) & 1:
        return -1
    return h


def rt_unset(ctx: i64, b: i64, t: i64, register: i64) -> i64:
    """What a register holds when its thread starts."""
    return rt_noise(ctx, b, (ld64(t + T_LINEAR) << 32) + register)


def rt_noise_shared(ctx: i64, b: i64) -> i64:
    """Shared memory of a block that starts: one byte over and over, since there may be much of it."""
    fill(ld64(b + B_SMEM), rt_noise(ctx, b, -1) & 0xFF, ld64(ctx + C_SMEM))
    fill(ld64(b + B_SHADOW), UNWRITTEN, ld64(ctx + C_SMEM))
    return 0


def rt_noise_local(ctx: i64, b: i64, t: i64) -> i64:
    """Local memory of a thread that starts; whole words, as `translate.place` rounds it."""
    p = t + T_FRAME + ld64(ctx + C_FRAMEBYTES)
    first = (ld64(t + T_LINEAR) << 32) + (1 << 31)
    for i in range(lshr(ld64(ctx + C_LOCAL), 3)):
        st64(p + i * 8, rt_noise(ctx, b, first + i))
    return 0
