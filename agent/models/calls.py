"""RecordedModel: one place where model calls are looked up, budgeted, retried, timed and written
down.

A finished call lies in the run's folder before its answer is used; asked again after a kill, the
same (scope, number) is answered from there and nothing is paid twice. Adapters below make one
attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent.budget import Ledger
from agent.models.base import (
    AuthError,
    Completion,
    CreditError,
    Estimate,
    Model,
    ModelError,
    Prompt,
    Schema,
    StopRun,
    Usage,
    WaitError,
    Waiting,
)
from agent.search import Spent
from agent.workspace import RunFiles, Workspace, read_json, write_json

ATTEMPTS = 6
LONGEST_WAIT_S = 120.0


class Lost(ModelError):
    """A recorded call that had failed, met again on resume: fails the same way, unpaid."""


@dataclass(frozen=True)
class Clerk:
    """What recording needs. `sleep` returns early, and True, when the run is asked to stop."""

    model: Model
    workspace: Workspace
    files: RunFiles
    ledger: Ledger
    sleep: Callable[[float], bool]
    now: Callable[[], str]

    def scope(self, scope: str) -> RecordedModel:
        """The model bound to one candidate or round: its calls are numbered from 0."""
        return RecordedModel(self, scope)


@dataclass
class RecordedModel:
    clerk: Clerk
    scope: str
    calls: int = field(default=0)

    @property
    def name(self) -> str:
        return self.clerk.model.name

    def estimate(self, prompt: Prompt) -> Estimate:
        return self.clerk.model.estimate(prompt)

    def complete(self, prompt: Prompt, schema: Schema | None = None) -> Completion:
        """Raises ModelError as the adapter does, StopRun for credit, key and budgets, Waiting when
        the run is asked to stop between two attempts.
        """
        path = self.clerk.files.call(self.scope, self.calls)
        self.calls += 1
        found = read_json(path)
        if found is not None and found["prompt"] == prompt.sha256:
            return self._recall(found)
        asked = self.clerk.workspace.put(_text(prompt))
        began = time.monotonic()
        try:
            completion, error = self._attempts(prompt, schema), None
        except ModelError as failure:
            completion, error = failure.partial or Completion(""), failure
        row = self._row(prompt, completion, error)
        row |= {"n": self.calls - 1, "prompt_blob": asked, "seconds": time.monotonic() - began}
        if error is None or error.partial is not None:
            write_json(path, row, paid=True)
        if isinstance(error, (CreditError, AuthError)):
            reason = "credit" if isinstance(error, CreditError) else "auth"
            raise StopRun(reason, str(error)) from error
        if error is not None:
            raise error
        return completion

    def _attempts(self, prompt: Prompt, schema: Schema | None) -> Completion:
        estimate = self.clerk.model.estimate(prompt)
        wait = 2.0
        for attempt in range(ATTEMPTS):
            bound = Spent(usd=estimate.cost or 0.0, tokens=estimate.tokens)
            try:
                with self.clerk.ledger.reserve(bound) as use:
                    try:
                        completion = self.clerk.model.complete(prompt, schema)
                    except ModelError as error:
                        use(_spent(error.partial))
                        raise
                    use(_spent(completion))
                    return completion
            except WaitError as error:
                pause = error.retry_after if error.retry_after is not None else wait
                if attempt + 1 == ATTEMPTS or pause > 10 * LONGEST_WAIT_S:
                    raise
                wait = min(2 * wait, LONGEST_WAIT_S)
                if self.clerk.sleep(pause):  # asked to stop: the candidate is no failure of anyone
                    raise Waiting(f"the provider is to be asked again: {error}") from error
        raise AssertionError("unreachable")

    def _row(
        self, prompt: Prompt, completion: Completion, error: ModelError | None
    ) -> dict[str, Any]:
        return {
            "scope": self.scope, "role": prompt.role, "model": completion.model or self.name,
            "prompt": prompt.sha256, "answer": completion.text,
            "input_tokens": completion.usage.input_tokens,
            "output_tokens": completion.usage.output_tokens,
            "cache_read_tokens": completion.usage.cache_read_tokens,
            "cache_write_tokens": completion.usage.cache_write_tokens,
            "cost": completion.cost, "date": self.clerk.now(),
            "error": f"{type(error).__name__}: {error}"[:500] if error else None,
        }  # fmt: skip

    def _recall(self, row: dict[str, Any]) -> Completion:
        usage = Usage(
            row["input_tokens"], row["output_tokens"], row["cache_read_tokens"],
            row["cache_write_tokens"],
        )  # fmt: skip
        completion = Completion(row["answer"], usage, row["cost"], row["model"], row["seconds"])
        if row["error"]:
            raise _failure(row["error"])(row["error"], completion)
        return completion


def _failure(text: str) -> type[ModelError]:
    """The class that was recorded, so that the reaction is the same."""
    name = text.partition(":")[0]
    known = {c.__name__: c for c in ModelError.__subclasses__()}
    return known.get(name, Lost)


def _spent(completion: Completion | None) -> Spent:
    if completion is None:
        return Spent()
    return Spent(usd=completion.cost or 0.0, tokens=completion.usage.total)


def _text(prompt: Prompt) -> str:
    turns = "".join(f"\n\n[{t.role}]\n{t.text}" for t in prompt.turns)
    return f"[stable]\n{prompt.stable}\n\n[{prompt.role}]\n{prompt.body}{turns}\n"
