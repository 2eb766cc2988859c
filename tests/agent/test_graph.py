"""The loop from proposal to promotion, on fakes: the story that the graph tells."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent import fakes
from agent.fakes import kernel
from agent.models.base import Unavailable
from agent.models.scripted import ScriptedProposer
from agent.runner import load_settings, save_settings, with_limits
from agent.search import Limits
from sandbox.jobs import CompileJob, CompileOutcome
from sandbox.verdict import Tier


def test_a_better_kernel_replaces_the_seed(kit: Any) -> None:
    ended = kit.optimize([kernel(120), kernel(80), kernel(90), kernel(70)])
    assert (ended.how, ended.stop, ended.incumbent) == ("review", "rounds", 4)
    rows = kit.queries.candidates(ended.run)
    assert [r["seq"] for r in rows] == [0, 1, 2, 3, 4]
    assert [r["outcome"] for r in rows] == ["not_timed", "slow", "better", "slow", "better"]
    assert [r["parent_seq"] for r in rows] == [None, 0, 0, 2, 2]
    assert [bool(r["promoted"]) for r in rows] == [True, False, True, False, True]
    assert [r["tier"] for r in rows] == ["screen", "screen", "promote", "screen", "promote"]


def test_the_winner_lies_in_kernels_out_and_replaces_its_predecessor(kit: Any) -> None:
    ended = kit.optimize([kernel(80), kernel(70)], limits=Limits(rounds=2, stop_at=None))
    folder: Path = kit.place.out / "fake" / "cpu"
    assert [p.name for p in folder.iterdir()] == [f"{ended.run}-2"]
    best = folder / f"{ended.run}-2"
    assert best.joinpath("kernel.py").read_text() == kernel(70)
    assert best.joinpath("artifact", "manifest.json").is_file()
    assert "80.00" not in best.joinpath("notes.md").read_text()
    assert "Not verified" in best.joinpath("notes.md").read_text()


def test_a_fluke_is_caught_by_the_fresh_judge_and_never_promoted(kit: Any) -> None:
    kit.full_penalty = 1.5
    ended = kit.optimize([kernel(80)], limits=Limits(rounds=1))
    assert ended.incumbent == 0
    assert [j.calls[0][1] for j in kit.fresh] == [Tier.PROMOTE]
    assert all(j.closed for j in kit.fresh)
    assert kit.queries.candidates(ended.run)[1]["outcome"] == "slow"


def test_failures_are_recorded_and_do_not_stop_their_siblings(kit: Any) -> None:
    modes = ["compile_error", "wrong", "hang", "fault"]
    sources = [kernel(80 + i, m) for i, m in enumerate(modes)] + [kernel(80)]
    ended = kit.optimize(sources, k=5, limits=Limits(rounds=1), repairs=0)
    rows = kit.queries.candidates(ended.run)
    assert [r["status"] for r in rows[1:]] == [*modes, "passed"]
    assert ended.incumbent == 5


def test_a_broken_candidate_is_repaired(kit: Any) -> None:
    broken, mended = kernel(80, "compile_error"), kernel(80)
    run = kit.new(limits=Limits(rounds=1))
    ended = kit.go(run, ScriptedProposer([broken], {broken: mended}))
    assert ended.incumbent == 1
    row = kit.queries.candidates(run)[1]
    verdicts = kit.queries.verdicts(row["id"])
    assert [(v["step"], v["status"], v["tier"]) for v in verdicts] == [
        (0, "compile_error", "screen"), (1, "passed", "screen"), (1, "passed", "promote"),
    ]  # fmt: skip


def test_a_passed_candidate_is_tuned_and_keeps_its_best_point(kit: Any) -> None:
    source = kernel(90, extra='# cost: a 2=0.8 3=1.5\nTUNABLES = {"a": (1, 2, 3)}\n')
    ended = kit.optimize([source], limits=Limits(rounds=1), tunings=5)
    row = kit.queries.candidates(ended.run)[1]
    assert row["tunables"] == '{"a": 2}'
    assert row["us"] == 72.0
    assert len(kit.queries.verdicts(row["id"])) == 4


def test_the_best_of_a_round_wins_and_the_other_is_kept_with_a_reason(kit: Any) -> None:
    ended = kit.optimize([kernel(80), kernel(60), kernel(70)], k=3, limits=Limits(rounds=1))
    assert ended.incumbent == 2
    kept = [d for d in kit.queries.decisions(ended.run) if d["kind"] == "keep"]
    assert [d["seq"] for d in kept] == [1, 3]
    assert all("candidate 2 gains more" in d["reason"] for d in kept)


def test_the_same_machine_work_is_not_measured_twice(kit: Any) -> None:
    ended = kit.optimize([kernel(120), kernel(120) + "# other text\n"], limits=Limits(rounds=2))
    rows = kit.queries.candidates(ended.run)
    assert rows[2]["duplicate_of"] == 1
    assert len(kit.judge.calls) == 2


def test_a_seed_that_fails_ends_the_run(kit: Any, tmp_path: Path) -> None:
    start = tmp_path / "start.py"
    start.write_text(kernel(1, "wrong"))
    ended = kit.optimize([kernel(80)], start=str(start))
    assert (ended.how, ended.stop) == ("end", "seed_failed")
    assert not kit.place.out.exists()
    again = kit.go(ended.run, ScriptedProposer([kernel(80)]))
    assert (again.stop, len(kit.queries.candidates(ended.run))) == ("seed_failed", 1)


def test_a_seed_that_the_machine_could_not_judge_is_judged_when_resumed(kit: Any) -> None:
    run = kit.new(limits=Limits(rounds=1))
    right = kit.judge
    kit.judge = fakes.FakeJudge(broken=True)
    with pytest.raises(Unavailable, match="cannot be judged here"):
        kit.go(run, ScriptedProposer([kernel(80)]))
    assert kit.queries.run(run)["state"] == "failed"
    kit.judge = right
    assert kit.go(run, ScriptedProposer([kernel(80)])).incumbent == 1


def test_a_budget_spent_before_the_seed_can_be_raised_when_resumed(kit: Any) -> None:
    run = kit.new(limits=Limits(rounds=1, gpu_seconds=0.0))
    ended = kit.go(run, ScriptedProposer([kernel(80)]))
    assert (ended.how, ended.stop, kit.judge.calls) == ("end", "gpu_seconds", [])
    assert kit.queries.run(run)["state"] == "spent"
    settings = with_limits(load_settings(kit.place, run), gpu_seconds=1000.0)
    save_settings(kit.place, run, settings)
    assert kit.go(run, ScriptedProposer([kernel(80)])).incumbent == 1


class Costly(fakes.FakeJudge):
    """Holds the GPU for 5 seconds a judgement, as it says itself; slow enough for others to queue."""

    def judge(self, job: Any) -> Any:
        time.sleep(0.1)
        return replace(super().judge(job), seconds={"held": 5.0})


def test_gpu_time_is_looked_at_when_the_gpu_is_free_and_not_while_waiting_for_it(kit: Any) -> None:
    kit.judge = Costly()
    ended = kit.optimize(
        [kernel(120), kernel(130), kernel(140)], k=3, limits=Limits(rounds=1, gpu_seconds=8.0)
    )
    assert (ended.stop, len(kit.judge.calls)) == ("gpu_seconds", 2)


def test_infra_is_tried_again_and_charged_to_nobody(kit: Any) -> None:
    judge = kit.judge
    run = kit.new(limits=Limits(rounds=1))
    ended = kit.go(run, ScriptedProposer([kernel(80, "infra")]))
    assert kit.queries.candidates(run)[1]["status"] == "infra"
    assert [t for _, t in judge.calls].count(Tier.SCREEN) == 1 + 3
    assert ended.incumbent == 0


class Faulty(ScriptedProposer):
    """Has a defect when asked for its second candidate."""

    def propose(self, r: Any) -> Any:
        if r.seq == 2:
            raise KeyError("a defect")
        return super().propose(r)


def test_a_defect_of_ours_costs_its_candidate_and_not_the_run(kit: Any) -> None:
    run = kit.new(limits=Limits(rounds=1), k=3)
    ended = kit.go(run, Faulty([kernel(80), kernel(70), kernel(90)]))
    rows = kit.queries.candidates(run)
    assert [r["status"] for r in rows] == ["passed", "passed", "infra", "passed"]
    assert ended.incumbent == 1
    trace = kit.place.workspace.run(run).folder / "crashes" / "2-0.txt"
    assert "a defect" in trace.read_text()


def test_a_verified_gain_is_in_kernels_out_before_its_round_ends(kit: Any) -> None:
    """Two candidates a round; the disk dies while the second is compiled: the first is there."""
    sound = kit.compiler

    class Dies(fakes.FakeCompiler):
        def compile(self, job: CompileJob) -> CompileOutcome:
            if "us=60" not in job.source:
                return super().compile(job)
            end = time.monotonic() + 120
            while not any(name.endswith("-1") for name in kept(kit)) and time.monotonic() < end:
                time.sleep(0.01)
            raise OSError(5, "the disk is gone")

    kit.compiler = Dies(sound.root)
    run = kit.new(k=2, limits=Limits(rounds=1, stop_at=None))
    sources = [kernel(80), kernel(60)]
    with pytest.raises(OSError, match="the disk is gone"):
        kit.go(run, ScriptedProposer(sources))
    assert kept(kit) == [f"{run}-0", f"{run}-1"]
    kit.compiler = sound
    assert kit.go(run, ScriptedProposer(sources)).incumbent == 2
    assert kept(kit) == [f"{run}-2"]


def kept(kit: Any) -> list[str]:
    return sorted(p.parent.name for p in kit.place.out.glob("*/*/[!.]*/verdict.json"))
