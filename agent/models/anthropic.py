"""Anthropic and compatible servers: the Messages API, streamed, the stable part of the prompt
cached.

One attempt a call, no retries here. This API hands out an answer once and honours no request name:
what a kill cuts off is lost, unless all of it had arrived. The key comes from ANTHROPIC_API_KEY (or
ANTHROPIC_AUTH_TOKEN) and is never stored. The constructor checks for it, since the SDK would fail
only at the first call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anthropic
import httpx2

from agent.models import pricing
from agent.models.base import (
    AuthError,
    Completion,
    ContextError,
    CreditError,
    ModelError,
    OverloadError,
    Prompt,
    RateError,
    RefusalError,
    Schema,
    TruncationError,
    Usage,
)
from agent.models.keys import hidden
from agent.models.provider import Provider, named, retry_after
from agent.models.wire import Event, Wire

_CREDIT = ("credit balance", "spend limit", "billing")
_CONTEXT = ("prompt is too long", "context window", "exceed context limit")


class AnthropicModel(Provider):
    """`base_url` None means ANTHROPIC_BASE_URL or the public API. Raises AuthError without a key
    for the latter.
    """

    provider = "anthropic"
    # the SDK lets the last two pass
    failures = (anthropic.APIError, httpx2.HTTPError, json.JSONDecodeError)

    def __init__(
        self, name: str, base_url: str | None = None, client: anthropic.Anthropic | None = None
    ) -> None:
        super().__init__(name)
        if client is None:
            base_url = base_url or os.environ.get("ANTHROPIC_BASE_URL")
            token = os.environ.get("ANTHROPIC_AUTH_TOKEN")
            key = os.environ.get("ANTHROPIC_API_KEY")
            if not key and not token and not base_url:
                raise AuthError("ANTHROPIC_API_KEY is not set")
            client = anthropic.Anthropic(
                api_key=key or ("local" if not token else None),
                auth_token=token,
                base_url=base_url,
                max_retries=0,
            )
        self._client = client.with_options(max_retries=0)

    def settle(self, prompt: Prompt, events: Sequence[Event]) -> Completion | None:
        """As `Streamed.settle`."""
        text, usage, reason = read(events)
        if not reason:
            return None
        done = self.completion(text, usage)
        if reason == "max_tokens":
            limit = prompt.max_output_tokens
            raise TruncationError(f"the answer hit its limit of {limit} tokens", done)
        if reason == "refusal":
            raise RefusalError(f"{self.name} declined: {text[:200]}", done)
        if reason == "model_context_window_exceeded":
            raise ContextError("prompt and answer exceed the context window", done)
        if reason not in ("end_turn", "stop_sequence"):
            raise OverloadError(f"the stream ended with {reason!r}", None, done)
        return done

    def fetchable(self, events: Sequence[Event]) -> bool:
        """Never: the Messages API hands out an answer once."""
        return False

    def fetch(self, prompt: Prompt, wire: Wire, events: Sequence[Event]) -> Completion | None:
        return None

    def typed(self, error: Exception) -> ModelError:
        if isinstance(error, anthropic.APIError):
            return _typed(error)
        return OverloadError(f"the stream broke off: {error}")

    def used(self, prompt: Prompt, events: Sequence[Event]) -> tuple[str, Usage, bool]:
        """The prompt as the first event says, the answer by length."""
        text, said, _ = read(events)
        guessed = pricing.guess(prompt, text)
        usage = replace(
            said if said.input_tokens else guessed,
            output_tokens=max(said.output_tokens, guessed.output_tokens),
        )
        return text, usage, True

    def call(self, prompt: Prompt, schema: Schema | None, wire: Wire, events: list[Event]) -> None:
        turns: list[Any] = [{"role": "user", "content": prompt.body}]
        turns += [{"role": t.role, "content": t.text} for t in prompt.turns]
        extra: dict[str, Any] = {}
        if schema is not None:
            extra["output_config"] = {"format": {"type": "json_schema", "schema": dict(schema)}}
        cached = {"type": "text", "text": prompt.stable, "cache_control": {"type": "ephemeral"}}
        system: list[Any] = [cached]
        stream = self._client.messages.create(
            model=self.name,
            max_tokens=prompt.max_output_tokens,
            system=system,
            messages=turns,
            stream=True,
            extra_headers=named(wire.key),
            **extra,
        )
        with stream:
            for item in stream:
                event = item.to_dict(mode="json")
                kind = event.get("type")
                wire.event(event, flush=kind in ("message_start", "message_delta"))
                events.append(event)
                if kind == "message_stop":
                    return


def read(events: Sequence[Event]) -> tuple[str, Usage, str]:
    """Text, usage and the stop reason, '' while there is none: of a live stream or a log."""
    pieces: list[str] = []
    usage, reason = Usage(), ""
    for event in events:
        kind = event.get("type")
        if kind == "message_start":
            usage = _usage(event["message"]["usage"])
        elif kind == "content_block_start":
            pieces.append(event["content_block"].get("text") or "")
        elif kind == "content_block_delta":
            pieces.append(event["delta"].get("text") or "")
        elif kind == "message_delta":
            said = event.get("usage") or {}
            usage = replace(usage, output_tokens=said.get("output_tokens") or usage.output_tokens)
            reason = event["delta"].get("stop_reason") or reason
    return "".join(pieces), usage, reason


def _usage(raw: Mapping[str, Any]) -> Usage:
    """The API's input count leaves cached tokens out; ours includes them."""
    read = raw.get("cache_read_input_tokens") or 0
    written = raw.get("cache_creation_input_tokens") or 0
    return Usage(raw["input_tokens"] + read + written, raw["output_tokens"], read, written)


def _typed(error: anthropic.APIError) -> ModelError:
    text = str(hidden(str(error.message)))[:500]
    low = text.lower()
    if isinstance(error, anthropic.APIConnectionError):  # includes time-outs
        return OverloadError(f"no answer: {text}")
    if not isinstance(error, anthropic.APIStatusError):
        return OverloadError(text)
    status = error.status_code
    # An error event inside a stream arrives with the status of the stream, 200: its type decides.
    kind = _kind(error.body)
    if status == 402 or kind == "billing_error" or any(w in low for w in _CREDIT):
        return CreditError(text)
    if status == 429 or kind == "rate_limit_error":
        return RateError(text, retry_after(error.response.headers))
    if status == 413 or any(w in low for w in _CONTEXT):
        return ContextError(text)
    if status >= 500 or status in (200, 408) or kind in ("overloaded_error", "api_error"):
        return OverloadError(text, retry_after(error.response.headers))
    return AuthError(f"HTTP {status}: {text}")


def _kind(body: object) -> str:
    inner = body.get("error") if isinstance(body, dict) else None
    return str(inner.get("type", "")) if isinstance(inner, dict) else ""
