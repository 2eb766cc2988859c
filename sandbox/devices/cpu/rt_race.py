"""Native runtime: happens-before between threads (exact mode). Written in the language of `subset`."""

# ruff: noqa: F403, F405  (the whole vocabulary of the language and all offsets are in scope here)

from __future__ import annotations

from sandbox.devices.cpu.layout import *
from sandbox.devices.cpu.words import *


def rt_race(ctx: i64, b: i64, t: i64, site: i64, addr: i64, size: i64, flags: i64) -> i64:
    return 0


def rt_race_release(ctx: i64, b: i64, t: i64, obj: i64) -> i64:
    return 0


def rt_race_acquire(ctx: i64, b: i64, t: i64, obj: i64) -> i64:
    return 0


def rt_race_reset(ctx: i64, obj: i64) -> i64:
    return 0


def rt_race_warp(ctx: i64, b: i64, w: i64, mask: i64) -> i64:
    return 0


def rt_race_fence(ctx: i64, b: i64, t: i64) -> i64:
    return 0


def rt_race_load(ctx: i64, b: i64, t: i64, p: i64, acquire: i64) -> i64:
    return 0


def rt_race_store(ctx: i64, b: i64, t: i64, p: i64, release: i64) -> i64:
    return 0


def rt_race_atomic(ctx: i64, b: i64, t: i64, p: i64, order: i64) -> i64:
    return 0
