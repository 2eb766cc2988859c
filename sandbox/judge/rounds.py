"""What one child does: open the device, then judge a job or run the canary. Runs after the fork, never in the server.

Everything it learns goes back as plain data. It opens the device only here, so the warm parent stays free of CUDA.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sandbox import canary, judge_wire
from sandbox.devices import cuda_rate
from sandbox.devices.base import Device, Faulted, Refused
from sandbox.devices.cuda import CudaDevice
from sandbox.devices.roofline import measure as roofline
from sandbox.jobs import JudgeJob
from sandbox.judge.confine import Room, confine, folders_of
from sandbox.judge.progress import Progress, WatchedDevice
from sandbox.verdict import Verdict

CPU_CANARY = 1 << 12  # the cpu device interprets threads one by one
Runner = Callable[[JudgeJob, Device, Callable[[str], None]], Verdict]


@dataclass(frozen=True)
class Place:
    """Where a child runs: device kind, the GPU it may see, the state folder, the process that forked it, its folder
    for temporary files, and the level of confinement (`sandbox.judge.confine.LEVELS`)."""

    kind: str
    gpu: str | None
    state: Path
    parent: int
    opener: Callable[[Place], Device]
    scratch: Path = Path("/nonexistent")
    level: int = 0


def open_device(place: Place) -> Device:
    """The device, in this process. Raises Faulted (`infra`) without a GPU."""
    if place.kind == "cuda":
        several = len((place.gpu or "").split(","))
        if several > 1:
            from sandbox.devices.cuda_ranks import CudaRanks

            ranks: Any = CudaRanks.open(several, place.state)
            device: Device = ranks
            return device
        return CudaDevice.open(0, place.state)
    from sandbox.devices.cpu import CpuDevice

    return CpuDevice(lint=True)


def gpus_of(job: JudgeJob) -> int:
    """GPUs that a job of a built-in target holds; one for a user's own, whose file only a child loads."""
    if ".py:" in job.target or job.device == "cpu":
        return 1
    from targets import base

    fields = {k: v for k, v in job.options.items() if k in base.Options.__dataclass_fields__}
    try:
        workload = base.find(job.target).workload(base.Options(**fields))
    except (base.UnknownTarget, base.UnknownOption, TypeError):
        return 1  # the child says what is wrong with it
    return 1 + max((b.rank for b in workload.buffers), default=0)


def _enter(place: Place, progress: Progress, read: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Confine this process and let it see one GPU. Returns what the verdict says of its isolation."""
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # numbers as nvidia-smi has them
    keep = (progress.result_fd,)
    return confine(
        place.parent, Room(place.scratch, place.state, place.gpu, read, place.level, keep)
    )


def judge(job: JudgeJob, place: Place, runner: Runner, progress: Progress) -> Mapping[str, Any]:
    """The verdict of one job, as JSON. Exceptions that are not about the candidate leave as they are: `infra`."""
    begin = time.monotonic()
    isolation = _enter(place, progress, folders_of(job))
    progress.confined(isolation)
    confined = opened = time.monotonic()
    try:
        progress.enter("device")
        device = place.opener(place)
        opened = time.monotonic()
        isolation |= _shared_memory(device)
        verdict = _run(job, WatchedDevice(device, progress), runner, progress)
    except (Refused, Faulted) as error:
        verdict = judge_wire.without_judging(job, error.status, error.failure)
    seconds = {
        **verdict.seconds, "confine": confined - begin, "open_device": opened - confined,
        "child": time.monotonic() - begin,
    }  # fmt: skip
    verdict = replace(verdict, isolation={**verdict.isolation, "judge": isolation}, seconds=seconds)
    return {"verdict": verdict.to_json()}


def _shared_memory(device: Device) -> dict[str, Any]:
    """Whether kernels can reach this process's heap, where results are compared: said, not prevented."""
    reach = device.facts().extra.get("pageable_memory_access") if device.kind == "cuda" else None
    return {} if reach is None else {"pageable_memory_access": reach}


def _run(job: JudgeJob, device: WatchedDevice, runner: Runner, progress: Progress) -> Verdict:
    try:
        return runner(job, device, progress.enter)
    except (Refused, Faulted):
        raise
    except Exception:
        # torch reports a fault of the kernel at its own next call: ask the device whether that is what happened.
        _, in_flight, _ = progress.read()
        if device.kind == "cuda" and in_flight:
            device.synchronize()
        raise


def _canaries(device: Device, elements: int) -> canary.CanaryResult:
    """On each GPU of several: the first that fails, or the last."""
    each: Any = getattr(device, "each", None)
    if each is None:
        return canary.run(device, elements)
    result = canary.CanaryResult(False, "no GPU")
    for one in each():
        result = canary.run(one, elements)
        if not result.ok:
            break
    return result


def probe(place: Place, progress: Progress) -> Mapping[str, Any]:
    """Open the device, run the canary, tell what there is."""
    isolation = _enter(place, progress)
    begin = time.monotonic()
    try:
        progress.enter("device")
        device = place.opener(place)
        opened = time.monotonic()
        progress.enter("canary")
        progress.launching()
        elements = canary.ELEMENTS if device.kind == "cuda" else CPU_CANARY
        result = _canaries(device, elements)
        progress.landed()
        tested = time.monotonic()
        first = getattr(device, "devices", (device,))[0]
        if result.ok and isinstance(first, CudaDevice):
            progress.enter("stream rate")
            cuda_rate.remember(first)
            progress.enter("roofline")
            roofline.remember(first)
        facts = asdict(device.facts())
    except (Refused, Faulted) as error:
        return {
            "ok": False, "rule": error.failure.rule, "status": str(error.status), "message": error.failure.message,
            "isolation": isolation,
        }  # fmt: skip
    seconds = {
        "open_device": opened - begin, "canary": tested - opened, "stream_rate": time.monotonic() - tested,
    }  # fmt: skip
    return {
        "ok": result.ok, "rule": "canary", "message": result.message, "us": result.us, "facts": facts,
        "isolation": isolation, "seconds": seconds,
    }  # fmt: skip
