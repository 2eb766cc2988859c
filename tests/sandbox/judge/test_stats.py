"""The statistics of a timing run: error rates on simulated noise as large as a GPU's."""

from __future__ import annotations

import numpy as np
import pytest

from sandbox.judge import stats
from sandbox.judge.ranking import outcome
from sandbox.verdict import Outcome


def simulate(rng: np.random.Generator, blocks: int, gain: float) -> dict[str, stats.Samples]:
    """Step times with block drift of 1 %, sample noise of 0.25 % and, at one in 40, an interrupted sample."""
    drift = np.exp(rng.normal(0, 0.01, (blocks, 1)))

    def arm(us: float) -> stats.Samples:
        late = 1 + (rng.random((blocks, 2)) < 0.025) * rng.exponential(0.05, (blocks, 2))
        return us * drift * (1 + rng.normal(0, 0.0025, (blocks, 2))) * late

    return {"candidate": arm(20.0), "incumbent": arm(20.0 * gain), "twin": arm(20.0 * gain)}


def verdict(arms: dict[str, stats.Samples], resamples: int = 400) -> Outcome:
    even = stats.paired(arms)
    test = stats.self_test(even["incumbent"], even["twin"], resamples)
    ratio = stats.ratio([even["incumbent"]], [even["candidate"]], resamples)
    return outcome(ratio, None, test.margin)


def test_equal_kernels_are_not_called_better() -> None:
    rng = np.random.default_rng(1)
    found = sum(verdict(simulate(rng, 10, 1.0)) is Outcome.BETTER for _ in range(1000))
    assert found < 10


def test_a_gain_of_one_percent_is_found_by_full() -> None:
    rng = np.random.default_rng(2)
    found = sum(verdict(simulate(rng, 40, 1.01)) is Outcome.BETTER for _ in range(200))
    assert found >= 190


def test_two_copies_rarely_fail_the_self_test() -> None:
    rng = np.random.default_rng(3)
    unsound = 0
    for _ in range(300):
        even = stats.paired(simulate(rng, 10, 1.0))
        unsound += not stats.self_test(even["incumbent"], even["twin"], 400).sound
    assert (unsound / 300) ** 2 < 0.01  # a run is `infra` only if the repetition fails too


def test_interval_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(300):
        even = stats.paired(simulate(rng, 20, 1.05))
        r = stats.ratio([even["incumbent"]], [even["candidate"]], 400)
        assert r.low <= r.value <= r.high
        hits += r.low <= 1.05 <= r.high
    assert 0.88 <= hits / 300 <= 1.0


def test_processes_are_a_level_of_their_own() -> None:
    """Three processes that disagree by 2 % must widen the interval far beyond that of one."""
    rng = np.random.default_rng(5)
    same = [1 + rng.normal(0, 0.001, (20, 2)) for _ in range(3)]
    fast = [x / r for x, r in zip(same, (1.00, 1.02, 1.04), strict=True)]
    r = stats.ratio(same, fast, 2000)
    assert r.value == pytest.approx(1.02, abs=0.003)
    assert r.low < 1.005 and r.high > 1.035
    one = stats.ratio([same[1]], [fast[1]], 2000)
    assert one.high - one.low < 0.002


def test_drift_between_blocks_cancels() -> None:
    rng = np.random.default_rng(6)
    level = np.linspace(1, 1.5, 20)[:, None]
    arms = {
        "candidate": level * (1 + rng.normal(0, 1e-4, (20, 2))),
        "incumbent": 1.02 * level * np.ones((20, 2)),
    }
    even = stats.paired(arms)
    r = stats.ratio([even["incumbent"]], [even["candidate"]], 1000)
    assert r.low > 1.0195 and r.high < 1.0205
