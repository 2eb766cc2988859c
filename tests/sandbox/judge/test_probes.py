"""The full tier's probes: kernels that pass a screen and are found by one probe each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sandbox.devices.fake import FakeDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import judge
from sandbox.judge.tiers import FULL, PROMOTE, effort
from sandbox.verdict import Status, Tier, Verdict
from tests.sandbox.judge import toy

torch.set_num_threads(1)
Kernel = Callable[[Mapping[str, torch.Tensor]], None]
FEW = replace(FULL, seeds=1, steps=2, long=0, repeats=1, blocks=0, cold=False)


def judged(folder: Path, kernels: Mapping[str, Kernel], **change: Any) -> Verdict:
    todo = change.pop("todo", FEW)
    target = change.pop("target", toy.TARGET)
    device = change.pop("device", None) or FakeDevice(kernels)
    made = replace(toy.artifact(tuple(kernels)), target=target)
    job = JudgeJob(toy.saved(folder, made), target, {"rows": 4}, "cpu", Tier.FULL, seed=5)
    return judge.run(job, device, todo=todo)


def test_right_kernel_passes_all_probes(tmp_path: Path) -> None:
    v = judged(tmp_path, {"k": toy.right}, todo=effort(Tier.FULL, "cpu"))
    assert v.status is Status.PASSED, v.failure
    said = " | ".join(v.checked)
    for part in (
        "other addresses",
        "exchanged",
        "perturbed",
        "one row of 4 states and 2 weights",
        "only a part is new",
        "rows that are alike",
        "without a pause",
        "distributions",
        "4 steps",
    ):
        assert part in said, part
    assert any("held-out" in line for line in v.not_verified)


def test_weights_kept_from_the_first_step(tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        if not kept:
            kept.update({n: x.clone() for n, x in t.items() if n.startswith("weights")})
        toy.right({**t, **kept})

    v = judged(tmp_path, {"k": kernel}, todo=replace(FEW, distributions=False))
    assert v.status is Status.WRONG and v.failure is not None
    assert v.failure.where["phase"] == "exchanged weights"


def test_a_weight_kept_by_a_sample_of_it(tmp_path: Path) -> None:
    """Layers' weights are packed once and again whenever their first row changes."""
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        used = dict(t)
        for n in [n for n in t if n.startswith("weights.layers")]:
            if n not in kept or not torch.equal(kept[n][0], t[n][0]):
                kept[n] = (t[n][0].clone(), t[n].clone())
            used[n] = kept[n][1]
        toy.right(used)

    v = judged(tmp_path, {"k": kernel}, todo=replace(FEW, distributions=False))
    assert v.status is Status.WRONG and v.failure is not None
    assert v.failure.where["phase"].startswith("one row of weights.layers")


def test_a_cache_row_that_is_not_followed(tmp_path: Path) -> None:
    """State rows with their usual size are right; one that is larger than all others is cut down to it."""

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        cut = dict(t)
        for n in [n for n in t if n.startswith("states")]:
            norms = t[n].norm(dim=1, keepdim=True)
            usual = norms.median()
            cut[n] = torch.where(norms > 2.5 * usual, t[n] * (usual / norms), t[n])
        toy.right(cut)
        for n, old in t.items():
            if n.startswith("states"):
                old.copy_(cut[n])

    v = judged(tmp_path, {"k": kernel}, todo=replace(FEW, distributions=False))
    assert v.status is Status.WRONG and v.failure is not None
    assert "one row of states" in v.failure.where["phase"]


@pytest.mark.parametrize("shared", ["steps", "rows"])
def test_results_shared_by_a_sample_of_the_inputs(tmp_path: Path, shared: str) -> None:
    """Results of the step before, or of the first row, where one element of the input is the same."""
    last: dict[str, torch.Tensor] = {}

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        x = t["inputs.x"].clone()
        old = x[:1].expand_as(x) if shared == "rows" else last.get("x", x)
        same = x[:, 5] == old[:, 5]
        last["x"] = x
        toy.right({**t, "inputs.x": torch.where(same[:, None], old, x)})
        t["outputs.copy"].copy_(x)

    v = judged(tmp_path, {"k": kernel}, todo=replace(FEW, distributions=False))
    assert v.status is Status.WRONG and v.failure is not None
    phase = "in common" if shared == "rows" else "of the inputs as before"
    assert phase in v.failure.where["phase"]


