"""Tiles of the Triton products by shape. Plain arithmetic; the choices were measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """`bn` rows of W by `bk` columns at a time; Triton's warps and pipeline stages."""

    bn: int
    bk: int
    warps: int = 4
    stages: int = 3


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def tile_of(n: int, k: int, mp: int) -> Tile:
    """For W [n, k] and rows padded to `mp`.

    One row: a program's first tile is all of its k where that is short, so that it arrives while the program waits.
    """
    if mp == 1:
        bk = power(k) if k <= 4096 else 1024
        return Tile(max(1, 8192 // bk), bk)
    bk = min(256 if mp <= 32 else 128, power(k))
    return Tile(32 if n > 2048 else 16, bk)
