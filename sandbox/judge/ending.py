"""How a judgement stops early: a status, the failure that says why, and what had been shown by then."""

from __future__ import annotations

from sandbox.verdict import Correctness, Failure, Status


class Ended(Exception):
    """Caught in `sandbox.judge.judge` alone, where it becomes the verdict."""

    def __init__(
        self, status: Status, failure: Failure, correctness: Correctness | None = None
    ) -> None:
        super().__init__(failure.message)
        self.status, self.failure, self.correctness = status, failure, correctness
