"""The loop over a scripted language model: complaints, refusals, truncation, credit, and what is recorded of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.book import Book
from agent.fakes import kernel
from agent.models.base import (
    Completion,
    ContextError,
    CreditError,
    ModelError,
    OverloadError,
    RateError,
    RefusalError,
    TruncationError,
    Usage,
)
from agent.models.llm import ModelProposer
from agent.models.scripted import ScriptedModel
from agent.search import Limits
from agent.summary import exit_code, summarise

PLAN = json.dumps(
    {"directions": [{"title": "fuse", "detail": "d", "predicted_gain": 1.2, "parent": 0}]}
)
LESSONS = json.dumps({"lessons": ["fusing helps"]})


def answer(us: float) -> str:
    return f"Fused.\n```python\n{kernel(us)}```\nPredicted gain: 1.3"


def go(kit: Any, script: dict[str, list[str | ModelError]], rounds: int = 1, **changes: Any) -> Any:
    full: dict[str, Any] = {"plan": [PLAN], "reflect": [LESSONS], "repair": [answer(90)], **script}
    model = ScriptedModel(full)
    run = kit.new(
        proposer="openai", model="scripted",
        limits=changes.pop("limits", Limits(rounds=rounds, stop_at=None)), **changes,
    )  # fmt: skip
    ended = kit.go(run, ModelProposer("openai", Book()), model)
    return ended, model, kit.queries.candidates(run)


def test_plan_proposal_and_lessons_are_asked_recorded_and_priced(kit: Any) -> None:
    ended, model, rows = go(kit, {"propose": [answer(80)]})
    assert (rows[1]["direction"], rows[1]["predicted_gain"], ended.incumbent) == ("fuse", 1.3, 1)
    calls = kit.queries.calls(ended.run)
    assert [(c["scope"], c["role"]) for c in calls] == [
        ("candidate-1", "propose"), ("plan-1", "plan"), ("reflect-1", "reflect"),
    ]  # fmt: skip
    assert sum(c["cost"] for c in calls) == 0.03
    shown, said = kit.queries.lessons(ended.run)
    assert said == "fusing helps"
    assert (
        shown.startswith("[fusion] fuse (fake, ")
        and "predicted 1.300x, the prediction missed" in shown
    )
    assert model.prompts[0].stable == model.prompts[1].stable


def test_an_unreadable_answer_gets_one_complaint(kit: Any) -> None:
    _, model, rows = go(kit, {"propose": ["no code here", answer(80)]})
    assert rows[1]["outcome"] == "better"
    assert [t.role for t in model.prompts[2].turns] == ["assistant", "user"]


def test_twice_unreadable_is_a_rejected_candidate_and_the_run_goes_on(kit: Any) -> None:
    ended, _, rows = go(kit, {"propose": ["no", "no", answer(80)]}, rounds=2)
    assert [r["status"] for r in rows] == ["passed", "rejected", "passed"]
    assert ended.incumbent == 2


def test_a_refusal_voids_the_proposal_only(kit: Any) -> None:
    _, _, rows = go(kit, {"propose": [RefusalError("no"), answer(80)]}, rounds=2)
    assert rows[1]["message"].startswith("the model declined")
    assert rows[2]["outcome"] == "better"


def test_a_truncated_answer_is_asked_again_shorter(kit: Any) -> None:
    _, model, rows = go(kit, {"propose": [TruncationError("cut"), answer(80)]})
    assert rows[1]["outcome"] == "better"
    assert "shorter" in model.prompts[2].turns[-1].text


def test_an_overlong_prompt_is_asked_with_less_history(kit: Any) -> None:
    _, model, rows = go(kit, {"propose": [answer(90), ContextError("long"), answer(80)]}, rounds=2)
    assert rows[2]["outcome"] == "better"
    proposals = [p for p in model.prompts if p.role == "propose"]
    assert len(proposals) == 3
    assert len(proposals[2].body) < len(proposals[1].body)


def test_a_prompt_that_cannot_be_made_shorter_is_not_asked_again(kit: Any) -> None:
    _, model, rows = go(kit, {"propose": [answer(90), *[ContextError("long")] * 9]}, rounds=2, k=1)
    assert (rows[2]["status"], "too long" in rows[2]["message"]) == ("rejected", True) or (
        "cannot be made shorter" in rows[2]["message"]
    )
    assert len([p for p in model.prompts if p.role == "propose"]) <= 3


def test_spent_credit_ends_the_run_with_what_there_is(kit: Any) -> None:
    ended, _, rows = go(kit, {"propose": [answer(80), CreditError("balance")]}, rounds=5)
    assert (ended.stop, ended.incumbent) == ("credit", 1)
    assert rows[2]["status"] == "cancelled"
    assert list((kit.place.out / "fake" / "cpu").iterdir())


def test_a_provider_that_stays_overloaded_is_infra_and_stops_after_three(kit: Any) -> None:
    run = kit.new(proposer="openai", limits=Limits(rounds=9, stop_at=None, patience=None))
    busy: dict[str, Any] = {
        "plan": [PLAN], "reflect": [LESSONS], "propose": [OverloadError("busy", 2000.0)]
    }  # fmt: skip
    ended = kit.go(run, ModelProposer("openai", Book()), ScriptedModel(busy))
    assert ended.stop == "infra"
    assert [r["status"] for r in kit.queries.candidates(run)[1:]] == ["infra"] * 3


def test_a_dollar_budget_ends_the_run_and_a_larger_one_lets_it_go_on(kit: Any) -> None:
    from agent.runner import load_settings, save_settings, with_limits

    ended, model, rows = go(
        kit, {"propose": [answer(80), answer(70)]}, limits=Limits(rounds=3, usd=0.025, stop_at=None)
    )
    assert (ended.stop, len(rows)) == ("usd", 2)
    settings = with_limits(load_settings(kit.place, ended.run), usd=1.0)
    save_settings(kit.place, ended.run, settings)
    again = kit.go(ended.run, ModelProposer("openai", Book()), model)
    assert (again.stop, again.incumbent) == ("rounds", 2)
    assert len(kit.queries.candidates(ended.run)) == 4


def test_a_repair_sees_the_failure_and_its_source_becomes_the_candidates(kit: Any) -> None:
    broken = f"```python\n{kernel(90, 'compile_error')}```"
    _, model, rows = go(kit, {"propose": [broken], "repair": [answer(75)]})
    assert rows[1]["us"] == 75
    repair = next(p for p in model.prompts if p.role == "repair")
    assert "ends as compile_error" in repair.body


def test_a_provider_out_of_reach_stops_the_run_which_can_go_on(kit: Any) -> None:
    gone = OverloadError("no answer: connection refused", 5000.0)
    ended, _, rows = go(kit, {"plan": [gone]})
    assert (ended.stop, len(rows)) == ("provider", 1)
    assert exit_code(ended, interrupted=False) == 3
    assert any("connection refused" in line for line in kit.reporter.lines)
    assert kit.queries.run(ended.run)["state"] == "spent"
    model = ScriptedModel({"plan": [PLAN], "propose": [answer(80)], "reflect": [LESSONS]})
    again = kit.go(ended.run, ModelProposer("openai", Book()), model)
    assert again.incumbent == 1


def test_what_failed_and_retried_attempts_cost_is_in_the_record_and_the_summary(kit: Any) -> None:
    """A stream that broke, a truncation and a refusal were all paid for; a 429 was not."""
    broken = OverloadError("broke off", 0.0, Completion("ha", Usage(100, 2), 0.25, "m"))
    cut = TruncationError("cut", Completion("half", Usage(100, 50), 0.5, "m"))
    refused = RefusalError("no", Completion("I can't", Usage(100, 3), 0.125, "m"))
    script = {"propose": [broken, RateError("slow down", 0.0), cut, answer(80), refused]}
    ended, model, rows = go(kit, script, rounds=2, k=1)
    assert ended.incumbent == 1 and rows[2]["message"].startswith("the model declined")
    failed = [c for c in kit.queries.calls(ended.run) if c["error"]]
    found = {
        c["error"].partition(":")[0]: (c["input_tokens"], c["output_tokens"], c["cost"])
        for c in failed
    }
    assert found == {
        "OverloadError": (100, 2, 0.25), "TruncationError": (100, 50, 0.5),
        "RefusalError": (100, 3, 0.125),
    }  # fmt: skip
    told = summarise(kit.place, ended, kit.settings())
    assert told.data["spent"]["failed"] == {"attempts": 3, "tokens": 355, "usd": 0.875}
    assert told.data["spent"]["lost"]["attempts"] == 0
    priced = 0.01 * (len(model.prompts) - 4)
    assert told.data["spent"]["usd"] == pytest.approx(0.875 + priced)
    assert "of these 3 model calls answered nothing of use: 355 tokens, $0.88" in told.text
