"""The CUDA device: assembles an artifact's PTX, checks its plans against this GPU, launches and captures them.

One stream, the device's own, is also torch's current stream, so copies, launches and events of the judge are in
order without further synchronisation. After a fault the process is of no use. It does not decide what is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from sandbox.artifact import Artifact
from sandbox.devices import cuda_facts
from sandbox.devices.base import DeviceFacts, Faulted, Refused
from sandbox.devices.cuda_driver import CudaDriver, CudaError, Driver
from sandbox.devices.cuda_faults import errors_as_faults, hung
from sandbox.devices.cuda_program import CudaGraph, CudaProgram
from sandbox.devices.cuda_toolchain import build
from sandbox.verdict import Failure, Status

HANG_S = 10.0  # far over any step; a legitimate queue of steps is milliseconds
SPIN_S = 2e-3  # poll without sleeping for this long: most waits are shorter


class CudaDevice:
    """See the module. `CudaDevice.open()` in a judge process; the constructor takes any `Driver`, for tests."""

    kind: Literal["cuda", "cpu"] = "cuda"

    def __init__(
        self, driver: Driver, stream: int, state: Path | None = None, torch_device: str = "cuda"
    ) -> None:
        self.driver, self.stream, self.torch_device = driver, stream, torch_device
        self.hang_s = HANG_S
        self.state = state
        self.limits = cuda_facts.limits(driver.attributes())
        self._facts: DeviceFacts | None = None

    @classmethod
    def open(cls, ordinal: int = 0, state: Path | None = None) -> CudaDevice:
        """Open torch's context on a visible device and make a stream of our own torch's current one.

        Raises Faulted (`infra`) where there is no usable GPU.
        """
        import torch

        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise no_gpu("torch is built without CUDA")
        try:
            torch.cuda.set_device(ordinal)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(stream)
            device = cls(CudaDriver(ordinal), stream.cuda_stream, state)
        except (RuntimeError, AssertionError, ImportError, CudaError) as error:
            raise no_gpu((str(error).splitlines() or [repr(error)])[0][:200]) from error
        device.torch_stream = stream
        return device

    torch_stream: Any = None

    def facts(self) -> DeviceFacts:
        if self._facts is None:
            with errors_as_faults():
                self._facts = cuda_facts.facts(self.driver, self.state)
        return self._facts

    def forget_facts(self) -> None:
        """What was stored about this card has changed."""
        self._facts = None

    def load(self, artifact: Artifact) -> CudaProgram:
        """Check, assemble and load. Raises Refused; Faulted (`infra`) if the driver fails."""
        mine = self.facts().arch
        if artifact.arch != mine:
            message = f"the artifact is for {artifact.arch}, this device is {mine}"
            raise Refused(Status.UNSUPPORTED, Failure("arch", message))
        return CudaProgram(self, artifact, build(artifact))

    def record(self, work: Callable[[], None], launches: int = 0) -> CudaGraph:
        """What `work` enqueues on the device's stream, as one graph; also torch's memsets and copies.

        `work` must have run once before: loading code or allocating memory is not allowed while recording.
        """
        with errors_as_faults():
            self.driver.begin_capture(self.stream)
            try:
                work()
            except BaseException:
                # The capture is broken already; the first error says why.
                with suppress(CudaError):
                    self.driver.end_capture(self.stream)
                raise
            return CudaGraph(launches, self, self.driver.end_capture(self.stream), work)

    def synchronize(self) -> None:
        """Wait until the stream is idle, at most `hang_s` seconds. Raises Faulted."""
        with errors_as_faults():
            begin = time.monotonic()
            while not self.driver.idle(self.stream):
                waited = time.monotonic() - begin
                if waited > self.hang_s:
                    raise hung(self.hang_s)
                if waited > SPIN_S:
                    time.sleep(50e-6)


def no_gpu(why: str) -> Faulted:
    return Faulted(Status.INFRA, Failure("no-gpu", f"no usable GPU: {why}"))
