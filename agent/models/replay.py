"""Proposer `replay`: the proposals of a recorded run, in their order, judged afresh.

Useful on another device, after a change of the judge, and to check a claim. It asks no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.models.base import Model, NoProposal, Request
from agent.types import Direction, Proposal, Situation
from agent.workspace import Missing, Workspace
from sandbox.verdict import Verdict


@dataclass(frozen=True)
class Replay:
    """`rows`: candidates of the recorded run as `Queries.candidates` gives them; the seed is
    skipped.
    """

    rows: Sequence[Mapping[str, Any]]
    workspace: Workspace
    name: str = "replay"

    def plan(self, s: Situation, calls: Model | None) -> tuple[Direction, ...]:
        done = sum(t.seq > 0 for t in s.history)
        return tuple(
            Direction(row["direction"] or "", f"candidate {row['seq']} of {row['run']}",
                      s.incumbent.seq, row["predicted_gain"])
            for row in self._proposals()[done : done + s.k]
        )  # fmt: skip

    def propose(self, r: Request) -> Proposal:
        row = self._proposals()[r.seq - 1]
        try:
            source = self.workspace.text(row["source"])
        except Missing as error:
            raise NoProposal(str(error)) from error
        if not source:
            raise NoProposal("the recorded candidate has no source")
        return Proposal(
            source, row["note"] or "", row["predicted_gain"], json.loads(row["tunables"] or "{}")
        )

    def repair(self, r: Request, source: str, failed: Verdict) -> Proposal | None:
        return None

    def reflect(self, s: Situation, calls: Model | None) -> tuple[str, ...]:
        return ()

    def _proposals(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["seq"] > 0]
