"""The compile server with real workers: the example of docs/candidate.md, its cache, and typed failures."""

from __future__ import annotations

import re
from pathlib import Path

from sandbox import artifact_store, ptx
from sandbox.artifact import Buffer
from sandbox.compile_client import CompileClient
from sandbox.jobs import CompileJob
from sandbox.verdict import Status

EXAMPLE = re.search(
    r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs" / "candidate.md").read_text(), re.S
)
BUFFERS = (Buffer("inputs.x", "f32", (4, 256)), Buffer("outputs.y", "f32", (4, 256)))


def job(source: str, **fields: object) -> CompileJob:
    base = {"source": source, "target": "demo", "workload": {"preset": "tiny"}, "buffers": BUFFERS}
    return CompileJob(**{**base, "dims": {"rows": 4, "hidden": 256}, **fields})  # type: ignore[arg-type]


def test_the_documented_example_becomes_an_artifact(compiler: CompileClient) -> None:
    assert EXAMPLE
    outcome = compiler.compile(job(EXAMPLE[1], tunables={"threads": 128}))
    assert outcome.failure is None and outcome.artifact
    artifact = artifact_store.load(outcome.artifact)
    assert artifact.sha256 == outcome.sha256 == outcome.artifact.name
    (launch,) = artifact.step.launches
    assert (launch.grid, launch.block) == ((8, 1, 1), (128, 1, 1))
    assert [r.buffer for r in launch.relocations] == ["inputs.x", "outputs.y"]
    assert artifact.tunables == {"threads": 128}
    assert outcome.tunables == {"threads": (256, 128, 512)}
    workspace = {
        b.name: (b.shape, b.init, b.lifetime) for b in artifact.buffers if b.group == "workspace"
    }
    assert workspace == {
        "workspace.acc": ((4, 256), "undefined", "step"),
        "workspace.epoch": ((32,), "zero", "persistent"),
    }
    assert ptx.target(artifact.step.ptx) == "sm_90a"
    assert '.file\t1 "candidate.py"' in artifact.step.ptx


def test_the_same_job_again_comes_from_the_cache(compiler: CompileClient) -> None:
    assert EXAMPLE
    first = compiler.compile(job(EXAMPLE[1], tunables={"threads": 512}))
    again = compiler.compile(job(EXAMPLE[1], tunables={"threads": 512}))
    assert (first.cached, again.cached) == (False, True)
    assert again.sha256 == first.sha256 and again.artifact == first.artifact
    assert again.seconds["total"] < 0.1


def test_a_tunable_outside_its_declared_values_is_rejected(compiler: CompileClient) -> None:
    assert EXAMPLE
    outcome = compiler.compile(job(EXAMPLE[1], tunables={"threads": 64}))
    assert outcome.status is Status.REJECTED and outcome.failure
    assert outcome.failure.rule == "tunables" and "64" in outcome.failure.message
