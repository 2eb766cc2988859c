"""What the loop's parts tell each other: task, situation, direction, proposal. Frozen data without
behaviour.

Nothing here reads a file, a clock or a database. `gain` is always a speed-up over the parent: 1.05
is 5 % faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox.artifact import Buffer
from sandbox.verdict import Verdict
from targets.base import Floor


@dataclass(frozen=True)
class Task:
    """What does not change during a run. `workload` is `Workload.key`; `dims` are what candidates
    read as `cfg.dims`; `brief` is the target's mathematics in words and formulas.
    """

    run: str
    target: str
    summary: str
    workload: Mapping[str, Any]
    dims: Mapping[str, Any]
    buffers: tuple[Buffer, ...]
    floor: Floor
    device: str
    arch: str
    tier: str = "screen"
    brief: str = ""


@dataclass(frozen=True)
class Tried:
    """A recorded candidate and its last word. `seq` counts within the run; 0 is the seed.

    `us` is microseconds a step, `fraction` the share of the byte floor reached, `speedup` over the
    incumbent of then; `twin` is the earlier candidate whose verdict this is, for it compiled to the same machine work.
    """

    seq: int
    round: int
    parent: int | None
    direction: str
    note: str
    predicted_gain: float | None
    source: str
    tunables: Mapping[str, Any]
    verdict: Verdict
    declared: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    us: float | None = None
    fraction: float | None = None
    speedup: float | None = None
    promoted: bool = False
    twin: int | None = None


@dataclass(frozen=True)
class Situation:
    """Where the run stands when a round begins. `history` is in order of `seq`; sources are looked
    up by `source_of`. `changes`: what the latest candidates changed against their parents, in words.
    """

    task: Task
    round: int
    k: int
    incumbent: Tried
    incumbent_source: str
    history: tuple[Tried, ...]
    lessons: tuple[str, ...] = ()
    seed: int = 0
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Direction:
    """What one candidate of a round should try. `tunables` pins values; a model leaves it empty."""

    title: str
    detail: str = ""
    parent: int = 0
    predicted_gain: float | None = None
    tunables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """A candidate's whole source. `tunables` chooses among the values its TUNABLES declare; empty
    means defaults.
    """

    source: str
    note: str = ""
    predicted_gain: float | None = None
    tunables: Mapping[str, Any] = field(default_factory=dict)
