"""Clock of several GPUs: a gate that lets all streams go at once, events on each, delays on purpose.

The gate is a kernel of ours that waits for a word in host memory, or for its patience to end, so that what the host
enqueues cannot be seen in an interval, nor that it reaches one GPU after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from sandbox.artifact import Launch
from sandbox.devices.cuda_plan import ParamBlock

if TYPE_CHECKING:
    from sandbox.devices.cuda_ranks import CudaRanks

PATIENCE_NS = 20_000_000
KEPT = 4096
_PTX = """\
.version 8.8
.target {arch}
.address_size 64
.visible .entry kernelgen_gate(.param .u64 word, .param .u64 wanted, .param .u64 patience)
.reqntid 32, 1, 1
{{
    .reg .pred %p<4>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [word];
    ld.param.u64 %rd2, [wanted];
    ld.param.u64 %rd3, [patience];
    mov.u64 %rd4, %globaltimer;
    add.s64 %rd5, %rd4, %rd3;
    setp.eq.u64 %p3, %rd1, 0;
AGAIN:
    mov.u64 %rd6, %globaltimer;
    setp.ge.u64 %p1, %rd6, %rd5;
    @%p1 bra DONE;
    @%p3 bra AGAIN;
    ld.volatile.global.u64 %rd7, [%rd1];
    setp.lt.u64 %p2, %rd7, %rd2;
    @%p2 bra AGAIN;
DONE:
    ret;
}}
"""


class Gate:
    """A word in host memory that all GPUs of a device can wait for."""

    def __init__(self, device: CudaRanks) -> None:
        import torch

        from sandbox.assemble import assemble

        arch = device.facts().arch
        cubin = assemble(_PTX.format(arch=arch), arch).cubin
        self._device, self._passed = device, 0
        self._word = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._kernels = []
        for rank, one in enumerate(device.devices):
            with device.contexts[rank].current():
                self._kernels.append(one.driver.kernel(one.driver.load(cubin), "kernelgen_gate"))

    def close(self) -> None:
        """Every stream waits here from now on."""
        self._passed += 1
        for rank in range(self._device.ranks):
            self._launch(rank, (self._word.data_ptr(), self._passed, PATIENCE_NS))

    def open(self) -> None:
        self._word[0] = self._passed

    def delay(self, rank: int, ns: int) -> None:
        """That rank's stream does nothing for so long."""
        self._launch(rank, (0, 0, ns))

    def _launch(self, rank: int, values: tuple[int, int, int]) -> None:
        one = self._device.devices[rank]
        data = b"".join(v.to_bytes(8, "little") for v in values)
        launch = Launch("kernelgen_gate", (1, 1, 1), (32, 1, 1), bytes(24), (0, 8, 16), ())
        with self._device.contexts[rank].current():
            params = ParamBlock(data, (0, 8, 16))
            one.driver.launch(
                [one.driver.call(self._kernels[rank], launch, params, one.stream, pdl=False)]
            )


class RanksClock:
    """Times work on all streams; see `CudaRanks.time`."""

    def __init__(self, device: CudaRanks) -> None:
        import torch

        from sandbox.devices.cuda_timing import L2Flusher

        self._device, self.gate = device, Gate(device)
        make: Any = torch.cuda.Event
        self._events = []
        self._flushers = []
        for rank, one in enumerate(device.devices):
            with torch.cuda.device(rank):
                self._events.append([make(enable_timing=True), make(enable_timing=True)])
                self._flushers.append(L2Flusher(one))
        self._apart: list[float] = []

    def time(self, work: Callable[[], None]) -> float:
        """Microseconds of the slowest rank between two events around what `work` enqueues. Raises Faulted."""
        device = self._device
        self.gate.close()
        for (begin, _), one in zip(self._events, device.devices, strict=True):
            begin.record(one.torch_stream)
        try:
            work()
        finally:
            for (_, end), one in zip(self._events, device.devices, strict=True):
                end.record(one.torch_stream)
            self.gate.open()
        device.synchronize()
        each = [float(begin.elapsed_time(end)) * 1e3 for begin, end in self._events]
        if len(self._apart) < KEPT:
            self._apart.append(max(each) - min(each))
        return max(each)

    def flush_l2(self) -> None:
        import torch

        for rank, flusher in enumerate(self._flushers):
            with torch.cuda.device(rank):
                flusher.flush()

    def apart(self) -> Mapping[str, Any]:
        if not self._apart:
            return {}
        return {
            "intervals": len(self._apart), "median_us": round(median(self._apart), 3),
            "most_us": round(max(self._apart), 3),
        }  # fmt: skip
