"""Times of one step of artifacts, whole and launch by launch, without judging them. Needs a CUDA device.

    python benchmarks/step_times.py ARTIFACT_FOLDER... [--repeats 7] [--no-launches] > times.jsonl

One JSON object a line: `cold_us`, the median of a recorded step after an L2 flush; `chained_us`, the mean of 32 steps
replayed back to back; and for each launch its share, the difference between two recorded prefixes of the plan, cold.
Outputs are not looked at: use `kernelgen judge` for kernels that nobody has judged. Written for comparing the `cpu`
device's modelled times with measured ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from replay_check import SEED, Bench

from sandbox import artifact_store
from sandbox.devices.base import Bound, Faulted, Refused
from sandbox.devices.cuda import CudaDevice
from sandbox.judge.clock import CudaClock
from sandbox.verdict import short_name

CHAIN = 32


def measure(
    device: CudaDevice, clock: CudaClock, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """The row of one artifact. Raises Faulted."""
    artifact = artifact_store.load(folder)
    row: dict[str, Any] = {
        "artifact": artifact.sha256, "target": artifact.target, "workload": dict(artifact.workload),
        "tunables": dict(artifact.tunables), "device": device.facts().slug,
    }  # fmt: skip
    begin = time.perf_counter()
    try:
        bench = Bench(device, artifact)
    except Refused as refused:
        return row | {"refused": refused.failure.message}
    bench.reset()
    inputs = bench.reference.inputs(bench.workload, SEED, 0, device.torch_device)
    for name, tensor in inputs.items():
        bench.buffers[name].copy_(tensor)
    states = {
        b.name: bench.buffers[b.name].clone() for b in artifact.buffers if b.group == "states"
    }
    split: Any = bench.step
    launches = artifact.step.launches
    whole = cold(bench, clock, split.prefix(len(launches)), options.repeats)
    row |= {
        "launches": len(launches),
        "cold_us": round(whole, 3),
        "chained_us": round(chained(bench, clock), 3),
    }
    if not options.no_launches:
        times = [0.0] + [
            cold(bench, clock, split.prefix(i + 1), options.repeats) for i in range(len(launches))
        ]
        row["shares"] = [
            {
                "kernel": short_name(x.kernel),
                "grid": x.grid,
                "block": x.block,
                "us": round(after - before, 3),
            }
            for x, before, after in zip(launches, times[:-1], times[1:], strict=True)
        ]
    for name, tensor in states.items():
        bench.buffers[name].copy_(tensor)
    return row | {"seconds": round(time.perf_counter() - begin, 2)}


def cold(bench: Bench, clock: CudaClock, bound: Bound, repeats: int) -> float:
    """Median microseconds of a recorded piece of the plan after an L2 flush."""
    bound.launch()
    graph, times = bound.capture(), []
    for _ in range(repeats):
        bench._clear()
        clock.flush_l2()
        times.append(clock.time(graph.launch))
    return median(times)


def chained(bench: Bench, clock: CudaClock) -> float:
    """Microseconds a step of CHAIN steps replayed back to back, the median of three chains."""
    graph = bench.step.capture()

    def chain() -> None:
        for _ in range(CHAIN):
            bench._clear()
            graph.launch()

    return median(clock.time(chain) / CHAIN for _ in range(3))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-launches", action="store_true", help="the whole step only")
    options = parser.parse_args()
    try:
        device = CudaDevice.open()
        clock = CudaClock(device)
        for folder in options.artifacts:
            print(json.dumps(measure(device, clock, folder, options)), flush=True)
            torch.cuda.empty_cache()
    except Faulted as fault:
        print(f"{fault.status}: {fault.failure.message}", file=sys.stderr)
        return 4 if fault.failure.rule == "no-gpu" else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
