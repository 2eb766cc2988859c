"""Ledger: what a run has spent and what is in flight, so that a budget is checked before each call.

In memory; rebuilt from the run's files when a run is resumed. Rules are in `agent.search`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agent.models.base import StopRun
from agent.models.leftovers import still_open
from agent.search import Limits, Spent, exceeds
from agent.workspace import RunFiles

WORDS = {
    "usd": "dollar budget", "tokens": "token budget", "minutes": "time budget",
    "gpu_seconds": "GPU time budget",
}  # fmt: skip


@dataclass
class Ledger:
    """`before`: spent in earlier sessions. Thread-safe; `clock` counts seconds."""

    limits: Limits
    before: Spent = field(default_factory=Spent)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._spent = replace(self.before, minutes=0.0)
        self._flying = Spent()
        self._began = self.clock()

    @property
    def spent(self) -> Spent:
        with self._lock:
            return replace(self._spent, minutes=self._minutes())

    @property
    def elapsed(self) -> float:
        """Seconds of this and earlier sessions."""
        return self._minutes() * 60

    def check(self, more: Spent | None = None) -> None:
        """Raises StopRun if a budget is used up, or `more` would break it on top of what is in
        flight.
        """
        with self._lock:
            self._check(more or Spent())

    @contextmanager
    def reserve(self, more: Spent) -> Iterator[Callable[[Spent], None]]:
        """Hold an upper bound while something runs; the block reports what it really used. Raises
        StopRun.
        """
        with self._lock:
            self._check(more)
            self._flying += more
        try:
            yield self._use
        finally:
            with self._lock:
                self._flying += Spent(-more.usd, -more.tokens, 0.0, -more.gpu_seconds)

    @contextmanager
    def using(self) -> Iterator[Callable[[Spent], None]]:
        """For what is charged already: the block reports the difference."""
        yield self._use

    def _use(self, used: Spent) -> None:
        with self._lock:
            self._spent += used

    def _check(self, more: Spent) -> None:
        committed = replace(self._spent, minutes=self._minutes()) + self._flying
        reason = exceeds(self.limits, committed, more)
        if reason:
            raise StopRun(reason, f"the {WORDS[reason]} is used up")

    def _minutes(self) -> float:
        return self.before.minutes + (self.clock() - self._began) / 60


def spent_before(files: RunFiles, elapsed: float) -> Spent:
    """What earlier sessions used, by the files they left. `elapsed` in seconds."""
    total = Spent(minutes=elapsed / 60)
    for call in files.calls():
        tokens = (call["input_tokens"] or 0) + (call["output_tokens"] or 0)
        total += Spent(usd=call["cost"] or 0.0, tokens=tokens)
    for judged in files.judgements():
        total += Spent(gpu_seconds=judged["gpu_seconds"])
    return total + still_open(files)
