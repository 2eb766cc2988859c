"""Recorded results against real kernels: tiny seeds run on the cpu device and must pass a bundle's own comparison."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from agent.export import bundle, subject
from agent.export.rebuild import compiler, rebuild
from sandbox import artifact_store
from sandbox.artifact import Buffer
from sandbox.devices.cpu import CpuDevice
from sandbox.jobs import CompileJob
from sandbox.judge.dtypes import TORCH
from targets.base import Options, find
from tests.agent.export import small

pytestmark = pytest.mark.slow


def aligned(b: Buffer) -> torch.Tensor:
    raw = torch.zeros(b.nbytes + b.align, dtype=torch.uint8)
    skip = -raw.data_ptr() % b.align
    return raw[skip : skip + b.nbytes].view(TORCH[b.dtype]).view(b.shape)


@pytest.mark.parametrize("part", ["router", "kda", "latent-moe"])
def test_a_seed_on_the_cpu_device_passes_the_bundles_comparison(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = find(f"kimi-k3-{part}")
    w = target.workload(Options("tiny", layers=1))
    source = target.seed_source()
    with compiler(tmp_path / "jail", "sm_90a") as c:
        outcome = c.compile(CompileJob(source, w.target, w.key, w.dims, w.buffers))
    assert outcome.artifact is not None, outcome.failure
    artifact = artifact_store.load(outcome.artifact)
    _, queries, run = small.record(tmp_path, artifact, source)
    found = subject.find(queries, run, force=False)
    again = rebuild(found)
    assert again.same is True
    made = bundle.write(queries, found, bundle.Wanted(tmp_path / "out", (), again))
    assert made.manifest["record"]["part"] == "main"
    monkeypatch.syspath_prepend(str(made.folder))
    check = importlib.import_module(f"{made.package}.check")
    index = json.loads((made.folder / made.package / "data" / "record.json").read_text())
    given = {n: check._load(e, torch.device("cpu")) for n, e in index["given"].items()}
    memory = {b.name: aligned(b) for b in artifact.buffers}
    for n, t in given.items():
        memory[n].copy_(t)
    for name, data in artifact.constants.items():
        memory[name].view(-1).view(torch.uint8).copy_(
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
        )
    program = CpuDevice().load(artifact)
    if artifact.prepare:
        program.bind("prepare", memory).launch()
    program.bind("step", memory).launch()
    assert check.compare(memory, given, index["expected"]) == ""
    name = next(n for n, e in index["expected"].items() if e["mask"] is None)
    memory[name].view(-1)[0] += 3
    assert name in check.compare(memory, given, index["expected"])
