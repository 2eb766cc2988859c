"""Timing on a fake clock: outcomes, cheats by arithmetic, wrong timed outputs, baselines and incumbents that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sandbox.artifact import Artifact, Buffer
from sandbox.devices.fake import FakeDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import judge, timing
from sandbox.judge.chains import Watch
from sandbox.judge.tiers import FULL, SCREEN
from sandbox.verdict import Outcome, Status, Tier, Verdict, WorkloadTiming
from tests.sandbox.judge import toy

torch.set_num_threads(1)
Kernel = Callable[[Mapping[str, torch.Tensor]], None]
FEW = {"seeds": 1, "steps": 1, "repeats": 1, "long": 0, "chain": 4, "resamples": 500}


def run(job: JudgeJob, device: FakeDevice) -> Verdict:
    """With short chains: the fake's kernels are slow."""
    effort = FULL if job.tier is Tier.FULL else SCREEN
    todo = replace(effort, **FEW, distributions=False, probes=False)
    return judge.run(job, device, todo=todo)


def timed(
    folder: Path, costs: Mapping[str, float], kernel: Kernel = toy.right, **change: Any
) -> Verdict:
    """The candidate runs kernel `k`, the incumbent kernel `old`."""
    tier = change.pop("tier", Tier.SCREEN)
    incumbent = toy.saved(folder, toy.artifact(("old",))) if "old" in costs else None
    job = JudgeJob(
        toy.saved(folder, toy.artifact(("k",))), toy.TARGET, {"rows": 4}, "cuda", tier, incumbent,
        change.pop("baselines", ()),
    )  # fmt: skip
    device = FakeDevice(
        {"k": kernel, "old": toy.right}, "cuda", costs, **{"noise": 0.002, **change}
    )
    return run(job, device)


def row(v: Verdict) -> WorkloadTiming:
    assert v.status is Status.PASSED, v.failure
    assert v.timing is not None and v.timing.kind == "measured"
    return v.timing.workloads[0]


def test_faster_than_the_incumbent_is_better(tmp_path: Path) -> None:
    v = timed(tmp_path, {"k": 10.0, "old": 11.0})
    t = row(v)
    assert v.outcome is Outcome.BETTER
    assert t.us == pytest.approx(10.0, rel=0.01) and t.us_per_layer == pytest.approx(5.0, rel=0.01)
    assert t.speedup_incumbent is not None
    assert (
        t.speedup_incumbent.low < 1.1 < t.speedup_incumbent.high
        or t.speedup_incumbent.value == pytest.approx(1.1, rel=0.005)
    )
    assert t.launches == 1 and t.detail["steps_per_block"] == 4 and t.detail["blocks"] == 10


def test_inside_the_margin_is_slow(tmp_path: Path) -> None:
    assert timed(tmp_path, {"k": 10.0, "old": 10.03}).outcome is Outcome.SLOW


def test_without_an_incumbent_times_are_carried(tmp_path: Path) -> None:
    v = timed(tmp_path, {"k": 10.0})
    assert v.outcome is Outcome.NOT_TIMED and row(v).us == pytest.approx(10.0, rel=0.01)


def test_the_incumbent_itself_is_not_compared(tmp_path: Path) -> None:
    made = toy.saved(tmp_path, toy.artifact(("k",)))
    job = JudgeJob(made, toy.TARGET, {"rows": 4}, "cuda", incumbent=made)
    v = run(job, FakeDevice({"k": toy.right}, "cuda"))
    assert v.outcome is Outcome.NOT_TIMED and any(f.rule == "same" for f in v.findings)


def test_faster_than_the_bytes_allow_is_a_cheat(tmp_path: Path) -> None:
    v = timed(tmp_path, {"k": 10.0}, spec_rate=1e9, l2_bytes=1024)
    assert v.status is Status.CHEAT and v.failure is not None and v.failure.rule == "floor"
    fine = timed(tmp_path, {"k": 10.0}, spec_rate=1e12, stream_rate=0.9e12, l2_bytes=1024)
    assert row(fine).fraction_of_floor_spec == pytest.approx(
        row(fine).floor_bytes / 1e12 * 1e6 / 10.0, rel=0.02
    )


