"""How much each tier does: the numbers of the protocol in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sandbox.verdict import Tier


@dataclass(frozen=True)
class Effort:
    """seeds x steps of trajectory (the first seed `long`), repeats of one step, ABBA blocks of `chain` steps; what
    else is tried."""

    seeds: int
    steps: int
    repeats: int
    blocks: int
    chain: int = 64
    rounds: int = 2
    distributions: bool = False
    probes: bool = False
    cold: bool = False
    fresh_bands: bool = False
    long: int = 0
    held_out: bool = False
    races: bool = False
    resamples: int = 2000


SCREEN = Effort(seeds=3, steps=2, repeats=3, blocks=10)
FULL = Effort(
    seeds=10, steps=3, long=16, repeats=16, blocks=40, rounds=8, distributions=True, probes=True, cold=True,
    fresh_bands=True, resamples=10_000,
)  # fmt: skip
PROMOTE = replace(FULL, seeds=12, long=32, repeats=104, held_out=True, races=True)


def brief(e: Effort) -> Effort:
    """For a report of times: one trajectory against the oracle, a few blocks. It says so in what was checked."""
    return replace(e, seeds=1, steps=2, repeats=2, blocks=min(e.blocks, 8), chain=16, long=0)


def effort(tier: Tier, kind: str) -> Effort:
    """The cpu device interprets the same launches at a fraction of the speed and is deterministic but for its
    schedules, so it repeats less and is not timed in blocks."""
    whole = {Tier.SCREEN: SCREEN, Tier.FULL: FULL, Tier.PROMOTE: PROMOTE}[tier]
    if kind == "cuda":
        return whole
    seeds, steps, repeats, most = {
        Tier.SCREEN: (2, 2, 1, 0), Tier.FULL: (3, 3, 3, 4), Tier.PROMOTE: (4, 3, 16, 8)
    }[tier]  # fmt: skip
    return replace(
        whole,
        seeds=seeds,
        steps=steps,
        repeats=repeats,
        long=min(whole.long, most),
        blocks=0,
        cold=False,
    )
