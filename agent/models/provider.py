"""What the adapters of providers share: one streamed attempt, its price, and the headers that all of these APIs know.

No SDK is imported here, and nothing is retried: waiting is `agent.models.calls`' work.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from agent.models import pricing
from agent.models.base import (
    Completion,
    Estimate,
    ModelError,
    OverloadError,
    Prompt,
    Schema,
    Usage,
)
from agent.models.keys import hidden
from agent.models.wire import Event, Loose, Wire


class Provider(ABC):
    """A Model whose answer is streamed. An adapter says how to call it, and what events and errors mean."""

    provider: ClassVar[str]
    failures: ClassVar[tuple[type[Exception], ...]]
    """What the SDK raises for a call that gave no answer; `typed` reads them."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def settle(self, prompt: Prompt, events: Sequence[Event]) -> Completion | None:
        """As `Streamed.settle`."""

    @abstractmethod
    def call(self, prompt: Prompt, schema: Schema | None, wire: Wire, events: list[Event]) -> None:
        """One call: every event to the wire before it is looked at. Raises what `failures` names."""

    @abstractmethod
    def typed(self, error: Exception) -> ModelError:
        """One of `failures` by the reaction that it asks for."""

    @abstractmethod
    def used(self, prompt: Prompt, events: Sequence[Event]) -> tuple[str, Usage, bool]:
        """Text and usage of an answer that was cut off, and whether the usage is a guess."""

    def estimate(self, prompt: Prompt) -> Estimate:
        return pricing.estimate(prompt, self.name, self.provider)

    def complete(self, prompt: Prompt, schema: Schema | None = None) -> Completion:
        return self.ask(prompt, schema, Loose())

    def ask(self, prompt: Prompt, schema: Schema | None, wire: Wire) -> Completion:
        """As `Streamed.ask`."""
        start = time.monotonic()
        events: list[Event] = []
        try:
            self.call(prompt, schema, wire, events)
        except self.failures as error:
            raise self.paid(self.typed(error), prompt, events) from error
        done = self.settle(prompt, events)
        if done is None:
            broken = OverloadError("the stream broke off before its end")
            raise self.paid(broken, prompt, events)
        return replace(done, seconds=time.monotonic() - start)

    def completion(self, text: str, usage: Usage, estimated: bool = False) -> Completion:
        cost = pricing.dollars(usage, self.name, self.provider)
        return Completion(hidden(text), usage, cost, self.name, estimated=estimated)

    def paid(self, error: ModelError, prompt: Prompt, events: Sequence[Event]) -> ModelError:
        """The failure with what it cost."""
        if events and error.partial is None:
            text, usage, guessed = self.used(prompt, events)
            error.partial = self.completion(text, usage, guessed)
        return error


def named(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key} if key else {}


def retry_after(headers: Mapping[str, str]) -> float | None:
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
