"""Statistics of paired timings: medians, hierarchical bootstrap of a ratio, the A/A check and the margin.

Samples of one arm are an array [blocks, samples]; arms of one run share blocks. Several processes are a list of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sandbox.verdict import Ratio

Samples = NDArray[np.float64]
LEVEL = 0.95
LEAST_MARGIN = 0.005
AA_TOLERANCE = 0.001
_CHUNK = 2000


def paired(arms: Mapping[str, Samples]) -> dict[str, Samples]:
    """Each block in units of its own geometric mean over all arms, so that drift from block to block cancels."""
    level = sum(np.log(x).mean(axis=1, keepdims=True) for x in arms.values()) / max(1, len(arms))
    return {name: np.exp(np.log(x) - level) for name, x in arms.items()}


def ratio(slow: Sequence[Samples], fast: Sequence[Samples], resamples: int, seed: int = 0) -> Ratio:
    """Ratio of medians slow / fast (of times: over 1 means that `fast` is faster) with a bootstrap interval.

    Processes, then blocks (the same for both arms), then samples in a block are drawn with replacement.
    """
    rng = np.random.default_rng(seed)
    value = float(np.median(_flat(slow)) / np.median(_flat(fast)))
    draws: list[Samples] = []
    left = resamples
    while left > 0:
        n = min(left, _CHUNK)
        draws.append(_draw(slow, fast, n, rng))
        left -= n
    low, high = np.quantile(np.concatenate(draws), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(value, min(float(low), value), max(float(high), value))


def _flat(arms: Sequence[Samples]) -> Samples:
    return np.concatenate([x.reshape(-1) for x in arms])


def _draw(
    slow: Sequence[Samples], fast: Sequence[Samples], n: int, rng: np.random.Generator
) -> Samples:
    picks = rng.integers(0, len(slow), (n, len(slow)))
    tops, bottoms = [], []
    for k in range(len(slow)):
        for p in range(len(slow)):
            chosen = picks[:, k] == p
            if len(slow) > 1 and not chosen.any():
                continue
            blocks = rng.integers(0, slow[p].shape[0], (n, slow[p].shape[0]))
            pair = [_inside(x[p], blocks, rng) for x in (slow, fast)]
            if len(slow) == 1:
                tops, bottoms = [pair[0]], [pair[1]]
            else:
                _place(tops, k, chosen, pair[0])
                _place(bottoms, k, chosen, pair[1])
    return np.median(np.concatenate(tops, axis=1), axis=1) / np.median(
        np.concatenate(bottoms, axis=1), axis=1
    )


def _place(parts: list[Samples], k: int, chosen: NDArray[np.bool_], drawn: Samples) -> None:
    """Rows of the k-th drawn process; processes have equally many samples."""
    if len(parts) <= k:
        parts.append(np.zeros_like(drawn))
    parts[k][chosen] = drawn[chosen]


def _inside(x: Samples, blocks: NDArray[np.int64], rng: np.random.Generator) -> Samples:
    inner = rng.integers(0, x.shape[1], (*blocks.shape, x.shape[1]))
    drawn: Samples = np.take_along_axis(x[blocks], inner, axis=2)
    return drawn.reshape(blocks.shape[0], -1)


@dataclass(frozen=True)
class SelfTest:
    """The A/A comparison: one arm against itself in the same blocks."""

    ratio: Ratio

    @property
    def half_width(self) -> float:
        """Largest distance of the interval from 1: noise and bias of the set-up together."""
        return max(abs(self.ratio.low - 1), abs(self.ratio.high - 1))

    @property
    def sound(self) -> bool:
        """The interval holds 1, give or take a fifth of the smallest margin."""
        return self.ratio.low <= 1 + AA_TOLERANCE and self.ratio.high >= 1 - AA_TOLERANCE

    @property
    def margin(self) -> float:
        """delta: how much faster a candidate must be."""
        return max(LEAST_MARGIN, 2 * self.half_width)


def drift(x: Samples) -> float:
    """Median of the last third of the blocks over that of the first, less one; 0 for fewer than six blocks."""
    third = x.shape[0] // 3
    return 0.0 if third < 2 else float(np.median(x[-third:]) / np.median(x[:third])) - 1.0


def self_test(a: Samples, twin: Samples, resamples: int, seed: int = 0) -> SelfTest:
    return SelfTest(ratio([a], [twin], resamples, seed))
