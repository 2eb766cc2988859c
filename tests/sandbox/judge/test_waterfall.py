"""The waterfall adds up to the step, splits edges at the last arrival, and names the largest losses."""

from __future__ import annotations

import random

import pytest

from sandbox.judge.waterfall import PARTS, Span, Step, of_launches, of_spans


def spans(work: tuple[float, ...], release: float, layers: int = 1) -> list[Span]:
    """Blocks that work for `work` microseconds, meet, and go on `release` after the last one has arrived."""
    out, at = [], [0.0] * len(work)
    for layer in range(layers):
        arrived = [t + w for t, w in zip(at, work, strict=True)]
        go = max(arrived) + release
        for n, (t, a) in enumerate(zip(at, arrived, strict=True)):
            out += [Span(n, "gemv", "work", layer, t, a), Span(n, "meet", "edge", layer, a, go)]
        at = [go] * len(work)
    return out


def test_an_edge_is_split_at_the_last_arrival() -> None:
    fall = of_spans(spans((2.0, 4.0), 1.0), Step(5.0, 3.0))
    (meet,) = [p for p in fall["phases"] if p["kind"] == "edge"]
    assert (meet["latency"], meet["skew"]) == (
        1.0,
        1.0,
    )  # one block waits 2 us for the other, mean 1
    assert fall["parts"] == {
        "floor": 3.0, "edge_latency": 1.0, "waits": 0.0, "skew": 1.0, "launch_gaps": 0.0, "rest": 0.0,
    }  # fmt: skip
    assert not fall["unexplained"]


def test_all_parts_add_up_whatever_the_spans_are() -> None:
    rng = random.Random(3)
    for _ in range(60):
        made = []
        for track in range(rng.randint(1, 5)):
            at = rng.random()
            for i in range(rng.randint(1, 6)):
                end = at + rng.random() * 3
                kind = rng.choice(("work", "edge", "wait"))
                made.append(Span(track, f"{kind}{i}", kind, i % 2, at, end))
                at = end + rng.choice((0.0, 0.0, 0.2))  # unmarked time in between
        step = Step(rng.random() * 20, rng.random() * 10)
        fall = of_spans(made, step)
        total = fall["step_us"]
        assert total >= step.us - 1e-3
        assert sum(fall["parts"][k] for k in PARTS) == pytest.approx(total, abs=2e-3)
        assert all(fall["parts"][k] >= -1e-3 for k in PARTS)


def test_waiting_that_hides_behind_streaming_is_not_lost_twice() -> None:
    """Work of 2 us for bytes that need 5: three of the four microseconds of waiting were used to stream."""
    made = [Span(0, "w", "work", 0, 0.0, 2.0), Span(0, "flag", "wait", 0, 2.0, 6.0)]
    fall = of_spans(made, Step(6.0, 5.0))
    assert fall["hidden_us"] == 3.0
    assert fall["parts"]["waits"] == 1.0 and fall["parts"]["rest"] == 0.0


def test_time_over_the_floor_that_nothing_explains_is_named() -> None:
    fall = of_spans([Span(0, "slow", "work", 0, 0.0, 9.0)], Step(10.0, 3.0))
    assert fall["parts"]["launch_gaps"] == 1.0 and fall["parts"]["rest"] == 6.0
    assert fall["unexplained"] and fall["losses"][0]["phase"] == "slow"
    assert "9.00 us of work for bytes that take 3.00 us" in fall["losses"][0]["text"]


def test_the_three_largest_losses_in_order() -> None:
    fall = of_spans(spans((1.0, 1.0, 4.0), 0.5, layers=4), Step(20.0, 8.0))
    us = [x["us"] for x in fall["losses"]]
    assert len(us) == 3 and us == sorted(us, reverse=True)
    assert (
        fall["losses"][0]["phase"] == "meet"
        and "wait 2.00 us for the slowest" in fall["losses"][0]["text"]
    )
    assert [x["layer"] for x in fall["layers"]] == [0, 1, 2, 3]
    assert fall["layers"][0]["phases"] == {"gemv": 2.0, "meet": 2.5}


def test_launches_make_the_same_report() -> None:
    rows = [
        {"kernel": "a", "us": 10.0, "first": 0, "last": 0, "bytes": 30_000_000},
        {"kernel": "b", "us": 2.0, "first": 1, "last": 1, "bytes": 1_000_000},
    ]
    fall = of_launches(rows, Step(12.5, 6.2))
    assert fall["step_us"] == 12.5 and fall["launch_count"] == 2
    assert sum(fall["parts"].values()) == pytest.approx(12.5, abs=1e-3)
    assert fall["parts"]["launch_gaps"] == pytest.approx(
        4.5
    )  # at most the shortest launch each, and the rest
    assert of_launches([], Step(1.0, 1.0)) == {}


def test_a_single_launch_is_work_but_for_a_boundary() -> None:
    fall = of_launches([{"kernel": "mega", "us": 416.8, "bytes": 1}], Step(416.8, 304.9))
    assert fall["parts"]["launch_gaps"] == 3.0
    assert fall["parts"]["rest"] == pytest.approx(416.8 - 304.9 - 3.0, abs=1e-3)


def test_noise_below_zero_does_not_break_the_sum() -> None:
    rows = [{"kernel": "a", "us": 30.0}, {"kernel": "b", "us": -10.0}, {"kernel": "c", "us": 5.0}]
    fall = of_launches(rows, Step(25.0, 2.0))
    assert fall["step_us"] == pytest.approx(25.0) and fall["hidden_us"] >= 0
    assert sum(fall["parts"].values()) == pytest.approx(25.0, abs=1e-3)
    assert all(v >= -1e-6 for v in fall["parts"].values())


def test_no_kernel_gets_more_of_the_floor_than_it_took() -> None:
    """Experts name all their weights and read a few: what they cannot have read, others did."""
    rows = [
        {"kernel": "experts", "us": 13.0, "bytes": 10**9}, {"kernel": "gemv", "us": 23.0, "bytes": 10**7},
    ]  # fmt: skip
    fall = of_launches(rows, Step(36.0, 20.0), gap_us=3.0)
    (loss,) = [x for x in fall["losses"] if x["phase"] == "gemv"]
    assert loss["us"] == pytest.approx(
        20.0 - 10.0, abs=1e-3
    )  # of 20 us of floor the experts take their 10
