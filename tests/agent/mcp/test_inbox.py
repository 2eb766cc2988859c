"""Submissions on disk: order, repetition, a kill at each point of being taken, files of others."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.fakes import kernel
from agent.models import inbox
from agent.models.base import NoProposal
from agent.models.external import offer
from agent.models.inbox import Offer
from agent.search import Limits
from tests.agent.test_external import external

LIMITS = Limits(rounds=None, candidates=9, stop_at=None, patience=None)


def never(seq: int) -> bool:
    return False


def test_submissions_are_taken_in_order_each_once(tmp_path: Path) -> None:
    first = inbox.submit(tmp_path, Offer("a = 1"), never)
    second = inbox.submit(tmp_path, Offer("a = 2"), never)
    assert (first.ahead, second.ahead) == (0, 1)
    assert inbox.submit(tmp_path, Offer("a = 1"), never) == first
    assert inbox.claim(tmp_path, 1)
    assert (tmp_path / "taken" / "1.py").read_text() == "a = 1"
    assert inbox.find(tmp_path, first.ticket) == inbox.Place(first.ticket, 1)
    assert inbox.find(tmp_path, second.ticket) == inbox.Place(second.ticket, None, 0)
    assert inbox.claim(tmp_path, 2)
    assert not inbox.claim(tmp_path, 3)
    assert inbox.taken(tmp_path) == {1: first.ticket, 2: second.ticket}
    assert inbox.submit(tmp_path, Offer("a = 1"), never).seq == 1


def test_what_the_machine_spoiled_may_be_handed_in_again(tmp_path: Path) -> None:
    first = inbox.submit(tmp_path, Offer("a = 1"), never)
    inbox.claim(tmp_path, 1)
    again = inbox.submit(tmp_path, Offer("a = 1"), lambda seq: seq == 1)
    assert again.ticket != first.ticket
    assert again.seq is None
    other = inbox.submit(tmp_path, Offer("a = 1", tunables={"n": 2}), never)
    assert other.ticket not in (first.ticket, again.ticket)


@pytest.mark.parametrize("left", ["nothing", "claims"])
def test_a_kill_after_the_rename_binds_the_submission_to_its_number(
    tmp_path: Path, left: str
) -> None:
    sent = inbox.submit(tmp_path, Offer("a = 1", "why", 1.5, {"n": 2}, "ann"), never)
    inbox.submit(tmp_path, Offer("a = 2"), never)
    inbox.claim(tmp_path, 4)
    (tmp_path / "taken" / "4.py").unlink()
    if left == "nothing":
        (tmp_path / "taken" / "4.json").unlink()
    assert inbox.claim(tmp_path, 4)
    assert (tmp_path / "taken" / "4.py").read_text() == "a = 1"
    claims = json.loads((tmp_path / "taken" / "4.json").read_text())
    assert claims == {"note": "[ann] why", "predicted_gain": 1.5, "tunables": {"n": 2}}
    assert inbox.find(tmp_path, sent.ticket) == inbox.Place(sent.ticket, 4)
    assert len(inbox.waiting(tmp_path)) == 1


def test_a_file_that_lay_there_first_goes_first(kit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "outside"
    run = kit.new(proposer="external", limits=LIMITS)
    kit.go(run, external(kit, folder))
    os.utime(offer(folder, kernel(90)), (1, 1))
    inbox.submit(folder, Offer(kernel(80)), never)
    kit.go(run, external(kit, folder))
    assert [row["us"] for row in kit.queries.candidates(run)] == [100.0, 90.0, 80.0]


def test_a_run_that_waits_takes_what_is_submitted_later(kit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "outside"
    run = kit.new(proposer="external", limits=replace(LIMITS, candidates=1))
    timer = threading.Timer(0.5, inbox.submit, (folder, Offer(kernel(80)), never))
    timer.start()
    ended = kit.go(run, external(kit, folder, wait=True))
    timer.join()
    assert (ended.stop, ended.incumbent) == ("candidates", 1)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"source": 3, "note": "", "author": "", "predicted_gain": 1, "tunables": {}}']
)  # fmt: skip
def test_garbage_in_the_queue_costs_one_candidate(kit: Any, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "outside"
    (folder / "queue").mkdir(parents=True)
    (folder / "queue" / "1-garbage-0.json").write_text(text)
    with pytest.raises(NoProposal):
        inbox.claim(folder, 1)
    run = kit.new(proposer="external", limits=LIMITS)
    inbox.submit(folder, Offer(kernel(80)), never)
    kit.go(run, external(kit, folder))
    assert [r["status"] for r in kit.queries.candidates(run)] == ["passed", "rejected", "passed"]
