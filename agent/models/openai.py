"""OpenAI and compatible servers: the Responses API, streamed; chat completions for servers that
speak only those, found out by their 404.

One attempt a call, no retries here (`agent.models.calls` waits and retries). At the public API a
response runs in the background and is kept there, so that one cut off by a kill or a lost
connection is fetched by its id. The key comes from OPENAI_API_KEY and is never stored here; a local
server needs none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import openai

from agent.models import pricing
from agent.models.base import (
    AuthError,
    Completion,
    ContextError,
    CreditError,
    ModelError,
    OverloadError,
    Pending,
    Prompt,
    RateError,
    RefusalError,
    Schema,
    TruncationError,
    Usage,
)
from agent.models.keys import hidden
from agent.models.openai_events import Answer, read
from agent.models.provider import Provider, named, retry_after
from agent.models.wire import Event, Wire

PUBLIC = "api.openai.com"
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")
_KEEPING = re.compile(r"\b(background|store|zero data retention)\b", re.IGNORECASE)
Api = Literal["responses", "chat"]


class OpenAIModel(Provider):
    """`base_url` None means OPENAI_BASE_URL or the public API. Raises AuthError without a key for
    the public API.
    """

    provider = "openai"
    failures = (openai.APIError, json.JSONDecodeError)  # the SDK lets a garbled event pass

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        api: Api = "responses",
        client: openai.OpenAI | None = None,
    ) -> None:
        super().__init__(name)
        self._api = api
        base_url = base_url or os.environ.get("OPENAI_BASE_URL")
        self._keep = client is not None or not base_url or PUBLIC in base_url
        self._local = bool(base_url) and PUBLIC not in (base_url or "")
        if client is None:
            key = os.environ.get("OPENAI_API_KEY") or ("local" if self._local else None)
            if not key:
                raise AuthError("OPENAI_API_KEY is not set")
            client = openai.OpenAI(api_key=key, base_url=base_url, max_retries=0)
        self._client = client.with_options(max_retries=0)

    def settle(self, prompt: Prompt, events: Sequence[Event]) -> Completion | None:
        """As `Streamed.settle`."""
        answer = read(events)
        if answer.failed is not None:
            raise self.paid(_failed(*answer.failed), prompt, events)
        if answer.end == "":
            return None
        done = self.completion(*_used(prompt, answer))
        if answer.end in ("length", "max_output_tokens"):
            limit = prompt.max_output_tokens
            raise TruncationError(f"the answer hit its limit of {limit} tokens", done)
        if answer.end in ("content_filter", "refusal"):
            raise RefusalError(f"{self.name} declined: {answer.text[:200] or answer.end}", done)
        if answer.end not in ("completed", "stop"):
            raise OverloadError(f"the stream ended with {answer.end!r}", None, done)
        return done

    def fetchable(self, events: Sequence[Event]) -> bool:
        answer = read(events)
        return bool(answer.id and answer.kept and answer.failed is None and not answer.end)

    def fetch(self, prompt: Prompt, wire: Wire, events: Sequence[Event]) -> Completion | None:
        """As `Streamed.fetch`: the response by its id."""
        try:
            response = self._client.responses.retrieve(read(events).id)
        except openai.NotFoundError:
            return None
        except openai.APIError as error:
            raise _typed(error) from error
        if response.status in ("queued", "in_progress"):
            raise Pending(f"response {response.id} is {response.status}", 2.0)
        last = {"type": f"response.{response.status}", "response": response.to_dict(mode="json")}
        wire.event(last, flush=True)
        return self.settle(prompt, [*events, last])

    def typed(self, error: Exception) -> ModelError:
        if isinstance(error, openai.APIError):
            return _typed(error)
        return OverloadError(f"the stream is garbled: {error}")

    def used(self, prompt: Prompt, events: Sequence[Event]) -> tuple[str, Usage, bool]:
        """As the provider says, else by what went over the wire."""
        return _used(prompt, read(events))

    def call(self, prompt: Prompt, schema: Schema | None, wire: Wire, events: list[Event]) -> None:
        """Through the API the server speaks: one without the Responses API is remembered as such."""
        if self._api == "responses":
            try:
                return _drain(self._responses(prompt, schema, wire.key), wire, events)
            except openai.NotFoundError:
                if not self._local:
                    raise
                _drain(self._chat(prompt, schema, wire.key), wire, events)
                self._api = "chat"
                return None
            except openai.BadRequestError as error:
                if not self._keep or not _KEEPING.search(str(error.message)):
                    raise
                self._keep = False  # an organisation whose responses are not kept
                return _drain(self._responses(prompt, schema, wire.key), wire, events)
        return _drain(self._chat(prompt, schema, wire.key), wire, events)

    def _responses(self, prompt: Prompt, schema: Schema | None, key: str) -> Any:
        turns: list[Any] = [{"role": "user", "content": prompt.body}]
        turns += [{"role": t.role, "content": t.text} for t in prompt.turns]
        extra: dict[str, Any] = {"background": True} if self._keep else {}
        if schema is not None:
            form = {"type": "json_schema", "name": prompt.role, "schema": dict(schema)}
            extra["text"] = {"format": {**form, "strict": True}}
        return self._client.responses.create(
            model=self.name,
            instructions=prompt.stable,
            input=turns,
            max_output_tokens=prompt.max_output_tokens,
            store=self._keep,
            stream=True,
            prompt_cache_key=cache_key(prompt),
            extra_headers=named(key),
            **extra,
        )

    def _chat(self, prompt: Prompt, schema: Schema | None, key: str) -> Any:
        messages: list[Any] = [
            {"role": "system", "content": prompt.stable},
            {"role": "user", "content": prompt.body},
        ]
        messages += [{"role": t.role, "content": t.text} for t in prompt.turns]
        extra: dict[str, Any] = {}
        if schema is not None:
            form = {"name": prompt.role, "schema": dict(schema), "strict": True}
            extra["response_format"] = {"type": "json_schema", "json_schema": form}
        return self._client.chat.completions.create(
            model=self.name,
            messages=messages,
            max_tokens=prompt.max_output_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=named(key),
            **extra,
        )


def _used(prompt: Prompt, answer: Answer) -> tuple[str, Usage, bool]:
    if answer.usage.total > 0:
        return answer.text, answer.usage, False
    return answer.text, pricing.guess(prompt, answer.text), True


def cache_key(prompt: Prompt) -> str:
    """The same for every role of a run: they share the stable part."""
    return f"kernelgen-{hashlib.sha256(prompt.stable.encode()).hexdigest()[:24]}"


def _drain(stream: Any, wire: Wire, events: list[Event]) -> None:
    """Every event to the wire before it is looked at."""
    with stream:
        for item in stream:
            event = item.to_dict(mode="json")
            kind = event.get("type", "")
            wire.event(event, flush=not events or kind in TERMINAL)
            events.append(event)
            if kind in TERMINAL:
                return


def _failed(code: str, message: str) -> ModelError:
    if code == "rate_limit_exceeded":
        return RateError(message)
    if code in ("insufficient_quota", "billing_hard_limit_reached"):
        return CreditError(message)
    if "context" in code:
        return ContextError(message)
    return OverloadError(f"{code}: {message}" if code else message)


def _typed(error: openai.APIError) -> ModelError:
    text = str(hidden(str(getattr(error, "message", error))))[:500]
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
