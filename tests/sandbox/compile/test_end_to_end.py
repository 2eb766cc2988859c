"""The compile server with real workers: the example of docs/candidate.md, its cache, and typed failures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sandbox import artifact_store, box, ptx
from sandbox.artifact import Buffer
from sandbox.compile import pool, service
from sandbox.compile.cache import OutcomeCache
from sandbox.compile_client import CompileClient
from sandbox.jobs import CompileJob
from sandbox.verdict import Status
from tests.sandbox.compile.conftest import start

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
    for _ in range(50):  # until nothing else wants the processors
        again = compiler.compile(job(EXAMPLE[1], tunables={"threads": 512}))
        if again.seconds["total"] < 0.1:
            break
    assert (first.cached, again.cached) == (False, True)
    assert again.sha256 == first.sha256 and again.artifact == first.artifact
    assert again.seconds["total"] < 0.1


def test_a_tunable_outside_its_declared_values_is_rejected(compiler: CompileClient) -> None:
    assert EXAMPLE
    outcome = compiler.compile(job(EXAMPLE[1], tunables={"threads": 64}))
    assert outcome.status is Status.REJECTED and outcome.failure
    assert outcome.failure.rule == "tunables" and "64" in outcome.failure.message


KERNEL = """
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

@cute.kernel
def k(x, y):
    tid, _, _ = cute.arch.thread_idx()
    y[0, tid] = x[0, tid]

@cute.kernel
def number(y, n: Int64):
    tid, _, _ = cute.arch.thread_idx()
    y[0, tid] = Float32(n)

@cute.jit
def step(t, cfg, stream):
    x, y = t.inputs.x, t.outputs.y
    %s
"""
LAUNCH = "k(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream%s)"
FAILURES = {
    "other stream": (LAUNCH.replace(", stream=stream", "") % "", Status.PLAN_ERROR, "stream"),
    "fallback cluster": (
        LAUNCH % ", cluster=(4, 1, 1), fallback_cluster=(2, 1, 1)", Status.PLAN_ERROR, "launch-attribute",
    ),
    "no launch": ("pass", Status.PLAN_ERROR, "no-kernel"),
    "host printf": ("cute.printf('%d', 3); " + LAUNCH % "", Status.PLAN_ERROR, "host-call"),
    "pointers taken apart": (
        "number(y, y.iterator.toint() - x.iterator.toint())"
        ".launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)",
        Status.PLAN_ERROR, "unstable",
    ),
    "past the end": (
        "k(cute.make_tensor(x.iterator + 1024, x.layout), y)"
        ".launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)",
        Status.PLAN_ERROR, "unstable",
    ),
    "unknown buffer": (LAUNCH.replace("k(x", "k(t.inputs.q") % "", Status.COMPILE_ERROR, "AttributeError"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_what_a_plan_cannot_carry_is_refused(compiler: CompileClient, name: str) -> None:
    body, status, rule = FAILURES[name]
    outcome = compiler.compile(job(KERNEL % body))
    assert outcome.artifact is None and outcome.failure
    assert (outcome.status, outcome.failure.rule) == (status, rule), outcome.failure


@pytest.mark.slow
def test_errors_of_the_dsl_name_the_line_and_what_to_do(compiler: CompileClient) -> None:
    source = KERNEL.replace("y[0, tid] = x[0, tid]", "y[0, tid, 3] = x[0, tid]") % (LAUNCH % "")
    failure = compiler.compile(job(source)).failure
    assert failure and "weakly congruent" in failure.message and "\x1b" not in failure.message
    assert failure.where["text"] == "y[0, tid, 3] = x[0, tid]" and failure.where["line"] == 9
    assert "local_tile" in failure.where["hint"]
    source = KERNEL.replace("y[0, tid] = x[0, tid]", "if tid > 3:\n        return") % (LAUNCH % "")
    failure = compiler.compile(job(source)).failure
    assert failure and failure.rule == "UNSUP_EARLY_EXIT"
    assert failure.where["text"] == "return"


HOSTILE = {
    "crash": ("import ctypes\nctypes.string_at(0)\n", Status.COMPILE_ERROR, "crash"),
    "exit": ("import sys\nsys.exit(0)\n", Status.COMPILE_ERROR, "SystemExit"),
    "silent exit": ("import os\nos._exit(0)\n", Status.COMPILE_ERROR, "crash"),
    "garbage": ("import os\nos.write(int(os.environ['BOX_RESULT_FD']), b'\\xff' * 99)\n", Status.REJECTED, "output"),
    "forged": ("import boxed\nboxed.send({'ok': True, 'sha256': '0' * 64})\n", Status.PLAN_ERROR, "malformed"),
    "endless": ("while True:\n    pass\n", Status.COMPILE_ERROR, "deadline"),
}  # fmt: skip


@pytest.mark.slow
def test_hostile_sources_fail_alone_and_the_next_one_compiles(tmp_path: Path) -> None:
    with start(tmp_path, deadline_s=10) as client:
        for name, (source, status, rule) in HOSTILE.items():
            outcome = client.compile(job(source + "def step(t, cfg, stream):\n    pass\n"))
            assert outcome.failure, name
            assert (outcome.status, outcome.failure.rule) == (status, rule), (name, outcome)
        assert client.compile(job(KERNEL % (LAUNCH % ""))).artifact


@pytest.mark.slow
def test_processor_time_ends_a_compile_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the clock: in the jail nothing may send signals, so one that is handled would end nobody."""
    monkeypatch.setattr(service, "WALL", 1000)
    choice = box.choose(pool.spec("sm_90a", 2), box.Settings())
    if isinstance(choice, box.Refusal):
        pytest.skip(choice.sentence)
    workers = pool.Pool(pool.starter(choice, 2), 0)
    compiling = service.Service(workers, OutcomeCache(tmp_path), choice, 2)
    try:
        failure = compiling.compile(
            job("def step(t, cfg, stream):\n    pass\n" + HOSTILE["endless"][0])
        ).failure
    finally:
        compiling.close()
    assert failure and failure.rule == "deadline", failure
    assert failure.where["line"] in (3, 4)


