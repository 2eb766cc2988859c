"""Calls to both providers over real HTTP, killed with SIGKILL: while the answer streams, after its
last byte, and between any two of our own writes. The server counts what was asked.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agent.budget import Ledger, spent_before
from agent.models import leftovers
from agent.models.anthropic import AnthropicModel
from agent.models.base import Model, Prompt, TruncationError
from agent.models.calls import Clerk
from agent.models.openai import OpenAIModel
from agent.models.wire import WireLog
from agent.search import Limits
from agent.workspace import RunFiles, Workspace
from tests.agent.models.provider_server import Answer, Server, serve

PROMPT = Prompt("propose", "stable part", "body", max_output_tokens=500)
TEXT = "def step(): ..."
Make = Callable[[Server], Model]


def _anthropic(s: Server) -> Model:
    client = anthropic.Anthropic(api_key="k", base_url=s.url, timeout=120.0)
    return AnthropicModel("claude-opus-5-5", client=client)


def _responses(s: Server) -> Model:
    client = openai.OpenAI(api_key="k", base_url=s.url + "/v1", timeout=120.0)
    return OpenAIModel("gpt-5.5", client=client)


def _chat(s: Server) -> Model:
    client = openai.OpenAI(api_key="k", base_url=s.url + "/v1", timeout=120.0)
    return OpenAIModel("gpt-5.5", api="chat", client=client)


ALL = pytest.mark.parametrize("make", [_anthropic, _responses, _chat])


def files_of(folder: Path) -> RunFiles:
    return Workspace(folder).run("r")


def clerk(folder: Path, model: Model) -> Clerk:
    files = files_of(folder)
    ledger = Ledger(Limits(), spent_before(files, 0))

    def sleep(seconds: float) -> bool:
        time.sleep(min(seconds, 0.05))
        return False

    made = Clerk(model, Workspace(folder), files, ledger, sleep, lambda: "now")
    made.sweep()
    return made


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path, model: Model, when: Callable[[], None] | None, s: Server) -> None:
    """A child that makes the call and is killed: by itself where `when` says, else while it waits."""

    def work() -> None:
        if when is not None:
            when()
        clerk(folder, model).scope("c").complete(PROMPT)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    if when is None:
        assert s.sent.wait(120)
        until(lambda: len(log_of(folder).events) > 0)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def log_of(folder: Path) -> WireLog:
    (path,) = files_of(folder).wires()
    found = WireLog.read(path)
    assert found is not None
    return found


def rows_of(folder: Path) -> list[tuple[str | None, int, bool]]:
    """Each row on disk: error class, tokens, estimated."""
    return [
        (
            r["error"] and r["error"].partition(":")[0],
            r["input_tokens"] + r["output_tokens"], r["estimated"],
        )
        for r in files_of(folder).calls()
    ]  # fmt: skip


def before_the_end_is_written() -> None:
    WireLog.finish = die  # type: ignore[method-assign]


def before_the_answer_has_its_name() -> None:
    leftovers.write_json = die  # type: ignore[attr-defined]


def before_the_log_is_removed() -> None:
    WireLog.remove = die  # type: ignore[method-assign]


@ALL
@pytest.mark.parametrize(
    "when", [before_the_end_is_written, before_the_answer_has_its_name, before_the_log_is_removed]
)
def test_an_answer_that_came_whole_is_never_asked_for_again(
    tmp_path: Path, make: Make, when: Callable[[], None]
) -> None:
    with serve(Answer(TEXT), Answer("paid twice")) as s:
        killed(tmp_path, make(s), when, s)
        again = clerk(tmp_path, make(s))
        assert again.scope("c").complete(PROMPT).text == TEXT
    assert (len(s.requests), s.fetches) == (1, [])
    assert rows_of(tmp_path) == [(None, 107, False)]
    assert again.ledger.spent.tokens == 107
    assert files_of(tmp_path).wires() == []


def test_a_failure_that_came_whole_fails_the_same_way_unasked(tmp_path: Path) -> None:
    with serve(Answer("half", end="max_tokens"), Answer("paid twice")) as s:
        killed(tmp_path, _anthropic(s), before_the_end_is_written, s)
        with pytest.raises(TruncationError):
            clerk(tmp_path, _anthropic(s)).scope("c").complete(PROMPT)
    assert len(s.requests) == 1
    assert rows_of(tmp_path) == [("TruncationError", 107, False)]


def test_openai_killed_while_streaming_fetches_the_answer_by_its_id(tmp_path: Path) -> None:
    slow = Answer(TEXT, hang_after=2, fetched=["in_progress", "in_progress"])
    with serve(slow, Answer("paid twice")) as s:
        killed(tmp_path, _responses(s), None, s)
        again = clerk(tmp_path, _responses(s))
        assert again.ledger.spent.tokens > 107  # its estimate, until it is known
        assert again.scope("c").complete(PROMPT).text == TEXT
    assert (len(s.requests), s.fetches) == (1, ["resp_1"] * 3)
    assert rows_of(tmp_path) == [(None, 107, False)]
    assert again.ledger.spent.tokens == 107


def test_killed_again_while_fetching_it_is_fetched_again(tmp_path: Path) -> None:
    with serve(Answer(TEXT, hang_after=2), Answer("paid twice")) as s:
        killed(tmp_path, _responses(s), None, s)
        killed(tmp_path, _responses(s), before_the_end_is_written, s)
        assert clerk(tmp_path, _responses(s)).scope("c").complete(PROMPT).text == TEXT
    assert len(s.requests) == 1
    assert rows_of(tmp_path) == [(None, 107, False)]


def test_a_response_that_the_provider_no_longer_has_is_lost_and_charged(tmp_path: Path) -> None:
    with serve(Answer(TEXT, hang_after=2), Answer(TEXT)) as s:
        killed(tmp_path, _responses(s), None, s)
        s.kept.clear()
        again = clerk(tmp_path, _responses(s))
        assert again.scope("c").complete(PROMPT).text == TEXT
    assert len(s.requests) == 2
    assert [r[0] for r in rows_of(tmp_path)] == ["Lost", None]
    bound = _responses(s).estimate(PROMPT).tokens
    assert again.ledger.spent.tokens == bound + 107


@pytest.mark.parametrize("make", [_anthropic, _chat])
def test_killed_while_streaming_what_cannot_be_fetched_is_charged_at_its_estimate(
    tmp_path: Path, make: Make
) -> None:
    with serve(Answer(TEXT, hang_after=1), Answer(TEXT)) as s:
        killed(tmp_path, make(s), None, s)
        again = clerk(tmp_path, make(s))
        assert again.scope("c").complete(PROMPT).text == TEXT
        estimate = make(s).estimate(PROMPT)
    first, second = s.headers
    assert first["idempotency-key"] == second["idempotency-key"]  # for gateways that know it
    assert rows_of(tmp_path) == [("Lost", estimate.tokens, True), (None, 107, False)]
    assert again.ledger.spent.tokens == estimate.tokens + 107
    costs = [r["cost"] for r in files_of(tmp_path).calls()]
    assert costs[0] == estimate.cost and again.ledger.spent.usd == pytest.approx(sum(costs))


def test_a_stream_that_breaks_is_fetched_instead_of_paid_again(tmp_path: Path) -> None:
    with serve(Answer(TEXT, cut=True), Answer("paid twice")) as s:
        asked = clerk(tmp_path, _responses(s))
        assert asked.scope("c").complete(PROMPT).text == TEXT
    assert (len(s.requests), s.fetches) == (1, ["resp_1"])
    assert asked.ledger.spent.tokens == 107


@pytest.mark.parametrize("make", [_anthropic, _chat])
def test_what_a_broken_stream_cost_is_recorded_beside_the_answer(
    tmp_path: Path, make: Make
) -> None:
    with serve(Answer("x" * 64, cut=True), Answer(TEXT)) as s:
        asked = clerk(tmp_path, make(s))
        assert asked.scope("c").complete(PROMPT).text == TEXT
    assert len({h["idempotency-key"] for h in s.headers}) == 2
    (error, tokens, estimated), last = rows_of(tmp_path)
    assert (error, estimated, last) == ("OverloadError", True, (None, 107, False))
    assert tokens >= 64 / 3.2
    assert asked.ledger.spent.tokens == tokens + 107


def test_a_power_cut_within_a_line_costs_that_line_alone(tmp_path: Path) -> None:
    with serve(Answer(TEXT), Answer("paid twice")) as s:
        killed(tmp_path, _anthropic(s), before_the_end_is_written, s)
        (path,) = files_of(tmp_path).wires()
        path.write_bytes(path.read_bytes()[:-9])  # within message_stop: the answer itself is whole
        assert clerk(tmp_path, _anthropic(s)).scope("c").complete(PROMPT).text == TEXT
        assert len(s.requests) == 1


def test_an_organisation_whose_responses_are_not_kept_is_served_all_the_same(
    tmp_path: Path,
) -> None:
    message = "background mode is not available with zero data retention"
    refused = Answer(status=400, error={"error": {"message": message, "type": "x"}})
    with serve(refused, Answer(TEXT)) as s:
        assert clerk(tmp_path, _responses(s)).scope("c").complete(PROMPT).text == TEXT
    assert [r["store"] for r in s.requests] == [True, False]
