"""Device protocol: where an artifact runs. `cuda` assembles its PTX, `cpu` translates it.

Buffers are torch tensors on the device's memory, allocated by the judge; their extent is the buffer's extent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from sandbox.artifact import Artifact, PlanName
from sandbox.verdict import Failure, KernelResources, Status

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceFacts:
    """Sizes in bytes, rates in bytes per second. `stream_rate` is measured or None."""

    kind: Literal["cuda", "cpu"]
    name: str
    arch: str
    sms: int
    l2_bytes: int
    smem_optin_bytes: int
    memory_bytes: int
    spec_rate: float | None
    stream_rate: float | None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """Folder name below kernels_out, such as `h200` or `cpu`."""
        words = self.name.lower().replace("nvidia", "").split()
        return "-".join(words) or self.kind


class Refused(Exception):
    """The device does not run this: `unsupported`, `lint`, `plan_error` or `compile_error`, with the reason."""

    def __init__(self, status: Status, failure: Failure) -> None:
        super().__init__(failure.message)
        self.status, self.failure = status, failure


class Faulted(Exception):
    """The kernel broke while running: `fault`, `hang` or `cheat`. The process must not be used again on cuda."""

    def __init__(self, status: Status, failure: Failure) -> None:
        super().__init__(failure.message)
        self.status, self.failure = status, failure


class Bound(Protocol):
    """A plan with addresses filled in."""

    launches: int

    def launch(self) -> None:
        """Enqueue all launches in stream order (cpu: run them). Raises Faulted."""
        ...

    def capture(self) -> Bound:
        """The same plan as one replayable unit (cuda: a CUDA graph; cpu: itself)."""
        ...

    def modelled_us(self) -> float | None:
        """Modelled time of the last launch in microseconds; None where times are measured."""
        ...


class Program(Protocol):
    """A loaded artifact."""

    resources: tuple[KernelResources, ...]

    def bind(
        self,
        plan: PlanName,
        buffers: Mapping[str, torch.Tensor],
        undefined: frozenset[str] = frozenset(),
    ) -> Bound:
        """Patch relocations. `undefined`: buffers whose content counts as never written. Raises Refused."""
        ...

    def findings(self) -> tuple[Failure, ...]:
        """What the device saw beyond results: races, reads of unwritten memory (cpu); empty on cuda."""
        ...


class Device(Protocol):
    kind: Literal["cuda", "cpu"]
    torch_device: str

    def facts(self) -> DeviceFacts: ...

    def load(self, artifact: Artifact) -> Program:
        """Validate as hostile input, assemble or translate. Raises Refused."""
        ...

    def record(self, work: Callable[[], None], launches: int = 0) -> Bound:
        """What `work` enqueues (`Bound.launch` of many steps, copies) as one replayable unit (cuda: one graph; cpu:
        calls it again). `work` has run once before."""
        ...

    def synchronize(self) -> None:
        """Wait for all launches. Raises Faulted."""
        ...


@runtime_checkable
class Timer(Protocol):
    """How a device with measured times is timed. All work goes to its one stream, which is also torch's current
    stream while a job runs, so that torch baselines are timed alike. `sandbox.judge.clock` has the one for cuda."""

    def time(self, work: Callable[[], None]) -> float:
        """Microseconds between two device events around what `work` enqueues; waits for the end. Raises Faulted."""
        ...

    def flush_l2(self) -> None:
        """Evict the L2 cache (2 x its size) and reset persisting lines; enqueued, not waited for."""
        ...

    def conditions(self) -> Mapping[str, Any]:
        """Now: sm_mhz, memory_mhz, watts, celsius, throttle; what cannot be read is missing."""
        ...
