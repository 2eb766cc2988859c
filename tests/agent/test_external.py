"""Proposals and verdicts from outside: the folder, stopping without a proposal, verdicts judged elsewhere."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent import fakes
from agent.elsewhere import FolderJudge, accept, read_verdict
from agent.fakes import kernel
from agent.models.base import Waiting
from agent.models.external import External, offer
from agent.models.replay import Replay
from agent.models.scripted import ScriptedProposer
from agent.models.tuner import Tuner
from agent.review.decide import decide
from agent.runner import Party, Run, Services, Session, advance, load_settings, make_ledger
from agent.search import Limits
from sandbox.jobs import JudgeJob
from sandbox.strict import Malformed
from sandbox.verdict import Tier

LIMITS = Limits(rounds=None, candidates=2, stop_at=None, patience=None)


def external(kit: Any, folder: Path, wait: bool = False) -> External:
    return External(
        folder, kit.place.workspace, wait, threading.Event().wait, kit.reporter.say, lambda: None
    )


def test_a_run_without_a_proposal_stops_and_resume_takes_the_next_one(
    kit: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "outside"
    run = kit.new(proposer="external", limits=LIMITS)
    first = kit.go(run, external(kit, folder))
    assert first.how == "waiting"
    assert "candidate.py" in first.waiting[0]
    assert kit.queries.run(run)["state"] == "waiting"
    assert (folder / "best.py").read_text() == fakes.SEED
    assert "Predicted gain" in (folder / "task.md").read_text()
    assert json.loads((folder / "signature.json").read_text())["buffers"][0]["name"] == "inputs.x"

    offer(folder, kernel(80), {"note": "mine", "predicted_gain": 1.2})
    second = kit.go(run, external(kit, folder))
    assert (second.how, second.incumbent) == ("waiting", 1)
    assert not (folder / "candidate.py").exists()
    assert (folder / "taken" / "1.py").read_text() == kernel(80)
    row = kit.queries.candidates(run)[1]
    assert (row["note"], row["predicted_gain"], row["outcome"]) == ("mine", 1.2, "better")
    assert "| 1 | 0 | better (promoted) | 80.00 |" in (folder / "feedback.md").read_text()

    offer(folder, kernel(100, "wrong"))
    third = kit.go(run, external(kit, folder))
    assert (third.how, third.stop, third.incumbent) == ("review", "candidates", 1)
    assert "ends as wrong" in (folder / "feedback.md").read_text()
    assert json.loads((folder / "history" / "2.json").read_text())["status"] == "wrong"


def test_a_note_taken_while_a_proposal_is_awaited_reaches_the_author(
    kit: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "outside"
    run = kit.new(proposer="external", limits=replace(LIMITS, candidates=3))
    kit.go(run, external(kit, folder))
    offer(folder, kernel(80))
    assert kit.go(run, external(kit, folder)).how == "waiting"  # the next round is planned already
    row = kit.queries.candidate(f"{run}-1")
    decide(kit.place, row, "send_back", ("no spins, please", "Ada <ada@example.org>"))
    assert kit.go(run, external(kit, folder)).how == "waiting"
    assert "sent back candidate 1: no spins, please" in (folder / "feedback.md").read_text()


def test_claims_in_the_docstring_are_read(kit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "outside"
    run = kit.new(proposer="external", limits=replace(LIMITS, candidates=1))
    kit.go(run, external(kit, folder))
    offer(folder, kernel(80))
    kit.go(run, external(kit, folder))
    assert kit.queries.candidates(run)[1]["predicted_gain"] == 1.1


def test_a_waiting_run_takes_a_file_that_appears_later(kit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "outside"
    run = kit.new(proposer="external", limits=replace(LIMITS, candidates=1))
    timer = threading.Timer(0.5, offer, (folder, kernel(80)))
    timer.start()
    ended = kit.go(run, external(kit, folder, wait=True))
    timer.join()
    assert ended.incumbent == 1


def test_an_unreadable_proposal_is_rejected_and_the_run_goes_on(kit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "outside"
    run = kit.new(proposer="external", limits=LIMITS)
    kit.go(run, external(kit, folder))
    offer(folder, kernel(80))
    (folder / "candidate.json").write_text("[1, 2")
    ended = kit.go(run, external(kit, folder))
    assert ended.how == "waiting"
    assert kit.queries.candidates(run)[1]["status"] == "rejected"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name, what",
    [
        ("candidate.py", "folder"), ("candidate.py", "pipe"), ("candidate.py", "link"),
        ("candidate.json", "folder"), ("candidate.json", "pipe"), ("candidate.json", "link"),
        ("candidate.json", '{"predicted_gain": NaN}'), ("candidate.json", '{"predicted_gain": 1e999}'),
        ("candidate.json", f'{{"predicted_gain": 1{"0" * 400}}}'), ("candidate.json", "[" * 100_000),
        ("candidate.json", '{"note": "\\ud800"}'), ("candidate.json", '{"note": "' + "x" * (1 << 20) + '"}'),
    ],
)  # fmt: skip
def test_what_is_no_plain_proposal_ends_as_rejected_and_the_run_goes_on(
    kit: Any, tmp_path: Path, name: str, what: str
) -> None:
    """A folder or a pipe there must neither hang the run nor leave it stuck at every resume."""
    folder = tmp_path / "outside"
    run = kit.new(proposer="external", limits=LIMITS)
    kit.go(run, external(kit, folder))
    offer(folder, kernel(80))
    odd = folder / name
    odd.unlink(missing_ok=True)
    if what == "folder":
        odd.mkdir()
    elif what == "pipe":
        os.mkfifo(odd)
    elif what == "link":
        (tmp_path / "secret").write_text("{}")
        odd.symlink_to(tmp_path / "secret")
    else:
        odd.write_text(what)
    assert kit.go(run, external(kit, folder)).how == "waiting"
    offer(folder, kernel(80))
    assert kit.go(run, external(kit, folder)).incumbent == 2
    assert kit.queries.candidates(run)[1]["status"] == "rejected"


def test_replay_judges_a_recorded_runs_proposals_again(kit: Any) -> None:
    first = kit.optimize([kernel(80), kernel(70)], limits=Limits(rounds=2, stop_at=None))
    rows = kit.queries.candidates(first.run)
    run = kit.new(proposer="replay", limits=Limits(rounds=9, stop_at=None))
    ended = kit.go(run, Replay(rows, kit.place.workspace))
    assert (ended.stop, ended.incumbent) == ("exhausted", 2)
    again = kit.queries.candidates(run)
    assert [r["source"] for r in again] == [r["source"] for r in rows]


def test_a_tuner_run_replayed_is_judged_afresh_and_ranks_the_same(kit: Any) -> None:
    limits = Limits(rounds=9, stop_at=None)
    first = kit.go(kit.new(proposer="tuner", k=2, limits=limits), Tuner())
    rows = kit.queries.candidates(first.run)
    before = len(kit.judge.calls)
    run = kit.new(proposer="replay", k=2, limits=limits)
    ended = kit.go(run, Replay(rows, kit.place.workspace))
    again = kit.queries.candidates(run)
    assert len(kit.judge.calls) - before == len(rows) == 6  # each one, and the seed, anew

    def story(rows: Any) -> Any:
        ranked = sorted(rows, key=lambda r: r["us"])
        return [(r["seq"], r["source"], r["tunables"], r["us"], r["promoted"]) for r in ranked]

    assert story(again) == story(rows)
    assert ended.incumbent == first.incumbent


class Elsewhere:
    """A run whose verdicts come from another host, and that host."""

    def __init__(self, kit: Any) -> None:
        self.kit = kit
        self.run = kit.new(limits=Limits(rounds=1, stop_at=None))
        self.files = kit.place.workspace.run(self.run)
        self.proposer = ScriptedProposer([kernel(80)])

    def go(self) -> Any:
        judge = FolderJudge(self.files)
        services = Services(self.kit.compiler, judge, lambda: judge)
        settings = load_settings(self.kit.place, self.run)
        session = Session(self.kit.place, self.kit.reporter)
        ledger = make_ledger(self.kit.place, self.run, settings)
        return advance(Run(self.run, settings, session, services, Party(self.proposer), ledger))

    def request(self) -> JudgeJob:
        names = {p.name for p in (self.files.folder / "requests").iterdir()}
        taken = {p.name for p in (self.files.folder / "imported").glob("*")}
        (name,) = names - taken
        r = json.loads((self.files.folder / "requests" / name).read_text())
        return JudgeJob(
            Path(r["artifact"]), r["target"], r["options"], r["device"], Tier(r["tier"]),
            Path(r["incumbent"]) if r["incumbent"] else None, compile_isolation=r["compile_isolation"],
        )  # fmt: skip


def test_a_run_is_judged_elsewhere_step_by_step(kit: Any) -> None:
    run = Elsewhere(kit)
    for tier in (Tier.SCREEN, Tier.SCREEN, Tier.PROMOTE):
        ended = run.go()
        assert ended.how == "waiting"
        job = run.request()
        assert job.tier is tier
        assert accept(run.files, fakes.FakeJudge().judge(job))
    ended = run.go()
    assert (ended.how, ended.incumbent) == ("review", 1)


def test_a_verdict_of_another_artifact_or_device_is_not_taken(kit: Any) -> None:
    run = Elsewhere(kit)
    run.go()
    verdict = fakes.FakeJudge().judge(run.request())
    assert not accept(run.files, replace(verdict, artifact="0" * 64))
    with pytest.raises(Malformed, match="device"):
        accept(run.files, replace(verdict, device={"kind": "cuda"}))
    assert run.go().how == "waiting"


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}', '{"schema": 1, "status": "passed"}'])
def test_a_malformed_verdict_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "v.json"
    path.write_text(text)
    with pytest.raises(Malformed):
        read_verdict(path)


def test_a_look_at_the_build_with_marks_is_asked_for_and_taken_apart_from_the_judgement(
    kit: Any,
) -> None:
    run = Elsewhere(kit)
    run.go()
    job = run.request()
    assert accept(run.files, fakes.FakeJudge().judge(job))
    marked = replace(job, timeline=job.artifact)
    with pytest.raises(Waiting, match=f"--timeline {job.artifact} .*[0-9a-f]-timeline.json"):
        FolderJudge(run.files).judge(marked)
    judged = fakes.FakeJudge().judge(job)
    assert not accept(run.files, judged)
    seen = replace(judged, seconds={"compare": 0.1, "timeline": 0.2})
    assert accept(run.files, seen)
    for tier in (Tier.SCREEN, Tier.FULL):
        assert FolderJudge(run.files).judge(replace(marked, tier=tier)).seconds == seen.seconds
