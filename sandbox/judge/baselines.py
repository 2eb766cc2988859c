"""Baselines as arms of a timing run: trusted torch callables of the target, captured in a CUDA graph.

A baseline is compared with the oracle once, so that nobody beats a baseline that does something else. Its launches are
the kernels in its graph. One that takes too long to be made ready is skipped: the job has other arms to time.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sandbox.judge.case import Case, load_attribute
from sandbox.judge.checks import Checker, Moment
from sandbox.judge.lanes import Lanes
from sandbox.judge.locate import Where
from sandbox.verdict import Failure
from targets.base import Workload
from targets.reference import Expected, Tensors

STEPS = 16
"""Steps of one replay, where the lanes have as many: baselines have many launches, and graphs of them grow."""
REPLAY_S = 0.03
"""A slow baseline's replay is cut to about this long, but not below one step for each set of weights."""
SHARE = 3.0
"""Every baseline may take this part of the job's deadline to be built, compiled and run for the first time."""


@dataclass
class BaselineArm:
    """One instance for each set of weights; `failure` if its results are not the oracle's. `made` keeps the instances:
    a recorded graph holds the addresses of their tensors, and the next capture gives free memory back to the driver."""

    name: str
    steps: int
    run: Callable[[], None]
    failure: Failure | None
    launches: int = 0
    singles: tuple[Callable[[], None], ...] = ()
    notes: tuple[str, ...] = ()
    made: tuple[Any, ...] = ()
    ready_s: float = 0.0

    def replay(self) -> None:
        self.run()


@dataclass
class Once:
    """A reference that computes what one step must leave only once: baselines are all given the same."""

    of: Any
    _given: Tensors | None = None
    _found: Expected | None = None

    def run(
        self,
        w: Workload,
        tensors: Tensors,
        schedule: str,
        forced: Mapping[str, torch.Tensor] | None = None,
    ) -> Expected:
        if schedule != "oracle" or forced is not None:
            found: Expected = self.of.run(w, tensors, schedule, forced)
            return found
        if self._found is None or self._given is not tensors:
            self._given, self._found = tensors, self.of.run(w, tensors, schedule)
        return self._found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


@dataclass
class Yardstick:
    """What the baselines of a job are compared with: the first step of lane 0, the same for all of them."""

    lanes: Lanes
    checker: Checker
    _before: Tensors = field(default_factory=dict)
    _given: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.lanes.case
        self._case = replace(case, reference=Once(case.reference))

    def compare(self, one: Any) -> Failure | None:
        """One step of a prepared baseline against the oracle, from the start of the round."""
        case, lanes = self._case, self.lanes
        lanes.restore()
        tensors = lanes.tensors(0)

        def copy() -> Tensors:
            return {b.name: case.copy(tensors[b.name]) for b in case.buffers("outputs", "states")}

        if not self._given:
            self._before = copy()
            read = _named(tensors, case, "inputs", "weights")
            self._given = {
                **{n: case.here(t) for n, t in read.items()}, **_named(self._before, case, "states"),
            }  # fmt: skip
        one.step()
        case.device.synchronize()
        moment = Moment(self._given, self._before, copy(), Where(0, 0, "baseline"))
        return Checker(case, noise=dict(self.checker.noise)).check(moment, "share")


def baseline_arm(name: str, where: str, yardstick: Yardstick) -> BaselineArm:
    """Build, compare, warm up and capture a baseline. It may raise whatever torch raises, and TimeoutError."""
    lanes = yardstick.lanes
    case = lanes.case
    _keep_compiled()
    made: list[Any] = []
    begin = time.monotonic()
    with _at_most(case.job.deadline_s / SHARE):
        for s in range(lanes.sets):
            one = load_attribute(where)()
            one.prepare(case.workload, lanes.tensors(s))
            made.append(one)
        failure = yardstick.compare(made[0])
        ready = time.monotonic() - begin
    steps = _steps(lanes, case, made)

    def chain() -> None:
        for i in range(steps):
            made[i % len(made)].step()

    chain()
    case.device.synchronize()
    whole, launches = _captured(case, chain)
    wanted = made if case.job.steps else []
    singles = tuple(_captured(case, one.step)[0] for one in wanted)
    notes = tuple(getattr(made[0], "notes", ()))
    return BaselineArm(
        name, steps, whole, failure, launches // steps, singles, notes, tuple(made), ready
    )


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block when it takes longer; a compiler in a library cannot be asked to hurry. Only a
    main thread can be interrupted, which a judging process is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _keep_compiled() -> None:
    """What Triton and torch.compile make outlives this process, whose home does not: the next job reads it."""
    folder = os.environ.get("KERNELGEN_CACHE")
    if folder:
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(folder) / "triton"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(folder) / "inductor"))
    driver = _loaded("libcuda.so")
    if driver is not None:  # else Triton asks ldconfig, once more a program to start
        os.environ.setdefault("TRITON_LIBCUDA_PATH", str(driver.parent))


def _loaded(name: str) -> Path | None:
    """Where a library of this process was loaded from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name):
            return Path(path)
    return None


def _steps(lanes: Lanes, case: Case, made: list[Any]) -> int:
    """How many steps to record, whole rounds of the weight sets; the first step warmed the baseline up."""
    begin = time.monotonic()
    for one in made:
        one.step()
    case.device.synchronize()
    spent = max(time.monotonic() - begin, 1e-6)
    rounds = max(1, min(-(-STEPS // lanes.sets), int(REPLAY_S / spent)))
    return min(lanes.steps, rounds * lanes.sets)


def _named(tensors: Mapping[str, torch.Tensor], case: Case, *groups: str) -> Tensors:
    return {b.name: tensors[b.name] for b in case.buffers(*groups)}


def _captured(case: Case, chain: Callable[[], None]) -> tuple[Callable[[], None], int]:
    """A replay of what `chain` launches, and how many kernels that is; 0 where they cannot be counted."""
    if case.device.torch_device == "cpu":
        return chain, 0
    if case.ranks > 1:  # a graph for each rank; such a baseline makes no memory while it runs
        return case.device.record(chain).launch, 0
    graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
    # torch's own capture: its allocator keeps the intermediates of a graph apart
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        chain()

    launches = _kernels(graph)
    graph.instantiate()

    def replay() -> None:
        graph.replay()

    return replay, launches


def _kernels(graph: Any) -> int:
    """Kernel nodes of a captured graph."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    handle = driver.CUgraph(graph.raw_cuda_graph())
    error, _, count = driver.cuGraphGetNodes(handle)
    if int(error):
        return 0
    error, nodes, _ = driver.cuGraphGetNodes(handle, count)
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return sum(driver.cuGraphNodeGetType(n)[1] == kernel for n in nodes)
