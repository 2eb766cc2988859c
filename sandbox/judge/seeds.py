"""Secret seeds of one judgement: all derived from one master drawn from `secrets`, recorded for the verdict.

Publish them only after the candidate's last launch.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable


class Seeds:
    """`Seeds(None)` draws a fresh master; a given one makes the judgement repeatable (tests, disputes)."""

    def __init__(self, master: int | None = None) -> None:
        self.master = secrets.randbits(62) if master is None else master

    def of(self, *labels: str | int) -> int:
        """A 62-bit seed for that purpose."""
        text = repr((self.master, labels)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 2

    def chooser(self, *labels: str | int) -> Callable[[int], int]:
        """choose(n): the next number in 0..n-1 of that stream."""
        count = 0

        def choose(n: int) -> int:
            nonlocal count
            count += 1
            return self.of(*labels, "draw", count) % n

        return choose