def test_results_kept_by_address(tmp_path: Path) -> None:
    """Reads the inputs of the addresses it was first given."""
    first: dict[str, torch.Tensor] = {}

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        first.setdefault("x", t["inputs.x"])
        toy.right({**t, "inputs.x": first["x"]})

    v = judged(tmp_path, {"k": kernel})
    assert v.status is Status.PASSED or (
        v.failure is not None and v.failure.rule == "other-addresses"
    )

    def copies(t: Mapping[str, torch.Tensor]) -> None:
        same = first.setdefault("where", t["inputs.x"]) is t["inputs.x"]
        toy.right(t)
        if not same:
            t["outputs.y"][0] = 1.0

    v = judged(tmp_path, {"k": copies})
    assert (
        v.status is Status.WRONG and v.failure is not None and v.failure.rule == "other-addresses"
    )


def test_state_clipped(tmp_path: Path) -> None:
    """Right for states of the usual size and sign pattern alone."""

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        s = t["states.layers.1.s"]
        clipped = s.clamp(-4.0, 4.0)
        held = {**t, "states.layers.1.s": clipped}
        toy.right(held)
        s[1:5] = clipped[1:5]

    v = judged(tmp_path, {"k": kernel}, todo=replace(FEW, steps=1, distributions=False))
    assert v.status is Status.WRONG and v.failure is not None
    assert "perturbed" in v.failure.message


def test_needs_a_pause_between_steps(tmp_path: Path) -> None:
    class Asynchronous(FakeDevice):
        pending = 0

        def synchronize(self) -> None:
            self.pending = 0

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        device.pending += 1
        toy.right(t)
        if device.pending > 1:
            t["states.layers.0.s"][1, 3] += 1

    device = Asynchronous({"k": kernel})
    v = judged(tmp_path, {"k": kernel}, device=device)
    assert v.status is Status.WRONG and v.failure is not None and v.failure.rule == "back-to-back"


def test_magnitude_is_probed(tmp_path: Path) -> None:
    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        t["outputs.y"].clamp_(-20, 20)

    v = judged(tmp_path, {"k": kernel})
    assert (
        v.status is Status.WRONG and v.failure is not None and v.failure.where["phase"] == "large"
    )


def test_decoy_launch_is_a_finding(tmp_path: Path) -> None:
    v = judged(tmp_path, {"k": toy.right, "decoy": lambda t: None})
    assert v.status is Status.PASSED, v.failure
    (found,) = [f for f in v.findings if f.rule == "ablation"]
    assert found.where == {"launch": 1, "kernel": "decoy"}


@pytest.mark.parametrize("wrong", [False, True])
def test_held_out_cases_are_not_told(tmp_path: Path, wrong: bool) -> None:
    file = tmp_path / "held.py"
    file.write_text(
        "from tests.sandbox.judge import toy\nfrom dataclasses import dataclass\n"
        "class Ref(toy.ToyReference):\n    held_out = ('zeros', 'huge')\n"
        "    def disturb(self, w, name, seed, tensors):\n"
        "        out = super().disturb(w, name, seed, tensors)\n"
        "        if name == 'huge':\n            out['inputs.x'] = out['inputs.x'] * 1000\n"
        "        return out\n"
        "@dataclass(frozen=True)\nclass Held(toy.Toy):\n"
        f"    name: str = {str(file) + ':Held'!r}\n    reference: str = {str(file) + ':Ref'!r}\n"
    )

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        if wrong:
            t["outputs.y"].clamp_(-500, 500)

    todo = replace(PROMOTE, seeds=1, steps=1, long=2, repeats=2, blocks=0, probes=False)
    v = judged(tmp_path, {"k": kernel}, target=f"{file}:Held", todo=todo)
    if not wrong:
        assert v.status is Status.PASSED and "2 held-out cases" in v.checked
        return
    assert v.status is Status.WRONG and v.failure is not None
    assert v.failure.rule == "held-out" and "huge" not in str(v.to_json())
    assert not v.failure.where
