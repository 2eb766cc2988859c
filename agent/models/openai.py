"""OpenAI and compatible servers: the Responses API, streamed; chat completions for servers that
speak only those, found out by their 404.

One attempt a call, no retries here (`agent.models.calls` waits and retries). The key comes from
OPENAI_API_KEY and is never stored; a local server needs none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any, Literal

import openai

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

PROVIDER = "openai"
Api = Literal["responses", "chat"]


class OpenAIModel:
    """`base_url` None means OPENAI_BASE_URL or the public API. Raises AuthError without a key for
    the public API.
    """

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        api: Api = "responses",
        client: openai.OpenAI | None = None,
    ) -> None:
        self.name = name
        self._api = api
        base_url = base_url or os.environ.get("OPENAI_BASE_URL")
        self._local = bool(base_url) and "api.openai.com" not in (base_url or "")
        if client is None:
            key = os.environ.get("OPENAI_API_KEY") or ("local" if self._local else None)
            if not key:
                raise AuthError("OPENAI_API_KEY is not set")
            client = openai.OpenAI(api_key=key, base_url=base_url, max_retries=0)
        self._client = client.with_options(max_retries=0)

    def estimate(self, prompt: Prompt) -> Estimate:
        return pricing.estimate(prompt, self.name, PROVIDER)

    def complete(self, prompt: Prompt, schema: Schema | None = None) -> Completion:
        start = time.monotonic()
        try:
            text, usage, end = self._call(prompt, schema)
        except openai.APIError as error:
            raise _typed(error) from error
        except json.JSONDecodeError as error:  # the SDK lets a garbled event pass
            raise OverloadError(f"the stream is garbled: {error}") from error
        done = Completion(
            text=text,
            usage=usage,
            cost=pricing.dollars(usage, self.name, PROVIDER),
            model=self.name,
            seconds=time.monotonic() - start,
        )
        if end in ("length", "max_output_tokens"):
            limit = prompt.max_output_tokens
            raise TruncationError(f"the answer hit its limit of {limit} tokens", done)
        if end in ("content_filter", "refusal"):
            raise RefusalError(f"{self.name} declined: {text[:200] or end}", done)
        if end not in ("completed", "stop"):
            raise OverloadError(f"the stream ended with {end!r}", None, done)
        return done

    def _call(self, prompt: Prompt, schema: Schema | None) -> tuple[str, Usage, str]:
        """Through the API the server speaks: one without the Responses API is remembered as such."""
        if self._api == "responses":
            try:
                return self._responses(prompt, schema)
            except openai.NotFoundError:
                if not self._local:
                    raise
                found = self._chat(prompt, schema)
                self._api = "chat"
                return found
        return self._chat(prompt, schema)

    def _responses(self, prompt: Prompt, schema: Schema | None) -> tuple[str, Usage, str]:
        turns: list[Any] = [{"role": "user", "content": prompt.body}]
        turns += [{"role": t.role, "content": t.text} for t in prompt.turns]
        extra: dict[str, Any] = {}
        if schema is not None:
            form = {"type": "json_schema", "name": prompt.role, "schema": dict(schema)}
            extra["text"] = {"format": {**form, "strict": True}}
        stream = self._client.responses.create(
            model=self.name,
            instructions=prompt.stable,
            input=turns,
            max_output_tokens=prompt.max_output_tokens,
            store=False,
            stream=True,
            prompt_cache_key=f"kernelgen-{prompt.role}",
            **extra,
        )
        return _read_responses(stream)

    def _chat(self, prompt: Prompt, schema: Schema | None) -> tuple[str, Usage, str]:
        messages: list[Any] = [
            {"role": "system", "content": prompt.stable},
            {"role": "user", "content": prompt.body},
        ]
        messages += [{"role": t.role, "content": t.text} for t in prompt.turns]
        extra: dict[str, Any] = {}
        if schema is not None:
            form = {"name": prompt.role, "schema": dict(schema), "strict": True}
            extra["response_format"] = {"type": "json_schema", "json_schema": form}
        stream = self._client.chat.completions.create(
            model=self.name,
            messages=messages,
            max_tokens=prompt.max_output_tokens,
            stream=True,
            stream_options={"include_usage": True},
            **extra,
        )
        return _read_chat(stream)


def _read_responses(stream: Iterable[Any]) -> tuple[str, Usage, str]:
    """Text, usage and how it ended: completed, max_output_tokens, content_filter, refusal or
    `broken`.
    """
    pieces: list[str] = []
    end, usage = "broken", Usage()
    for event in stream:
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        elif event.type == "response.refusal.delta":
            pieces.append(event.delta)
            end = "refusal"
        elif event.type in ("response.completed", "response.incomplete"):
            usage = _usage(event.response.usage)
            details = event.response.incomplete_details
            if end != "refusal":
                end = details.reason if details and details.reason else "completed"
        elif event.type == "response.failed":
            error = event.response.error
            raise _failed(error.code if error else "", error.message if error else "failed")
        elif event.type == "error":
            raise _failed(event.code or "", event.message)
    return "".join(pieces), usage, end


def _read_chat(stream: Iterable[Any]) -> tuple[str, Usage, str]:
    pieces: list[str] = []
    end, usage = "broken", Usage()
    for chunk in stream:
        if chunk.usage:
            cached = getattr(chunk.usage.prompt_tokens_details, "cached_tokens", 0) or 0
            usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached)
        for choice in chunk.choices:
            pieces.append(choice.delta.content or getattr(choice.delta, "refusal", None) or "")
            if getattr(choice.delta, "refusal", None):
                end = "refusal"
            elif choice.finish_reason and end != "refusal":
                end = choice.finish_reason
    return "".join(pieces), usage, end


def _usage(raw: Any) -> Usage:
    """The API's input count already includes cached tokens, as ours does."""
    if raw is None:
        return Usage()
    details = raw.input_tokens_details
    read = getattr(details, "cached_tokens", 0) or 0
    written = getattr(details, "cache_write_tokens", 0) or 0
    return Usage(raw.input_tokens, raw.output_tokens, read, written)


def _failed(code: str, message: str) -> ModelError:
    if code == "rate_limit_exceeded":
        return RateError(message)
    if code in ("insufficient_quota", "billing_hard_limit_reached"):
        return CreditError(message)
    if "context" in code:
        return ContextError(message)
    return OverloadError(f"{code}: {message}" if code else message)


def _typed(error: openai.APIError) -> ModelError:
    text = str(getattr(error, "message", error))[:500]
    code = str(getattr(error, "code", "") or "")
    if isinstance(error, openai.APIConnectionError):  # includes time-outs
        return OverloadError(f"no answer: {text}")
    if not isinstance(error, openai.APIStatusError):
        return _failed(code, text)
    status = error.status_code
    if status == 402 or code in ("insufficient_quota", "billing_hard_limit_reached"):
        return CreditError(text)
    if status == 429:
        return RateError(text, retry_after(error.response.headers))
    if code == "context_length_exceeded" or status == 413:
        return ContextError(text)
    if status >= 500 or status == 408:
        return OverloadError(text, retry_after(error.response.headers))
    return AuthError(f"HTTP {status}: {text}")


def retry_after(headers: Any) -> float | None:
    """Seconds from `retry-after-ms` or `retry-after`, or None. HTTP dates are not used by these
    APIs.
    """
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * scale
        except ValueError:
            continue
        if 0 <= seconds <= 3600:
            return seconds
    return None
