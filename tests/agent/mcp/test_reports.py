"""Verdicts as the tools show them: kernel times against the parent, wrong tensors, resources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent import fakes
from agent.mcp import reports
from sandbox.jobs import CompileJob, JudgeJob
from sandbox.verdict import (
    Correctness,
    Failure,
    KernelResources,
    Outcome,
    Status,
    TensorCheck,
    Verdict,
)

ROW = {
    "seq": 2, "parent_seq": 1, "promoted": 1, "duplicate_of": None, "note": "n", "predicted_gain": 1.2,
    "us": 80.0,
}  # fmt: skip


@pytest.fixture
def verdict(tmp_path: Any) -> Verdict:
    target = fakes.FakeTarget()
    w = target.workload(fakes.Options())
    compiled = fakes.FakeCompiler(tmp_path).compile(
        CompileJob(fakes.kernel(80), "fake", w.key, w.dims, w.buffers, "sm_90a", {})
    )
    assert compiled.artifact is not None
    options = {"preset": "tiny", "layers": None, "rows": 1, "context": None, "extra": {}}
    job = JudgeJob(compiled.artifact, "fake", options, "cpu", compile_isolation={"tier": "strict"})
    return fakes.FakeJudge().judge(job)


def profiled(v: Verdict, **us: float) -> Verdict:
    total = sum(us.values())
    rows = [
        {"kernel": name, "calls": 2, "us": value, "share": value / total} for name, value in us.items()
    ]  # fmt: skip
    seeds = {"master": 12345}
    profile = {"method": "prefixes", "step_us": total, "kernels": rows, "seeds": seeds}
    return replace(v, profile=profile)


def test_kernel_times_stand_beside_the_parents(verdict: Verdict) -> None:
    mine, parent = profiled(verdict, gemv=30.0, norm=10.0), profiled(verdict, gemv=50.0, old=5.0)
    got = reports.report(ROW, verdict, mine, parent)
    assert [(k.kernel, k.us, k.share, k.parent_us) for k in got.kernels] == [
        ("gemv", 30.0, 0.75, 50.0), ("norm", 10.0, 0.25, None),
    ]  # fmt: skip
    assert got.profile_note == "prefixes; 40.0 us in all"
    assert "12345" not in repr(got)  # what the inputs were drawn from stays with the judge
    found = reports.comparison([{**ROW, "seq": 1, "us": 55.0}, ROW], [parent, mine], ["a\n", "b\n"])
    assert [(k.kernel, k.delta_us) for k in found.kernels] == [
        ("gemv", -20.0), ("norm", 10.0), ("old", -5.0),
    ]  # fmt: skip
    assert found.ratio == pytest.approx(55 / 80)
    assert found.diff.splitlines()[-2:] == ["-a", "+b"]


def test_no_ratio_across_devices(verdict: Verdict) -> None:
    other = replace(verdict, device={"kind": "cuda"})
    assert reports.comparison([ROW, ROW], [verdict, other], ["", ""]).ratio is None


def test_registers_and_spills_that_changed_are_listed(verdict: Verdict) -> None:
    a = replace(verdict, resources=(KernelResources("k", 64, 0, 0, 0, 1024),))
    b = replace(verdict, resources=(KernelResources("k", 96, 0, 8, 4, 1024),))
    assert reports.report(ROW, b, b, None).resources == [reports.Resources("k", 96, 12, 1024)]
    rows = reports.comparison([ROW, ROW], [a, b], ["", ""]).resources
    assert ("registers", 64, 96) in [(r.what, r.a, r.b) for r in rows]
    assert not [r for r in rows if "static" in r.what]


def test_a_wrong_tensor_is_named_and_times_are_withheld(verdict: Verdict) -> None:
    checks = (
        TensorCheck("outputs.y", 0.5, 0.01, 9.0, 0.1, 1.5, 1.1, False, "at [3]"),
        TensorCheck("outputs.z", 0.0, 0.01, 0.0, 0.1, 1.0, 1.1, True),
    )
    bad = replace(
        verdict, status=Status.WRONG, outcome=None, timing=None,
        correctness=Correctness(1, 1, 1, checks, ("outputs.y", "outputs.z"), ()),
        failure=Failure("band", "x" * 9000, {"tensor": "outputs.y"}),
    )  # fmt: skip
    got = reports.report(ROW, bad, bad, None)
    assert [(t.name, t.rel_l2, t.where) for t in got.wrong] == [("outputs.y", 0.5, "at [3]")]
    assert (got.us, got.kind, got.fraction_of_floor, got.kernels) == (None, None, None, [])
    assert got.failure is not None
    assert len(got.failure.message) == reports.LONGEST_MESSAGE
    assert "only what passed" in got.profile_note
    assert verdict.outcome is Outcome.NOT_TIMED
