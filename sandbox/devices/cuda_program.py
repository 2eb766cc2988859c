"""An artifact loaded on the CUDA device, its plans bound to memory, and recorded work as graphs.

Loading checks every launch against the cubin and this GPU before anything can be launched. It does not own the device:
stream, driver and waiting are `sandbox.devices.cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sandbox.artifact import Artifact, Launch, LaunchPlan, PlanName
from sandbox.devices import cuda_plan
from sandbox.devices.base import Refused
from sandbox.devices.cuda_driver import Call, CudaError
from sandbox.devices.cuda_faults import KERNEL_FAULTS, REFUSED_LAUNCHES, errors_as_faults, faulted
from sandbox.devices.cuda_plan import KernelFacts, ParamBlock
from sandbox.devices.cuda_toolchain import Built
from sandbox.lint import polls
from sandbox.verdict import Failure, KernelResources, Status

if TYPE_CHECKING:
    import torch

    from sandbox.devices.cuda import CudaDevice


@dataclass(eq=False)
class CudaBound:
    """A plan with addresses. It keeps its tensors alive; `launch` costs one driver call for each launch."""

    launches: int
    _device: CudaDevice
    _calls: tuple[Call, ...]
    _keep: tuple[Any, ...] = field(repr=False)

    def launch(self) -> None:
        try:
            self._device.driver.launch(self._calls)
        except CudaError as error:
            raise faulted(error) from error

    def launch_part(self, first: int, end: int) -> None:
        """Enqueue launches first to end - 1 alone."""
        try:
            self._device.driver.launch(self._calls[first:end])
        except CudaError as error:
            raise faulted(error) from error

    def capture(self) -> CudaGraph:
        """The launches as one CUDA graph, programmatic edges between them kept. Enqueues nothing."""
        return self._device.record(self.launch, self.launches)

    def prefix(self, n: int) -> CudaBound:
        """The first n launches alone, for profiles."""
        return CudaBound(n, self._device, self._calls[:n], self._keep)

    def modelled_us(self) -> float | None:
        return None


@dataclass(eq=False)
class CudaGraph:
    """An instantiated graph of recorded work. It lives as long as the process."""

    launches: int
    _device: CudaDevice
    _graph: Any
    _keep: Any = field(repr=False)

    def launch(self) -> None:
        try:
            self._device.driver.replay(self._graph, self._device.stream)
        except CudaError as error:
            raise faulted(error) from error

    def capture(self) -> CudaGraph:
        return self

    def modelled_us(self) -> float | None:
        return None


@dataclass(frozen=True)
class _Kernel:
    handle: Any
    facts: KernelFacts


@contextmanager
def placement_refusals(plan: str, kernel: str) -> Iterator[None]:
    """Nothing runs yet, so a driver that finds a launch impossible is no fault of a running kernel."""
    try:
        yield
    except CudaError as error:
        if error.name in REFUSED_LAUNCHES or error.name in KERNEL_FAULTS:
            message = f"{plan}, {kernel}: the driver cannot place it ({error.call}: {error.name})"
            failure = Failure("residency", message, {"plan": plan, "kernel": kernel})
            raise Refused(Status.LINT, failure) from error
        raise


class CudaProgram:
    """A loaded artifact. `facts`: the driver's view of each kernel."""

    def __init__(self, device: CudaDevice, artifact: Artifact, built: Built) -> None:
        self._device, self._artifact = device, artifact
        self.resources: tuple[KernelResources, ...] = built.resources
        with errors_as_faults():
            modules = {ptx: device.driver.load(cubin) for ptx, cubin in built.cubins.items()}
            self._plans = {name: self._kernels(name, modules) for name in _plan_names(artifact)}
            for name in self._plans:
                self._check(name)
        self.facts: Mapping[str, KernelFacts] = {
            k: v.facts for plan in self._plans.values() for k, v in plan.items() if v
        }

    @property
    def has_prepare(self) -> bool:
        return self._artifact.prepare is not None

    def _kernels(self, name: PlanName, modules: Mapping[str, Any]) -> dict[str, _Kernel | None]:
        driver, out = self._device.driver, dict[str, _Kernel | None]()
        plan = _plan(self._artifact, name)
        waiting = polls(plan.ptx)
        for kernel in dict.fromkeys(x.kernel for x in plan.launches):
            handle = driver.kernel(modules[plan.ptx], kernel)
            if handle is None:
                out[kernel] = None
                continue
            facts = replace(driver.facts(handle, kernel), polls=kernel in waiting)
            out[kernel] = _Kernel(handle, facts)
        return out

    def _check(self, name: PlanName) -> None:
        """Refuse a plan that this GPU cannot run safely; let its kernels have the shared memory they ask for."""
        device, kernels = self._device, self._plans[name]
        facts = {k: v.facts if v else None for k, v in kernels.items()}
        found = cuda_plan.check_plan(self._artifact, name, facts, device.limits)
        if found:
            raise Refused(found.status, found.failure)
        plan = _plan(self._artifact, name)
        for kernel, known in kernels.items():
            assert known is not None  # check_plan refuses plans with unknown kernels
            with placement_refusals(name, kernel):
                self._allow(plan, known)
        for x in {_shape(x): x for x in plan.launches}.values():
            self._check_residency(name, x, kernels)

    def _allow(self, plan: LaunchPlan, known: _Kernel) -> None:
        """The most shared memory and the largest cluster of any launch: `step` and `prepare` may share the kernel."""
        plans = [_plan(self._artifact, n) for n in _plan_names(self._artifact)]
        mine = [
            x
            for p in plans
            if p.ptx == plan.ptx
            for x in p.launches
            if x.kernel == known.facts.name
        ]
        cluster = max(_blocks(cuda_plan.cluster_of(x, known.facts)) for x in mine)
        self._device.driver.allow(known.handle, max(x.smem for x in mine), cluster)

    def _check_residency(
        self, name: PlanName, launch: Launch, kernels: Mapping[str, _Kernel | None]
    ) -> None:
        known, device = kernels[launch.kernel], self._device
        assert known is not None
        x = replace(launch, cluster=launch.cluster or known.facts.required_cluster)
        with placement_refusals(name, x.kernel):
            room = device.driver.residency(known.handle, x, device.stream)
        found = cuda_plan.check_residency(x, known.facts, device.limits, room)
        if found:
            where = {"plan": name, "kernel": x.kernel}
            message = f"{name}, {x.kernel}: {found.failure.message}"
            raise Refused(found.status, Failure(found.failure.rule, message, where))

    def bind(
        self,
        plan: PlanName,
        buffers: Mapping[str, torch.Tensor],
        undefined: frozenset[str] = frozenset(),
    ) -> CudaBound:
        """Fill in addresses. `undefined` is for devices that can track it; this one cannot.

        Raises Refused for a plan that the artifact lacks, ValueError for tensors that do not fit their buffers.
        """
        if plan not in self._plans:
            raise Refused(Status.PLAN_ERROR, Failure("no-plan", f"the artifact has no plan {plan}"))
        body = _plan(self._artifact, plan)
        named = {r.buffer for x in body.launches for r in x.relocations}
        for name in named & buffers.keys():
            check_tensor(name, buffers[name], self._artifact)
        addresses = {n: t.data_ptr() for n, t in buffers.items()}
        cuda_plan.check_addresses(body, self._artifact, addresses)
        calls = []
        with errors_as_faults():
            for i, x in enumerate(body.launches):
                params = ParamBlock(cuda_plan.patch(x, addresses), x.param_offsets)
                kernel = self._plans[plan][x.kernel]
                assert kernel is not None  # __init__ refused plans with unknown kernels
                # The first launch never overlaps what came before: work deferred past a step's end must not hide.
                calls.append(
                    self._device.driver.call(
                        kernel.handle, x, params, self._device.stream, pdl=x.pdl and i > 0
                    )
                )
        keep = tuple(buffers[n] for n in sorted(named))
        return CudaBound(len(calls), self._device, tuple(calls), (self, keep))

    def findings(self) -> tuple[Failure, ...]:
        return ()


def check_tensor(name: str, tensor: torch.Tensor, artifact: Artifact) -> None:
    """That a tensor is the whole of its buffer. Raises ValueError."""
    size = tensor.numel() * tensor.element_size()
    wanted = artifact.buffer(name).nbytes
    if size != wanted or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {size} bytes, dense: {tensor.is_contiguous()}; wanted {wanted}"
        )


def _plan_names(artifact: Artifact) -> tuple[PlanName, ...]:
    return ("step", "prepare") if artifact.prepare else ("step",)


def _plan(artifact: Artifact, name: PlanName) -> LaunchPlan:
    plan = artifact.plan(name)
    assert plan is not None
    return plan


def _blocks(shape: Sequence[int]) -> int:
    return shape[0] * shape[1] * shape[2]


def _shape(x: Launch) -> tuple[Any, ...]:
    """What decides residency; equal launches are asked of the driver once."""
    grid = x.grid if x.cooperative or x.pdl else None
    return (x.kernel, x.block, x.smem, x.cluster, x.cooperative, x.pdl, grid)
