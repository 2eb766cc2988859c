"""Modelled time of an artifact too large to execute whole: `python -m sandbox.devices.cpu.estimate ARTIFACT_FOLDER`.

Launches of one kernel with one geometry and the same plain parameters do the same work: one of each kind is executed,
in order, and its counts stand for the others, whose buffers are taken from their own parameters. The same weight of
all layers shares its memory. Results are not right and not looked at; the time is modelled, never measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact, Buffer, Launch
from sandbox.devices.base import Refused
from sandbox.devices.cpu.device import CpuDevice
from sandbox.devices.cpu.execute import run
from sandbox.devices.cpu.facts import Facts, Residency, facts_of
from sandbox.devices.cpu.model import H200, Machine, launch_seconds
from sandbox.devices.cpu.program import CpuProgram
from sandbox.devices.cpu.record import Counts, Region, Work
from sandbox.verdict import Failure, Status

SAMPLED = 6
RANDOM_BYTES = 64 << 20  # larger weights stay zero: their values decide nothing that is counted
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def kind_of(x: Launch) -> tuple[object, ...]:
    """Launches with equal keys do the same work on different buffers."""
    params = bytearray(x.params)
    for r in x.relocations:
        params[r.offset : r.offset + 8] = bytes(8)
    return (
        x.kernel,
        x.grid,
        x.block,
        x.cluster,
        x.smem,
        bytes(params),
        tuple((r.offset, r.addend) for r in x.relocations),
    )


def buffers_of(artifact: Artifact, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Memory for every buffer. `given` fills inputs and states; the same weight of all layers is one tensor."""
    generator = torch.Generator().manual_seed(1)
    shared: dict[tuple[str, int, str], torch.Tensor] = {}
    out = {}
    for b in artifact.buffers:
        key = (b.dtype, b.nbytes, b.name.rsplit(".", 1)[-1])
        if b.group == "weights" and key in shared:
            out[b.name] = shared[key]
            continue
        out[b.name] = _memory(b, artifact, given.get(b.name), generator)
        if b.group == "weights":
            shared[key] = out[b.name]
    return out


def _memory(
    b: Buffer, artifact: Artifact, given: torch.Tensor | None, generator: torch.Generator
) -> torch.Tensor:
    raw = torch.zeros(b.nbytes + 4096, dtype=torch.uint8)
    view = raw[-raw.data_ptr() % 4096 :][: b.nbytes]
    if given is not None:
        view.copy_(given.contiguous().view(-1).view(torch.uint8))
    elif b.name in artifact.constants:
        view.copy_(torch.frombuffer(bytearray(artifact.constants[b.name]), dtype=torch.uint8))
    elif b.group == "weights" and b.dtype in FLOATS and b.nbytes <= RANDOM_BYTES:
        values = view.view(FLOATS[b.dtype])
        values.copy_(torch.randn(values.shape, generator=generator) * 0.1)
    return view


def step_facts(artifact: Artifact, given: Mapping[str, torch.Tensor]) -> list[Facts]:
    """Facts of every launch of the step, in order. Raises Refused or Faulted."""
    if artifact.ranks > 1:
        text = "launches of several ranks wait for each other: none of them runs alone"
        raise Refused(Status.UNSUPPORTED, Failure("cpu-ranks", text))
    device = CpuDevice()
    program = device.load(artifact)
    buffers = buffers_of(artifact, given)
    if artifact.prepare is not None:
        program.bind("prepare", buffers).launch()
    program.bind("step", buffers)  # checks that every buffer is there and fits
    done: dict[tuple[object, ...], tuple[Counts, Launch]] = {}
    sizes = {b.name: b.nbytes for b in artifact.buffers}
    out, step = [], Residency()
    for x in artifact.step.launches:
        key = kind_of(x)
        if key not in done:
            done[key] = (_execute(program, x, buffers), x)
        counts, like = done[key]
        kernel = program.kernel(artifact.step, x.kernel)
        out.append(
            facts_of(x, kernel.timing, _renamed(counts, like, x), sizes, step, kernel.static_bytes)
        )
    return out


def _execute(program: CpuProgram, x: Launch, buffers: Mapping[str, torch.Tensor]) -> Counts:
    plan = program.artifact.step
    params = bytearray(x.params)
    regions: dict[int, Region] = {}
    for r in x.relocations:
        t = buffers[r.buffer]
        params[r.offset : r.offset + 8] = (t.data_ptr() + r.addend).to_bytes(8, "little")
        regions.setdefault(t.data_ptr(), Region(r.buffer, t.data_ptr(), t.numel()))
    every = [*regions.values(), *program.module_regions(plan)]
    known = {r.base for r in every}
    for name, t in buffers.items():  # addresses may also come from tables in memory
        if t.data_ptr() not in known and t.numel():
            known.add(t.data_ptr())
            every.append(Region(name, t.data_ptr(), t.numel()))
    policy = replace(program.policy, sampled=SAMPLED)
    work = Work(program.kernel(plan, x.kernel), x, bytes(params), every)
    counts, _ = run(work, policy, program.memory)
    return counts


def _renamed(counts: Counts, like: Launch, x: Launch) -> Counts:
    """The same counts on another launch's buffers."""
    names = {a.buffer: b.buffer for a, b in zip(like.relocations, x.relocations, strict=True)}
    where = {site: names.get(name, name) for site, name in counts.site_regions.items()}
    made = replace(counts, site_regions=where)
    made.__dict__.update(blocks=counts.blocks, warps=counts.warps)  # cached: the same arrays
    return made


def given_of(artifact: Artifact) -> dict[str, torch.Tensor]:
    """Inputs and states from the target's own reference."""
    from sandbox.judge.case import load_reference
    from targets.base import Options, find

    fields = ("preset", "layers", "rows", "context")
    chosen = {k: v for k, v in artifact.workload.items() if k in fields}
    target = find(artifact.target)
    w = target.workload(Options(**chosen))
    reference = load_reference(target.reference)
    return {**reference.inputs(w, 1, 0, "cpu"), **reference.states(w, 1, "cpu")}


def estimate(artifact: Artifact, machine: Machine = H200) -> list[tuple[str, float]]:
    """Kernel and modelled microseconds of each launch. Raises Refused or Faulted."""
    found = step_facts(artifact, given_of(artifact))
    return [(f.kernel, 1e6 * launch_seconds(f, machine)) for f in found]


def main() -> None:
    torch.set_num_threads(1)
    rows = estimate(artifact_store.load(Path(sys.argv[1])))
    shown = [{"kernel": name, "modelled_us": round(us, 3)} for name, us in rows]
    print(
        json.dumps(
            {"modelled_us": round(sum(us for _, us in rows), 2), "launches": shown}, indent=1
        )
    )


if __name__ == "__main__":
    main()
