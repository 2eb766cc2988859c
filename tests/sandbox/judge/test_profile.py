"""The profile adds up to the step and says which launch costs what."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.judge.profile import MAX_POINTS, _ends
from sandbox.verdict import Status, short_name
from tests.sandbox.judge import toy
from tests.sandbox.judge.test_timing import FakeDevice, JudgeJob, run


def test_shares_follow_the_launches_and_add_up(tmp_path: Path) -> None:
    job = JudgeJob(
        toy.saved(tmp_path, toy.artifact(("k", "tail", "tail"))),
        toy.TARGET,
        {"rows": 4},
        "cuda",
        baselines=(),
    )
    kernels = {"k": toy.right, "tail": lambda _: None}
    v = run(job, FakeDevice(kernels, "cuda", {"k": 10.0, "tail": 5.0}))
    assert v.status is Status.PASSED, v.failure
    p = v.profile
    assert [x["kernel"] for x in p["launches"]] == ["k", "tail", "tail"]
    assert [x["us"] for x in p["launches"]] == pytest.approx([10, 5, 5], abs=0.1)
    assert sum(x["us"] for x in p["launches"]) == pytest.approx(p["step_us"], abs=0.01)
    assert [(k["kernel"], k["calls"], k["share"]) for k in p["kernels"]] == [
        ("k", 1, pytest.approx(0.5, abs=0.02)),
        ("tail", 2, pytest.approx(0.5, abs=0.02)),
    ]


def test_no_profile_where_times_are_modelled(tmp_path: Path) -> None:
    job = JudgeJob(
        toy.saved(tmp_path, toy.artifact(("k",))), toy.TARGET, {"rows": 4}, "cpu", baselines=()
    )
    assert "launches" not in run(job, FakeDevice({"k": toy.right})).profile


@pytest.mark.parametrize("n", [1, 7, MAX_POINTS, MAX_POINTS + 1, 5 * MAX_POINTS + 3])
def test_long_plans_are_cut_into_pieces_that_end_with_the_plan(n: int) -> None:
    ends = _ends(n)
    assert ends[-1] == n and len(ends) == min(n, MAX_POINTS) and ends == sorted(set(ends))


def test_short_names() -> None:
    assert short_name("kernel_cutlass_gemv_kernel_tensorptrbf16gmem_0") == "gemv_kernel"
