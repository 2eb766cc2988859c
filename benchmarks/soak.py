"""Many chained steps of one artifact on a GPU: do they end, how far is the P99 of a step from its median, same bits?

    python benchmarks/soak.py ARTIFACT_FOLDER [--seconds 60] [--steps 50000] [--json]

Steps are graph replays, one after the other, on states that they change themselves. A candidate that bounds its spins
leaves a record of one that gave up (word 64 of workspace.sync); that, and a step that does not end, count as a hang.
Delays are the candidate's own (tunable `jitter` of the persistent kernels). It judges nothing: there is no oracle.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from replay_check import SEED, Bench

from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice

BATCH = 500
COMPARED = 200
GAVE_UP = 64
SYNC = "workspace.sync"


@dataclass
class Soak:
    """Times are microseconds of one step, from event to event in a chain."""

    artifact: str
    tunables: dict[str, Any]
    device: str
    steps: int = 0
    hung_after: int | None = None
    gave_up: list[int] | None = None
    same_bits: bool | None = None
    finite: bool | None = None
    median: float | None = None
    p99: float | None = None
    most: float | None = None


def bits(bench: Bench, launch: Any) -> str:
    """Of outputs and states after some steps from the start."""
    bench.reset()
    place_inputs(bench)
    for _ in range(COMPARED):
        launch()
    bench.device.synchronize()
    found = hashlib.sha256()
    for b in bench.artifact.buffers:
        if b.group in ("outputs", "states") and bench.buffers[b.name].numel() < 1 << 24:
            found.update(bench.buffers[b.name].view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def place_inputs(bench: Bench) -> None:
    inputs = bench.reference.inputs(bench.workload, SEED, 0, bench.device.torch_device)
    for name, t in inputs.items():
        bench.buffers[name].copy_(t)


def batch(launch: Any, device: CudaDevice) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(BATCH + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    device.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:], strict=False)]


def soak(folder: Path, seconds: float, steps: int) -> Soak:
    device = CudaDevice.open()
    artifact = artifact_store.load(folder)
    out = Soak(folder.name, dict(artifact.tunables), torch.cuda.get_device_name())
    bench = Bench(device, artifact)
    bench.reset()
    graph = bench.step.capture()
    out.same_bits = bits(bench, graph.launch) == bits(bench, graph.launch)
    times: list[float] = []
    end = time.monotonic() + seconds
    while out.steps < steps and time.monotonic() < end:
        try:
            times += batch(graph.launch, device)
        except Exception as error:  # a hang ends the context, whatever the driver calls it
            out.hung_after = out.steps
            print(f"after {out.steps} steps: {error}", flush=True)
            return out
        out.steps += BATCH
        if SYNC in bench.buffers and int(bench.buffers[SYNC][GAVE_UP]) != 0:
            out.gave_up = bench.buffers[SYNC][GAVE_UP : GAVE_UP + 4].tolist()
            break
    out.finite = all(
        bool(torch.isfinite(bench.buffers[b.name].float()).all())
        for b in artifact.buffers
        if b.group == "outputs" and bench.buffers[b.name].is_floating_point()
    )
    times.sort()
    out.median, out.p99, out.most = (
        statistics.median(times),
        times[int(len(times) * 0.99)],
        times[-1],
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=50000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = asdict(soak(args.artifact, args.seconds, args.steps))
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:12} {value}")


if __name__ == "__main__":
    main()
