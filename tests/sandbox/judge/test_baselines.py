"""Baselines beside a candidate: which are asked for, named best, skipped, and whose fault a broken one is."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.devices.base import Faulted
from sandbox.devices.fake import FakeDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import judge
from sandbox.judge.session import named_baselines
from sandbox.verdict import Failure, Status, Tier
from tests.sandbox.judge import toy
from tests.sandbox.judge.test_timing import row, run, timed


def test_baselines_are_arms(tmp_path: Path) -> None:
    v = timed(tmp_path, {"k": 10.0}, baselines=("graph", "broken", "wrong", "unknown"))
    t = row(v)
    assert t.best_baseline == "graph" and t.speedup_graph is not None
    said = [f.message for f in v.findings]
    assert any("no such operator" in m for m in said)
    assert any("baseline wrong is wrong and not timed" in m for m in said)
    assert any("baseline unknown" in line for line in v.not_verified)


class _Strong(toy.Toy):
    """A target whose graph baseline alone is not the best there is."""

    strong_baselines = ("mix",)


def test_the_best_baseline_is_named_only_if_a_strong_one_was_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "open_case", _with_target(judge.open_case, _Strong()))
    v = timed(tmp_path, {"k": 10.0}, baselines=("graph", "mix"))
    t = row(v)
    assert t.best_baseline == "" and t.speedup_best is None and t.speedup_graph is not None
    assert t.detail["skipped"] == {"mix": "this target has none"}
    assert any("mix was not timed" in line for line in v.not_verified)


def _with_target(open_case: Callable[..., Any], target: toy.Toy) -> Callable[..., Any]:
    return lambda *a: replace(open_case(*a), target=target)


def test_baselines_have_names_for_some_and_all(tmp_path: Path) -> None:
    made = toy.saved(tmp_path, toy.artifact(("k",)))
    for asked, wanted in (
        (("usual",), ("graph",)),
        (("usual", "wrong"), ("graph", "wrong")),
        (("all",), ("graph", "broken", "wrong")),
        (("all", "-broken"), ("graph", "wrong")),
    ):
        job = JudgeJob(made, toy.TARGET, {"rows": 4}, "cuda", baselines=asked)
        assert named_baselines(judge.open_case(job, FakeDevice({}))) == wanted


def test_strong_baselines_stand_beside_winners_by_default(tmp_path: Path) -> None:
    made = toy.saved(tmp_path, toy.artifact(("k",)))
    for tier, wanted in ((Tier.SCREEN, ("graph",)), (Tier.FULL, ("mix", "graph"))):
        job = JudgeJob(made, toy.TARGET, {"rows": 4}, "cuda", tier)
        case = replace(judge.open_case(job, FakeDevice({})), target=_Strong())
        assert named_baselines(case) == wanted


class NeverReady(toy.ToyBaseline):
    def prepare(self, *given: Any) -> None:
        while True:
            time.sleep(0.01)


TWO = toy.Toy(baselines={
    "graph": f"{toy.__file__}:ToyBaseline", "again": f"{toy.__file__}:ToyBaseline",
    "slow": f"{__file__}:NeverReady",
})  # fmt: skip


def test_the_oracle_runs_once_for_all_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    class Counting(toy.ToyReference):
        def run(self, w: Any, tensors: Any, schedule: str, forced: Any = None) -> Any:
            runs.append(schedule)
            return super().run(w, tensors, schedule, forced)

    def opened(*given: Any) -> Any:
        return replace(real(*given), target=TWO, reference=Counting())

    real = judge.open_case
    monkeypatch.setattr(judge, "open_case", opened)
    counts = {}
    for names in ((), ("graph",), ("graph", "again")):
        runs.clear()
        v = timed(tmp_path, {"k": 10.0}, baselines=names)
        assert {*names} <= {*row(v).detail["us"]}
        counts[names] = runs.count("oracle")
    assert counts["graph",] == counts[()] + 1 == counts["graph", "again"]


def test_a_baseline_that_never_gets_ready_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "open_case", _with_target(judge.open_case, TWO))
    made = toy.saved(tmp_path, toy.artifact(("k",)))
    job = JudgeJob(made, toy.TARGET, {"rows": 4}, "cuda", baselines=("slow", "graph"))
    for deadline_s in (
        0.6,
        10.0,
        100.0,
    ):  # longer where a busy machine had not made the other one ready
        device = FakeDevice({"k": toy.right}, "cuda", {"k": 10.0})
        v = run(replace(job, deadline_s=deadline_s), device)
        if "graph" in row(v).detail["us"]:
            break
    assert "not ready after" in row(v).detail["skipped"]["slow"]
    assert "graph" in row(v).detail["us"]


class Greedy(toy.ToyBaseline):
    """It holds itself, as a recorded graph and its tensors do, and has no memory for its step."""

    alive: Callable[[], Any]

    def prepare(self, *given: Any) -> None:
        self.me = self
        Greedy.alive = weakref.ref(self)

    def step(self) -> None:
        raise RuntimeError("out of memory")


class AfterGreedy(toy.ToyBaseline):
    def prepare(self, *given: Any) -> None:
        assert Greedy.alive() is None
        super().prepare(*given)


def test_what_a_failed_baseline_held_is_free_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = toy.Toy(baselines={"greedy": f"{__name__}:Greedy", "after": f"{__name__}:AfterGreedy"})
    monkeypatch.setattr(judge, "open_case", _with_target(judge.open_case, target))
    t = row(timed(tmp_path, {"k": 10.0}, baselines=("greedy", "after")))
    assert list(t.detail["skipped"]) == ["greedy"] and "after" in t.detail["us"]


def test_a_baseline_that_breaks_the_gpu_is_not_the_candidates_fault(tmp_path: Path) -> None:
    class Breaking(FakeDevice):
        def time(self, work: Callable[[], None]) -> float:
            if getattr(work, "__self__", None).__class__.__name__ == "BaselineArm":
                raise Faulted(Status.FAULT, Failure("cuda-fault", "CUDA_ERROR_ILLEGAL_ADDRESS"))
            return super().time(work)

    made = toy.saved(tmp_path, toy.artifact(("k",)))
    job = JudgeJob(made, toy.TARGET, {"rows": 4}, "cuda", baselines=("graph",))
    v = run(job, Breaking({"k": toy.right}, "cuda", {"k": 10.0}))
    assert v.status is Status.INFRA and v.failure is not None
    assert (v.failure.rule, v.failure.where) == ("baseline-fault", {"baseline": "graph"})
    without = replace(job, baselines=("graph", "-graph"))
    assert run(without, Breaking({"k": toy.right}, "cuda", {"k": 10.0})).status is Status.PASSED


def test_a_fault_while_a_baseline_is_built_is_not_the_candidates_either(tmp_path: Path) -> None:
    class Dead(FakeDevice):
        """As CUDA is after torch said `illegal memory access` in the baseline `broken`."""

        dead = False

        def synchronize(self) -> None:
            if self.dead:
                raise Faulted(Status.FAULT, Failure("cuda-fault", "CUDA_ERROR_ILLEGAL_ADDRESS"))

        def record(self, work: Callable[[], None], launches: int = 0) -> Any:
            self.dead = True
            return super().record(work, launches)

    made = toy.saved(tmp_path, toy.artifact(("k",)))
    job = JudgeJob(made, toy.TARGET, {"rows": 4}, "cuda", baselines=("broken",))
    v = run(job, Dead({"k": toy.right}, "cuda", {"k": 10.0}))
    assert v.status is Status.INFRA and v.failure is not None
    assert (v.failure.rule, v.failure.where) == ("baseline-fault", {"baseline": "broken"})
