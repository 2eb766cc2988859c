"""Protocols of the proposing side: Model (text in, text out), PromptBook (what to ask, how to read
it), Proposer.

Also the typed provider errors with the reaction each asks for. No SDK is imported here. Adapters
make one attempt and raise; waiting, retrying, budgets and the record of calls are
`agent.models.calls`' work, in that one place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from agent.models.keys import hidden
from agent.models.wire import Event, Wire
from agent.types import Direction, Proposal, Situation
from sandbox.verdict import Verdict

Role = Literal["plan", "propose", "repair", "reflect"]
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """Tokens, normalised: `input_tokens` includes those read from and written to the provider's
    cache.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class Turn:
    """One message after the first, for follow-ups such as a format complaint."""

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True)
class Prompt:
    """`stable` is the same for a whole run (system text, cacheable); `body` is the first user
    message.
    """

    role: Role
    stable: str
    body: str
    turns: tuple[Turn, ...] = ()
    max_output_tokens: int = 32_000

    def then(self, answer: str, say: str) -> Prompt:
        """The conversation continued: the model's answer and what we say to it."""
        turns = (*self.turns, Turn("assistant", answer), Turn("user", say))
        return Prompt(self.role, self.stable, self.body, turns, self.max_output_tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role, "stable": self.stable, "body": self.body,
            "turns": [[t.role, t.text] for t in self.turns],
            "max_output_tokens": self.max_output_tokens,
        }  # fmt: skip

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Completion:
    """A finished answer. `cost` in dollars; None when the model has no known price. `estimated`:
    the provider did not say what was used.
    """

    text: str
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None
    model: str = ""
    seconds: float = 0.0
    estimated: bool = False


@dataclass(frozen=True)
class Estimate:
    """An upper bound before the call, for budgets. `cost` None: unpriced."""

    tokens: int
    cost: float | None


class Model(Protocol):
    """One provider and model name. `complete` makes exactly one attempt."""

    name: str

    def complete(self, prompt: Prompt, schema: Schema | None = None) -> Completion:
        """Raises ModelError. `schema` asks for JSON of that JSON schema where the provider offers
        it.
        """
        ...

    def estimate(self, prompt: Prompt) -> Estimate: ...


@runtime_checkable
class Streamed(Protocol):
    """A Model whose answer arrives in events, so that a killed process can pick it up again."""

    def ask(self, prompt: Prompt, schema: Schema | None, wire: Wire) -> Completion:
        """`complete`, with every event given to the wire before it is used. Raises ModelError."""
        ...

    def settle(self, prompt: Prompt, events: Sequence[Event]) -> Completion | None:
        """The answer if these events hold all of it. Raises ModelError as `ask` would have."""
        ...

    def fetchable(self, events: Sequence[Event]) -> bool:
        """Whether the provider can be asked for that answer again without paying again."""
        ...

    def fetch(self, prompt: Prompt, wire: Wire, events: Sequence[Event]) -> Completion | None:
        """The answer by its id; None if the provider no longer has it. Raises Pending, ModelError."""
        ...


class ModelError(Exception):
    """A call that gave no usable answer. `partial` holds text and usage that were paid for all the
    same.
    """

    def __init__(self, message: str, partial: Completion | None = None) -> None:
        super().__init__(hidden(message))
        self.partial = partial


class Lost(ModelError):
    """An attempt of which nobody knows the end: charged at its estimate, and asked again."""


class CreditError(ModelError):
    """Balance or spend limit: stops the run with what there is."""


class AuthError(ModelError):
    """Key missing or refused, or a request the API will never take: stops the run."""


class WaitError(ModelError):
    """Worth another attempt after `retry_after` seconds (None: back off)."""

    def __init__(
        self, message: str, retry_after: float | None = None, partial: Completion | None = None
    ) -> None:
        super().__init__(message, partial)
        self.retry_after = retry_after


class RateError(WaitError):
    """429."""


class OverloadError(WaitError):
    """529, 5xx, connection lost, time-out."""


class ContextError(ModelError):
    """The prompt is too long: ask again with less history."""


class Pending(WaitError):
    """The provider is still at work on an answer that was asked for before."""


class RefusalError(ModelError):
    """The model declined: this proposal is void, the run goes on."""


class TruncationError(ModelError):
    """The answer hit its length limit: ask for a diff or something shorter."""


class BadFormat(Exception):
    """An answer that could not be read. The message says what to send instead, in words for the
    model.
    """


class PromptBook(Protocol):
    """What to ask in each role, and how to read the answers. Pure: no call, no file after
    loading.
    """

    def plan(self, s: Situation) -> Prompt: ...
    def propose(self, s: Situation, d: Direction, parent_source: str) -> Prompt: ...
    def repair(self, s: Situation, source: str, failed: Verdict) -> Prompt: ...
    def reflect(self, s: Situation) -> Prompt: ...

    def schema(self, role: Role) -> Schema | None:
        """JSON schema of the answer, or None where free text is better (whole files, diffs)."""
        ...

    def read_plan(self, text: str, k: int) -> tuple[Direction, ...]:
        """Raises BadFormat."""
        ...

    def read_proposal(self, text: str, parent_source: str) -> Proposal:
        """Whole file or strictly applied unified diff against `parent_source`. Raises BadFormat."""
        ...

    def read_lessons(self, text: str) -> tuple[str, ...]:
        """Raises BadFormat."""
        ...


@dataclass(frozen=True)
class Request:
    """A proposal asked of a proposer. `calls` is the model bound to this candidate's record; None
    without a model.
    """

    situation: Situation
    seq: int
    slot: int
    direction: Direction
    parent_source: str
    calls: Model | None = None


class NoProposal(Exception):
    """There will be none for this candidate: the reason. The candidate is recorded as
    `rejected`.
    """


class Waiting(Exception):
    """None yet: the run checkpoints and can be resumed. The message says what would let it go
    on.
    """


class StopRun(Exception):
    """The run cannot go on (credit, key, budget). `reason` is one of `agent.search`'s stop
    reasons.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Unavailable(Exception):
    """The device or toolchain asked for is missing here; the message says what and what would help."""


class Proposer(Protocol):
    """Where candidates come from. Methods may be called again after a kill and must then give the
    same answer without paying twice; they write nothing but their own files."""

    @property
    def name(self) -> str: ...

    def plan(self, s: Situation, calls: Model | None) -> tuple[Direction, ...]:
        """At most `s.k` directions; none when there is nothing left to try."""
        ...

    def propose(self, r: Request) -> Proposal:
        """Raises NoProposal, Waiting, StopRun."""
        ...

    def repair(self, r: Request, source: str, failed: Verdict) -> Proposal | None:
        """A mended candidate after a failure before timing, or None to let it be."""
        ...

    def reflect(self, s: Situation, calls: Model | None) -> tuple[str, ...]:
        """Lessons of the round that was just recorded."""
        ...
