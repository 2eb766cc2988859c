"""How far ranks lay apart in time is said wherever a profile is told, without a waterfall of one GPU."""

from __future__ import annotations

from agent import waterfall


def test_the_skew_of_ranks_is_shown() -> None:
    profile = {"ranks": {"intervals": 210, "median_us": 0.768, "most_us": 12.5}}
    (line,) = waterfall.lines(profile)
    assert "0.77 us (median)" in line and "12.50 us (most)" in line and "210 timed" in line
    assert waterfall.lines(profile, layers=False) == [line]


def test_one_gpu_has_no_such_line() -> None:
    assert waterfall.lines({}) == [] and waterfall.lines({"ranks": {}}) == []
