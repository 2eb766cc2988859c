"""RecordedModel: one place where model calls are looked up, budgeted, retried, timed and written
down.

A finished call lies in the run's folder before its answer is used; asked again after a kill, the
same (scope, number) is answered from there and nothing is paid twice (`agent.models.attempts`).
Adapters below make one attempt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent.budget import Ledger
from agent.models.attempts import Call, recall
from agent.models.base import (
    AuthError,
    Completion,
    CreditError,
    Estimate,
    Lost,
    Model,
    ModelError,
    Pending,
    Prompt,
    Schema,
    StopRun,
    WaitError,
    Waiting,
)
from agent.models.leftovers import lose, sweep
from agent.search import Spent
from agent.workspace import RunFiles, Workspace

ATTEMPTS = 6
LONGEST_WAIT_S = 120.0
LONGEST_PENDING_S = 3600.0


@dataclass
class Gate:
    """One a provider: when it asks to slow down, every call of the run keeps away until then, and
    afterwards they go one by one until one has got through.
    """

    clock: Callable[[], float] = time.monotonic
    until: float = 0.0
    narrow: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    single: threading.Lock = field(default_factory=threading.Lock)

    def close_for(self, seconds: float) -> None:
        with self.lock:
            self.until = max(self.until, self.clock() + seconds)
            self.narrow = True

    def left(self) -> float:
        with self.lock:
            return self.until - self.clock()

    def opened(self) -> None:
        with self.lock:
            self.narrow = False

    @contextmanager
    def passage(self) -> Iterator[None]:
        held = False
        while self.narrow and not held:
            held = self.single.acquire(timeout=0.2)
        try:
            yield
        finally:
            if held:
                self.single.release()


@dataclass(frozen=True)
class Clerk:
    """What recording needs. `sleep` returns early, and True, when the run is asked to stop."""

    model: Model
    workspace: Workspace
    files: RunFiles
    ledger: Ledger
    sleep: Callable[[float], bool]
    now: Callable[[], str]
    gate: Gate = field(default_factory=Gate)

    def scope(self, scope: str) -> RecordedModel:
        """The model bound to one candidate or round: its calls are numbered from 0."""
        return RecordedModel(self, scope)

    def sweep(self, give_up: bool = False) -> None:
        """What calls cut off earlier are known to have cost becomes rows. Asks nobody."""
        sweep(self.files, self.model, give_up)


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
        c = self.clerk
        call = Call(c.model, c.workspace, c.files, c.now, self.scope, self.calls, prompt)
        self.calls += 1
        found = call.answered()
        if found is not None:
            return recall(found)
        try:
            return self._attempts(call, schema)
        except (CreditError, AuthError) as error:
            reason = "credit" if isinstance(error, CreditError) else "auth"
            raise StopRun(reason, str(error)) from error

    def _attempts(self, call: Call, schema: Schema | None) -> Completion:
        gate, began = self.clerk.gate, time.monotonic()
        wait, failures, why = 2.0, 0, "it asked to be left alone for a while"
        while True:
            left = gate.left()
            # Asked to stop meanwhile: the candidate is no failure of anyone.
            if left > 0 and self.clerk.sleep(left):
                raise Waiting(f"the provider is to be asked again: {why}")
            try:
                completion = self._attempt(call, schema)
                gate.opened()
                return completion
            except Lost:
                continue
            except Pending as error:
                if time.monotonic() - began > LONGEST_PENDING_S:
                    self._give_up(call)
                    raise
                if self.clerk.sleep(error.retry_after or wait):
                    raise Waiting(f"the provider is still at work: {error}") from error
            except WaitError as error:
                pause = error.retry_after if error.retry_after is not None else wait
                failures, wait, why = failures + 1, min(2 * wait, LONGEST_WAIT_S), str(error)
                if failures == ATTEMPTS or pause > 10 * LONGEST_WAIT_S:
                    self._give_up(call)
                    raise
                gate.close_for(pause)
            except ModelError:
                gate.opened()
                raise

    def _attempt(self, call: Call, schema: Schema | None) -> Completion:
        """One attempt, or what is left of an earlier one. Raises Lost, ModelError, StopRun."""
        log = call.cut_off()
        if log is not None:  # charged already
            with self.clerk.ledger.using() as use:
                return call.pick_up(log, use)
        found = call.answered()  # the cut-off attempt had its end on disk after all
        if found is not None:
            return recall(found)
        estimate = self.clerk.model.estimate(call.prompt)
        bound = Spent(usd=estimate.cost or 0.0, tokens=estimate.tokens)
        with self.clerk.gate.passage(), self.clerk.ledger.reserve(bound) as use:
            return call.ask(schema, use)

    def _give_up(self, call: Call) -> None:
        log = call.cut_off()
        if log is not None:
            lose(call.files, log)
