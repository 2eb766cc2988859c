"""The judge from end to end on a fake device: right kernels pass, each kind of wrong one gets its status and place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sandbox.artifact import Artifact, Buffer
from sandbox.devices.base import Faulted
from sandbox.devices.fake import FakeDevice, FakeProgram
from sandbox.jobs import JudgeJob
from sandbox.judge.judge import run
from sandbox.verdict import Failure, Outcome, Status, Trust, Verdict, from_json
from tests.sandbox.judge import toy

torch.set_num_threads(1)
Kernel = Callable[[Mapping[str, torch.Tensor]], None]


def judged(folder: Path, kernel: Kernel, *, rows: int = 4, **change: object) -> Verdict:
    made = toy.artifact(("k",), rows=rows, **change)
    job = JudgeJob(toy.saved(folder, made), toy.TARGET, {"rows": rows}, "cpu")
    return run(job, FakeDevice({"k": kernel}))


def then(after: Kernel) -> Kernel:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        after(t)

    return kernel


def test_right_kernel_passes(tmp_path: Path) -> None:
    phases: list[str] = []
    made = toy.artifact(("k",))
    job = JudgeJob(
        toy.saved(tmp_path, made),
        toy.TARGET,
        {"rows": 4},
        "cpu",
        compile_isolation={"tier": "strict"},
    )
    v = run(job, FakeDevice({"k": toy.right}), phases.append)
    assert (v.status, v.outcome, v.trust) == (Status.PASSED, Outcome.NOT_TIMED, Trust.JUDGED)
    assert v.correctness is not None and v.correctness.seeds >= 2 and v.correctness.repeats >= 1
    assert {t.name for t in v.correctness.tensors} == {
        "outputs.y", "states.layers.0.s", "states.layers.1.s",
    }  # fmt: skip
    assert all(t.ok and t.rel_l2 <= t.rel_l2_bound for t in v.correctness.tensors)
    assert phases[:4] == ["load", "allocate", "check", "time"]
    assert v.timing is not None and v.timing.kind == "modelled"
    assert from_json(v.to_json()) == v


class Doubting(FakeDevice):
    """Fake: as the cpu device, has something to say of kernels that end badly, and something in any case."""

    secrets: list[int]

    def load(self, artifact: Artifact) -> FakeProgram:
        program: Any = super().load(artifact)
        self.secrets = []
        program.scramble = self.secrets.append
        program.doubts = lambda: (Failure("unset-register", "reads what nothing wrote"),)
        program.findings = lambda: (Failure("unwritten-read", "noticed"),)
        made: FakeProgram = program
        return made


@pytest.mark.parametrize("kernel,rules", [
    (toy.right, ["unwritten-read"]), (lambda t: scale_y(t), ["unset-register", "unwritten-read"]),
])  # fmt: skip
def test_what_the_device_noticed_stands_in_every_verdict_and_its_doubts_in_bad_ones(
    kernel: Kernel, rules: list[str], tmp_path: Path
) -> None:
    job = JudgeJob(
        toy.saved(tmp_path, toy.artifact(("k",))), toy.TARGET, {"rows": 4}, "cpu", seed=7
    )
    device = Doubting({"k": kernel})
    v = run(job, device)
    assert sorted(f.rule for f in v.findings if f.rule.startswith("un")) == rules
    assert len(device.secrets) == 1 and device.secrets[0] > 1 << 32


def scale_y(t: Mapping[str, torch.Tensor]) -> None:
    t["outputs.y"].mul_(1.01)


def wrong_row(t: Mapping[str, torch.Tensor]) -> None:
    t["outputs.y"][2] = t["outputs.y"][3]


def nan_state(t: Mapping[str, torch.Tensor]) -> None:
    t["states.layers.1.s"][1, 17] = float("nan")


def null_slot(t: Mapping[str, torch.Tensor]) -> None:
    t["states.layers.0.s"][0, 5] += 1


def other_slot(t: Mapping[str, torch.Tensor]) -> None:
    t["states.layers.0.s"][5] *= 0.999


def wrong_id(t: Mapping[str, torch.Tensor]) -> None:
    t["outputs.ids"][1, 1] = (t["outputs.ids"][1, 0] + 3) % toy.CHOICES


def wild_id(t: Mapping[str, torch.Tensor]) -> None:
    t["outputs.ids"][1, 1] = 1 << 30


def copy_rounded(t: Mapping[str, torch.Tensor]) -> None:
    t["outputs.copy"][0, 0] += 2**-6


WRONG: dict[str, tuple[Kernel, str, str]] = {
    "scaled by 1 %": (then(scale_y), "band", "outputs.y"),
    "one row": (then(wrong_row), "band", "outputs.y at row 2"),
    "nan in one element of a state": (then(nan_state), "not_finite", "states.layers.1.s: 1 of"),
    "null slot written": (then(null_slot), "touched", "slot 0, column 5"),
    "slot of nobody": (then(other_slot), "touched", "slot 5"),
    "second best id": (then(wrong_id), "integers", "row 1, rank 1"),
    "id out of range": (then(wild_id), "integers", "1073741824"),
    "copy not exact": (then(copy_rounded), "integers", "outputs.copy"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_located(tmp_path: Path, name: str) -> None:
    kernel, rule, said = WRONG[name]
    v = judged(tmp_path, kernel)
    assert v.status is Status.WRONG and v.failure is not None
    assert v.failure.rule == rule and said in v.failure.message, v.failure
    assert v.timing is None and v.correctness is not None
    assert from_json(v.to_json()) == v


def test_unwritten_output(tmp_path: Path) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        kept = t["outputs.y"].clone()
        toy.right(t)
        t["outputs.y"][3, 64:] = kept[3, 64:]

    v = judged(tmp_path, kernel)
    assert (
        v.status is Status.WRONG
        and v.failure is not None
        and v.failure.where["tensor"] == "outputs.y"
    )


def test_state_ignored(tmp_path: Path) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        zeroed = {
            n: torch.zeros_like(x) if n == "states.layers.1.s" else x.clone() for n, x in t.items()
        }
        toy.right(zeroed)
        for n in ("outputs.y", "outputs.copy", "outputs.ids", "states.layers.0.s"):
            t[n].copy_(zeroed[n])
        t["states.layers.1.s"][1:5] = zeroed["states.layers.1.s"][1:5]

    v = judged(tmp_path, kernel)
    assert (
        v.status is Status.WRONG and v.failure is not None and v.failure.where["layer"] in (1, None)
    )


def test_earliest_layer_is_named(tmp_path: Path) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        broken = dict(t)
        broken["weights.layers.0.w"] = t["weights.layers.0.w"] * 1.1
        toy.right(broken)

    v = judged(tmp_path, kernel)
    assert v.failure is not None and v.failure.where["tensor"] == "states.layers.0.s"
    assert "outputs.y" in v.failure.where["also"]


def outside(t: torch.Tensor, element: int) -> torch.Tensor:
    return t.as_strided((1,), (1,), t.storage_offset() + element)


@pytest.mark.parametrize(
    ("name", "at"), [("outputs.y", 4 * toy.H), ("states.layers.0.s", -3), ("inputs.slots", 9)]
)
def test_write_outside_a_buffer_is_a_cheat(tmp_path: Path, name: str, at: int) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        beyond = outside(t[name], at).view(torch.uint8)
        beyond.copy_(beyond ^ 1)

    v = judged(tmp_path, kernel)
    assert v.status is Status.CHEAT and v.failure is not None
    assert v.failure.rule == "guard" and name in v.failure.message


@pytest.mark.parametrize("name", ["inputs.x", "weights.layers.1.w", "weights.gate"])
def test_modified_input_is_a_cheat(tmp_path: Path, name: str) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        t[name].view(-1)[7] = 0.25

    v = judged(tmp_path, kernel)
    assert v.status is Status.CHEAT and v.failure is not None
    assert v.failure.rule == "read-only" and v.failure.where["buffer"] == name


def test_flaky_kernel(tmp_path: Path) -> None:
    count = 0

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        nonlocal count
        count += 1
        toy.right(t)
        if count > 2:
            t["states.layers.0.s"][1, 0] += 1e-6

    v = judged(tmp_path, kernel)
    assert (
        v.status is Status.FLAKY
        and v.failure is not None
        and "states.layers.0.s" in v.failure.message
    )


def test_float_atomics_may_differ_inside_the_band(tmp_path: Path) -> None:
    count = 0

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        nonlocal count
        count += 1
        toy.right(t)
        t["states.layers.0.s"][1, 0] *= 1 + count * 1e-7

    v = judged(tmp_path, kernel, ptx="red.global.add.f32 [%rd1], %f1;")
    assert v.status is Status.PASSED
    assert any("inside the noise band" in line for line in v.checked)


def test_results_kept_by_input_address(tmp_path: Path) -> None:
    """A kernel that computes once and hands out the old result afterwards."""
    kept: dict[str, torch.Tensor] = {}

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        if not kept:
            toy.right(t)
            kept.update({n: x.clone() for n, x in t.items() if n.startswith(("outputs", "states"))})
        for n, x in kept.items():
            t[n].copy_(x)

    assert judged(tmp_path, kernel).status is Status.WRONG


def test_epochs_in_persistent_workspace(tmp_path: Path) -> None:
    """Persistent zero words start at zero, see `prepare` once and live through steps."""
    seen: list[tuple[int, int]] = []

    def prepare(t: Mapping[str, torch.Tensor]) -> None:
        assert set(t) == {n.name for n in toy.buffers(4) if n.group == "weights"} | {
            "workspace.epoch"
        }
        t["workspace.epoch"][1] = 5

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        assert int(t["workspace.step"].sum()) == 0
        t["workspace.step"].fill_(9)
        seen.append((int(t["workspace.epoch"][0]), int(t["workspace.epoch"][1])))
        t["workspace.epoch"][0] += 1
        toy.right(t)

    made = toy.artifact(
        ("k",),
        prepare="p",
        workspace=(
            Buffer("workspace.epoch", "i32", (2,), init="zero", lifetime="persistent"),
            Buffer("workspace.step", "i32", (32,), init="zero", lifetime="step"),
        ),
    )
    job = JudgeJob(toy.saved(tmp_path, made), toy.TARGET, {"rows": 4}, "cpu")
    v = run(job, FakeDevice({"k": kernel, "p": prepare}))
    assert v.status is Status.PASSED, v.failure
    assert seen[:3] == [(0, 5), (1, 5), (2, 5)]


def test_tied_choice_passes_and_is_counted(tmp_path: Path) -> None:
    """Exactly equal scores: the other id is a proved tie."""

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        first = int(t["outputs.ids"][0, 0])
        if first in (0, 3):  # three choices with equal scores: the third is as good as the second
            t["outputs.ids"][0, 1] = first + 2

    file = tmp_path / "tied.py"
    file.write_text(
        "from tests.sandbox.judge import toy\nfrom dataclasses import dataclass\n"
        "class TiedReference(toy.ToyReference):\n"
        "    def weights(self, w, seed, device):\n"
        "        return self.disturb(w, 'ties', seed, super().weights(w, seed, device))\n"
        "@dataclass(frozen=True)\nclass TiedToy(toy.Toy):\n"
        f"    name: str = {str(file) + ':TiedToy'!r}\n    reference: str = {str(file) + ':TiedReference'!r}\n"
    )
    name = f"{file}:TiedToy"
    made = replace(toy.artifact(("k",)), target=name)
    job = JudgeJob(toy.saved(tmp_path, made), name, {"rows": 4}, "cpu", seed=3)
    v = run(job, FakeDevice({"k": kernel}))
    assert v.status is Status.PASSED, v.failure
    assert any("proved tie" in line for line in v.checked)


def test_device_verdicts_are_passed_on(tmp_path: Path) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        raise Faulted(Status.HANG, Failure("watchdog", "no end after 10 s"))

    v = judged(tmp_path, kernel)
    assert v.status is Status.HANG and v.failure is not None and v.failure.rule == "watchdog"


def test_a_failing_judge_is_infra(tmp_path: Path) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        raise ZeroDivisionError("boom")

    v = judged(tmp_path, kernel)
    assert (
        v.status is Status.INFRA
        and v.failure is not None
        and "ZeroDivisionError" in v.failure.message
    )


def refused(tmp_path: Path, **change: object) -> str:
    v = judged(tmp_path, toy.right, **change)
    assert v.status is Status.PLAN_ERROR and v.failure is not None
    return v.failure.message


def test_buffers_must_be_the_targets(tmp_path: Path) -> None:
    bigger = tuple(
        replace(b, shape=(4, toy.H, 2)) if b.name == "outputs.y" else b for b in toy.buffers(4)
    )
    assert "outputs.y is bf16 [4, 128, 2]" in refused(tmp_path, buffers=bigger)
    assert "lacks the buffer weights.gate" in refused(
        tmp_path, buffers=tuple(b for b in toy.buffers(4) if b.name != "weights.gate")
    )
    more = (*toy.buffers(4), Buffer("outputs.z", "bf16", (4,)))
    assert "no buffer outputs.z" in refused(tmp_path, buffers=more)
    huge = (Buffer("workspace.w", "f32", (1 << 34,), init="zero", lifetime="step"),)
    assert "workspace" in refused(tmp_path, workspace=huge)
    assert "judged with rows = 4" in refused(
        tmp_path, workload={**toy.artifact().workload, "rows": 8}
    )


def test_malformed_artifact(tmp_path: Path) -> None:
    folder = toy.saved(tmp_path, toy.artifact(("k",)))
    (folder / "manifest.json").write_text("{}")
    v = run(JudgeJob(folder, toy.TARGET, {"rows": 4}, "cpu"), FakeDevice({}))
    assert v.status is Status.PLAN_ERROR
    gone = run(JudgeJob(tmp_path / "none", toy.TARGET, {"rows": 4}, "cpu"), FakeDevice({}))
    assert gone.status is Status.PLAN_ERROR


def test_a_reference_that_breaks_down_is_not_the_candidates_fault(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "import torch\nfrom tests.sandbox.judge import toy\nfrom dataclasses import dataclass\n"
        "class Ref(toy.ToyReference):\n"
        "    def run(self, w, tensors, schedule, forced=None):\n"
        "        e = super().run(w, tensors, schedule, forced)\n"
        "        if schedule == 'reversed':\n            e.tensors['outputs.y'][0, 0] = float('nan')\n"
        "        return e\n"
        "@dataclass(frozen=True)\nclass BrokenToy(toy.Toy):\n"
        f"    name: str = {str(file) + ':BrokenToy'!r}\n    reference: str = {str(file) + ':Ref'!r}\n"
    )
    name = f"{file}:BrokenToy"
    made = replace(toy.artifact(("k",)), target=name)
    job = JudgeJob(toy.saved(tmp_path, made), name, {"rows": 4}, "cpu")
    v = run(job, FakeDevice({"k": toy.right}))
    assert v.status is Status.INFRA and v.failure is not None and "reversed" in v.failure.message
