"""The provider adapters against a local server that speaks their protocols over real HTTP."""

from __future__ import annotations

from collections.abc import Callable

import anthropic
import openai
import pytest

from agent.models import base
from agent.models.anthropic import AnthropicModel
from agent.models.openai import OpenAIModel
from tests.agent.models.provider_server import Answer, Server, broken, serve

PROMPT = base.Prompt("propose", "stable part", "body", max_output_tokens=500)
Make = Callable[..., base.Model]


def _anthropic(s: Server, timeout: float = 120.0) -> base.Model:
    client = anthropic.Anthropic(api_key="k", base_url=s.url, timeout=timeout)
    return AnthropicModel("claude-opus-5-5", client=client)


def _responses(s: Server, timeout: float = 120.0) -> base.Model:
    client = openai.OpenAI(api_key="k", base_url=s.url + "/v1", timeout=timeout)
    return OpenAIModel("gpt-5.5", client=client)


def _chat(s: Server, timeout: float = 120.0) -> base.Model:
    client = openai.OpenAI(api_key="k", base_url=s.url + "/v1", timeout=timeout)
    return OpenAIModel("local-model", api="chat", client=client)


ALL = pytest.mark.parametrize("make", [_anthropic, _responses, _chat])


@ALL
def test_a_streamed_answer_and_its_usage(make: Make) -> None:
    with serve(Answer("def step(): ...", cached=40)) as s:
        done = make(s).complete(PROMPT)
    assert done.text == "def step(): ..."
    assert (done.usage.input_tokens, done.usage.output_tokens) == (100, 7)
    assert done.usage.cache_read_tokens == 40
    priced = done.model != "local-model"
    assert (done.cost is not None and done.cost > 0) is priced


@ALL
def test_follow_up_turns_are_sent_in_order(make: Make) -> None:
    with serve(Answer("x")) as s:
        make(s).complete(PROMPT.then("first answer", "not a diff"))
    sent = s.requests[0].get("input") or s.requests[0]["messages"]
    users = [m for m in sent if m["role"] != "system"]
    assert [m["content"] for m in users] == ["body", "first answer", "not a diff"]


@ALL
def test_a_schema_reaches_the_provider(make: Make) -> None:
    with serve(Answer("{}")) as s:
        make(s).complete(PROMPT, {"type": "object", "properties": {"odd": {"type": "string"}}})
    assert '"odd"' in str(s.requests[0]).replace("'", '"')


@ALL
@pytest.mark.parametrize("header, seconds", [("2", 2.0), ("", None), ("99999", None)])
def test_429_is_a_rate_error_with_its_wait(make: Make, header: str, seconds: float | None) -> None:
    error = {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}
    headers = {"retry-after": header} if header else {}
    with serve(Answer(status=429, error=error, headers=headers)) as s:
        with pytest.raises(base.RateError) as caught:
            make(s).complete(PROMPT)
    assert caught.value.retry_after == seconds
    assert len(s.requests) == 1  # no retry of the SDK's own


@ALL
@pytest.mark.parametrize("status", [500, 503, 529])
def test_overload(make: Make, status: int) -> None:
    error = {"error": {"type": "overloaded_error", "message": "busy"}}
    with serve(Answer(status=status, error=error)) as s, pytest.raises(base.OverloadError):
        make(s).complete(PROMPT)


@ALL
@pytest.mark.parametrize(
    "status, kind", [(401, base.AuthError), (402, base.CreditError), (404, base.AuthError)]
)
def test_errors_that_no_retry_mends(make: Make, status: int, kind: type[Exception]) -> None:
    error = {"error": {"type": "e", "message": "no"}}
    with serve(Answer(status=status, error=error)) as s, pytest.raises(kind):
        make(s).complete(PROMPT)


def test_an_empty_balance_stops_whatever_its_status() -> None:
    quota = {
        "error": {"code": "insufficient_quota", "message": "quota", "type": "insufficient_quota"}
    }
    with serve(Answer(status=429, error=quota)) as s, pytest.raises(base.CreditError):
        _responses(s).complete(PROMPT)
    low = {"error": {"type": "invalid_request_error", "message": "Your credit balance is too low"}}
    with serve(Answer(status=400, error=low)) as s, pytest.raises(base.CreditError):
        _anthropic(s).complete(PROMPT)


def test_too_long_a_prompt_is_a_context_error() -> None:
    long = {"error": {"code": "context_length_exceeded", "message": "too long", "type": "x"}}
    with serve(Answer(status=400, error=long)) as s, pytest.raises(base.ContextError):
        _responses(s).complete(PROMPT)
    long = {"error": {"type": "invalid_request_error", "message": "prompt is too long: 1 > 0"}}
    with serve(Answer(status=400, error=long)) as s, pytest.raises(base.ContextError):
        _anthropic(s).complete(PROMPT)


