"""Several GPUs of one host as one device: a rank on each, one process, peer access both ways.

A launch enqueues every rank's launches on that rank's stream, a recording is one CUDA graph per rank. It times itself:
all ranks are held at a gate until everything is enqueued, an interval is the slowest rank's, and how far ranks lie
apart is kept. Rank 0 is torch's current device; tensors of other ranks live on theirs. NVLink multicast is not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sandbox.artifact import Artifact, LaunchPlan, PlanName
from sandbox.devices.base import DeviceFacts, Faulted, Refused
from sandbox.devices.cuda import HANG_S, SPIN_S, CudaDevice, no_gpu
from sandbox.devices.cuda_driver import CudaDriver, CudaError
from sandbox.devices.cuda_faults import errors_as_faults, faulted
from sandbox.devices.cuda_program import CudaBound, CudaProgram
from sandbox.devices.cuda_toolchain import build
from sandbox.verdict import Failure, KernelResources, Status

if TYPE_CHECKING:
    import torch

CHUNK = 64
"""Launches of one rank that are enqueued before the next rank has its turn: a rank that waits for another must not fill
its queue first."""


class CudaRanks:
    """See the module. `CudaRanks.open(n)` in a judge process."""

    kind: Literal["cuda", "cpu"] = "cuda"
    torch_device = "cuda"

    def __init__(self, devices: Sequence[CudaDevice], contexts: Sequence[Context]) -> None:
        self.devices, self.contexts = tuple(devices), tuple(contexts)
        first = self.devices[0]
        self.driver, self.stream, self.torch_stream = first.driver, first.stream, first.torch_stream
        self.hang_s = HANG_S
        self._turn = 0
        self._clock: Any = None

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @classmethod
    def open(cls, count: int, state: Path | None = None) -> CudaRanks:
        """Visible GPUs 0 to count - 1, each able to reach the others. Raises Faulted (`infra`) where that fails."""
        import torch

        if torch.cuda.device_count() < count:
            raise no_gpu(f"{count} GPUs are needed, {torch.cuda.device_count()} are visible")
        opened = [CudaDevice.open(r, state) for r in range(count)]
        try:
            contexts = [Context.of(r) for r in range(count)]
            for one in contexts:
                for other in contexts:
                    one.reach(other)
        except CudaError as error:
            raise no_gpu(f"GPUs cannot reach each other: {error}") from error
        torch.cuda.set_device(0)
        return cls(opened, contexts)

    def each(self) -> Iterator[CudaDevice]:
        """Every rank's GPU by itself, torch's current device meanwhile."""
        import torch

        for rank, device in enumerate(self.devices):
            with torch.cuda.device(rank):
                yield device

    def device_of(self, rank: int) -> str:
        """torch's name of the GPU that holds a rank's buffers."""
        return f"cuda:{rank}"

    def facts(self) -> DeviceFacts:
        """Those of rank 0's GPU; `extra.ranks` counts the GPUs. Raises Faulted for GPUs that differ."""
        found = []
        for rank, device in enumerate(self.devices):
            with self.contexts[rank].current():
                found.append(device.facts())
        names = {f.name for f in found}
        if len(names) > 1:
            raise Faulted(
                Status.INFRA, Failure("ranks", f"the GPUs differ: {', '.join(sorted(names))}")
            )
        return replace(found[0], extra={**found[0].extra, "ranks": self.ranks})

    def load(self, artifact: Artifact) -> CudaProgram | RanksProgram:
        """As on one GPU; each rank loads what it launches. Raises Refused."""
        if artifact.ranks == 1:
            return self.devices[0].load(artifact)
        if artifact.ranks > self.ranks:
            text = f"the artifact has {artifact.ranks} ranks, this job holds {self.ranks} GPUs"
            raise Refused(Status.UNSUPPORTED, Failure("ranks", text))
        mine = self.facts().arch
        if artifact.arch != mine:
            text = f"the artifact is for {artifact.arch}, this device is {mine}"
            raise Refused(Status.UNSUPPORTED, Failure("arch", text))
        return RanksProgram(self, artifact)

    def record(self, work: Callable[[], None], launches: int = 0) -> RanksGraph:
        """What `work` enqueues on all streams, as one graph per rank. It has run once before."""
        graphs: list[Any] = []
        with errors_as_faults():
            for rank, device in enumerate(self.devices):
                with self.contexts[rank].current():
                    device.driver.begin_capture(device.stream)
            try:
                work()
            except BaseException:
                for device in self.devices:  # the first error says why
                    with suppress(CudaError):
                        _driver(device).captured(device.stream)
                raise
            # all captures end before the first graph is made: that is not allowed while one goes on
            taken = []
            for rank, device in enumerate(self.devices):
                with self.contexts[rank].current():
                    taken.append(_driver(device).captured(device.stream))
            for rank, device in enumerate(self.devices):
                with self.contexts[rank].current():
                    graphs.append(_driver(device).instantiate(taken[rank], device.stream))
        return RanksGraph(launches, self, tuple(graphs), work)

    def synchronize(self) -> None:
        """Wait until every stream is idle, at most `hang_s` seconds. Raises Faulted, naming the ranks."""
        begin = time.monotonic()
        left = set(range(self.ranks))
        while True:
            left -= {rank for rank in sorted(left) if self._idle(rank)}
            if not left:
                return
            waited = time.monotonic() - begin
            if waited > self.hang_s:
                raise self._hung(sorted(left))
            if waited > SPIN_S:
                time.sleep(50e-6)

    def _idle(self, rank: int) -> bool:
        device = self.devices[rank]
        with self.contexts[rank].current():
            try:
                return device.driver.idle(device.stream)
            except CudaError as error:
                end = faulted(error)
                message = f"rank {rank}: {end.failure.message}"
                where = {**end.failure.where, "rank": rank}
                raise Faulted(end.status, Failure(end.failure.rule, message, where)) from error

    def _hung(self, waiting: list[int]) -> Faulted:
        done = sorted(set(range(self.ranks)) - set(waiting))
        ended = f"; rank {', '.join(map(str, done))} has ended" if done else ""
        names = " and ".join(map(str, waiting))
        message = f"the kernels of rank {names} did not end within {self.hang_s:g} s{ended}"
        where = {"seconds": self.hang_s, "waiting": waiting, "ended": done}
        return Faulted(Status.HANG, Failure("hang", message, where))

    def order(self) -> list[int]:
        """Ranks in the order in which this launch reaches them: another one is first each time."""
        self._turn += 1
        return [(k + self._turn) % self.ranks for k in range(self.ranks)]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Streams queue by themselves: nothing more is to be done here for ranks to run apart."""
        yield

    def delay(self, rank: int, ns: int) -> None:
        """Hold that rank's stream for so long from when it comes to this."""
        self.clock().gate.delay(rank, ns)

    def clock(self) -> Any:
        if self._clock is None:
            from sandbox.devices.cuda_gate import RanksClock

            self._clock = RanksClock(self)
        return self._clock

    def time(self, work: Callable[[], None]) -> float:
        """Microseconds of the slowest rank between two events on each around what `work` enqueues. Raises Faulted."""
        return float(self.clock().time(work))

    def flush_l2(self) -> None:
        self.clock().flush_l2()

    def apart(self) -> Mapping[str, Any]:
        """How far the ranks of timed intervals lay apart, in microseconds: number, median, largest."""
        found: Mapping[str, Any] = self.clock().apart()
        return found


