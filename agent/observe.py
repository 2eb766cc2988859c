"""A closer look at what has passed: the build with marks, compiled and run beside the artifact in its own process.

The verdict keeps its status whatever happens here; what goes wrong is a finding. Nothing is looked at before it is
correct.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sandbox.artifact import TIMELINE
from sandbox.jobs import CompileJob, Compiler, Judge, JudgeJob
from sandbox.verdict import Failure, Status, Verdict

_IMPORT = re.compile(
    r"^\s*(?:from\s+kernelgen\s+import\s+.*\btimeline\b|(?:from|import)\s+kernelgen\.timeline\b)",
    re.M,
)


def marks_phases(source: str) -> bool:
    """Whether a source uses the helper of marks."""
    return bool(_IMPORT.search(source))


def timeline(
    verdict: Verdict, compile_job: CompileJob, judge_job: JudgeJob, services: tuple[Compiler, Judge]
) -> Verdict:
    """The verdict with the timeline and waterfall of the build with marks, where the source has any."""
    if verdict.status is not Status.PASSED or not marks_phases(compile_job.source):
        return verdict
    compiler, judge = services
    outcome = compiler.compile(
        replace(compile_job, tunables={**compile_job.tunables, TIMELINE: True})
    )
    if outcome.artifact is None:
        why = outcome.failure.message if outcome.failure else str(outcome.status)
        return _without(verdict, f"the build with marks does not compile: {why}")
    job = replace(judge_job, timeline=outcome.artifact, incumbent=None, baselines=())
    seen = judge.judge(job)
    if seen.status is not Status.PASSED:
        why = seen.failure.message if seen.failure else str(seen.status)
        return _without(verdict, why)
    seconds = {
        f"timeline_{k}": s for k, s in seen.seconds.items() if k in ("child", "compare", "timeline")
    }
    held = verdict.seconds.get("held", 0.0) + seen.seconds.get("held", 0.0)
    return replace(
        verdict, profile={**verdict.profile, **seen.profile}, checked=(*verdict.checked, *seen.correctness.checked)
        if seen.correctness else verdict.checked,
        seconds={**verdict.seconds, **seconds, **({"held": held} if held else {})},
    )  # fmt: skip


def _without(verdict: Verdict, why: str) -> Verdict:
    found = Failure("timeline", f"no timeline: {why}"[:2000])
    return replace(verdict, findings=(*verdict.findings, found))
