"""Tunable search without a model: never twice, always ends, finds the optimum of a small space."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from agent.models.tuner import Tuner
from agent.search import Limits
from agent.tune import Trial, suggest

SMALL = {"a": (1, 2, 4), "b": ("x", "y"), "c": (True, False)}
LARGE: dict[str, tuple[Any, ...]] = {f"t{i}": tuple(range(6)) for i in range(6)}


def cost(point: dict[str, Any]) -> float | None:
    if point["a"] == 4 and point["b"] == "x":
        return None
    return 100 - 10 * point["a"] + (5 if point["b"] == "x" else 0) + point["c"]


def test_the_default_comes_first_then_changes_of_one_value() -> None:
    assert suggest(SMALL, [], 1, 0) == [{"a": 1, "b": "x", "c": True}]
    tried = [Trial({"a": 1, "b": "x", "c": True}, 1.0)]
    for point in suggest(SMALL, tried, 4, 0):
        assert sum(point[n] != v for n, v in tried[0].point.items()) == 1


def test_a_small_space_is_exhausted_without_repeats_and_then_over() -> None:
    tried: list[Trial] = []
    while points := suggest(SMALL, tried, 3, 0):
        tried += [Trial(p, cost(p)) for p in points]
    keys = {tuple(t.point.values()) for t in tried}
    assert keys == set(itertools.product(*SMALL.values()))
    assert len(tried) == 12


def test_a_large_space_never_repeats_and_gets_better_than_the_default() -> None:
    pytest.importorskip("optuna")
    tried: list[Trial] = []
    for _ in range(12):
        points = suggest(LARGE, tried, 3, seed=1)
        assert len(points) == 3
        tried += [Trial(p, float(sum((v - 3) ** 2 for v in p.values())) + 1) for p in points]
    assert len({tuple(t.point.values()) for t in tried}) == 36
    assert min(t.time or 0 for t in tried) < (tried[0].time or 0) / 2


def test_a_change_that_did_well_is_tried_on_the_new_best_before_unknown_ones() -> None:
    base = {f"t{i}": 0 for i in range(6)}
    tried = [
        Trial(base, 100.0), Trial({**base, "t4": 1}, 90.0), Trial({**base, "t5": 2}, 95.0),
        Trial({**base, "t0": 1}, 130.0),
    ]  # fmt: skip
    first, second, _ = suggest(LARGE, tried, 3, seed=0)
    assert first == {**base, "t4": 1, "t5": 2}
    assert second != {**base, "t4": 1, "t0": 1}
    assert suggest({n: v[:2] for n, v in LARGE.items()}, tried[:2], 1, 0) == [
        {**base, "t4": 1, "t0": 1}
    ]


def test_the_same_history_and_seed_give_the_same_suggestions() -> None:
    tried = [
        Trial({f"t{i}": 0 for i in range(6)}, 5.0),
        Trial({f"t{i}": 1 for i in range(6)}, None),
    ]
    assert suggest(LARGE, tried, 3, 4) == suggest(LARGE, tried, 3, 4)


def test_nothing_declared_means_nothing_to_suggest() -> None:
    assert suggest({}, [], 3, 0) == []
    assert suggest({"a": ()}, [], 3, 0) == []


def test_the_tuner_finds_the_best_point_of_the_seed_and_stops_when_all_are_tried(kit: Any) -> None:
    run = kit.new(proposer="tuner", k=2, limits=Limits(rounds=20, stop_at=None, patience=None))
    ended = kit.go(run, Tuner())
    assert ended.stop == "exhausted"
    rows = kit.queries.candidates(run)
    assert len(rows) == 6
    best = rows[ended.incumbent]
    assert best["tunables"] == '{"stages": 3, "threads": 128}'
    assert best["us"] == pytest.approx(85.5)
