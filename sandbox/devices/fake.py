"""A device for tests of the judge: kernels are Python functions over the bound tensors, times are arithmetic.

It checks nothing: whatever a function does to memory, a judge must find. With kind `cuda` it is also a `Timer`, whose
clock advances by each launch's cost, with drift and noise from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sandbox.artifact import Artifact, Launch, PlanName
from sandbox.devices.base import DeviceFacts, Refused
from sandbox.verdict import Failure, KernelResources, Status

if TYPE_CHECKING:
    import torch

EVENTS_US = 0.01
"""An empty interval takes this long."""
Kernel = Callable[[Mapping[str, "torch.Tensor"]], None]


@dataclass
class FakeBound:
    launches: int
    device: FakeDevice
    calls: Sequence[tuple[str, Kernel]]
    buffers: Mapping[str, torch.Tensor]
    us: float = 0.0

    def launch(self) -> None:
        self.us = 0.0
        for name, kernel in self.calls:
            kernel(self.buffers)
            self.us += self.device.costs.get(name, 1.0)
        self.device.spent += self.us

    def capture(self) -> FakeBound:
        return self

    def prefix(self, n: int) -> FakeBound:
        return FakeBound(n, self.device, self.calls[:n], self.buffers)

    def modelled_us(self) -> float | None:
        return self.us if self.device.kind == "cpu" else None


@dataclass
class FakeReplay:
    launches: int
    work: Callable[[], None]

    def launch(self) -> None:
        self.work()

    def capture(self) -> FakeReplay:
        return self

    def modelled_us(self) -> float | None:
        return None


@dataclass
class FakeProgram:
    device: FakeDevice
    artifact: Artifact
    resources: tuple[KernelResources, ...] = ()

    def bind(
        self,
        plan: PlanName,
        buffers: Mapping[str, torch.Tensor],
        undefined: frozenset[str] = frozenset(),
    ) -> FakeBound:
        body = self.artifact.plan(plan)
        if body is None:
            raise Refused(Status.PLAN_ERROR, Failure("no-plan", f"the artifact has no plan {plan}"))
        calls = [(x.kernel, self.device.kernel(x)) for x in body.launches]
        return FakeBound(len(calls), self.device, calls, dict(buffers))

    def findings(self) -> tuple[Failure, ...]:
        return ()


@dataclass
class FakeDevice:
    """`costs`: microseconds of a launch by kernel name. `noise`: relative standard deviation of one timing."""

    kernels: Mapping[str, Kernel]
    kind: Literal["cuda", "cpu"] = "cpu"
    costs: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0
    seed: int = 0
    spec_rate: float | None = None
    stream_rate: float | None = None
    torch_device: str = "cpu"
    spent: float = 0.0
    l2_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            kind=self.kind, name="fake", arch="sm_90a", sms=4, l2_bytes=self.l2_bytes, smem_optin_bytes=232448,
            memory_bytes=1 << 33, spec_rate=self.spec_rate, stream_rate=self.stream_rate,
        )  # fmt: skip

    def kernel(self, launch: Launch) -> Kernel:
        if launch.kernel not in self.kernels:
            raise Refused(Status.PLAN_ERROR, Failure("kernel", f"no kernel {launch.kernel}"))
        return self.kernels[launch.kernel]

    def load(self, artifact: Artifact) -> FakeProgram:
        return FakeProgram(self, artifact)

    def record(self, work: Callable[[], None], launches: int = 0) -> FakeReplay:
        return FakeReplay(launches, work)

    def synchronize(self) -> None:
        """Launches end before they return."""

    def time(self, work: Callable[[], None]) -> float:
        begin = self.spent
        work()
        us = self.spent - begin + EVENTS_US
        return us * (1.0 + self._rng.gauss(0.0, self.noise))

    def flush_l2(self) -> None:
        """There is no cache."""

    def conditions(self) -> Mapping[str, Any]:
        return {"sm_mhz": 1980, "throttle": []}
