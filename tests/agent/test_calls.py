"""Recorded calls: paid once, retried in one place, budgets before the call, typed failures with their reactions."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from agent.budget import Ledger, spent_before
from agent.models.base import (
    AuthError,
    Completion,
    CreditError,
    Estimate,
    ModelError,
    OverloadError,
    Prompt,
    RateError,
    RefusalError,
    StopRun,
    TruncationError,
    Usage,
    Waiting,
)
from agent.models.calls import ATTEMPTS, Clerk, Gate
from agent.models.scripted import ScriptedModel
from agent.models.wire import WireLog
from agent.search import Limits, Spent
from agent.workspace import Workspace

PROMPT = Prompt("propose", "stable", "body", max_output_tokens=100)


class Desk:
    """A clerk over a scripted model, with the waits it asked for."""

    def __init__(self, tmp: Path, answers: list[str | ModelError], **limits: float) -> None:
        self.model = ScriptedModel({"propose": answers})
        self.waits: list[float] = []
        self.files = Workspace(tmp).run("r")
        self.ledger = Ledger(Limits(**limits))  # type: ignore[arg-type]
        self.time = 0.0
        self.clerk = Clerk(
            self.model, Workspace(tmp), self.files, self.ledger, self._sleep, lambda: "now",
            Gate(lambda: self.time),
        )  # fmt: skip

    def _sleep(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.time += seconds
        return False


def test_a_finished_call_is_answered_from_disk(tmp_path: Path) -> None:
    first = Desk(tmp_path, ["answer"])
    assert first.clerk.scope("candidate-1").complete(PROMPT).text == "answer"
    again = Desk(tmp_path, ["another"])
    found = again.clerk.scope("candidate-1").complete(PROMPT)
    assert (found.text, found.cost, again.model.prompts) == ("answer", 0.01, [])
    assert spent_before(again.files, 60).usd == 0.01


def test_another_prompt_or_number_is_a_new_call(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ["a", "b", "c"])
    scope = desk.clerk.scope("s")
    assert [scope.complete(PROMPT).text, scope.complete(PROMPT).text] == ["a", "b"]
    other = Prompt("propose", "stable", "other")
    assert desk.clerk.scope("s").complete(other).text == "c"


def test_a_rate_limit_waits_as_long_as_the_provider_says(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [RateError("slow down", 7.0), OverloadError("busy"), "answer"])
    assert desk.clerk.scope("s").complete(PROMPT).text == "answer"
    assert desk.waits == pytest.approx([7.0, 2.0 * 2])


def test_an_overloaded_provider_is_given_up_after_a_while(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [OverloadError("busy")])
    with pytest.raises(OverloadError):
        desk.clerk.scope("s").complete(PROMPT)
    assert len(desk.model.prompts) == ATTEMPTS


@pytest.mark.parametrize(
    ("error", "reason"), [(CreditError("balance"), "credit"), (AuthError("401"), "auth")]
)
def test_credit_and_key_stop_the_run(tmp_path: Path, error: ModelError, reason: str) -> None:
    desk = Desk(tmp_path, [error])
    with pytest.raises(StopRun) as stop:
        desk.clerk.scope("s").complete(PROMPT)
    assert stop.value.reason == reason
    assert desk.waits == []


def test_a_truncated_answer_is_paid_and_fails_the_same_way_on_resume(tmp_path: Path) -> None:
    partial = Completion("half", Usage(10, 20), 0.5, "m")
    desk = Desk(tmp_path, [TruncationError("cut", partial)])
    with pytest.raises(TruncationError):
        desk.clerk.scope("s").complete(PROMPT)
    assert desk.ledger.spent.usd == 0.5
    again = Desk(tmp_path, ["never asked"])
    with pytest.raises(TruncationError) as found:
        again.clerk.scope("s").complete(PROMPT)
    assert found.value.partial is not None and found.value.partial.text == "half"
    assert again.model.prompts == []


def test_a_refusal_without_usage_leaves_no_call(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [RefusalError("no")])
    with pytest.raises(RefusalError):
        desk.clerk.scope("s").complete(PROMPT)
    assert list(desk.files.calls()) == []


def test_stopping_between_two_attempts_is_no_failure_and_is_asked_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [OverloadError("busy"), "answer"])
    impatient = replace(desk.clerk, sleep=lambda seconds: True)
    with pytest.raises(Waiting, match="busy"):
        impatient.scope("s").complete(PROMPT)
    assert list(desk.files.calls()) == []
    assert desk.clerk.scope("s").complete(PROMPT).text == "answer"


def test_a_call_that_would_break_the_budget_is_not_made(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ["answer"], usd=0.015)
    scope = desk.clerk.scope("s")
    scope.complete(PROMPT)
    with pytest.raises(StopRun) as stop:
        scope.complete(PROMPT)
    assert stop.value.reason == "usd"
    assert len(desk.model.prompts) == 1


def test_calls_in_flight_count_against_the_budget() -> None:
    ledger = Ledger(Limits(usd=1.0))
    with ledger.reserve(Spent(usd=0.7)) as use:
        with pytest.raises(StopRun), ledger.reserve(Spent(usd=0.4)):
            pass
        use(Spent(usd=0.1))
    with ledger.reserve(Spent(usd=0.4)):
        pass
    assert ledger.spent.usd == pytest.approx(0.1)


def test_the_clock_ends_a_run_across_sessions() -> None:
    seconds = [0.0]
    ledger = Ledger(Limits(minutes=2.0), Spent(minutes=1.0), clock=lambda: seconds[0])
    ledger.check()
    seconds[0] = 61.0
    with pytest.raises(StopRun):
        ledger.check()


def test_one_rate_limit_holds_back_every_call_of_the_run(tmp_path: Path) -> None:
    """Six calls at once, the first is told to slow down: nobody asks until then, then one by one."""
    desk = Desk(tmp_path, [])
    seen: list[tuple[float, int]] = []
    flying = [0]
    lock = threading.Lock()

    class Busy:
        name = "busy"

        def complete(self, prompt: Prompt, schema: object = None) -> Completion:
            with lock:
                first = not seen
                flying[0] += 1
                seen.append((desk.time, flying[0]))
            time.sleep(0.02)
            with lock:
                flying[0] -= 1
            if first:
                raise RateError("slow down", 30.0)
            return Completion("answer", Usage(1, 1), 0.0, "busy")

        def estimate(self, prompt: Prompt) -> Estimate:
            return Estimate(10, 0.0)

    clerk = replace(desk.clerk, model=Busy())
    with pytest.raises(Waiting):
        replace(clerk, sleep=lambda s: True).scope("first").complete(PROMPT)
    assert clerk.gate.left() == 30.0
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(clerk.scope(f"s{i}").complete, PROMPT) for i in range(6)]
        assert [a.result().text for a in asked] == ["answer"] * 6
    after = seen[1:]
    assert all(when >= 30.0 for when, _ in after)  # held back until the provider was ready
    assert after[0][1] == 1 and not clerk.gate.narrow


def test_a_budget_counts_what_a_killed_session_had_in_flight(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ["answer"])
    question = {
        "scope": "s", "n": 0, "attempt": 0, "role": "propose", "model": "m", "prompt": PROMPT.sha256,
        "prompt_blob": "p", "key": "k", "tokens": 110, "answer_tokens": 100, "cost": 0.75,
        "date": "now",
    }  # fmt: skip
    WireLog.begin(desk.files.attempt("s", 0, 0).with_suffix(".log"), question)
    assert spent_before(desk.files, 0).usd == 0.75
    with pytest.raises(StopRun):
        Ledger(Limits(usd=0.7), spent_before(desk.files, 0)).check()
    desk.clerk.sweep()
    assert spent_before(desk.files, 0) == Spent(usd=0.75, tokens=110)
    (row,) = desk.files.calls()
    assert row["error"].startswith("Lost:") and row["estimated"]
