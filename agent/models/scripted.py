"""Deterministic stand-ins: a model that answers from a list, a proposer that hands out given
sources.

For tests and demonstrations; they cost nothing and know nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.models.base import (
    Completion,
    Estimate,
    Model,
    ModelError,
    NoProposal,
    Prompt,
    Request,
    Schema,
    Usage,
)
from agent.types import Direction, Proposal, Situation
from sandbox.verdict import Verdict


@dataclass
class ScriptedModel:
    """Answers by role, in order; the last one repeats. An exception in the script is raised."""

    script: Mapping[str, Sequence[str | ModelError]]
    name: str = "scripted"
    price: float | None = 0.01
    prompts: list[Prompt] = field(default_factory=list)

    def complete(self, prompt: Prompt, schema: Schema | None = None) -> Completion:
        answers = self.script[prompt.role]
        seen = sum(p.role == prompt.role for p in self.prompts)
        self.prompts.append(prompt)
        answer = answers[min(seen, len(answers) - 1)]
        if isinstance(answer, ModelError):
            raise answer
        usage = Usage(len(prompt.stable + prompt.body) // 4, len(answer) // 4)
        return Completion(answer, usage, self.price, self.name)

    def estimate(self, prompt: Prompt) -> Estimate:
        return Estimate(
            len(prompt.stable + prompt.body) // 4 + prompt.max_output_tokens, self.price
        )


@dataclass
class ScriptedProposer:
    """Gives candidate `seq` the source `sources[seq - 1]`; repairs by source text."""

    sources: Sequence[str]
    repairs: Mapping[str, str] = field(default_factory=dict)
    name: str = "scripted"

    def plan(self, s: Situation, calls: Model | None) -> tuple[Direction, ...]:
        left = len(self.sources) - max(t.seq for t in s.history)
        return tuple(
            Direction(f"scripted {i}", parent=s.incumbent.seq) for i in range(min(s.k, left))
        )

    def propose(self, r: Request) -> Proposal:
        if r.seq > len(self.sources):
            raise NoProposal("the script is at its end")
        return Proposal(self.sources[r.seq - 1], f"source {r.seq} of the script", 1.01)

    def repair(self, r: Request, source: str, failed: Verdict) -> Proposal | None:
        mended = self.repairs.get(source)
        return Proposal(mended, "repaired by the script") if mended else None

    def reflect(self, s: Situation, calls: Model | None) -> tuple[str, ...]:
        best = s.incumbent
        return (f"round {s.round}: candidate {best.seq} leads",)
