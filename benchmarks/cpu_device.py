"""Speed of the cpu device on one artifact: `python benchmarks/cpu_device.py ARTIFACT_FOLDER [--launches N]`.

Prints one JSON object: seconds to load with an empty and with a warm cache, PTX instructions of a launch (all threads),
and simulated instructions per second of processor time. It checks no results.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.devices.cpu import CpuDevice
from sandbox.devices.cpu.program import CpuBound


def tensors(artifact: Artifact) -> dict[str, torch.Tensor]:
    """Zeroed bytes for every buffer, aligned; constants as shipped; small random values in floating-point inputs."""
    generator = torch.Generator().manual_seed(1)
    out = {}
    for b in artifact.buffers:
        raw = torch.zeros(b.nbytes + 4096, dtype=torch.uint8)
        view = raw[-raw.data_ptr() % 4096 :][: b.nbytes]
        if b.name in artifact.constants:
            view.copy_(torch.frombuffer(bytearray(artifact.constants[b.name]), dtype=torch.uint8))
        elif b.dtype in ("f32", "bf16", "f16") and b.init is None:
            dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[b.dtype]
            values = view.view(dtype)
            values.copy_(torch.randn(values.shape, generator=generator) * 0.1)
        out[b.name] = view
    return out


def instructions(bound: CpuBound) -> int:
    """PTX instructions that the threads of the last launch executed, predicated ones included."""
    total = 0
    for _, kernel, counts in bound.counts():
        total += sum(int(n) * len(b) for n, b in zip(counts.blocks, kernel.blocks, strict=True))
    return total


def measure(artifact: Artifact, launches: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KERNELGEN_CPU_CACHE"] = folder
        begin = time.process_time()
        CpuDevice().load(artifact)
        cold = time.process_time() - begin
        begin = time.process_time()
        program = CpuDevice().load(artifact)
        warm = time.process_time() - begin
        bound = program.bind("step", tensors(artifact))
        bound.launch()
        begin = time.process_time()
        for _ in range(launches):
            bound.launch()
        seconds = (time.process_time() - begin) / launches
    count = instructions(bound)
    return {
        "load_cold_s": cold,
        "load_warm_s": warm,
        "launch_s": seconds,
        "instructions": count,
        "instructions_per_s": count / seconds,
        "modelled_us": bound.modelled_us() or 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--launches", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(artifact_store.load(args.artifact), args.launches), indent=2))


if __name__ == "__main__":
    main()
