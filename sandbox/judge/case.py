"""What is judged: the artifact checked against its target's contract, the reference, the device, the secret seeds.

Loading reads hostile input (`sandbox.artifact_store`); whether the plan may run on a device is the device's to say.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact, Buffer
from sandbox.devices.base import Device, Refused
from sandbox.jobs import JudgeJob
from sandbox.judge.seeds import Seeds
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status
from targets import base as targets
from targets.base import Options, Target, Workload
from targets.reference import Reference

MIN_WORKSPACE = 4 << 30
CALLER = ("inputs", "weights", "states", "outputs")


@dataclass(frozen=True)
class Case:
    """One artifact on one workload. `seeds` are secret until the verdict."""

    job: JudgeJob
    target: Target
    reference: Reference
    workload: Workload
    device: Device
    seeds: Seeds

    def buffers(self, *groups: str) -> tuple[Buffer, ...]:
        return tuple(b for b in self.workload.buffers if b.group in groups)

    @cached_property
    def ranks(self) -> int:
        """GPUs that the job holds."""
        return 1 + max((b.rank for b in self.workload.buffers), default=0)

    def device_of(self, rank: int) -> str:
        """torch's name of the device with a rank's buffers."""
        find = getattr(self.device, "device_of", None)
        return str(find(rank)) if find is not None else self.device.torch_device

    def here(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor where the oracle works, which is rank 0's device."""
        return t if self.ranks == 1 else t.to(self.device_of(0))

    def copy(self, t: torch.Tensor) -> torch.Tensor:
        """A copy of it there."""
        moved = self.here(t)
        return moved.clone() if moved is t else moved

    def group_bytes(self, *groups: str) -> int:
        return sum(b.nbytes for b in self.buffers(*groups))

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """Names of tensor dimensions for messages, where the reference has them."""
        found: Mapping[str, tuple[str, ...]] = getattr(self.reference, "axes", {})
        return found


def options_of(fields: Mapping[str, Any]) -> Options:
    return Options(**{k: v for k, v in fields.items() if k in Options.__dataclass_fields__})


def open_case(job: JudgeJob, device: Device) -> Case:
    """Target, workload and reference of a job. Raises what targets raise: a wrong job is not the candidate's fault."""
    target = targets.find(job.target)
    workload = target.workload(options_of(job.options))
    return Case(job, target, load_reference(target.reference), workload, device, Seeds(job.seed))


def load_reference(where: str) -> Reference:
    """`module:Class` or `path/to/file.py:Class`, constructed."""
    made: Reference = load_attribute(where)()
    return made


def load_attribute(where: str) -> Any:
    name, _, attribute = where.rpartition(":")
    module = (
        targets.load_module(Path(name).resolve())
        if name.endswith(".py")
        else importlib.import_module(name)
    )
    return getattr(module, attribute)


def read_artifact(folder: Path, case: Case, instrumented: bool = False) -> Artifact:
    """Load and compare with the target's contract. A build with marks is read only where one is asked for.

    Raises Refused with `plan_error`."""
    try:
        artifact = artifact_store.load(folder)
    except Malformed as error:
        raise _refused("schema", f"the artifact is malformed: {error}") from error
    except OSError as error:
        raise _refused("schema", f"the artifact cannot be read: {error.strerror}") from error
    if artifact.instrumented is not instrumented:
        raise _refused(
            "instrumented", "a build with marks is for the timeline, and for nothing else"
        )
    _check_identity(artifact, case)
    _check_buffers(artifact, case.workload)
    _check_workspace(artifact, case)
    _check_prepare(artifact)
    return artifact


def _refused(rule: str, message: str, **where: Any) -> Refused:
    return Refused(Status.PLAN_ERROR, Failure(rule, message, where))


def _check_identity(artifact: Artifact, case: Case) -> None:
    if artifact.target != case.job.target:
        raise _refused("target", f"compiled for {artifact.target}, judged as {case.job.target}")
    want = case.workload.key
    odd = sorted(
        k for k in want.keys() | artifact.workload.keys() if want.get(k) != artifact.workload.get(k)
    )
    if odd:
        k = odd[0]
        raise _refused(
            "workload",
            f"compiled for {k} = {artifact.workload.get(k)!r}, judged with {k} = {want.get(k)!r}",
        )


def _check_buffers(artifact: Artifact, workload: Workload) -> None:
    declared = {b.name: b for b in workload.buffers}
    given = {b.name: b for b in artifact.buffers if b.group in CALLER}
    for name in sorted(declared.keys() | given.keys()):
        if name not in given:
            raise _refused("buffers", f"the artifact lacks the buffer {name}", buffer=name)
        if name not in declared:
            raise _refused("buffers", f"the target has no buffer {name}", buffer=name)
        if given[name] != declared[name]:
            raise _refused(
                "buffers",
                f"{name} is {_spelled(given[name])}, the target says {_spelled(declared[name])}",
                buffer=name,
            )


def _spelled(b: Buffer) -> str:
    return f"{b.dtype} {list(b.shape)} aligned to {b.align}"


def _check_workspace(artifact: Artifact, case: Case) -> None:
    """A bound on scratch: 4 GB, or twice the weights where a candidate packs them anew."""
    asked = sum(b.nbytes for b in artifact.buffers if b.group == "workspace")
    most = max(MIN_WORKSPACE, 2 * case.group_bytes("weights"))
    most = min(most, case.device.facts().memory_bytes // 2)
    if asked > most:
        raise _refused("workspace", f"asks for {asked} bytes of workspace, {most} are allowed")


def _check_prepare(artifact: Artifact) -> None:
    """Preparation sees weights, constants and persistent scratch only."""
    named = {
        r.buffer
        for x in (artifact.prepare.launches if artifact.prepare else ())
        for r in x.relocations
    }
    for name in sorted(named):
        b = artifact.buffer(name)
        if b.group not in ("weights", "constants") and b.lifetime != "persistent":
            raise _refused(
                "prepare",
                f"prepare uses {name}; it sees weights, constants and persistent workspace only",
                buffer=name,
            )
