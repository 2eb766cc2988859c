"""The command line on fakes, as a process of its own: for tests with signals and real terminals.

`SLOW` in the environment: seconds a judgement against an incumbent takes; a file `judging` says that one has begun.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agent.commands.optimize
from agent import fakes
from agent.cli import main
from agent.runner import Services
from agent.services import Wanted
from agent.workspace import Workspace
from sandbox.jobs import JudgeJob
from sandbox.verdict import Verdict

SLOW = float(os.environ.get("SLOW", "0"))


@dataclass
class SlowJudge(fakes.FakeJudge):
    def judge(self, job: JudgeJob) -> Verdict:
        self.delay = SLOW if job.incumbent is not None else 0.0
        if self.delay:
            Path("judging").touch()
        return super().judge(job)


def start(w: Wanted, workspace: Workspace) -> tuple[Services, dict[str, Any]]:
    services = Services(fakes.FakeCompiler(workspace.root), SlowJudge(), SlowJudge)
    return services, {"arch": "sm_90a"}


if __name__ == "__main__":
    agent.commands.optimize.start = start  # type: ignore[attr-defined]
    main(sys.argv[1:])
