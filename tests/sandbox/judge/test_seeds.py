"""Real kernels in the judge: a compiled seed on the cpu device, right and with forged plans; all seeds on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact, Launch, Relocation
from sandbox.compile_client import CompileClient, CompileSettings, NoIsolation
from sandbox.jobs import CompileJob, JudgeJob
from sandbox.judge import judge
from sandbox.judge.locate import layer_of
from sandbox.judge_client import ClientOptions, JudgeClient
from sandbox.verdict import Status, Tier, Verdict
from targets.base import Options, Workload, find

GEMV = "kimi-k3-gemv"


def client(store: Path) -> CompileClient:
    settings = CompileSettings(store=store, jobs=1, deadline_s=240.0)
    made = CompileClient(settings)
    try:
        made.start()
    except NoIsolation:  # the sources here are ours
        made = CompileClient(replace(settings, tier="none", trust_this_code=True))
    return made


def compiled(compiler: CompileClient, target: str, options: Options) -> tuple[Path, Workload]:
    found = find(target)
    w = found.workload(options)
    out = compiler.compile(CompileJob(found.seed_source(), target, w.key, w.dims, w.buffers))
    assert out.artifact is not None, out.failure
    return out.artifact, w


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    with client(tmp_path_factory.mktemp("store")) as compiler:
        folder, _ = compiled(compiler, GEMV, Options("tiny", rows=2))
    return artifact_store.load(folder)


def on_cpu(folder: Path, made: Artifact) -> Verdict:
    from sandbox.devices.cpu import CpuDevice

    torch.set_num_threads(1)
    job = JudgeJob(artifact_store.save(made, folder), GEMV, asdict(Options("tiny", rows=2)), "cpu")
    return judge.run(job, CpuDevice())


def edited(made: Artifact, index: int, old: str, new: Relocation) -> Artifact:
    """The plan with one relocation of one launch exchanged."""

    def change(x: Launch) -> Launch:
        fields = tuple(
            replace(new, offset=r.offset) if r.buffer == old else r for r in x.relocations
        )
        return replace(x, relocations=fields)

    launches = list(made.step.launches)
    launches[index] = change(launches[index])
    assert launches[index] != made.step.launches[index]
    return replace(made, step=replace(made.step, launches=tuple(launches)))


@pytest.mark.slow
def test_a_seed_passes_on_cpu(seed: Artifact, tmp_path: Path) -> None:
    v = on_cpu(tmp_path, seed)
    assert v.status is Status.PASSED, v.failure
    assert v.timing is not None and v.timing.workloads[0].us > 0


@pytest.mark.slow
def test_a_launch_left_out_is_an_unwritten_output(seed: Artifact, tmp_path: Path) -> None:
    fewer = replace(seed, step=replace(seed.step, launches=seed.step.launches[:-1]))
    v = on_cpu(tmp_path, fewer)
    assert v.status is Status.WRONG and v.failure is not None
    assert v.failure.where["tensor"] == "outputs.y.2" and layer_of("outputs.y.2") == 2


@pytest.mark.slow
def test_weights_of_another_instance(seed: Artifact, tmp_path: Path) -> None:
    forged = edited(seed, 1, "weights.layers.1.w", Relocation(0, "weights.layers.0.w"))
    v = on_cpu(tmp_path, forged)
    assert v.status is Status.WRONG and v.failure is not None
    assert v.failure.where["tensor"] == "outputs.y.1"


@pytest.mark.slow
def test_an_output_moved_beyond_its_end(seed: Artifact, tmp_path: Path) -> None:
    forged = edited(seed, 2, "outputs.y.2", Relocation(0, "outputs.y.2", 16))
    v = on_cpu(tmp_path, forged)
    assert v.status in (Status.FAULT, Status.CHEAT), v.failure


TARGETS = ("gemv", "attn-res", "router", "kda", "mla", "latent-moe", "decode")


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CompileClient, JudgeClient]]:
    folder = tmp_path_factory.mktemp("gpu")
    with client(folder / "store") as compiler, JudgeClient(ClientOptions(state=folder)) as judges:
        yield compiler, judges


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["tiny", "tp8"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("part", TARGETS)
def test_seeds_pass_on_a_gpu(
    gpu: tuple[CompileClient, JudgeClient], part: str, rows: int, preset: str
) -> None:
    options = Options(preset, rows=rows)
    folder, w = compiled(gpu[0], f"kimi-k3-{part}", options)
    job = JudgeJob(folder, w.target, asdict(options), "cuda", Tier.SCREEN, deadline_s=300.0)
    v = gpu[1].judge(job)
    assert v.status is Status.PASSED, v.failure
    assert v.timing is not None and v.timing.kind == "measured"
    row = v.timing.workloads[0]
    assert row.us > 0 and row.speedup_graph is not None
    fraction = row.fraction_of_floor_spec
    assert fraction is None or preset == "tiny" or fraction < 1.0