@pytest.mark.parametrize(
    "make, end",
    [(_anthropic, "max_tokens"), (_responses, "max_output_tokens"), (_chat, "length")],
)
def test_a_truncated_answer_keeps_what_was_paid_for(make: Make, end: str) -> None:
    with serve(Answer("half of it", end=end)) as s, pytest.raises(base.TruncationError) as caught:
        make(s).complete(PROMPT)
    assert caught.value.partial is not None
    assert caught.value.partial.text == "half of it"
    assert caught.value.partial.usage.output_tokens == 7


@pytest.mark.parametrize(
    "make, end",
    [
        (_anthropic, "refusal"),
        (_responses, "refusal"),
        (_responses, "content_filter"),
        (_chat, "content_filter"),
    ],
)
def test_refusals(make: Make, end: str) -> None:
    with serve(Answer("I can't.", end=end)) as s, pytest.raises(base.RefusalError) as caught:
        make(s).complete(PROMPT)
    assert caught.value.partial is not None


@ALL
def test_a_stream_that_breaks_off_is_worth_another_attempt(make: Make) -> None:
    with serve(Answer("half", cut=True)) as s, pytest.raises(base.OverloadError):
        make(s).complete(PROMPT)


def test_errors_inside_a_stream() -> None:
    with serve(Answer("x", error={"type": "overloaded_error", "message": "busy"})) as s:
        with pytest.raises(base.OverloadError):
            _anthropic(s).complete(PROMPT)
    with serve(Answer("x", error={"code": "rate_limit_exceeded", "message": "slow"})) as s:
        with pytest.raises(base.RateError):
            _responses(s).complete(PROMPT)


@ALL
def test_a_time_out_is_worth_another_attempt(make: Make) -> None:
    with serve(Answer("late", delay=30.0)) as s, pytest.raises(base.OverloadError):
        make(s, timeout=0.5).complete(PROMPT)


def test_the_stable_part_is_marked_for_the_cache() -> None:
    with serve(Answer("x")) as s:
        _anthropic(s).complete(PROMPT)
    (block,) = s.requests[0]["system"]
    assert block["text"] == "stable part" and block["cache_control"] == {"type": "ephemeral"}
    with serve(Answer("x")) as s:
        _responses(s).complete(PROMPT)
    with serve(Answer("x")) as plan:
        _responses(plan).complete(base.Prompt("plan", "stable part", "other", max_output_tokens=9))
    assert s.requests[0]["instructions"] == plan.requests[0]["instructions"] == "stable part"
    assert s.requests[0]["prompt_cache_key"] == plan.requests[0]["prompt_cache_key"]
    assert s.requests[0]["store"] is True and s.requests[0]["background"] is True


def test_no_key_is_said_before_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(base.AuthError, match="OPENAI_API_KEY"):
        OpenAIModel("gpt-5.5")
    with pytest.raises(base.AuthError, match="ANTHROPIC_API_KEY"):
        AnthropicModel("claude-opus-5-5")


def test_a_local_server_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serve(Answer("hello")) as s:
        assert OpenAIModel("my-model", base_url=s.url + "/v1").complete(PROMPT).text == "hello"
    assert s.headers[0]["authorization"] == "Bearer local"


def test_an_estimate_bounds_the_bill() -> None:
    with serve(Answer("x")) as s:
        got = _anthropic(s).estimate(
            base.Prompt("propose", "a" * 32_000, "b" * 3_200, max_output_tokens=1000)
        )
    assert got.tokens == 11_001 + 1000
    assert got.cost is not None and got.cost > 0


@ALL
@pytest.mark.parametrize("body", [b": hello\n\n", b"event: message_start\ndata: {half\n\n"])
def test_a_connection_lost_or_garbled_within_the_stream_is_worth_another_attempt(
    make: Make, body: bytes
) -> None:
    with broken(body) as s, pytest.raises(base.OverloadError):
        make(s).complete(PROMPT)


def test_a_compatible_server_without_the_responses_api_is_asked_by_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    missing = Answer(status=404, error={"error": {"message": "Not Found"}})
    with serve(missing, Answer("one"), Answer("two"), missing, missing) as s:
        model = OpenAIModel("local-model", s.url + "/v1")
        assert [model.complete(PROMPT).text for _ in range(2)] == ["one", "two"]
        with pytest.raises(base.AuthError, match="HTTP 404"):
            OpenAIModel("no-such-model", s.url + "/v1").complete(PROMPT)
    paths = [r["path"].removeprefix("/v1/") for r in s.requests]
    assert paths == ["responses", *["chat/completions"] * 2, "responses", "chat/completions"]
