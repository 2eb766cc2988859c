"""Does an exported bundle do what the judged artifact does, and what does a call cost? Needs a CUDA device.

    python benchmarks/bundle_check.py BUNDLE_FOLDER ARTIFACT_FOLDER [--steps 3] [--json]

Same weights, states and inputs through the judge's own device and through the bundle: outputs and states must be equal
bit for bit, eagerly, through the torch operator, and replayed from a torch CUDA graph. Then `torch.library.opcheck`,
the self-check, and times: of a bound call on the host over the bare driver calls in it (limit 10 us), and of graph
replay against the judge's own graph. Stages are named on stderr as they end. Exit code 0 if all of it holds. It judges
nothing: there is no oracle.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from replay_check import SEED, Bench, Tensors

from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice
from sandbox.judge.dtypes import same_bits

LIMIT_US = 10.0
CALLS, ROUNDS = 50, 20
GRAPH_SLACK = 1.03  # replays of equal graphs differ by clocks and placement
OPCHECK_BYTES = 2 << 30


@dataclass
class Report:
    """Times in microseconds: medians on the host (`*_host_us`) or between device events (`*_us`)."""

    bundle: str
    artifact: str
    equal: dict[str, bool] = field(default_factory=dict)
    differs: dict[str, list[str]] = field(default_factory=dict)
    self_check: str = ""
    self_check_ok: bool = False
    opcheck: dict[str, str] = field(default_factory=dict)
    launches: int = 0
    call_host_us: float = 0.0
    bare_host_us: float = 0.0
    op_host_us: float = 0.0
    graph_us: float = 0.0
    judge_graph_us: float = 0.0

    @property
    def overhead_us(self) -> float:
        return self.call_host_us - self.bare_host_us

    @property
    def ok(self) -> bool:
        return (
            all(self.equal.values()) and self.self_check_ok and self.overhead_us < LIMIT_US
            and set(self.opcheck.values()) <= {"SUCCESS"}
            and self.graph_us <= self.judge_graph_us * GRAPH_SLACK
        )  # fmt: skip


class Side:
    """The bundle with tensors of its own."""

    def __init__(self, package: Any, bench: Bench) -> None:
        self.bench = bench
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.kernel = package.Kernel(self.device)
        # Read-only for both sides; two copies of a large model's weights might not fit.
        self.weights = {n: bench.buffers[n] for n in bench._weights}
        self.inputs, self.states, self.outputs = (
            self.kernel.empty(g) for g in ("inputs", "states", "outputs")
        )
        self.kernel.prepare(self.weights)
        self.call = self.kernel.bind(self.inputs, self.states, self.outputs)

    def reset(self) -> None:
        for n, t in self.bench._states.items():
            self.states[n].copy_(t)
        for t in self.outputs.values():
            t.view(-1).view(torch.uint8).zero_()
        self.kernel.prepare(self.weights)

    def set_inputs(self, step: int) -> None:
        made = self.bench.reference.inputs(self.bench.workload, SEED, step, str(self.device))
        for n, t in made.items():
            self.inputs[n].copy_(t)

    def trajectory(self, launch: Callable[[], None], steps: int) -> list[Tensors]:
        self.reset()
        out = []
        for i in range(steps):
            self.set_inputs(i)
            launch()
            torch.cuda.synchronize()
            out.append({n: t.clone() for n, t in {**self.outputs, **self.states}.items()})
        return out

    def moving(self) -> None:
        self.kernel(self.inputs, self.states, self.outputs)

    def lists(self) -> list[list[torch.Tensor]]:
        return [list(x.values()) for x in (self.inputs, self.states, self.outputs)]


def stage(begin: float, words: str) -> None:
    """So that a check that is cut short has said how far it came."""
    print(f"{time.perf_counter() - begin:6.1f} s  {words}", file=sys.stderr, flush=True)


def differences(judged: list[Tensors], ours: list[Tensors]) -> list[str]:
    return [
        f"step {i}: {n}"
        for i, (a, b) in enumerate(zip(judged, ours, strict=True))
        for n in b
        if not same_bits(a[n], b[n])
    ]


def host_us(work: Callable[[], None]) -> float:
    """Median over rounds of the host's time for one enqueue; the queue is empty before each round."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            work()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def device_us(work: Callable[[], None]) -> float:
    found = []
    for _ in range(ROUNDS):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(CALLS):
            work()
        b.record()
        torch.cuda.synchronize()
        found.append(a.elapsed_time(b) / CALLS * 1e3)
    return statistics.median(found)


def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def check(package: Any, bench: Bench, steps: int, report: Report) -> None:
    report.self_check_ok, report.self_check = package.self_check(
        torch.device("cuda", torch.cuda.current_device())
    )
    begin = time.perf_counter()
    stage(
        begin, f"self-check {'passed' if report.self_check_ok else 'FAILED'}: {report.self_check}"
    )
    side = Side(package, bench)
    judged = bench.trajectory(bench.step.launch, steps)
    op = importlib.import_module(f"{package.__name__}.op")
    handle = op.register(side.kernel)
    graph = capture(side.call)
    ways = {
        "bound": side.call, "moving": side.moving, "graph": graph.replay,
        "op": lambda: op.step(handle, *side.lists()),
    }  # fmt: skip
    for name, launch in ways.items():
        found = differences(judged, side.trajectory(launch, steps))
        report.equal[name], report.differs[name] = not found, found[:8]
        stage(begin, f"{name}: {'equal bit for bit' if not found else 'DIFFERS'}, {steps} steps")
    sizes = sum(t.numel() * t.element_size() for x in side.lists() for t in x)
    if sizes <= OPCHECK_BYTES:
        operator = getattr(torch.ops, package.__name__).step.default
        found = torch.library.opcheck(operator, (handle, *side.lists()), raise_exception=False)
        report.opcheck = {k: str(v) for k, v in found.items()}
        stage(begin, f"opcheck: {report.opcheck}")
    side.reset()
    side.set_inputs(0)
    plan, driver = side.call._plan, side.kernel.driver
    report.launches = len(plan.blocks)
    report.call_host_us = host_us(side.call)
    report.bare_host_us = host_us(lambda: driver.launch(plan._calls))
    report.op_host_us = host_us(ways["op"])
    stage(begin, f"a call takes {report.overhead_us:.2f} us more than its driver calls")
    judge_graph = bench.step.capture()
    report.judge_graph_us = device_us(judge_graph.launch)
    report.graph_us = device_us(graph.replay)
    report.judge_graph_us = min(report.judge_graph_us, device_us(judge_graph.launch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = CudaDevice.open()
    artifact = artifact_store.load(args.artifact)
    found = [p.parent.name for p in args.bundle.glob("*/manifest.json")]
    if len(found) != 1:
        parser.error(f"{args.bundle} holds {len(found)} packages, not one")
    sys.path.insert(0, str(args.bundle.resolve()))
    package = importlib.import_module(found[0])
    report = Report(found[0], artifact.sha256)
    check(package, Bench(device, artifact), args.steps, report)
    data = {**asdict(report), "overhead_us": report.overhead_us, "ok": report.ok}
    if args.json:
        print(json.dumps(data, indent=1))
    else:
        for key, value in data.items():
            print(f"{key}: {value}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