def test_noise_without_end_is_infra(tmp_path: Path) -> None:
    class Uneven(FakeDevice):
        """Replays of the twin are slower: it is the same work under another bound method."""

        def time(self, work: Callable[[], None]) -> float:
            us = super().time(work)
            return us * (1.02 if type(getattr(work, "__self__", None)).__name__ == "Twin" else 1.0)

    device = Uneven({"k": toy.right}, "cuda", {"k": 10.0}, noise=1e-5)
    job = JudgeJob(
        toy.saved(tmp_path, toy.artifact(("k",))), toy.TARGET, {"rows": 4}, "cuda", baselines=()
    )
    v = run(job, device)
    assert v.status is Status.INFRA and v.failure is not None and v.failure.rule == "aa"
    assert any(f.rule == "aa" for f in v.findings)


def test_wrong_only_in_the_timed_run(tmp_path: Path) -> None:
    """Right when launched one by one, wrong in a recorded chain: the fake's replay is where the clock runs."""

    class Honest(FakeDevice):
        running = False

        def time(self, work: Callable[[], None]) -> float:
            self.running = True
            try:
                return super().time(work)
            finally:
                self.running = False

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        if device.running:
            t["outputs.y"][1, 3] = 0.0

    device = Honest({"k": kernel}, "cuda", {"k": 10.0})
    job = JudgeJob(toy.saved(tmp_path, toy.artifact(("k",))), toy.TARGET, {"rows": 4}, "cuda")
    v = run(job, device)
    assert v.status is Status.WRONG and v.failure is not None and v.failure.rule == "timed"


def test_no_set_of_weights_is_out_of_sight(tmp_path: Path) -> None:
    """Wrong in the same way timed and untimed, on sets of weights between the first and the last."""
    sets: list[int] = []

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        mine = next(v.data_ptr() for k, v in t.items() if k.startswith("weights."))
        if mine not in sets:
            sets.append(mine)
        toy.right(t)
        if 2 < sets.index(mine) < 14:
            t["outputs.y"][1, 3] = 0.0

    v = timed(tmp_path, {"k": 10.0}, kernel, l2_bytes=1 << 20, tier=Tier.FULL)
    assert len(sets) >= 16
    assert v.status is Status.WRONG and v.failure is not None and "chain of" in v.failure.message


def counted(folder: Path, made: Artifact, kernel: Kernel) -> Verdict:
    """Two rounds of short chains at tier full; little else, so that launches are few."""
    job = JudgeJob(
        toy.saved(folder, made), toy.TARGET, {"rows": 4}, "cuda", Tier.FULL, baselines=()
    )
    todo = replace(
        FULL, **{**FEW, "chain": 12}, distributions=False, probes=False, rounds=2, blocks=6
    )
    return judge.run(job, FakeDevice({"k": kernel}, "cuda", {"k": 10.0}, noise=1e-4), todo=todo)


@pytest.mark.parametrize("cheats", [False, True])
def test_a_kernel_that_counts_is_run_as_in_the_trial(tmp_path: Path, cheats: bool) -> None:
    """After many launches in one memory it leaves steps of a chain out, timed and untimed alike. Nearly all of them:
    whatever steps are drawn for the oracle, one that is run once more is looked at before them."""
    count = Buffer("workspace.count", "i32", (1,), init="zero", lifetime="persistent")

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        t["workspace.count"] += 1
        toy.right(t)
        if cheats and int(t["workspace.count"]) > 30 and float(t["inputs.x"][0, 0]) > -1.0:
            t["outputs.y"].zero_()

    made = toy.artifact(("k",), workspace=(count,))
    v = counted(tmp_path, made, kernel)
    if cheats:
        assert v.status is Status.WRONG and v.failure is not None, v.failure
        assert "not what it is in a trial" in v.failure.message
    else:
        assert v.status is Status.PASSED, v.failure
        assert any(line.startswith("16 steps of timed chains once more") for line in v.checked)


