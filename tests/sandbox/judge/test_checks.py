"""The checker's second look: noise of more schedules where an unusual problem leaves a result just beyond a few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sandbox.artifact import Buffer
from sandbox.judge.checks import Checker, Moment
from sandbox.judge.locate import Where
from sandbox.verdict import Failure
from targets.reference import Expected, Tensors

TRUE = torch.linspace(1.0, 2.0, 256)
STRAYS = {"oracle": 0.0, "a": 0.004, "b": 0.006, "luck": 0.009, "far": 0.1}
"""By schedule: how far every second element is off, to either side."""


def off(by: float) -> torch.Tensor:
    sign = torch.ones(256)
    sign[::4], sign[1::2] = -1.0, 0.0
    return TRUE * (1 + by * sign)


class Wave:
    """One output whose noise two schedules show too small; a third, spare one, shows more."""

    schedules = ("a", "b")

    def __init__(self, *spare: str) -> None:
        self.spare, self.ran = spare, []  # type: ignore[var-annotated]

    def run(self, w: Any, tensors: Tensors, schedule: str, forced: Any = None) -> Expected:
        self.ran.append(schedule)
        return Expected({"outputs.y": off(STRAYS[schedule])})


def looked(by: float, band: Any, *spare: str) -> tuple[Failure | None, list[str]]:
    reference = Wave(*spare)
    y = Buffer("outputs.y", "f32", (256,))
    case: Any = SimpleNamespace(
        reference=reference, workload=SimpleNamespace(layers=1), ranks=1,
        buffers=lambda *groups: (y,) if "outputs" in groups else (),
    )  # fmt: skip
    left = {"outputs.y": off(by)}
    moment = Moment({}, {"outputs.y": torch.zeros(256)}, left, Where(0, 0))
    return Checker(case).check(moment, band), reference.ran


@pytest.mark.parametrize("band", ["alone", "share"])
def test_more_schedules_decide_where_a_problem_beside_the_trial_is_just_beyond_a_few(
    band: Any,
) -> None:
    assert looked(0.009, band)[0] is None
    beyond, ran = looked(0.018, band)
    assert beyond is not None and beyond.rule == "band" and "luck" not in ran
    again, ran = looked(0.018, band, "luck")
    assert again is None and "luck" in ran


@pytest.mark.parametrize(
    ("by", "band", "spare"),
    [
        (0.018, "learn", "luck"),  # usual values have a band of many moments
        (0.0225, "alone", "luck"),  # beyond those, too
        (0.060, "share", "far"),
        (0.060, "alone", "far"),  # too far for luck: not even asked
    ],
)
def test_the_second_look_takes_nothing_else(by: float, band: Any, spare: str) -> None:
    failure, ran = looked(by, band, spare)
    assert failure is not None and failure.rule == "band"
    assert (spare in ran) == (by == 0.0225)
