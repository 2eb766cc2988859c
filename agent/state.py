"""State of the graph and what its nodes depend on. State holds ids and counters only; texts lie on
disk.

Every superstep is checkpointed with full values, so nothing here may grow with the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict

from agent.budget import Ledger
from agent.config import RunSettings
from agent.models.base import Proposer
from agent.models.calls import Clerk
from agent.store import Queries, Store
from agent.types import Task
from agent.workspace import RunFiles, Workspace
from sandbox.jobs import Compiler, Judge
from sandbox.verdict import Verdict


def gather(old: list[int], new: list[int] | None) -> list[int]:
    """Reducer: branches append, `record` clears with None."""
    return [] if new is None else sorted({*old, *new})


def first(old: str, new: str | None) -> str:
    """Reducer: the first stop reason stands until it is cleared with None."""
    return "" if new is None else old or new


class RunState(TypedDict, total=False):
    """`next`: the next unused candidate number; `seqs`: this round's; `done`: those finished."""

    run: str
    round: int
    next: int
    seqs: list[int]
    incumbent: int
    stale: int
    infra: int
    done: Annotated[list[int], gather]
    stop: Annotated[str, first]


class CandidateState(TypedDict, total=False):
    """`step`: the version being worked on; `go`: the node that should come next."""

    run: str
    round: int
    seq: int
    incumbent: int
    step: int
    go: str
    done: Annotated[list[int], gather]
    stop: Annotated[str, first]


class CandidateOut(TypedDict, total=False):
    done: Annotated[list[int], gather]
    stop: Annotated[str, first]


class Reporter(Protocol):
    """Where progress goes. Called from worker threads."""

    def say(self, text: str) -> None: ...
    def round(self, number: int, candidates: list[int]) -> None: ...
    def status(self, seq: int, text: str) -> None: ...
    def verdict(self, seq: int, step: int, verdict: Verdict) -> None: ...
    def promoted(self, seq: int, reason: str) -> None: ...


@dataclass(frozen=True)
class Deps:
    """The nodes' world. `fresh_judge` starts a judge process that shares nothing with earlier
    ones.
    """

    settings: RunSettings
    task: Task
    seed_source: str
    proposer: Proposer
    compiler: Compiler
    judge: Judge
    fresh_judge: Callable[[], Judge]
    store: Store
    workspace: Workspace
    files: RunFiles
    ledger: Ledger
    reporter: Reporter
    now: Callable[[], str]
    out: Path
    clerk: Clerk | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    gpu: AbstractContextManager[Any] = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def queries(self) -> Queries:
        return Queries(self.store, self.workspace)

    def calls(self, scope: str) -> Any:
        """The model bound to that part of the record, or None for proposers without one."""
        return self.clerk.scope(scope) if self.clerk else None
