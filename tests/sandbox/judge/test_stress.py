"""Counters that run over: kernels that are right until a word of theirs is 2^31 or 2^32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sandbox.artifact import Buffer
from sandbox.devices.fake import FakeDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import judge, stress
from sandbox.judge.tiers import FULL
from sandbox.verdict import Status, Tier, Verdict
from tests.sandbox.judge import toy

torch.set_num_threads(1)
EPOCH = Buffer("workspace.epoch", "i32", (2,), init="zero", lifetime="persistent")
Kernel = Callable[[Mapping[str, torch.Tensor]], None]


def judged(
    folder: Path, kernel: Kernel, kind: str = "cpu", workspace: tuple[Buffer, ...] = (EPOCH,)
) -> Verdict:
    todo = replace(
        FULL, seeds=1, steps=2, long=0, repeats=1, blocks=0, cold=False, distributions=False
    )
    made = toy.artifact(("k",), workspace=workspace)
    job = JudgeJob(toy.saved(folder, made), toy.TARGET, {"rows": 4}, kind, Tier.FULL, seed=5)
    return judge.run(job, FakeDevice({"k": kernel}), todo=todo)


def counting(fails: Callable[[int], bool], by: int = 132) -> Kernel:
    """A right step that adds to a counter and flips a parity; `fails` looks at the counter."""

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        epoch = t["workspace.epoch"]
        epoch[0] += by
        epoch[1] ^= 1
        if fails(int(epoch[0])):
            t["outputs.y"][0] = 0.0

    return kernel


def test_a_counter_that_may_run_over_passes(tmp_path: Path) -> None:
    v = judged(tmp_path, counting(lambda seen: False))
    assert v.status is Status.PASSED, v.failure
    assert any("run over 2^31 and 2^32" in line for line in v.checked)


@pytest.mark.parametrize("start", [1, 2])
def test_what_alternates_with_a_counter_stands_where_it_stood(tmp_path: Path, start: int) -> None:
    """Two boxes by the counter's parity: the one of this step was emptied in the step before. From one of both starts
    the border is an odd number of steps away."""
    boxes = Buffer("workspace.boxes", "f32", (2,), init="zero", lifetime="persistent")

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        count = int(t["workspace.epoch"][0])
        now = count & 1
        if count and float(t["workspace.boxes"][now]) != 0.0:
            t["outputs.y"][0] = 0.0
        following = (count + (1 if count else start)) & 1
        t["workspace.boxes"][1 - following], t["workspace.boxes"][following] = 1.0, 0.0
        t["workspace.epoch"][0] += 1 if count else start

    v = judged(tmp_path, kernel, workspace=(EPOCH, boxes))
    assert v.status is Status.PASSED, v.failure
    assert any("run over 2^31" in line for line in v.checked)


@pytest.mark.parametrize(
    ("fails", "steps"),
    [(lambda seen: seen < 0, 2**31 / 132), (lambda seen: -132 <= seen < 0, 2**32 / 132)],
    ids=["signed", "wraps to zero"],
)
def test_a_counter_that_breaks_there_is_wrong(
    tmp_path: Path, fails: Callable[[int], bool], steps: float
) -> None:
    v = judged(tmp_path, counting(fails))
    assert v.status is Status.WRONG and v.failure is not None
    assert v.failure.rule == "counters" and "counters as after" in v.failure.message
    assert v.failure.where["steps"] == pytest.approx(steps, rel=0.01)


def test_words_that_do_not_grow_evenly_are_left_alone(tmp_path: Path) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        t["workspace.epoch"][0] = t["workspace.epoch"][0] * 3 + 1

    v = judged(tmp_path, kernel)
    assert v.status is Status.PASSED, v.failure
    assert any("does not change evenly" in line for line in v.not_verified)


def test_words_stay_as_they_are_without_growth(tmp_path: Path) -> None:
    v = judged(tmp_path, lambda t: toy.right(t))
    assert v.status is Status.PASSED
    assert not any("set forward" in line for line in v.checked)


def test_the_low_word_of_a_sum() -> None:
    wide = torch.tensor([(1 << 31) - 1, 1 << 31, (1 << 32) + 5, -1])
    assert stress.as_words(wide).tolist() == [2**31 - 1, -(2**31), 5, -1]


@pytest.mark.gpu
def test_held_sms_are_held_and_come_back() -> None:
    from sandbox import canary
    from sandbox.devices.cuda import CudaDevice

    device = CudaDevice.open(0)
    assert canary.run(device).ok
    side = torch.cuda.Stream()
    holder = stress.Holder(device, side.cuda_stream)
    n = 1 << 16
    program = device.load(canary.artifact(device.facts().arch, n))
    x, y = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
    bound = program.bind("step", {"inputs.x": x, "outputs.y": y})
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    holder.hold(device.facts().sms // 2, 5_000_000)
    assert not side.query()
    begin.record()
    bound.launch()
    end.record()
    device.synchronize()
    assert not side.query()  # half of the SMs are still taken, and the kernel has run on the others
    side.synchronize()
    assert float(y.min()) == 1.0
