"""Running an artifact on the GPU in a process of its own, so that a fault or a hang costs one case and not the run.

Tensors travel as bytes over a pipe. It compares nothing.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from sandbox.artifact import Artifact, PlanName
from sandbox.devices.base import Faulted, Refused

Bytes = dict[str, bytes]
TIMEOUT_S = 60.0


class TwinFailed(Exception):
    """The GPU refused the artifact, faulted, or did not answer."""


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> Bytes:
    return {
        n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()
    }


class Twin:
    """A child with a CUDA context; started when it is first needed and again after a failure."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(
        self, a: Artifact, tensors: Mapping[str, torch.Tensor], plans: Sequence[PlanName]
    ) -> Bytes:
        """Contents of all buffers after the plans ran one after another. Raises TwinFailed."""
        if self._pipe is None:
            self._start()
        pipe = self._pipe
        assert pipe is not None
        try:
            pipe.send((a, bytes_of(tensors), list(plans)))
            if not pipe.poll(TIMEOUT_S):
                raise TwinFailed("no answer from the GPU")
            answer = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self.close()
            raise TwinFailed(f"the process with the GPU died: {error!r}") from error
        except TwinFailed:
            self.close()
            raise
        if isinstance(answer, str):
            self.close()
            raise TwinFailed(answer)
        return dict(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def serve(pipe: Connection) -> None:
    """The child: artifacts in, buffers out, until the parent is gone or the device has faulted."""
    from sandbox.devices.cuda import CudaDevice

    device = CudaDevice.open(0, Path(tempfile.mkdtemp()))
    while True:
        try:
            a, tensors, plans = pipe.recv()
        except EOFError:
            return
        placed = {
            n: torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
            for n, data in tensors.items()
            if data
        }
        try:
            program = device.load(a)
            for plan in plans:
                program.bind(plan, placed).launch()
                device.synchronize()
        except (Refused, Faulted) as error:
            pipe.send(f"{type(error).__name__} {error.status.value} {error.failure.rule}: {error}")
            return
        pipe.send({n: t.cpu().numpy().tobytes() for n, t in placed.items()})
