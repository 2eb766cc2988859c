"""Steps timed one by one for reports, warm and cold; clocks that are logged, and runs that drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sandbox.devices.fake import FakeDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import judge, series
from sandbox.verdict import Status, Tier
from tests.sandbox.judge import toy
from tests.sandbox.judge.test_timing import row, run, timed


def test_isolated_steps_of_a_slow_arm_are_few(tmp_path: Path) -> None:
    made = toy.saved(tmp_path, toy.artifact(("k",)))
    counted = []
    for us in (10.0, 200_000.0):
        job = JudgeJob(made, toy.TARGET, {"rows": 4}, "cuda", baselines=(), steps=10)
        device = _Counting({"k": toy.right}, "cuda", {"k": us})
        assert row(judge.run(job, device)).detail["arms"]["candidate"]["isolated_us"] >= us * 0.99
        counted.append(device.timings)
    spared = counted[0] - counted[1]  # some of them are rounds of warming up
    assert spared >= 2 * (series.ISOLATED - series.FEWEST) > 20


class _Counting(FakeDevice):
    timings = 0

    def time(self, work: Callable[[], None]) -> float:
        self.timings += 1
        return super().time(work)


def test_steps_are_timed_one_by_one_for_reports(tmp_path: Path) -> None:
    made = toy.saved(tmp_path, toy.artifact(("k",)))
    job = JudgeJob(made, toy.TARGET, {"rows": 4}, "cuda", baselines=("graph",), steps=40)
    device = FakeDevice({"k": toy.right}, "cuda", {"k": 10.0}, noise=0.002)
    v = judge.run(job, device)
    arms = row(v).detail["arms"]
    assert set(arms) == {"candidate", "graph"}
    own = arms["candidate"]
    assert own["steps"] == 40 and own["launches"] == 1
    assert own["p50_us"] == pytest.approx(10.0, rel=0.01)
    assert own["p50_us"] <= own["p95_us"] <= own["p99_us"]
    assert own["isolated_us"] == pytest.approx(10.0, rel=0.01)
    assert v.correctness is not None and v.correctness.seeds == 1


@pytest.mark.parametrize(
    ("us", "steps"), [(7_900.0, 1000), (9_000.0, 222), (200_000.0, series.ISOLATED)]
)
def test_a_slow_arm_has_fewer_steps_and_says_how_many(
    tmp_path: Path, us: float, steps: int
) -> None:
    job = JudgeJob(
        toy.saved(tmp_path, toy.artifact(("k",))),
        toy.TARGET,
        {"rows": 4},
        "cuda",
        baselines=(),
        steps=1000,
    )
    v = judge.run(job, FakeDevice({"k": toy.right}, "cuda", {"k": us}))
    assert row(v).detail["arms"]["candidate"]["steps"] == pytest.approx(steps, abs=1)


class Warming(FakeDevice):
    """Gets slower with each timing, until `steady` timings have passed; the first blocks of a run are the fastest."""

    steady = 0

    def time(self, work: Callable[[], None]) -> float:
        self.count = getattr(self, "count", 0) + 1
        return super().time(work) * (1.0 + 0.2 * min(self.count, self.steady) / max(1, self.steady))


def test_a_run_that_drifted_is_repeated(tmp_path: Path) -> None:
    job = JudgeJob(toy.saved(tmp_path, toy.artifact(("k",))), toy.TARGET, {"rows": 4}, "cuda")
    device = Warming({"k": toy.right}, "cuda", {"k": 10.0})
    device.steady = 60
    v = run(job, device)
    assert row(v).us == pytest.approx(12.0, rel=0.005), "the second run counts"
    said = [f.message for f in v.findings if f.rule == "drift"]
    assert len(said) == 1 and "slower from the first blocks to the last; timed again" in said[0]
    device.count, device.steady = 0, 150
    twice = [f.message for f in run(job, device).findings if f.rule == "drift"]
    assert len(twice) == 2 and "it drifted twice" in twice[1]


def test_clocks_power_and_temperature_are_logged(tmp_path: Path) -> None:
    class Metered(FakeDevice):
        def conditions(self) -> Mapping[str, Any]:
            n = self.asked = getattr(self, "asked", 0) + 1
            return {
                "sm_mhz": 1980 - 10 * (n % 3),
                "watts": 300.0 + n,
                "celsius": 40,
                "throttle": ["power cap"],
            }

    job = JudgeJob(toy.saved(tmp_path, toy.artifact(("k",))), toy.TARGET, {"rows": 4}, "cuda")
    v = run(job, Metered({"k": toy.right}, "cuda", {"k": 10.0}))
    row(v)
    assert v.timing is not None
    seen = v.timing.conditions
    assert seen["sm_mhz"] == [1960, 1970, 1980] and seen["celsius"] == [40, 40, 40]
    assert seen["throttled_blocks"] == {"power cap": 10}


def test_isolated_warm_and_cold_are_reported_and_checked(tmp_path: Path) -> None:
    t = row(timed(tmp_path, {"k": 10.0}, tier=Tier.FULL))
    assert t.detail["isolated_us"]["candidate"] == pytest.approx(10.0, rel=0.01)
    assert t.detail["cold_us"]["candidate"] == pytest.approx(10.0, rel=0.01)

    calls = {"n": 0}

    def late(x: Mapping[str, torch.Tensor]) -> None:
        """Wrong in isolated steps alone: those come last."""
        toy.right(x)
        calls["n"] += 1
        if calls["n"] > most:
            x["outputs.y"][0] += float(calls["n"])

    most = 1 << 30
    row(timed(tmp_path / "count", {"k": 10.0}, kernel=late, tier=Tier.FULL))
    most, calls["n"] = (
        calls["n"] - 60,
        0,
    )  # 9 profile steps of one launch, then 40 blocks x 2 isolated ones before
    v = timed(tmp_path / "late", {"k": 10.0}, kernel=late, tier=Tier.FULL)
    assert (
        v.status is Status.FLAKY and v.failure is not None and "isolated steps" in v.failure.message
    )
