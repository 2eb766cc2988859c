"""What a failure says of a layer with experts: the earliest wrong tensor, and the experts of its wrong tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact, Launch, LaunchPlan, Relocation
from sandbox.devices.fake import FakeDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import judge
from sandbox.judge.case import load_reference
from sandbox.verdict import Status, Verdict
from targets.base import Options, find

torch.set_num_threads(1)
NAME, OPTIONS = "kimi-k3-latent-moe", Options("tiny", 2, 2)
TARGET = find(NAME)
Kernel = Callable[[Mapping[str, torch.Tensor]], None]


def judged(folder: Path, kernel: Kernel) -> Verdict:
    w = TARGET.workload(OPTIONS)
    launch = Launch("k", (1, 1, 1), (32, 1, 1), bytes(8), (0,), (Relocation(0, "outputs.ids"),))
    made = Artifact(
        NAME, w.key, "sm_90a", tuple(w.buffers), LaunchPlan("// none", (launch,)), source_sha256="0" * 64
    )  # fmt: skip
    job = JudgeJob(
        artifact_store.save(made, folder), NAME, {"preset": "tiny", "layers": 2, "rows": 2}, "cpu", seed=11
    )  # fmt: skip
    return judge.run(job, FakeDevice({"k": kernel}))


def without(expert: int, layer: int) -> Kernel:
    """The reference's own arithmetic, with an expert of one layer whose down product is nothing."""
    w, reference = TARGET.workload(OPTIONS), load_reference(TARGET.reference)

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        given = dict(t)
        name = f"weights.layers.{layer}.w2_scale"
        given[name] = given[name].clone()
        if expert >= 0:
            given[name][expert] = 0
        made = reference.run(w, given, reference.schedules[0])
        for name, value in made.tensors.items():
            t[name].copy_(value)

    return kernel


def test_the_reference_as_a_kernel_is_right(tmp_path: Path) -> None:
    assert judged(tmp_path, without(-1, 0)).status is Status.PASSED


@pytest.mark.parametrize("layer", [0, 1])
def test_a_dropped_expert_is_named(tmp_path: Path, layer: int) -> None:
    """In layer 0 it also changes what layer 1 chooses: that is no explanation."""
    for expert in range(8):
        v = judged(tmp_path, without(expert, layer))
        if v.status is Status.PASSED:  # nobody chose it in a screen of four tokens
            continue
        assert v.status is Status.WRONG and v.failure is not None
        assert v.failure.where["tensor"] == f"outputs.y.{layer}", v.failure.message
        if "experts" in v.failure.where:
            assert expert in v.failure.where["experts"], v.failure.message
            assert (
                f"chose expert{'s' * (len(v.failure.where['experts']) > 1)} " in v.failure.message
            )
            return
    pytest.fail("no dropped expert was named")
