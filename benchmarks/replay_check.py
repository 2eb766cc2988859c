"""Does replaying a plan do what the DSL's own launch does, and what does a launch cost? Needs a CUDA device.

    python benchmarks/replay_check.py ARTIFACT_FOLDER... [--source candidate.py] [--steps 3] [--json]

For each artifact: the same steps from the same state, launched eagerly and as a CUDA graph, compared bit for bit;
then, where CuTe DSL is installed and the source is at hand (the target's seed, or --source), through a JIT launch of
the DSL. The source is imported and run here, so use it with trusted code only. It judges nothing: there is no oracle.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact, digest
from sandbox.devices.base import Bound, Faulted, Refused
from sandbox.devices.cuda import CudaDevice
from sandbox.devices.cuda_timing import Stopwatch
from sandbox.judge.case import load_reference, options_of
from sandbox.judge.dtypes import TORCH, same_bits
from targets import base as targets

SEED = 20240229
REPEATS = 50
Tensors = dict[str, torch.Tensor]


@dataclass
class Row:
    """Results of one artifact. Times are medians in microseconds of one step; `host_us` is one launch's cost."""

    artifact: str
    target: str
    launches: int = 0
    eager_equals_graph: bool | None = None
    dsl_equals_eager: bool | None = None
    differences: dict[str, float] = field(default_factory=dict)
    eager_us: float | None = None
    graph_us: float | None = None
    dsl_us: float | None = None
    host_us: float | None = None
    graph_host_us: float | None = None
    load_ms: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.eager_equals_graph is True and self.dsl_equals_eager is not False


class Bench:
    """One artifact on the device, with buffers that can be set back to the same start."""

    def __init__(self, device: CudaDevice, artifact: Artifact) -> None:
        self.device, self.artifact = device, artifact
        target = targets.find(artifact.target)
        w = artifact.workload
        extra = {k[2:]: v for k, v in w.items() if k.startswith("x_")}
        self.workload = target.workload(options_of({**w, "extra": extra}))
        self.source = target.seed_source()
        self.reference = load_reference(target.reference)
        self.buffers: Tensors = {
            b.name: torch.empty(b.shape, dtype=TORCH[b.dtype], device=device.torch_device)
            for b in artifact.buffers
        }
        begin = time.perf_counter()
        self.program = device.load(artifact)
        self.load_ms = (time.perf_counter() - begin) * 1e3
        self.step: Bound = self.program.bind("step", self.buffers)
        self._weights = self.reference.weights(self.workload, SEED, device.torch_device)
        self._states = self.reference.states(self.workload, SEED, device.torch_device)

    def reset(self) -> None:
        """The start of every comparison: same weights, states and constants, scratch zero, preparation done."""
        for t in self.buffers.values():
            t.view(-1).view(torch.uint8).zero_()
        for name, t in {**self._weights, **self._states}.items():
            self.buffers[name].copy_(t)
        for name, data in self.artifact.constants.items():
            raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.buffers[name].view(-1).view(torch.uint8).copy_(raw)
        if self.artifact.prepare is not None:
            self.program.bind("prepare", self.buffers).launch()
        self.device.synchronize()

    def trajectory(self, launch: Callable[[], None], steps: int) -> list[Tensors]:
        """Outputs and states after each of `steps` steps."""
        self.reset()
        out = []
        for i in range(steps):
            inputs = self.reference.inputs(self.workload, SEED, i, self.device.torch_device)
            for name, t in inputs.items():
                self.buffers[name].copy_(t)
            self._clear()
            launch()
            self.device.synchronize()
            out.append(
                {
                    b.name: self.buffers[b.name].clone()
                    for b in self.artifact.buffers
                    if b.group in ("outputs", "states")
                }
            )
        return out

    def _clear(self) -> None:
        for b in self.artifact.buffers:
            if b.lifetime == "step":
                self.buffers[b.name].view(-1).view(torch.uint8).zero_()

    def times(self, launch: Callable[[], None]) -> tuple[float, float]:
        """Medians of one step: microseconds by device events, and of the host's call."""
        watch, device, host = Stopwatch(self.device), [], []
        for _ in range(REPEATS):
            self._clear()
            self.device.synchronize()
            watch.start()
            begin = time.perf_counter()
            launch()
            host.append((time.perf_counter() - begin) * 1e6)
            watch.stop()
            self.device.synchronize()
            device.append(watch.us())
        return statistics.median(device), statistics.median(host)


def compare(a: list[Tensors], b: list[Tensors]) -> tuple[bool, dict[str, float]]:
    """Whether two trajectories are equal bit for bit, and the largest difference of each tensor that is not."""
    worst: dict[str, float] = {}
    for left, right in zip(a, b, strict=True):
        for name in left:
            if not same_bits(left[name], right[name]):
                delta = (left[name].double() - right[name].double()).abs().max().item()
                worst[name] = max(worst.get(name, 0.0), delta)
    return not worst, worst


