"""One model call as a series of attempts: each is written down before it leaves, picked up again
after a kill, and paid for once.

What is guaranteed, and for which provider, is in docs/model-calls.md. Which failures are worth
another attempt is said by the error types; how long to wait, by `agent.models.calls`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.models.base import (
    AuthError,
    Completion,
    CreditError,
    Lost,
    Model,
    ModelError,
    Prompt,
    Schema,
    Streamed,
    Usage,
    WaitError,
)
from agent.models.leftovers import LOST, charged, is_lost, keep, lose, named
from agent.models.wire import WireLog
from agent.search import Spent
from agent.workspace import RunFiles, Workspace, read_json


@dataclass(frozen=True)
class Call:
    """Number `n` of a scope, and what it asks."""

    model: Model
    workspace: Workspace
    files: RunFiles
    now: Callable[[], str]
    scope: str
    n: int
    prompt: Prompt

    @property
    def path(self) -> Path:
        return self.files.call(self.scope, self.n)

    def answered(self) -> dict[str, Any] | None:
        """The row of the finished call. One that asked something else stays paid, as an attempt."""
        found: dict[str, Any] | None = read_json(self.path)
        if found is not None and found["prompt"] != self.prompt.sha256:
            aside = self.files.attempt(self.scope, self.n, found.get("attempt", 0))
            self.path.rename(aside)
            return None
        return found

    def cut_off(self) -> WireLog | None:
        """The log of an attempt that has no end yet; other leftovers are put in order."""
        for path in self.files.wires(f"{self.scope}-{self.n}"):
            log = WireLog.read(path)
            if log is None:
                path.unlink()
            elif log.question["prompt"] != self.prompt.sha256:
                lose(self.files, log)
            elif log.end is not None:
                keep(self.files, log)
            else:
                return log
        return None

    def ask(self, schema: Schema | None, use: Callable[[Spent], None]) -> Completion:
        """A new attempt. Raises ModelError; of a WaitError that can be fetched the log stays."""
        log = self._begin()
        began = time.monotonic()
        completion, error = self._answer(log, schema)
        left = isinstance(error, WaitError) and self._fetchable(log)
        use(charged(log) if left else spent(completion))
        if not left:
            self._close(log, completion, error, time.monotonic() - began)
        if error is not None:
            raise error
        return completion

    def pick_up(self, log: WireLog, use: Callable[[Spent], None]) -> Completion:
        """The answer to an attempt that was cut off, unpaid. Raises Lost if there is none, and
        ModelError as `ask`.
        """
        before = charged(log)
        try:
            completion, error = self._found(log), None
        except ModelError as failure:
            if isinstance(failure, WaitError) and self._fetchable(log):
                raise
            completion, error = failure.partial or Completion(""), failure
        if completion is None:
            lose(self.files, log)
            raise Lost(LOST)
        paid = spent(completion)
        use(Spent(paid.usd - before.usd, paid.tokens - before.tokens))
        self._close(log, completion, error, 0.0)
        if error is not None:
            raise error
        return completion

    def _begin(self) -> WireLog:
        estimate = self.model.estimate(self.prompt)
        text = f"{self.files.folder.name}/{self.scope}/{self.n}/{self.prompt.sha256}"
        k = self._next()
        question = {
            "scope": self.scope, "n": self.n, "attempt": k, "role": self.prompt.role,
            "model": self.model.name, "prompt": self.prompt.sha256,
            "prompt_blob": self.workspace.put(text_of(self.prompt)),
            "key": hashlib.sha256(f"{text}/{self._spoiled()}".encode()).hexdigest(),
            "tokens": estimate.tokens, "answer_tokens": self.prompt.max_output_tokens,
            "cost": estimate.cost, "date": self.now(),
        }  # fmt: skip
        return WireLog.begin(wire(self.files.attempt(self.scope, self.n, k)), question)

    def _next(self) -> int:
        folder = self.path.parent
        taken = [p.name.split(".")[1] for p in folder.glob(f"{self.path.stem}.*.*")]
        return max((int(k) + 1 for k in taken if k.isdigit()), default=0)

    def _spoiled(self) -> int:
        """Attempts that got an answer of no use. One that was lost is asked for under its own name
        again, so that a gateway that knows the name can hand over what it has.
        """
        rows = map(read_json, self.path.parent.glob(f"{self.path.stem}.*.json"))
        return sum(not is_lost(row) for row in rows if row)

    def _answer(self, log: WireLog, schema: Schema | None) -> tuple[Completion, ModelError | None]:
        try:
            if isinstance(self.model, Streamed):
                return self.model.ask(self.prompt, schema, log), None
            return self.model.complete(self.prompt, schema), None
        except ModelError as failure:
            return failure.partial or Completion(""), failure

    def _found(self, log: WireLog) -> Completion | None:
        if not isinstance(self.model, Streamed):
            return None
        whole = self.model.settle(self.prompt, log.events)
        if whole is None and self.model.fetchable(log.events):
            whole = self.model.fetch(self.prompt, log, log.events)
        return whole

    def _fetchable(self, log: WireLog) -> bool:
        return isinstance(self.model, Streamed) and self.model.fetchable(log.events)

    def _close(
        self, log: WireLog, completion: Completion, error: ModelError | None, seconds: float
    ) -> None:
        """The end of an attempt: the call's answer, a row of what was paid for nothing, or no trace."""
        billed = bool(completion.text or completion.usage.total)
        if error is not None and not billed:
            log.remove()
            return
        final = error is None or not isinstance(error, (WaitError, CreditError, AuthError))
        row = {
            **named(log), "model": completion.model or self.model.name,
            "answer": completion.text.encode("utf-8", "replace").decode(),
            "input_tokens": completion.usage.input_tokens,
            "output_tokens": completion.usage.output_tokens,
            "cache_read_tokens": completion.usage.cache_read_tokens,
            "cache_write_tokens": completion.usage.cache_write_tokens,
            "cost": completion.cost, "date": self.now(), "seconds": seconds,
            "error": f"{type(error).__name__}: {error}"[:500] if error else None,
            "estimated": completion.estimated, "final": final,
        }  # fmt: skip
        log.finish(row)
        keep(self.files, log)


def recall(row: dict[str, Any]) -> Completion:
    """A recorded answer. Raises the recorded error, so that the reaction is the same."""
    usage = Usage(
        row["input_tokens"], row["output_tokens"], row["cache_read_tokens"],
        row["cache_write_tokens"],
    )  # fmt: skip
    completion = Completion(
        row["answer"], usage, row["cost"], row["model"], row["seconds"], row.get("estimated", False)
    )
    if row["error"]:
        raise _failure(row["error"])(row["error"], completion)
    return completion


def spent(completion: Completion) -> Spent:
    return Spent(usd=completion.cost or 0.0, tokens=completion.usage.total)


def wire(attempt: Path) -> Path:
    return attempt.with_suffix(".log")


def text_of(prompt: Prompt) -> str:
    turns = "".join(f"\n\n[{t.role}]\n{t.text}" for t in prompt.turns)
    return f"[stable]\n{prompt.stable}\n\n[{prompt.role}]\n{prompt.body}{turns}\n"


def _failure(text: str) -> type[ModelError]:
    name = text.partition(":")[0]
    known = {c.__name__: c for c in ModelError.__subclasses__()}
    return known.get(name, ModelError)
