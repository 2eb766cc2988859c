"""What outputs and undefined scratch hold before a launch: random finite values, random bits, NaN, or what an earlier
step left.

No single poison is told apart by a kernel that works only when it sees it, because the kinds alternate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

Poison = Literal["random", "nan", "stale", "bits"]
CYCLE: tuple[Poison, ...] = ("random", "nan", "stale", "bits")


def fill(tensors: Iterable[torch.Tensor], kind: Poison, seed: int) -> None:
    if kind == "stale":
        return
    for i, t in enumerate(tensors):
        if t.dtype.is_floating_point and kind == "nan":
            t.fill_(float("nan"))
        elif t.dtype.is_floating_point and kind == "random":
            _random_floats(t, seed + i)
        else:
            _random_bits(t, seed + i)


def _generator(t: torch.Tensor, seed: int) -> torch.Generator:
    return torch.Generator(device=t.device).manual_seed(seed & (2**62 - 1))


def _random_floats(t: torch.Tensor, seed: int) -> None:
    """Normal values of a size that results could have."""
    if t.element_size() == 1:
        t.copy_(torch.randn(t.shape, device=t.device, generator=_generator(t, seed)))
    else:
        t.normal_(0.0, 1.0, generator=_generator(t, seed))


def _random_bits(t: torch.Tensor, seed: int) -> None:
    """Any bit pattern, so that a stale index is far outside."""
    raw = t.reshape(-1).view(torch.uint8)
    raw.random_(0, 256, generator=_generator(t, seed))
