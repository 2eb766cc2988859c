"""Proposer over a language model: asks by the prompt book, reads the answer, reacts to typed
failures.

Calls go through the recorded model of the request, so they are budgeted and never paid twice. The
reactions: unreadable or cut-off answers get one complaint, an overlong prompt is asked with less
history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from agent import search
from agent.models.base import (
    BadFormat,
    ContextError,
    Model,
    ModelError,
    NoProposal,
    Prompt,
    PromptBook,
    RefusalError,
    Request,
    TruncationError,
    WaitError,
)
from agent.search import Standing
from agent.types import Direction, Proposal, Situation
from sandbox.verdict import Verdict

T = TypeVar("T")
COMPLAINTS = 1
SHORTER = (
    "Your answer was cut off at its length limit. Answer again, shorter: "
    "only a unified diff against the file, and no explanation."
)


@dataclass(frozen=True)
class ModelProposer:
    name: str
    book: PromptBook

    def plan(self, s: Situation, calls: Model | None) -> tuple[Direction, ...]:
        """Directions from the model with parents chosen by `search`; without a readable answer,
        plain ones.
        """
        standings = [Standing(t.seq, t.parent, t.verdict, t.promoted) for t in s.history]
        parents = search.parents(standings, s.incumbent.seq, s.k)
        try:
            found = self._ask(calls, s, self.book.plan, lambda text: self.book.read_plan(text, s.k))
        except WaitError:
            raise
        except (NoProposal, ModelError):
            found = ()
        free = Direction("your own choice", "No plan was readable; pick the most promising change.")
        padded = (*found, *([free] * s.k))[: s.k]
        return tuple(replace(d, parent=p) for d, p in zip(padded, parents, strict=True))

    def propose(self, r: Request) -> Proposal:
        def prompt(s: Situation) -> Prompt:
            return self.book.propose(s, r.direction, r.parent_source)

        found = self._ask(
            r.calls, r.situation, prompt, lambda t: self.book.read_proposal(t, r.parent_source)
        )
        gain = found.predicted_gain
        return replace(found, predicted_gain=r.direction.predicted_gain if gain is None else gain)

    def repair(self, r: Request, source: str, failed: Verdict) -> Proposal | None:
        def prompt(s: Situation) -> Prompt:
            return self.book.repair(s, source, failed)

        return self._ask(r.calls, r.situation, prompt, lambda t: self.book.read_proposal(t, source))

    def reflect(self, s: Situation, calls: Model | None) -> tuple[str, ...]:
        try:
            return self._ask(calls, s, self.book.reflect, self.book.read_lessons)
        except (NoProposal, ModelError):
            return ()

    def _ask(
        self,
        calls: Model | None,
        s: Situation,
        write: Callable[[Situation], Prompt],
        read: Callable[[str], T],
    ) -> T:
        """One readable answer. Raises NoProposal, WaitError, StopRun."""
        if calls is None:
            raise NoProposal("this proposer has no model")
        prompt = write(s)
        schema = self.book.schema(prompt.role)
        complaints = 0
        while True:
            try:
                completion = calls.complete(prompt, schema)
                return read(completion.text)
            except BadFormat as error:
                say, answer = str(error), completion.text
            except TruncationError as error:
                say, answer = SHORTER, (error.partial.text if error.partial else "")[:2000]
            except ContextError as error:
                if not s.history:
                    raise NoProposal(
                        f"the prompt is too long even without history: {error}"
                    ) from error
                fewer = s.lessons[-5:] if len(s.lessons) > 5 else ()
                s = replace(s, history=s.history[len(s.history) // 2 + 1 :], lessons=fewer)
                shorter = write(s)
                if shorter == prompt:
                    raise NoProposal(f"the prompt cannot be made shorter: {error}") from error
                prompt = shorter
                continue
            except RefusalError as error:
                raise NoProposal(f"the model declined: {error}") from error
            complaints += 1
            if complaints > COMPLAINTS:
                raise NoProposal(f"no readable answer: {say}")
            prompt = prompt.then(answer or "(nothing)", say)
