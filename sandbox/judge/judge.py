"""The judge: an artifact on a device, checked against its target's oracle, timed against its rivals, as a verdict.

`run` is the whole of it and returns a verdict for whatever a candidate did. It holds no process or GPU management
(`sandbox.judge.server`), and after a fault on cuda its process is of no further use.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from sandbox.devices.base import Device, Faulted, Refused
from sandbox.jobs import JudgeJob
from sandbox.judge import profile, rig, timeline, timing
from sandbox.judge.case import open_case, read_artifact
from sandbox.judge.checks import Checker
from sandbox.judge.ending import Ended
from sandbox.judge.kernels import MachineCode
from sandbox.judge.report import Draft, device_of
from sandbox.judge.tiers import Effort, brief, effort
from sandbox.judge.trial import Trial
from sandbox.verdict import Failure, Status, Verdict

_GPU_DIED = (
    "CUDA error",
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
)


def run(
    job: JudgeJob,
    device: Device,
    progress: Callable[[str], None] | None = None,
    todo: Effort | None = None,
) -> Verdict:
    """Judge one artifact. `progress` hears the name of each phase; `todo` replaces what the tier asks for. Never
    raises for what a candidate did; errors of the judge or the machine are `infra`."""
    draft = Draft(job, progress or (lambda phase: None))
    try:
        with torch.inference_mode():
            if job.timeline is not None:
                return timeline.run(draft, device)
            asked = effort(job.tier, device.kind)
            return _judge(job, device, draft, todo or (brief(asked) if job.steps else asked))
    except (Refused, Faulted) as end:
        return draft.ended(end.status, end.failure)
    except Ended as end:
        return draft.ended(end.status, end.failure, end.correctness)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return draft.ended(Status.INFRA, Failure("memory", f"out of memory: {_line(error)}"))
    except Exception as error:  # a crashed checker is infra, never a pass
        return draft.ended(*_crash(error, device))


def _judge(job: JudgeJob, device: Device, draft: Draft, todo: Effort) -> Verdict:
    with draft.phase("load"):
        draft.device = device_of(device.facts())
        case = open_case(job, device)
        artifact = read_artifact(job.artifact, case)
        draft.artifact = artifact.sha256
        program = device.load(artifact)
        draft.resources = tuple(program.resources)
    disassembly = MachineCode(artifact) if _measures(device) else None
    with draft.phase("allocate"):
        built = rig.build(case, artifact, program)
    trial = Trial(built, todo, Checker(case))
    draft.profile["seeds"] = {"master": case.seeds.master}
    with draft.phase("check"):
        _try(trial, draft)
    with draft.phase("time"):
        timed = timing.run(built, trial.checker, draft, todo)
    apart = getattr(device, "apart", None)
    if case.ranks > 1 and apart is not None:
        draft.profile["ranks"] = apart()
    with draft.phase("profile"):
        _profile(built, draft, disassembly)
    correctness = trial.result()
    draft.checked[:0] = correctness.checked
    draft.not_verified[:0] = correctness.not_verified
    return draft.passed(timed.outcome, correctness, timed.timing)


def _try(trial: Trial, draft: Draft) -> None:
    """The correctness trial. What the device noticed is kept however it ends; where it ends badly, with what else the
    device has to say of the kernels."""
    program = trial.rig.program
    scramble = getattr(program, "scramble", None)
    if scramble is not None:
        scramble(trial.rig.case.seeds.of("unset"))
    try:
        trial.run()
    except (Ended, Faulted):
        draft.findings += getattr(program, "doubts", tuple)()
        raise
    finally:
        draft.findings += [*trial.findings, *program.findings()]


def _measures(device: Device) -> bool:
    """Whether a profile will be measured: then its machine code is read meanwhile."""
    return device.kind == "cuda" and device.torch_device != "cpu"


def _profile(built: rig.Rig, draft: Draft, disassembly: MachineCode | None) -> None:
    """A part of a plan may wait for the rest of it: that ends the profile and takes nothing from the verdict."""
    try:
        draft.profile |= profile.run(built, draft.resources, disassembly)
    except Faulted as end:
        draft.findings.append(Failure("profile", f"no profile: {end.failure.message}"))
    for kernel, found in draft.profile.get("sass", {}).items():
        count = found.get("early_arrivals", 0) if isinstance(found, dict) else 0
        if count:
            draft.findings.append(_early(kernel, count))


def _early(kernel: str, count: int) -> Failure:
    message = (
        f"{count} arrivals on mbarriers in {kernel} wait for no load of shared memory before them: a bulk copy may "
        "fill that memory again while a load is on its way, rarely. A proxy fence before the arrival orders them"
    )
    return Failure("early-arrivals", message, {"kernel": kernel, "arrivals": count})


def _crash(error: Exception, device: Device) -> tuple[Status, Failure]:
    """torch reports a fault of a kernel at its own next call, so the device is asked first."""
    text = _line(error)
    try:
        device.synchronize()
    except Faulted as fault:
        return fault.status, fault.failure
    if isinstance(error, RuntimeError) and any(mark in text for mark in _GPU_DIED):
        return Status.FAULT, Failure("gpu-error", f"the GPU reported an error: {text}")
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    where = {"trace": [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in frames]}
    return Status.INFRA, Failure(
        "judge", f"the judge failed: {type(error).__name__}: {text}", where
    )


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
