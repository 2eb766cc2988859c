"""Rows of marks become tracks and spans; the build with marks agrees with the artifact, and is no candidate itself."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sandbox import artifact_store
from sandbox.compile_client import CompileClient
from sandbox.devices.cpu import CpuDevice
from sandbox.jobs import CompileJob, JudgeJob
from sandbox.judge.dtypes import TORCH
from sandbox.judge.judge import run
from sandbox.judge.timeline import Trace, Track, decode, spans, spread_out
from sandbox.judge_client import ClientOptions, JudgeClient
from sandbox.verdict import Status
from targets.base import Options, find
from tests.sandbox.compile.conftest import start
from tests.sandbox.compile.test_end_to_end import job as compile_job
from tests.sandbox.judge.marked import SOURCE, norm_with_marks

PHASES = (("gemv", "work"), ("meet", "edge"), ("end", "end"))
TARGET = f"{Path(__file__).parents[3] / 'examples' / 'my_target.py'}:RmsNorm"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with start(tmp_path_factory.mktemp("store")) as client:
        yield client


def rows(marks: list[list[tuple[int, int, int, int]]], n: int = 8) -> np.ndarray:
    """[track, row, word] from (nanoseconds, clock, phase, layer)."""
    out = np.zeros((len(marks) + 1, n, 4), np.int64)
    for t, track in enumerate(marks):
        out[t, 0] = (len(track), 0, 40 + t, 0)
        for i, (ns, clock, phase, layer) in enumerate(track):
            out[t, i + 1] = (ns & 0xFFFFFFFF, ns >> 32, clock & 0xFFFFFFFF, phase + 1 | layer << 16)
    return out


def test_rows_become_spans_with_layers_and_repeats() -> None:
    base = (1 << 40) + 5
    marks = [
        (base, 0, 0, 3),
        (base + 2000, 10, 1, 3),
        (base + 2500, 20, 0, 3),
        (base + 4032, 30, 2, 0),
    ]
    trace = decode(rows([marks]), PHASES, 1)
    assert [t.sm for t in trace.tracks] == [40]
    found = [(s.phase, s.layer, s.nth, round(s.end - s.begin, 3)) for s in spans(trace)]
    assert found == [("gemv", 3, 0, 2.0), ("meet", 3, 0, 0.5), ("gemv", 3, 1, 1.532)]


def test_a_coarse_global_timer_is_sharpened_with_the_clock() -> None:
    """Ticks of 1024 ns; the clock of the SM runs at 1.5 GHz and wraps in between."""
    true = [0.0, 300.0, 5000.0, 40_000.0, 80_000.0]
    start = (1 << 32) - 1000
    marks = [(int(t // 1024 * 1024), int(start + 1.5 * t), 0, i) for i, t in enumerate(true)]
    trace = decode(rows([marks]), PHASES, 1)
    got = [m[0] * 1e3 for m in trace.tracks[0].marks]
    assert got == pytest.approx(true, abs=900) and got[1] - got[0] == pytest.approx(300, abs=20)


def test_marks_beyond_the_buffer_are_counted_as_lost() -> None:
    table = rows([[(i, i, 0, 0) for i in range(7)]])
    table[0, 0, 0] = 12
    (track,) = decode(table, PHASES, 1).tracks
    assert (len(track.marks), track.lost) == (7, 5)


def test_modelled_lengths_keep_the_order_and_fill_the_step() -> None:
    marks = ((0.0, 0, 0), (1.0, 1, 0), (2.0, 0, 1), (3.0, 2, 0))
    moved = spread_out(Trace(PHASES, (Track(0, 0, marks, 0),), 1), 9.0)
    assert [m[0] for m in moved.tracks[0].marks] == [0.0, 4.0, 5.0, 9.0]


def test_all_blocks_of_a_kernel_leave_their_marks(compiler: CompileClient) -> None:
    """The normal build has no trace of them; the other computes the same."""
    outcomes = [compiler.compile(compile_job(SOURCE, tunables=t)) for t in ({}, {"timeline": True})]
    plain, marked = (artifact_store.load(o.artifact) for o in outcomes if o.artifact)
    assert "globaltimer" not in plain.step.ptx and "globaltimer" in marked.step.ptx
    assert not plain.instrumented and marked.instrumented
    tensors = {}
    for b in marked.buffers:
        raw = torch.zeros(b.nbytes + 128, dtype=torch.uint8)
        at = -raw.data_ptr() % 128
        tensors[b.name] = raw[at : at + b.nbytes].view(TORCH[b.dtype]).reshape(b.shape)
    tensors["inputs.x"].copy_(torch.randn(4, 256))
    CpuDevice().load(marked).bind("step", tensors).launch()
    assert torch.equal(tensors["outputs.y"], 2 * tensors["inputs.x"])
    table = tensors["workspace.timeline"].view(torch.int32).numpy().astype(np.int64)
    trace = decode(table, (("scale", "work"), ("edge", "edge"), ("end", "end")), 4)
    assert [t.number for t in trace.tracks] == [0, 1, 2, 3]
    names = [(s.phase, s.layer) for s in spans(trace) if s.track == 2]
    assert names == [("scale", 0), ("edge", 0), ("scale", 1), ("edge", 1)]


def test_the_judge_compares_both_builds_and_refuses_marks_elsewhere(
    compiler: CompileClient,
) -> None:
    target = find(TARGET)
    w = target.workload(Options("tiny", rows=4))
    source = norm_with_marks(target.seed_source())
    made = [
        compiler.compile(CompileJob(source, TARGET, w.key, w.dims, w.buffers, tunables=t)).artifact
        for t in ({}, {"timeline": True})
    ]
    assert made[0] and made[1]
    options = {**asdict(w.options), "extra": dict(w.options.extra)}
    job = JudgeJob(made[0], TARGET, options, "cpu", timeline=made[1])
    v = run(job, CpuDevice())
    assert v.status is Status.PASSED, v.failure
    fall = v.profile["waterfall"]
    assert fall["kind"] == "modelled" and fall["overhead"] >= 1.0
    assert sum(fall["parts"].values()) == pytest.approx(fall["step_us"], abs=1e-2)
    assert any("bit for bit" in x for x in v.checked)
    refused = run(replace(job, artifact=made[1], timeline=None), CpuDevice())
    assert refused.failure and refused.failure.rule == "instrumented"


def test_a_build_with_marks_needs_marks(compiler: CompileClient) -> None:
    target = find(TARGET)
    w = target.workload(Options("tiny"))
    job = CompileJob(
        target.seed_source(), TARGET, w.key, w.dims, w.buffers, tunables={"timeline": True}
    )
    outcome = compiler.compile(job)
    assert (
        outcome.status is Status.REJECTED and outcome.failure and outcome.failure.rule == "timeline"
    )


@pytest.mark.gpu
def test_marks_on_a_gpu_are_measured(compiler: CompileClient, tmp_path: Path) -> None:
    target = find(TARGET)
    w = target.workload(Options("large", rows=8))
    source = norm_with_marks(target.seed_source())
    plain, marked = (
        compiler.compile(CompileJob(source, TARGET, w.key, w.dims, w.buffers, tunables=t)).artifact
        for t in ({}, {"timeline": True})
    )
    assert plain and marked
    options = {**asdict(w.options), "extra": dict(w.options.extra)}
    client = JudgeClient(ClientOptions(tmp_path))
    try:
        v = client.judge(JudgeJob(plain, TARGET, options, "cuda", timeline=marked))
    finally:
        client.close()
    assert v.status is Status.PASSED, v.failure
    fall = v.profile["waterfall"]
    assert fall["kind"] == "measured" and 0.8 < fall["overhead"] < 1.3
    assert sum(fall["parts"].values()) == pytest.approx(fall["step_us"], abs=0.05)
    assert {t["block"] for t in v.profile["timeline"]["tracks"]} == {0, 1}
