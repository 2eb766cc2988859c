"""Runners and a device for tests of the judge's server: each misbehaves in one way. Named on the server's command line.

The device is the real CUDA device class over a driver without a GPU, so `cuda` jobs go the whole way.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from sandbox import assemble, canary, judge_wire
from sandbox.devices.base import Device, Faulted
from sandbox.devices.cuda import CudaDevice
from sandbox.jobs import JudgeJob
from sandbox.judge.rounds import Place, open_device
from sandbox.verdict import Correctness, Failure, Outcome, Status, Verdict
from tests.sandbox.devices import kernels
from tests.sandbox.devices.fake_driver import CANARY, FakeDriver, canary_run

Progress = Callable[[str], None]


# Once here, so that children need not.
torch.set_num_threads(1)
assemble.version()


def open_fake(place: Place) -> Device:
    """A GPU whose canary works, unless the state folder says otherwise by a file: `broken`, or `broken-times` with the
    number of opened devices that are still to fail."""
    kernel = CANARY
    times = place.state / "broken-times"
    left = int(times.read_text()) if times.exists() else 0
    if left:
        times.write_text(str(left - 1))
    if left or (place.state / "broken").exists():
        kernel = replace(CANARY, run=lambda params: None)
    with (place.state / "opened").open("a") as log:
        log.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    _unless_lost(place)
    return CudaDevice(FakeDriver(kernels={"canary": kernel}), 1, place.state, torch_device="cpu")


def _unless_lost(place: Place) -> None:
    """The GPU falls off the bus as soon as the state folder has a file `lost`."""
    if (place.state / "lost").exists():
        raise Faulted(Status.INFRA, Failure("no-gpu", "no usable GPU: it fell off the bus"))


def open_losable(place: Place) -> Device:
    """A real GPU, until it is lost."""
    _unless_lost(place)
    return open_device(place)


def open_none(place: Place) -> Device:
    raise Faulted(Status.INFRA, Failure("no-gpu", "no usable GPU: none here"))


def passed(job: JudgeJob, note: str = "") -> Verdict:
    done = judge_wire.without_judging(job, Status.INFRA, Failure("x", "x"))
    correctness = Correctness(1, 1, 1, (), ("all",), ())
    return replace(
        done, status=Status.PASSED, failure=None, outcome=Outcome.NOT_TIMED, correctness=correctness,
        profile={"note": note, "seed": job.seed, "deadline": job.deadline_s},
    )  # fmt: skip


def ok(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    print("noise on stdout that must not reach the protocol", flush=True)
    result = canary.run(device, 1000)
    return passed(job, result.message)


def environment(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    return passed(job, "\n".join(sorted(f"{k}={v}" for k, v in os.environ.items())))


def infinite(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    return replace(passed(job), profile={"worst": float("inf"), "nan": float("nan")})


def raises(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    progress("compare")
    raise ZeroDivisionError("the checker is wrong")


def _launch(device: Device, during: Callable[[], None]) -> None:
    """Launch a kernel that does `during` while it runs."""

    def run(params: list[bytes]) -> None:
        canary_run(params)
        during()

    device.inner.driver.kernels["canary"] = replace(CANARY, run=run)  # type: ignore[attr-defined]
    canary.run(device, 1000)


def _die() -> None:
    faulthandler.disable()  # pytest's would print a page
    os.kill(os.getpid(), signal.SIGSEGV)


def dies_in_launch(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    progress("check")
    _launch(device, _die)
    return passed(job)


def dies_outside(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    progress("compare")
    _die()
    return passed(job)


def hangs_in_launch(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    progress("check")
    _launch(device, lambda: time.sleep(60))
    return passed(job)


def hangs_outside(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    progress("oracle")
    time.sleep(60)
    return passed(job)


def faults(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    raise Faulted(Status.FAULT, Failure("cuda-fault", "the kernel read memory outside (FAKE)"))


def faults_once(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    """Faults in the first child of this artifact's folder, passes afterwards."""
    mark = Path(job.artifact.parent, "first-run")
    if mark.exists():
        return passed(job)
    mark.touch()
    return faults(job, device, progress)


def torch_reports(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    """A kernel faults and torch is the first to say so, with an error of its own."""

    def during() -> None:
        device.inner.driver.errors = ["CUDA_ERROR_MISALIGNED_ADDRESS"] * 2  # type: ignore[attr-defined]
        raise RuntimeError("CUDA error: misaligned address")

    _launch(device, during)
    return passed(job)


def leaves_children(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    """A process of the child's group that would live on."""
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return passed(job, str(left.pid))


def ends_silently(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    os._exit(0)


def kills_server(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait(30)
    return passed(job)


def _on_gpu(device: Device, body: str, wait: bool = True) -> torch.Tensor:
    """Run a kernel of our own on a real GPU; its output."""
    n = 4096
    x = torch.arange(n, dtype=torch.float32, device=device.torch_device)
    y = torch.zeros_like(x)
    # One block: a loop in a larger grid would be refused before it could hang.
    one = replace(kernels.launch(n), grid=(1, 1, 1))
    program = device.load(kernels.artifact(body, n, (one,)))
    program.bind("step", {"inputs.x": x, "outputs.y": y}).launch()
    if wait:
        device.synchronize()
    return y.cpu()


def gpu_double(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    y = _on_gpu(device, kernels.DOUBLE)
    assert y[100] == 201
    return passed(job)


def gpu_wild_store(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    _on_gpu(device, kernels.WILD_STORE)
    return passed(job)


def gpu_lost(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    """A fault after which the GPU is gone."""
    (job.artifact.parent / "lost").touch()
    return gpu_wild_store(job, device, progress)


def gpu_misaligned(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    """torch is the first to notice."""
    _on_gpu(device, kernels.MISALIGNED, wait=False)
    return passed(job)


def gpu_endless(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    _on_gpu(device, kernels.ENDLESS)
    return passed(job)


def gpu_endless_copy(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    """Waits in torch, where only the server's deadline helps."""
    progress("check")
    _on_gpu(device, kernels.ENDLESS, wait=False)
    return passed(job)


def by_target(job: JudgeJob, device: Device, progress: Progress) -> Verdict:
    """The runner that the job's target names, so that one server shows many."""
    chosen: Callable[[JudgeJob, Device, Progress], Verdict] = globals()[job.target]
    return chosen(job, device, progress)