CHAIN = KERNEL.replace("%s", "for layer in t.weights.layers:\n        k(layer.w, y)%s") % (
    ".launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, cooperative=True, cluster=(1, 1, 1), use_pdl=True)"
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_a_chain_is_one_kernel_and_many_launches(compiler: CompileClient, arch: str) -> None:
    weights = tuple(Buffer(f"weights.layers.{i}.w", "f32", (4, 256)) for i in range(24))
    outcome = compiler.compile(job(CHAIN, buffers=(*BUFFERS, *weights), arch=arch))
    assert outcome.artifact, outcome.failure
    plan = artifact_store.load(outcome.artifact).step
    assert plan.ptx.count(".entry") == 1 and ptx.target(plan.ptx) == arch
    assert [x.relocations[0].buffer for x in plan.launches] == [w.name for w in weights]
    first = plan.launches[0]
    assert (first.cooperative, first.pdl, first.cluster) == (True, True, (1, 1, 1))


@pytest.mark.slow
def test_prepare_sees_weights_constants_and_what_persists(compiler: CompileClient) -> None:
    source = """
import numpy as np
import cutlass.cute as cute

def workspace(dims, cfg):
    return {"packed": ("f32", (32,), "undefined", "persistent"), "tmp": ("f32", (32,), "zero", "step")}

def constants(dims, cfg):
    return {"table": np.arange(32, dtype=np.float32)}

@cute.kernel
def add(a, b, out):
    tid, _, _ = cute.arch.thread_idx()
    out[tid] = a[tid] + b[tid]

@cute.jit
def prepare(t, cfg, stream):
    assert not hasattr(t.inputs, "x") and not hasattr(t.workspace, "tmp")
    add(t.weights.w, t.constants.table, t.workspace.packed).launch(
        grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

@cute.jit
def step(t, cfg, stream):
    add(t.workspace.packed, t.workspace.tmp, t.outputs.y).launch(
        grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
"""
    buffers = (*(Buffer(n, "f32", (32,)) for n in ("inputs.x", "weights.w", "outputs.y")),)
    outcome = compiler.compile(job(source, buffers=buffers))
    assert outcome.artifact, outcome.failure
    artifact = artifact_store.load(outcome.artifact)
    assert artifact.prepare
    assert [r.buffer for r in artifact.prepare.launches[0].relocations] == [
        "weights.w", "constants.table", "workspace.packed",
    ]  # fmt: skip
    assert [r.buffer for r in artifact.step.launches[0].relocations] == [
        "workspace.packed", "workspace.tmp", "outputs.y",
    ]  # fmt: skip
    assert artifact.constants["constants.table"][4:8] == b"\0\0\x80\x3f"
