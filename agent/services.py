"""Starts the sandbox's services and says beforehand whether this machine can do what was asked.

The clients start processes; nothing of the compiler, the judge, torch or CUDA is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.models.base import Unavailable
from agent.runner import Services
from agent.workspace import Workspace
from sandbox.compile_client import CompileClient, CompileSettings, NoIsolation
from sandbox.jobs import Judge, JudgeJob
from sandbox.judge_client import ClientOptions, JudgeClient, JudgeFailed, state_folder
from sandbox.verdict import Verdict

DEFAULT_ARCH = "sm_90a"


@dataclass(frozen=True)
class Wanted:
    """What to start. `sandbox` '' means the strongest isolation that works; `arch` '' that of the
    device.
    """

    device: str
    arch: str = ""
    sandbox: str = ""
    trust_this_code: bool = False
    parallel: int = 1
    deadline_s: float = 120.0


def judge_state() -> Path:
    """Locks and device facts are the machine's, not the project's."""
    return state_folder()


def new_judge() -> JudgeClient:
    return JudgeClient(ClientOptions(judge_state()))


def new_compiler(w: Wanted, workspace: Workspace) -> CompileClient:
    cores = os.cpu_count() or 1
    return CompileClient(
        CompileSettings(
            store=workspace.root, tier=w.sandbox or None, trust_this_code=w.trust_this_code,
            arch=w.arch or DEFAULT_ARCH, idle=max(1, min(w.parallel + 1, cores)),
            jobs=max(1, min(w.parallel, cores)), deadline_s=w.deadline_s,
        )
    )  # fmt: skip


def device_facts(judge: JudgeClient, device: str) -> Mapping[str, Any]:
    """What the judge sees of the device, after a canary ran on it. Raises Unavailable."""
    try:
        found = judge.probe(device)
    except JudgeFailed as error:
        raise Unavailable(f"device {device}: {error}") from error
    if not found.get("ok"):
        raise Unavailable(f"device {device}: {found.get('message', 'it does not work')}")
    facts: Mapping[str, Any] = found["facts"]
    return facts


def start(w: Wanted, workspace: Workspace) -> tuple[Services, Mapping[str, Any]]:
    """Running services, and the device's facts. Raises Unavailable; nothing is left running
    then.
    """
    judge = new_judge()
    compiler = None
    try:
        facts = device_facts(judge, w.device)
        compiler = new_compiler(w, workspace)
        try:
            compiler.start()
        except NoIsolation as error:
            raise Unavailable(f"no compile jail: {error}") from error
    except BaseException:
        judge.close()
        if compiler is not None:
            compiler.close()
        raise
    return Services(compiler, judge, new_judge), facts


class NoJudge:
    """Where only compiling was asked for."""

    def judge(self, job: JudgeJob) -> Verdict:
        raise Unavailable("no judge was started")

    def close(self) -> None:
        return None


def start_compiler(w: Wanted, workspace: Workspace, judge: Judge | None = None) -> Services:
    """The compiler alone, or with verdicts that come from elsewhere. Raises Unavailable."""
    compiler = new_compiler(w, workspace)
    try:
        compiler.start()
    except NoIsolation as error:
        compiler.close()
        raise Unavailable(f"no compile jail: {error}") from error
    judging = judge or NoJudge()
    return Services(compiler, judging, lambda: judging)
