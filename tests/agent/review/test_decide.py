"""Decisions of people: what is recorded, what is refused, and how the run goes on from another process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from agent.fakes import kernel
from agent.models.base import Request
from agent.models.scripted import ScriptedProposer
from agent.review.decide import Refused, approved, decide, decisions, standing, whoami
from agent.search import Limits

WHO = "Ada <ada@example.org>"


class Listening(ScriptedProposer):
    """Remembers the lessons it was given."""

    heard: tuple[str, ...] = ()

    def propose(self, r: Request) -> Any:
        self.heard = r.situation.lessons
        return super().propose(r)


def finished(kit: Any, sources: list[str] | None = None) -> str:
    ended = kit.optimize(sources or [kernel(80), kernel(70)], limits=Limits(rounds=2, stop_at=None))
    assert ended.how == "review"
    return str(ended.run)


def test_approval_is_recorded_with_who_when_and_hashes_and_ends_the_run(kit: Any) -> None:
    run = finished(kit)
    row = kit.queries.candidate(f"{run}-2")
    done = decide(kit.place, row, "approve", ("reads well", WHO))
    assert done.effect == "answered"
    (d,) = decisions(kit.queries, run)
    assert (d.kind, d.note, d.who, d.seq) == ("approve", "reads well", WHO, 2)
    assert d.date.endswith("Z") and d.hashes["source"] == row["source"]
    assert set(d.hashes) == {"source", "artifact", "ptx", "verdict"}
    assert all(len(x) == 64 for x in d.hashes.values())
    assert approved(kit.queries, row) == d
    assert kit.queries.run(run)["state"] == "done"


def test_the_last_word_counts_and_the_same_word_twice_is_one(kit: Any) -> None:
    run = finished(kit)
    row = kit.queries.candidate(f"{run}-2")
    for kind, note in [
        ("approve", ""),
        ("approve", ""),
        ("reject", "it spins"),
        ("reject", "it spins"),
    ]:
        decide(kit.place, row, kind, (note, WHO))
    assert [d.kind for d in decisions(kit.queries, run)] == ["approve", "reject"]
    assert approved(kit.queries, row) is None
    last = standing(kit.queries, row)
    assert last is not None and last.kind == "reject"


def test_an_approval_does_not_stand_for_another_artifact(kit: Any) -> None:
    run = finished(kit)
    row = kit.queries.candidate(f"{run}-2")
    decide(kit.place, row, "approve", ("", WHO))
    assert approved(kit.queries, {**row, "artifact": "0" * 64}) is None
    assert approved(kit.queries, {**row, "blob": "0" * 64}) is not None


def test_sent_back_the_comment_reaches_the_proposer_and_one_more_round_is_run(kit: Any) -> None:
    run = finished(kit)
    row = kit.queries.candidate(f"{run}-2")
    done = decide(kit.place, row, "send_back", ("no spin loops,\nplease", WHO))
    assert (done.effect, kit.queries.run(run)["state"]) == ("answered", "waiting")
    proposer = Listening([kernel(80), kernel(70), kernel(60)])
    ended = kit.go(run, proposer)
    assert proposer.heard[-1] == "A reviewer sent back candidate 2: no spin loops, please"
    assert (ended.how, ended.stop, ended.incumbent) == ("review", "rounds", 3)
    assert [r["seq"] for r in kit.queries.candidates(run)] == [0, 1, 2, 3]


def test_a_run_that_has_ended_is_opened_again_by_sending_back(kit: Any) -> None:
    run = finished(kit)
    row = kit.queries.candidate(f"{run}-2")
    decide(kit.place, row, "approve", ("", WHO))
    done = decide(kit.place, row, "send_back", ("on second thought", WHO))
    assert done.effect == "reopened"
    assert kit.go(run, Listening([kernel(80), kernel(70), kernel(60)])).incumbent == 3


def test_a_decision_on_another_candidate_leaves_the_review_open(kit: Any) -> None:
    run = finished(kit)
    row = kit.queries.candidate(f"{run}-1")
    assert decide(kit.place, row, "reject", ("the older one", WHO)).effect == "recorded"
    assert kit.queries.run(run)["state"] == "review"


def test_another_process_decides(kit: Any) -> None:
    run = finished(kit)
    code = (
        "import sys, pathlib\n"
        "from agent.review.decide import decide\n"
        "from agent.store import Queries, Store\n"
        "from agent.workspace import Place\n"
        "place = Place(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
        "row = Queries(Store(place.db), place.workspace).candidate(sys.argv[3])\n"
        "print(decide(place, row, 'send_back', ('smaller', 'Bob')).effect)\n"
    )
    args = [sys.executable, "-c", code, str(kit.place.db), str(kit.place.out), f"{run}-2"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "answered", done.stderr
    assert kit.go(run, Listening([kernel(80), kernel(70), kernel(60)])).incumbent == 3


def test_a_busy_run_takes_the_note_without_waiting(kit: Any) -> None:
    from agent.locks import hold

    run = finished(kit)
    with hold(kit.place.workspace.run(run)):
        row = kit.queries.candidate(f"{run}-2")
        assert decide(kit.place, row, "send_back", ("later", WHO)).effect == "busy"
    assert len(decisions(kit.queries, run)) == 1


@pytest.mark.parametrize(
    ("seq", "kind", "note", "words"),
    [
        (1, "approve", "", "status is wrong"),
        (2, "reject", " ", "needs a note"),
        (2, "send_back", "", "needs a note"),
        (2, "bless", "x", "no decision"),
        (2, "reject", "x" * 9000, "more than"),
    ],
)
def test_what_is_refused_is_not_recorded(
    kit: Any, seq: int, kind: str, note: str, words: str
) -> None:
    run = finished(kit, [kernel(80, "wrong"), kernel(70)])
    with pytest.raises(Refused, match=words):
        decide(kit.place, kit.queries.candidate(f"{run}-{seq}"), kind, (note, WHO))
    assert decisions(kit.queries, run) == ()


def test_the_loops_own_decisions_are_not_a_persons(kit: Any) -> None:
    run = finished(kit)
    assert decisions(kit.queries, run) == ()
    assert {d["kind"] for d in kit.queries.decisions(run)} == {"promote"}


def test_who_comes_from_git_or_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    config = tmp_path / "config"
    config.write_text("[user]\n\tname = Ada\n\temail = ada@example.org\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    assert whoami() == WHO
    config.write_text("")
    monkeypatch.setenv("USER", "grace")
    assert whoami() == "grace"
    assert json.dumps(whoami())
