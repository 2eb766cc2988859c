"""In which phase a kernel hangs, by the marks of its build with marks. Needs a CUDA device.

    python benchmarks/where_it_hangs.py ARTIFACT_FOLDER [--steps 3] [--seconds 5]

The artifact is a build with marks (`kernelgen.timeline`; the judge keeps it beside the plain one). Their rows lie in
host memory here, so they can be read while the kernel is stuck: the last phase of each block, by role. The process ends
with exit code 3 then, since nothing else frees the GPU. It judges nothing: a hang is the judge's to call.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from replay_check import SEED, Bench

from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.devices.cuda import CudaDevice
from sandbox.judge import timeline

SHOWN, APART_S = 8, 0.5


class Mapped:
    """Pinned host memory that the GPU reaches at the host's address, described so that torch takes it as it is."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.plain = torch.zeros(shape, dtype=torch.int32).pin_memory()
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<i4", "data": (self.plain.data_ptr(), False), "version": 3, "strides": None,
        }  # fmt: skip


def opened(device: CudaDevice, artifact: Artifact) -> tuple[Bench, torch.Tensor]:
    """The artifact with weights and inputs in place; its marks, i32 [track, row, 4], in host memory."""
    bench = Bench(device, artifact)
    if timeline.ROWS not in bench.buffers:
        raise SystemExit("this artifact has no marks: it is not a build with timeline=1")
    mapped = Mapped(tuple(bench.buffers[timeline.ROWS].shape))
    bench.buffers[timeline.ROWS] = torch.as_tensor(mapped, device=device.torch_device)
    bench.step = bench.program.bind("step", bench.buffers)
    bench.reset()
    mapped.plain.zero_()
    inputs = bench.reference.inputs(bench.workload, SEED, 0, device.torch_device)
    for name, t in inputs.items():
        bench.buffers[name].copy_(t)
    device.synchronize()
    return bench, mapped.plain


def last_marks(rows: torch.Tensor, artifact: Artifact) -> list[str]:
    """A line for each (role, marks so far, phase, layer) that blocks stand in, the most blocks first."""
    phases, blocks = timeline.phases_of(artifact), timeline.blocks_of(artifact)
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for track in range(rows.shape[0]):
        used = torch.nonzero(rows[track, 1:, 0]).flatten()
        if len(used):
            what = int(rows[track, 1 + int(used[-1]), 3]) & 0xFFFFFFFF
            number, layer = what & 0xFFFF, what >> 16
            name = phases[number - 1][0] if 0 < number <= len(phases) else str(number)
            found[track // blocks, len(used), name, layer].append(track % blocks)
    order = sorted(found.items(), key=lambda x: (x[0][0], -len(x[1])))
    return [
        f"role {role}: {len(where)} blocks after {n} marks in {name!r} of layer {layer}, such as {where[:4]}"
        for (role, n, name, layer), where in order[: 2 * SHOWN]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="that a step may take")
    args = parser.parse_args()
    device, artifact = CudaDevice.open(), artifact_store.load(args.artifact)
    bench, rows = opened(device, artifact)
    for step in range(args.steps):
        bench.step.launch()
        ended = threading.Thread(target=device.synchronize, daemon=True)
        ended.start()
        ended.join(args.seconds)
        if ended.is_alive():
            for _ in range(2):  # twice, since what still moves is no hang
                print(
                    f"step {step} has not ended",
                    *last_marks(rows, artifact),
                    sep="\n  ",
                    flush=True,
                )
                time.sleep(APART_S)
            os._exit(3)
        print(f"step {step} ended", flush=True)


if __name__ == "__main__":
    main()
