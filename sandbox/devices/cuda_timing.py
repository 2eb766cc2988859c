"""Timing on the CUDA device: events on its stream, and clearing what L2 holds. Statistics are for the judge.

Event times have a resolution of about half a microsecond; the cost of an empty interval is for the caller to measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandbox.devices.cuda import CudaDevice
from sandbox.devices.cuda_faults import errors_as_faults

if TYPE_CHECKING:
    import torch


class Stopwatch:
    """A pair of events on the device's stream. `start` and `stop` enqueue; `us` is valid after a synchronisation."""

    def __init__(self, device: CudaDevice) -> None:
        import torch

        self._stream = device.torch_stream
        make: Any = torch.cuda.Event
        self._begin, self._end = make(enable_timing=True), make(enable_timing=True)

    def start(self) -> None:
        self._begin.record(self._stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def us(self) -> float:
        """Microseconds from start to stop."""
        return float(self._begin.elapsed_time(self._end)) * 1e3


class L2Flusher:
    """Fills twice the L2 with other data. The buffer is allocated once; flushing is one memset on the stream."""

    def __init__(self, device: CudaDevice) -> None:
        import torch

        self._device = device
        size = 2 * device.facts().l2_bytes
        self.buffer: torch.Tensor = torch.empty(size, dtype=torch.uint8, device=device.torch_device)

    def flush(self) -> None:
        """Evict everything, also lines that were marked as persisting."""
        with errors_as_faults():
            self._device.driver.reset_persisting_l2()
        self.buffer.zero_()