def check(device: CudaDevice, folder: Path, options: argparse.Namespace) -> Row:
    artifact = artifact_store.load(folder)
    row = Row(artifact.sha256[:12], artifact.target)
    try:
        bench = Bench(device, artifact)
    except Refused as refused:
        row.note = f"{refused.status}: {refused.failure.message}"
        return row
    row.launches, row.load_ms = bench.step.launches, bench.load_ms
    eager = bench.trajectory(bench.step.launch, options.steps)
    graph = bench.step.capture()
    row.eager_equals_graph, row.differences = compare(
        eager, bench.trajectory(graph.launch, options.steps)
    )
    row.eager_us, host = bench.times(bench.step.launch)
    row.host_us = host / row.launches
    row.graph_us, row.graph_host_us = bench.times(graph.launch)
    source = options.source.read_text() if options.source else bench.source
    if digest(source.encode()) != artifact.source_sha256:
        row.note = "no source of this artifact at hand: not compared with the DSL"
        return row
    try:
        launch = dsl_launch(bench, source)
    except ImportError as error:
        row.note = f"not compared with the DSL: {error}"
        return row
    row.dsl_equals_eager, different = compare(eager, bench.trajectory(launch, options.steps))
    row.differences |= {f"dsl {k}": v for k, v in different.items()}
    row.dsl_us, _ = bench.times(launch)
    return row


def dsl_launch(bench: Bench, source: str) -> Callable[[], None]:
    """`step` of the source, compiled and launched by the DSL itself on the same buffers. Raises ImportError."""
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")
    runtime: Any = importlib.import_module("cutlass.cute.runtime")
    driver: Any = importlib.import_module("cuda.bindings.driver")
    signature: Any = importlib.import_module("sandbox.compile.jail.signature")
    artifact = bench.artifact
    names = [b.name for b in artifact.buffers]
    tensors = []
    for b in artifact.buffers:
        t = bench.buffers[b.name]
        small = t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        view = runtime.from_dlpack(t.view(torch.uint8) if small else t, assumed_align=b.align)
        if small:
            view.element_type = getattr(cutlass, signature.ITEM[b.dtype])
        tensors.append(view)
    with working_folder():
        Path("replay_candidate.py").write_text(source)
        module = importlib.import_module("replay_candidate")
        job = {
            "tunables": dict(artifact.tunables), "dims": dict(bench.workload.dims), "arch": artifact.arch,
            "sms": bench.device.facts().sms,
        }  # fmt: skip
        cfg: SimpleNamespace = signature.config(job, signature.tunables(module))
        host = host_function(len(names))
        host.BODY = lambda values, stream: module.step(signature.tree(names, values), cfg, stream)
        stream = driver.CUstream(bench.device.stream)
        compiled = cute.compile(host.host, *tensors, stream)
    return lambda: compiled(*tensors, stream)


@contextmanager
def working_folder() -> Iterator[None]:
    """A fresh folder that modules can be imported from: the DSL wants sources as files."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="kernelgen-replay-") as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        for name in ("replay_candidate", "replay_host"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            os.chdir(before)


def host_function(count: int) -> Any:
    """A `@cute.jit` function with one parameter a tensor; the DSL traces fixed signatures only."""
    listed = "".join(f"a{i}, " for i in range(count))
    Path("replay_host.py").write_text(
        "import cutlass.cute as cute\n\nBODY = None\n\n\n@cute.jit\n"
        f"def host({listed}stream):\n    BODY(({listed}), stream)\n"
    )
    return importlib.import_module("replay_host")


def show(row: Row) -> str:
    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    equal: Mapping[bool | None, str] = {True: "equal", False: "DIFFERENT", None: "-"}
    return (
        f"{row.target:24} {row.artifact} {row.launches:4} launches  graph {equal[row.eager_equals_graph]:9} "
        f"dsl {equal[row.dsl_equals_eager]:9} eager {us(row.eager_us)} us, graph {us(row.graph_us)} us, "
        f"dsl {us(row.dsl_us)} us; host {us(row.host_us)} us a launch, {us(row.graph_host_us)} us a graph; "
        f"load {us(row.load_ms)} ms {row.note} {row.differences or ''}".rstrip()
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument(
        "--source", type=Path, help="the source that the artifacts were compiled from"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    options = parser.parse_args()
    try:
        device = CudaDevice.open()
        rows = []
        for folder in options.artifacts:
            rows.append(check(device, folder, options))
            print(json.dumps(asdict(rows[-1])) if options.json else show(rows[-1]), flush=True)
    except Faulted as fault:
        print(f"{fault.status}: {fault.failure.message}", file=sys.stderr)
        return 4 if fault.failure.rule == "no-gpu" else 1
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