def test_a_kernel_that_finds_its_scratch_as_it_was_left(tmp_path: Path) -> None:
    """Scratch is disturbed before the steps of a trial and not between those of a chain: that tells them apart."""
    mark = Buffer("workspace.mark", "i32", (2,), init="undefined", lifetime="step")

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        here = t["workspace.mark"]
        seen = int(here[1]) + 1 if int(here[0]) == 74565 else 0
        here.copy_(torch.tensor([74565, seen], dtype=torch.int32))
        toy.right(t)
        if seen > 4 and float(t["inputs.x"][0, 0]) > -1.0:
            t["outputs.y"].zero_()

    job = JudgeJob(
        toy.saved(tmp_path, toy.artifact(("k",), workspace=(mark,))), toy.TARGET, {"rows": 4}, "cuda", baselines=()
    )  # fmt: skip
    todo = replace(SCREEN, **{**FEW, "chain": 24})
    v = judge.run(job, FakeDevice({"k": kernel}, "cuda", {"k": 10.0}, noise=1e-4), todo=todo)
    assert v.status is Status.WRONG and v.failure is not None, v.failure
    assert v.failure.rule == "timed"


def adding(folder: Path) -> Path:
    """An artifact that adds floats atomically, as far as its PTX says."""
    made = toy.artifact(("k",))
    text = made.step.ptx + "// red.global.add.f32 [%rd1], %f1;\n"
    return toy.saved(folder, replace(made, step=replace(made.step, ptx=text)))


@pytest.mark.parametrize("cheats", [False, True])
def test_float_atomics_hide_no_timed_output(tmp_path: Path, cheats: bool) -> None:
    """Noise passes; a result left out in one timed step of many does not, though no bits are compared."""
    running = False

    class Honest(FakeDevice):
        def time(self, work: Callable[[], None]) -> float:
            nonlocal running
            running = True
            try:
                return super().time(work)
            finally:
                running = False

    count = 0

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        nonlocal count
        count += 1
        toy.right(t)
        y = t["outputs.y"]
        y[count % 2, 3] *= 1.0 + 2.0**-8 * (count % 3 == 0)
        if cheats and running and count % 4 == 2:
            y[1].zero_()

    job = JudgeJob(adding(tmp_path), toy.TARGET, {"rows": 4}, "cuda", baselines=())
    v = run(job, Honest({"k": kernel}, "cuda", {"k": 10.0}))
    assert v.status is (Status.WRONG if cheats else Status.PASSED), v.failure
    assert not cheats or (v.failure is not None and "chain of candidate" in v.failure.message)


@pytest.mark.parametrize("cheats", [False, True])
def test_float_atomics_are_run_as_in_the_trial_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheats: bool
) -> None:
    """Steps that no oracle was to look at: what they left is far from the trial's memory, so that they go there."""
    monkeypatch.setattr(timing, "_watched", lambda s, last: Watch(0, s.lanes.steps if last else 0))
    count = Buffer("workspace.count", "i32", (1,), init="zero", lifetime="persistent")

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        t["workspace.count"] += 1
        toy.right(t)
        t["outputs.y"][int(t["workspace.count"]) % 2, 3] *= 1.0 + 2.0**-8
        if cheats and int(t["workspace.count"]) > 30 and float(t["inputs.x"][0, 0]) > -1.0:
            t["outputs.y"].zero_()

    made = toy.artifact(("k",), workspace=(count,), ptx="// red.global.add.f32 [%rd1], %f1;\n")
    v = counted(tmp_path, made, kernel)
    if cheats:
        assert v.status is Status.WRONG and v.failure is not None, v.failure
        assert "chain of candidate" in v.failure.message
    else:
        assert v.status is Status.PASSED, v.failure
        assert any(line.endswith("once more as in the trial, within noise") for line in v.checked)


def remembering(folder: Path, first: float, later: float) -> Verdict:
    """Right bits every time, but what inputs cost depends on whether they are new. The incumbent takes 9."""
    known: set[int] = set()
    device = FakeDevice({}, "cuda", {"k": 0.0, "old": 9.0})

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        key = hash(
            (t["inputs.x"].view(torch.int16).sum().item(), t["states.layers.0.s"].sum().item())
        )
        device.spent += later if key in known else first
        known.add(key)
        toy.right(t)

    device.kernels = {"k": kernel, "old": toy.right}
    old, new = (toy.saved(folder, toy.artifact((k,))) for k in ("old", "k"))
    return run(JudgeJob(new, toy.TARGET, {"rows": 4}, "cuda", incumbent=old, baselines=()), device)


def test_results_remembered_by_content(tmp_path: Path) -> None:
    v = remembering(tmp_path, 10.0, 2.0)
    assert v.status is Status.CHEAT and v.failure is not None and v.failure.rule == "memory"