@dataclass(frozen=True)
class Context:
    """The primary context of one GPU, as torch opened it."""

    rank: int
    handle: Any
    cu: Any

    @classmethod
    def of(cls, rank: int) -> Context:
        import cuda.bindings.driver as cu
        import torch

        torch.cuda.set_device(rank)
        torch.zeros(1, device=f"cuda:{rank}")  # the context exists from here on
        code, handle = cu.cuCtxGetCurrent()
        if int(code):
            raise CudaError(code.name, "cuCtxGetCurrent")
        return cls(rank, handle, cu)

    def reach(self, other: Context) -> None:
        """Let this GPU's kernels use the other's memory. Raises CudaError."""
        if other.rank == self.rank:
            return
        with self.current():
            (code,) = self.cu.cuCtxEnablePeerAccess(other.handle, 0)
        if int(code) and code != self.cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            raise CudaError(code.name, "cuCtxEnablePeerAccess")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Current in this thread; afterwards what was."""
        _, before = self.cu.cuCtxGetCurrent()
        self.cu.cuCtxSetCurrent(self.handle)
        try:
            yield
        finally:
            self.cu.cuCtxSetCurrent(before)


@dataclass(eq=False)
class RanksBound:
    """A plan with addresses on all ranks. `launches`: of the rank that has most."""

    launches: int
    _ranks: CudaRanks
    _bounds: Mapping[int, CudaBound]

    def launch(self) -> None:
        most = max(b.launches for b in self._bounds.values())
        for at in range(0, most, CHUNK):
            for rank in self._ranks.order():
                bound = self._bounds.get(rank)
                if bound is not None and at < bound.launches:
                    with self._ranks.contexts[rank].current():
                        bound.launch_part(at, at + CHUNK)

    def capture(self) -> RanksGraph:
        return self._ranks.record(self.launch, self.launches)

    def modelled_us(self) -> float | None:
        return None


@dataclass(eq=False)
class RanksGraph:
    """A recorded graph per rank, replayed together."""

    launches: int
    _ranks: CudaRanks
    _graphs: tuple[Any, ...]
    _keep: Any = field(repr=False)

    def launch(self) -> None:
        for rank in self._ranks.order():
            device = self._ranks.devices[rank]
            try:
                with self._ranks.contexts[rank].current():
                    device.driver.replay(self._graphs[rank], device.stream)
            except CudaError as error:
                raise faulted(error) from error

    def capture(self) -> RanksGraph:
        return self

    def modelled_us(self) -> float | None:
        return None


class RanksProgram:
    """An artifact of several ranks: each rank's launches loaded and checked on its GPU. Raises Refused."""

    def __init__(self, device: CudaRanks, artifact: Artifact) -> None:
        self._device = device
        built = build(artifact)
        self.resources: tuple[KernelResources, ...] = built.resources
        self._programs: list[CudaProgram] = []
        for rank in range(artifact.ranks):
            with device.contexts[rank].current():
                self._programs.append(
                    CudaProgram(device.devices[rank], _share(artifact, rank), built)
                )

    def bind(
        self,
        plan: PlanName,
        buffers: Mapping[str, torch.Tensor],
        undefined: frozenset[str] = frozenset(),
    ) -> RanksBound:
        """As of one GPU. A rank that launches nothing in `prepare` has no part in it."""
        bounds = {}
        for rank, program in enumerate(self._programs):
            if plan == "step" or program.has_prepare:
                with self._device.contexts[rank].current():
                    bounds[rank] = program.bind(plan, buffers, undefined)
        if not bounds:
            raise Refused(Status.PLAN_ERROR, Failure("no-plan", f"the artifact has no plan {plan}"))
        return RanksBound(max(b.launches for b in bounds.values()), self._device, bounds)

    def findings(self) -> tuple[Failure, ...]:
        return ()


def _driver(device: CudaDevice) -> CudaDriver:
    """The real driver: of several GPUs there is no fake."""
    assert isinstance(device.driver, CudaDriver)
    return device.driver


def _share(artifact: Artifact, rank: int) -> Artifact:
    """What one rank launches, over the buffers of all."""
    prepare: LaunchPlan | None = artifact.prepare.of(rank) if artifact.prepare else None
    if prepare is not None and not prepare.launches:
        prepare = None
    return replace(artifact, step=artifact.step.of(rank), prepare=prepare)
