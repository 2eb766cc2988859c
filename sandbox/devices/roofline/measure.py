"""Runs the probes and keeps what they say: bytes a second, microseconds. Medians or best of a few, as each says.

A device that refuses one probe lacks that fact and keeps the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sandbox.devices import cuda_rate
from sandbox.devices.base import Bound, Faulted, Refused
from sandbox.devices.cuda import CudaDevice
from sandbox.devices.cuda_facts import store_roofline
from sandbox.devices.cuda_timing import Stopwatch
from sandbox.devices.roofline import kernels
from sandbox.devices.roofline.kernels import Probe

REPEATS = 9
LAUNCHES = 512
ROUNDS = 500
COPY_BYTES = 1 << 30
L2_SIZES = tuple(1 << n for n in range(22, 28))
L2_ROUNDS = 64


@dataclass
class Bench:
    """A device with its stopwatch."""

    device: CudaDevice
    watch: Stopwatch

    def us(
        self, work: Callable[[], None], before: Callable[[], None] = lambda: None
    ) -> list[float]:
        times = []
        for _ in range(REPEATS):
            before()
            self.device.synchronize()
            self.watch.start()
            work()
            self.watch.stop()
            self.device.synchronize()
            times.append(self.watch.us())
        return times

    def bound(self, p: Probe) -> tuple[Bound, Any]:
        import torch

        program = self.device.load(kernels.artifact(p, self.device.facts().arch))
        on = self.device.torch_device
        x = torch.zeros(p.words, dtype=torch.int32, device=on)
        y = torch.zeros(p.out, dtype=torch.int32, device=on)
        bound = program.bind("step", {"states.x": x, "outputs.y": y})
        bound.launch()
        self.device.synchronize()
        return bound, (x, y)


def measure(device: CudaDevice) -> dict[str, Any]:
    """All facts; `missing` names those that could not be had. Raises Faulted when the device breaks."""
    bench = Bench(device, Stopwatch(device))
    asked: Mapping[str, Callable[[Bench], Mapping[str, Any]]] = {
        "stream": _stream, "bulk": _bulk, "copy": _copy, "l2": _l2, "launch": _launch, "barrier": _barrier,
        "flag": _flag,
    }  # fmt: skip
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, ask in asked.items():
        try:
            found |= ask(bench)
        except Refused as error:
            missing[name] = error.failure.message
        except RuntimeError as error:  # torch: out of memory
            missing[name] = (str(error).splitlines() or ["?"])[0][:200]
    return found | ({"missing": missing} if missing else {})


def remember(device: CudaDevice) -> Mapping[str, Any] | None:
    """What is stored of this card, measured and stored first if there is nothing."""
    known: Mapping[str, Any] | None = device.facts().extra.get("roofline")
    if known is not None or device.state is None or device.torch_stream is None:
        return known
    try:
        found = measure(device)
    except Faulted:
        return None
    store_roofline(device.state, device.facts(), found)
    device.forget_facts()
    return found


def _stream(b: Bench) -> Mapping[str, Any]:
    return {"stream_read_bytes_per_s": cuda_rate.measure(b.device)}


def _bulk(b: Bench) -> Mapping[str, Any]:
    """The same by bulk copies into shared memory, as persistent kernels read their weights."""
    blocks = b.device.facts().sms * kernels.BULK_BLOCKS_PER_SM
    p = kernels.bulk_read(blocks, cuda_rate.TOTAL_BYTES // (blocks * kernels.BULK_BYTES))
    bound, kept = b.bound(p)
    rate = 4 * p.words / (min(b.us(bound.launch)) * 1e-6)
    del kept
    return {"bulk_read_bytes_per_s": rate}


def _copy(b: Bench) -> Mapping[str, Any]:
    """Bytes read and written."""
    import torch

    x = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=b.device.torch_device)
    y = torch.empty_like(x)

    def copies() -> None:
        for _ in range(4):
            y.copy_(x)

    times = b.us(copies)
    return {"copy_bytes_per_s": 8 * COPY_BYTES / (min(times) * 1e-6)}


def _l2(b: Bench) -> Mapping[str, Any]:
    """The rate of reads from buffers of several sizes: L2's where they fit, memory's where they do not."""
    facts = b.device.facts()
    rates = {}
    for size in L2_SIZES:
        p = kernels.l2_read(2 * facts.sms, size, L2_ROUNDS)
        bound, kept = b.bound(p)
        rates[str(size)] = kernels.l2_bytes(p) / (min(b.us(bound.launch)) * 1e-6)
        del kept
    fitting = [rate for size, rate in rates.items() if int(size) <= facts.l2_bytes // 2]
    best = {"l2_read_bytes_per_s": max(fitting)} if fitting else {}
    return {**best, "l2_bytes": facts.l2_bytes, "read_bytes_per_s_by_size": rates}


def _launch(b: Bench) -> Mapping[str, Any]:
    """Time from one empty kernel to the next: launched one by one, in a graph, in one with programmatic launches."""
    out = {}
    for name, pdl in (("", False), ("_pdl", True)):
        bound, kept = b.bound(kernels.empty(LAUNCHES, pdl))
        if not pdl:
            out["launch_gap_us"] = median(b.us(bound.launch)) / LAUNCHES
        graph = bound.capture()
        graph.launch()
        out[f"graph_node_gap{name}_us"] = median(b.us(graph.launch)) / LAUNCHES
        del kept
    return out


def _barrier(b: Bench) -> Mapping[str, Any]:
    """One barrier over a block an SM, less what a kernel without barriers takes."""
    sms = b.device.facts().sms

    def each(rounds: int) -> float:
        bound, (x, y) = b.bound(kernels.barrier(sms, rounds))
        us = median(b.us(bound.launch, lambda: x.zero_()))
        if int(y.min()) < sms * rounds:
            raise Refused(*_stuck("grid barrier"))
        return us

    return {"grid_barrier_us": (each(ROUNDS) - each(1)) / (ROUNDS - 1)}


def _flag(b: Bench) -> Mapping[str, Any]:
    """From a release store in one SM to an acquire load that sees it in another: half a round trip."""

    def each(rounds: int) -> float:
        bound, (x, y) = b.bound(kernels.ping(rounds))
        us = median(b.us(bound.launch, lambda: x.zero_()))
        if int(y.min()) < rounds:
            raise Refused(*_stuck("flag"))
        return us

    return {"flag_us": (each(ROUNDS) - each(1)) / (ROUNDS - 1) / 2}


def _stuck(what: str) -> tuple[Any, Any]:
    from sandbox.verdict import Failure, Status

    return Status.UNSUPPORTED, Failure("spin", f"the {what} was not seen in time")
