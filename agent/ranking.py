"""Whether candidates judged again come out in the same order: pure comparison of two lists of results.

Reads no file and no clock. Times of different devices are never compared with each other, only orders are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

MARGIN = 0.02
"""Times that differ by less than this share are not told apart: nothing is said of their order."""


@dataclass(frozen=True)
class Result:
    """What became of a candidate. `us`: microseconds a step, None for one that did not pass or was not timed."""

    seq: int
    status: str
    us: float | None


@dataclass(frozen=True)
class Comparison:
    """Two orders, best first. `pairs` were told apart in the record and timed again; `swapped` of them are the other
    way round now, `close` are not told apart now; `changed`: whose status is another (seq, then, now); `missing` were
    not judged again.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    pairs: int
    swapped: tuple[tuple[int, int], ...]
    close: tuple[tuple[int, int], ...]
    changed: tuple[tuple[int, str, str], ...]
    missing: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Nothing contradicts the record, and something confirms it if it says anything."""
        confirmed = not self.pairs or self.pairs > len(self.close)
        return confirmed and not (self.swapped or self.changed or self.missing)

    def to_json(self) -> dict[str, Any]:
        return {
            "before": list(self.before), "after": list(self.after), "pairs": self.pairs,
            "swapped": [list(x) for x in self.swapped], "close": [list(x) for x in self.close],
            "changed": [list(x) for x in self.changed], "missing": list(self.missing), "same": self.same,
        }  # fmt: skip


def results(rows: Sequence[Mapping[str, Any]]) -> tuple[Result, ...]:
    """Of a record's candidates: rows with seq, status and us."""
    found = []
    for row in rows:
        passed = row["status"] == "passed"
        found.append(Result(row["seq"], row["status"], row["us"] if passed else None))
    return tuple(found)


def order(found: Sequence[Result]) -> tuple[int, ...]:
    """Candidates with a time, fastest first."""
    timed = [(r.us, r.seq) for r in found if r.us is not None]
    return tuple(seq for _, seq in sorted(timed))


def compare(
    before: Sequence[Result], after: Sequence[Result], margin: float = MARGIN
) -> Comparison:
    """Pairs count if the recorded times differ by more than `margin` and both have a time now."""
    now = {r.seq: r for r in after}
    swapped, close, pairs = [], [], 0
    for a, b in combinations([r for r in before if r.us is not None], 2):
        fast, slow = (a, b) if (a.us or 0.0) < (b.us or 0.0) else (b, a)
        again = [now[r.seq].us if r.seq in now else None for r in (fast, slow)]
        if (slow.us or 0.0) <= (fast.us or 0.0) * (1 + margin) or None in again:
            continue
        pairs += 1
        first, second = again[0] or 0.0, again[1] or 0.0
        if max(first, second) <= min(first, second) * (1 + margin):
            close.append((fast.seq, slow.seq))
        elif first > second:
            swapped.append((fast.seq, slow.seq))
    changed = [
        (r.seq, r.status, now[r.seq].status)
        for r in before
        if r.seq in now and now[r.seq].status != r.status
    ]
    missing = tuple(r.seq for r in before if r.seq not in now)
    return Comparison(
        order(before), order(after), pairs, tuple(swapped), tuple(close), tuple(changed), missing
    )
