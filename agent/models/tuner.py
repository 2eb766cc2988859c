"""Proposer `tuner`: no model. The incumbent's source with other values of its declared TUNABLES.

It writes no kernel: its best result is the best point of a space that somebody else declared.
"""

from __future__ import annotations

from agent import search
from agent.models.base import Model, Request
from agent.tune import Trial, default, suggest
from agent.types import Direction, Proposal, Situation, Tried
from sandbox.verdict import Verdict


class Tuner:
    name = "tuner"

    def plan(self, s: Situation, calls: Model | None) -> tuple[Direction, ...]:
        """The next points of the space; none when it is exhausted or nothing is declared."""
        space = s.incumbent.declared
        family = [t for t in s.history if t.source == s.incumbent.source]
        trials = [Trial(t.tunables, _us(t)) for t in family]
        points = suggest(space, trials, s.k, s.seed)
        base = {**default(space), **s.incumbent.tunables} if space else {}
        return tuple(
            Direction(_words(base, point), parent=s.incumbent.seq, tunables=point)
            for point in points
        )

    def propose(self, r: Request) -> Proposal:
        return Proposal(r.parent_source, r.direction.title, None, r.direction.tunables)

    def repair(self, r: Request, source: str, failed: Verdict) -> Proposal | None:
        return None

    def reflect(self, s: Situation, calls: Model | None) -> tuple[str, ...]:
        return ()


def _us(t: Tried) -> float | None:
    row = search.workload(t.verdict)
    return row.us if row else None


def _words(base: dict[str, object], point: dict[str, object]) -> str:
    changed = [f"{n}: {base.get(n)} -> {v}" for n, v in point.items() if base.get(n) != v]
    return ", ".join(changed) or "the defaults"
