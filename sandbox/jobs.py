"""Jobs: what the agent asks of the sandbox, and what comes back. Plain data; the services run in other processes.

Compile jobs go to `python -m sandbox.compile.server`, judge jobs to `python -m sandbox.judge.server`
(`sandbox.compile_client` and `sandbox.judge_client` start them and speak to them). This imports neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sandbox.artifact import Buffer
from sandbox.verdict import Failure, Status, Tier, Verdict


@dataclass(frozen=True)
class CompileJob:
    """Source of one candidate and the signature it is traced against.

    `sms` is what the candidate reads as `cfg.sms`; 0 takes the architecture's usual part.
    """

    source: str
    target: str
    workload: Mapping[str, Any]
    dims: Mapping[str, Any]
    buffers: tuple[Buffer, ...]
    arch: str = "sm_90a"
    tunables: Mapping[str, Any] = field(default_factory=dict)
    filename: str = "candidate.py"
    sms: int = 0


@dataclass(frozen=True)
class CompileOutcome:
    """An artifact folder, or why there is none. `tunables` are the candidate's declared TUNABLES: name -> values.

    `findings` is advice about the source; it changes no status.
    """

    artifact: Path | None
    sha256: str = ""
    status: Status | None = None
    failure: Failure | None = None
    tunables: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    isolation: Mapping[str, Any] = field(default_factory=dict)
    cached: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class JudgeJob:
    """An artifact to judge at a tier on a device. `incumbent` and `baselines` are timed against it, interleaved.

    `options` selects the workload (`targets.base.Options` as a dict); `seed` None means secret and fresh. With
    `timeline`, a build of the same source with marks, nothing is judged: both are run, compared bit for bit, and the
    verdict holds the waterfall alone. Baselines `usual`: `graph`, beyond a screen the strong ones too; `all`: all.
    `steps` > 0 is for reports: so many steps of every arm are timed one by one as well, and a screen checks less.
    """

    artifact: Path
    target: str
    options: Mapping[str, Any]
    device: str
    tier: Tier = Tier.SCREEN
    incumbent: Path | None = None
    baselines: tuple[str, ...] = ("usual",)
    seed: int | None = None
    deadline_s: float = 120.0
    compile_isolation: Mapping[str, Any] = field(default_factory=dict)
    timeline: Path | None = None
    steps: int = 0


class Compiler(Protocol):
    def compile(self, job: CompileJob) -> CompileOutcome: ...
    def close(self) -> None: ...


class Judge(Protocol):
    def judge(self, job: JudgeJob) -> Verdict: ...
    def close(self) -> None: ...
