"""A timing run's parts: clock, lanes, and the arms that take part in it. It times nothing itself."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch

from sandbox.artifact import Artifact
from sandbox.devices.base import Faulted, Program, Refused, Timer
from sandbox.judge import arms as arm_kinds
from sandbox.judge import baselines
from sandbox.judge.arms import Arm, PlanArm
from sandbox.judge.case import Case, read_artifact
from sandbox.judge.checks import Checker
from sandbox.judge.ending import Ended
from sandbox.judge.lanes import Lanes
from sandbox.judge.report import Draft
from sandbox.judge.rig import Rig
from sandbox.judge.tiers import Effort
from sandbox.verdict import Failure, Status, Tier

CANDIDATE, TWIN, INCUMBENT = "candidate", "twin", "incumbent"


@dataclass
class Session:
    """Everything one timing run needs."""

    case: Case
    rig: Rig
    checker: Checker
    draft: Draft
    effort: Effort
    clock: Timer
    lanes: Lanes
    arms: list[Arm] = field(default_factory=list)
    conditions: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    timed_us: float = 0.0

    def plan_arms(self) -> list[PlanArm]:
        return [a for a in self.arms if isinstance(a, PlanArm)]


@dataclass(frozen=True)
class Twin:
    """A second name for an arm: the A/A comparison."""

    of: Arm
    name: str = TWIN

    @property
    def steps(self) -> int:
        return self.of.steps

    @property
    def launches(self) -> int:
        return self.of.launches

    def replay(self) -> None:
        self.of.replay()


def find_rival(rig: Rig, draft: Draft) -> tuple[Artifact, Program] | None:
    """The incumbent, loaded; None where there is none or it is the candidate itself."""
    case = rig.case
    if case.job.incumbent is None:
        return None
    try:
        artifact = read_artifact(case.job.incumbent, case)
        if artifact.ptx_sha256 == rig.artifact.ptx_sha256:
            draft.findings.append(
                Failure("same", "the incumbent has the same PTX and plan; nothing to compare")
            )
            return None
        return artifact, case.device.load(artifact)
    except Refused as error:
        draft.findings.append(
            Failure("incumbent", f"the incumbent cannot be timed: {error.failure.message}")
        )
        return None


def make_arms(s: Session, rival: tuple[Artifact, Program] | None) -> None:
    s.lanes.refresh(-1)
    candidate = arm_kinds.plan_arm(CANDIDATE, (s.rig.artifact, s.rig.program), s.lanes, s.rig)
    candidate.record()
    s.arms.append(candidate)
    reference: Arm = candidate
    if rival is not None:
        incumbent = arm_kinds.plan_arm(INCUMBENT, rival, s.lanes)
        incumbent.record()
        s.arms.append(incumbent)
        reference = incumbent
    s.arms.append(Twin(reference))
    yardstick = baselines.Yardstick(s.lanes, s.checker)
    for name in named_baselines(s.case):
        _add_baseline(s, name, yardstick)


def named_baselines(case: Case) -> tuple[str, ...]:
    """The job's, with `usual` and `all` spelled out; `-NAME` leaves one out. Beside a screen `usual` is what costs
    nearly nothing to make ready; whoever looks like a winner meets the target's strong baselines. Those come first:
    memory may not do for all."""
    strong = tuple(getattr(case.target, "strong_baselines", ()))
    confirming = case.job.tier is not Tier.SCREEN
    known = {
        "usual": ("graph", *(strong if confirming else ())),
        "all": tuple(getattr(case.target, "baselines", {})),
    }
    found = [n for x in case.job.baselines for n in known.get(x, (x,))]
    left_out = {x[1:] for x in case.job.baselines if x.startswith("-")}
    wanted = [n for n in dict.fromkeys(found) if not n.startswith("-") and n not in left_out]
    return tuple(sorted(wanted, key=lambda n: n not in strong))


def broke_the_gpu(baseline: str, end: Faulted) -> Ended:
    """For what a baseline did: `infra`, never the candidate's fault; the keeper judges once more without it."""
    message = f"baseline {baseline} broke the GPU: {end.failure.message}"
    return Ended(Status.INFRA, Failure("baseline-fault", message, {"baseline": baseline}))


def _add_baseline(s: Session, name: str, yardstick: baselines.Yardstick) -> None:
    """A baseline is a comparison: where it fails, that is said and the candidate's verdict does not hang on it."""
    arm = _made(s, name, yardstick)
    if arm is None:
        _released()
    else:
        s.arms.append(arm)


def _released() -> None:
    """What a baseline that failed has held goes back: graphs of large workloads hold tens of gigabytes."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use


def _made(s: Session, name: str, yardstick: baselines.Yardstick) -> baselines.BaselineArm | None:
    """None for one that is not timed, and why among what was skipped."""
    where = getattr(s.case.target, "baselines", {}).get(name)
    if where is None:
        s.skipped[name] = "this target has none"
        s.draft.not_verified.append(f"baseline {name}: this target has none")
        return None
    try:
        arm = baselines.baseline_arm(name, where, yardstick)
    except Faulted as end:
        raise broke_the_gpu(name, end) from end
    except Exception as error:
        try:  # torch reports a fault by an error of its own; then this process is of no further use
            s.case.device.synchronize()
        except Faulted as end:
            raise broke_the_gpu(name, end) from error
        s.skipped[name] = f"{type(error).__name__}: {str(error)[:300]}"
        s.draft.findings.append(Failure("baseline", f"baseline {name} failed: {str(error)[:300]}"))
        return None
    if arm.failure is not None:
        message = f"baseline {name} is wrong and not timed: {arm.failure.message}"
        s.skipped[name] = f"wrong: {arm.failure.message}"
        s.draft.findings.append(Failure("baseline", message, arm.failure.where))
        return None
    return arm
