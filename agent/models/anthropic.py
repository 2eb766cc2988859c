"""Anthropic and compatible servers: the Messages API, streamed, the stable part of the prompt
cached.

One attempt a call, no retries here. The key comes from ANTHROPIC_API_KEY (or ANTHROPIC_AUTH_TOKEN)
and is never stored. The constructor checks for it, since the SDK would fail only at the first call.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import anthropic
import httpx2

from agent.models import pricing
from agent.models.base import (
    AuthError,
    Completion,
    ContextError,
    CreditError,
    Estimate,
    ModelError,
    OverloadError,
    Prompt,
    RateError,
    RefusalError,
    Schema,
    TruncationError,
    Usage,
)
from agent.models.openai import retry_after

PROVIDER = "anthropic"
_CREDIT = ("credit balance", "spend limit", "billing")
_CONTEXT = ("prompt is too long", "context window", "exceed context limit")


class AnthropicModel:
    """`base_url` None means ANTHROPIC_BASE_URL or the public API. Raises AuthError without a key
    for the latter.
    """

    def __init__(
        self, name: str, base_url: str | None = None, client: anthropic.Anthropic | None = None
    ) -> None:
        self.name = name
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

    def estimate(self, prompt: Prompt) -> Estimate:
        return pricing.estimate(prompt, self.name, PROVIDER)

    def complete(self, prompt: Prompt, schema: Schema | None = None) -> Completion:
        start = time.monotonic()
        turns: list[Any] = [{"role": "user", "content": prompt.body}]
        turns += [{"role": t.role, "content": t.text} for t in prompt.turns]
        extra: dict[str, Any] = {}
        if schema is not None:
            extra["output_config"] = {"format": {"type": "json_schema", "schema": dict(schema)}}
        cached = {"type": "text", "text": prompt.stable, "cache_control": {"type": "ephemeral"}}
        system: list[Any] = [cached]
        try:
            with self._client.messages.stream(
                model=self.name,
                max_tokens=prompt.max_output_tokens,
                system=system,
                messages=turns,
                **extra,
            ) as stream:
                message = stream.get_final_message()
        except anthropic.APIError as error:
            raise _typed(error) from error
        except (httpx2.HTTPError, json.JSONDecodeError) as error:  # the SDK lets both pass
            raise OverloadError(f"the stream broke off: {error}") from error
        except AssertionError as error:  # the SDK's word for a stream that ended before its message
            raise OverloadError("the stream broke off") from error
        return self._checked(message, prompt, time.monotonic() - start)

    def _checked(self, message: Any, prompt: Prompt, seconds: float) -> Completion:
        text = "".join(b.text for b in message.content if b.type == "text")
        usage = _usage(message.usage)
        cost = pricing.dollars(usage, self.name, PROVIDER)
        done = Completion(text, usage, cost, self.name, seconds)
        reason = message.stop_reason
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


def _usage(raw: Any) -> Usage:
    """The API's input count leaves cached tokens out; ours includes them."""
    read = raw.cache_read_input_tokens or 0
    written = raw.cache_creation_input_tokens or 0
    return Usage(raw.input_tokens + read + written, raw.output_tokens, read, written)


def _typed(error: anthropic.APIError) -> ModelError:
    text = str(error.message)[:500]
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