def test_a_little_memory_of_inputs_wins_nothing(tmp_path: Path) -> None:
    v = remembering(tmp_path / "a", 9.6, 8.0)
    assert row(v).detail["fresh_over_repeated"] == pytest.approx(1.2, rel=0.01)
    assert v.outcome is Outcome.SLOW and any(f.rule == "memory" for f in v.findings)
    assert remembering(tmp_path / "b", 8.1, 8.0).outcome is Outcome.BETTER


def test_guards_hold_in_timed_chains(tmp_path: Path) -> None:
    count = 0

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        nonlocal count
        count += 1
        toy.right(t)
        if count > 8:
            x = t["inputs.slots"]
            x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(1234567)

    v = timed(tmp_path, {"k": 10.0}, kernel)
    assert v.status is Status.CHEAT and v.failure is not None


def test_modelled_times_compare_exactly(tmp_path: Path) -> None:
    old, new = (toy.saved(tmp_path, toy.artifact((k,))) for k in ("old", "k"))
    job = JudgeJob(new, toy.TARGET, {"rows": 4}, "cpu", incumbent=old)
    for cost, expected in ((8.0, Outcome.BETTER), (10.0, Outcome.SLOW), (12.0, Outcome.SLOW)):
        v = run(
            job, FakeDevice({"k": toy.right, "old": toy.right}, "cpu", {"k": cost, "old": 10.0})
        )
        assert v.outcome is expected and v.timing is not None and v.timing.kind == "modelled"
        ratio = v.timing.workloads[0].speedup_incumbent
        assert ratio is not None and ratio.low == ratio.value == ratio.high == 10.0 / cost


def test_full_adds_a_cold_step(tmp_path: Path) -> None:
    v = timed(tmp_path, {"k": 10.0, "old": 10.5}, tier=Tier.FULL)
    assert v.outcome is Outcome.BETTER, v
    detail = row(v).detail
    assert detail["cold_us"]["candidate"] == pytest.approx(10.0, rel=0.01)
    assert detail["cold_ratio"][0] == pytest.approx(1.05, rel=0.01) and detail["blocks"] == 40
    assert not any("cold" in line for line in v.not_verified)


def test_small_weights_rotate_through_several_sets(tmp_path: Path) -> None:
    v = timed(tmp_path, {"k": 10.0}, l2_bytes=1 << 20)
    assert row(v).detail["weight_sets"] == 16
    assert any("below 4 x L2" in line for line in v.not_verified)


def test_every_lane_of_a_long_chain_has_contents_of_its_own(tmp_path: Path) -> None:
    """Lanes beyond those that the reference draws differ too, in each round."""
    seen: dict[int, set[bytes]] = {}

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        seen.setdefault(t["inputs.x"].data_ptr(), set()).add(
            t["inputs.x"].view(torch.int16).numpy().tobytes()
        )
        toy.right(t)

    job = JudgeJob(
        toy.saved(tmp_path, toy.artifact(("k",))), toy.TARGET, {"rows": 4}, "cuda", baselines=()
    )
    todo = replace(SCREEN, **{**FEW, "chain": 20}, blocks=2)
    v = judge.run(job, FakeDevice({"k": kernel}, "cuda", {"k": 10.0}, noise=1e-4), todo=todo)
    lanes = [x for x in seen.values() if len(x) == 3]  # drawn, then two rounds
    assert row(v).detail["steps_per_block"] == 20 and len(lanes) >= 20
    contents = [c for x in lanes for c in x]
    assert len(set(contents)) == len(contents)


def test_an_incumbent_that_is_not_stable_is_left_out(tmp_path: Path) -> None:
    count = 0

    def old(t: Mapping[str, torch.Tensor]) -> None:
        nonlocal count
        count += 1
        toy.right(t)
        if count % 7 == 0:
            t["outputs.y"][0, 0] += 1

    incumbent = toy.saved(tmp_path, toy.artifact(("old",)))
    job = JudgeJob(
        toy.saved(tmp_path, toy.artifact(("k",))),
        toy.TARGET,
        {"rows": 4},
        "cuda",
        incumbent=incumbent,
    )
    v = run(job, FakeDevice({"k": toy.right, "old": old}, "cuda", {"k": 10.0, "old": 20.0}))
    assert v.status is Status.PASSED and v.outcome is Outcome.NOT_TIMED
    assert any(f.rule == "incumbent" for f in v.findings) and row(v).speedup_incumbent is None
