"""Native runtime: records of faults and findings. Written in the language of `subset`."""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.words import *


def rt_fault(ctx: i64, b: i64, t: i64, code: i64, site: i64, addr: i64, size: i64) -> i64:
    """Record the first fault. Returns 0, so that callers can `return rt_fault(...)`."""
    if ld64(ctx + C_STATUS) == 0:
        st64(ctx + C_STATUS, code)
        st64(ctx + C_SITE, site)
        st64(ctx + C_ADDR, addr)
        st64(ctx + C_SIZE, size)
        st64(ctx + C_BLOCK, ld64(b + B_LINEAR))
        st64(ctx + C_THREAD, ld64(t + T_LINEAR))
    return 0


def rt_found(ctx: i64, b: i64, t: i64, kind: i64, site: i64, addr: i64, size: i64) -> i64:
    """Record a finding, once per kind and site."""
    n = ld64(ctx + C_NFOUND)
    base = ld64(ctx + C_FOUND)
    for i in range(n):
        if ld64(base + i * 64) == kind and ld64(base + i * 64 + 8) == site:
            return 0
    if n < ld64(ctx + C_MAXFOUND):
        p = base + n * 64
        st64(p, kind)
        st64(p + 8, site)
        st64(p + 16, addr)
        st64(p + 24, size)
        st64(p + 32, ld64(b + B_LINEAR))
        st64(p + 40, ld64(t + T_LINEAR))
        st64(p + 48, 0)
        st64(ctx + C_NFOUND, n + 1)
    return 0
