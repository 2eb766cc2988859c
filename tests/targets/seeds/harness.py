"""Seeds from text to numbers in tests: compiled by the real service, run on the cpu device, held to the reference.

No tests of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.compile_client import CompileClient
from sandbox.devices.cpu.device import CpuDevice
from sandbox.jobs import CompileJob, CompileOutcome
from targets.base import Options, Scalar, Workload, find
from targets.kimi_k3 import seeds
from targets.kimi_k3.reference import DTYPES, IDS, KimiReference
from targets.reference import Expected, Tensors

REFERENCE = KimiReference()
PARTS = ("attn-res", "decode", "gemv", "kda", "latent-moe", "mla", "router")
SLACK = 1.5
"""How far beyond the spread of correct working-precision schedules a seed may be."""
FLOOR = 1e-6
FLIPS = 4
"""Elements of a bf16 tensor that may fall to the other side of a rounding where all schedules happen to agree."""


@dataclass(frozen=True)
class Case:
    """One seed on one workload. `disturb` is a distribution of the reference, empty for the usual one."""

    part: str
    rows: int = 1
    preset: str = "tiny"
    layers: int | None = None
    disturb: str = ""
    steps: int = 1
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    tunables: Mapping[str, Any] = field(default_factory=dict)
    family: str = "kimi-k3"

    @property
    def target(self) -> str:
        return f"{self.family}-{self.part}"

    def workload(self) -> Workload:
        options = Options(self.preset, self.layers, self.rows, extra=self.extra)
        return find(self.target).workload(options)


def compile_seed(compiler: CompileClient, case: Case, arch: str = "sm_90a") -> CompileOutcome:
    w = case.workload()
    return compiler.compile(
        CompileJob(
            seeds.source(case.target), case.target, w.key, w.dims, w.buffers, arch, case.tunables
        )
    )


def built(compiler: CompileClient, case: Case) -> Artifact:
    outcome = compile_seed(compiler, case)
    assert outcome.failure is None and outcome.artifact, outcome.failure
    return artifact_store.load(outcome.artifact)


def aligned(like: Tensor) -> Tensor:
    """Uninitialised, at an address that the artifact may rely on."""
    size = like.numel() * like.element_size()
    raw = torch.empty(size + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 128
    return raw[start : start + size].view(like.dtype).reshape(like.shape)


def placed(artifact: Artifact, values: Tensors) -> Tensors:
    """Every buffer of the artifact: a copy of its value, or all ones bits (NaN) where a kernel must write first."""
    out = {}
    for b in artifact.buffers:
        meta = torch.empty(b.shape, dtype=DTYPES[b.dtype])
        out[b.name] = aligned(meta)
        if b.name in values:
            out[b.name].copy_(values[b.name])
        else:
            out[b.name].view(torch.uint8).fill_(0xFF)
    return out


@dataclass(frozen=True)
class Step:
    """What one step got, what it should have, and what it started from."""

    start: Tensors
    got: Tensors
    oracle: Expected
    band: Mapping[str, float]
    findings: tuple[Any, ...]


def steps(artifact: Artifact, case: Case, seed: int = 5) -> Iterator[Step]:
    """Run the artifact step by step, states carried on, each step beside the oracle under the seed's own routing."""
    torch.set_num_threads(1)
    w = case.workload()
    program = CpuDevice().load(artifact)
    values = {**REFERENCE.weights(w, seed, "cpu"), **REFERENCE.states(w, seed, "cpu")}
    unwritten = frozenset(b.name for b in artifact.buffers if b.group in ("workspace", "outputs"))
    for step in range(case.steps):
        values |= REFERENCE.inputs(w, seed, step, "cpu")
        if case.disturb:
            values = REFERENCE.disturb(w, case.disturb, seed, values)
        got = placed(artifact, values)
        program.bind("step", got, unwritten).launch()
        forced = {IDS: got[IDS]} if IDS in got else None
        oracle = REFERENCE.run(w, values, "oracle", forced)
        runs = [REFERENCE.run(w, values, s, forced).tensors for s in REFERENCE.schedules]
        band = {
            n: max(distance(r[n], x) for r in runs)
            for n, x in oracle.tensors.items()
            if x.is_floating_point()
        }
        yield Step(values, got, oracle, band, program.findings())
        values = {**values, **{n: got[n] for n in values if n.startswith("states.")}}


def results(artifact: Artifact, case: Case, device: CpuDevice) -> tuple[Tensors, tuple[Any, ...]]:
    """Outputs and states after one step on that device, and what it saw."""
    torch.set_num_threads(1)
    w = case.workload()
    values = {**REFERENCE.weights(w, 5, "cpu"), **REFERENCE.states(w, 5, "cpu")}
    got = placed(artifact, values | REFERENCE.inputs(w, 5, 0, "cpu"))
    unwritten = frozenset(b.name for b in artifact.buffers if b.group in ("workspace", "outputs"))
    program = device.load(artifact)
    program.bind("step", got, unwritten).launch()
    kept = {n: x for n, x in got.items() if n.startswith(("outputs.", "states."))}
    return kept, program.findings()


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of a from b, absolute where b is all zero."""
    scale = float(b.double().norm())
    return float((a.double() - b.double()).norm()) / (scale or 1.0)


def check(step: Step) -> None:
    """Every specified tensor inside the noise band, everything else as it was, nothing seen by the device."""
    for name, value in step.oracle.tensors.items():
        if name == IDS:
            continue
        got = step.got[name]
        if name in step.oracle.masks:
            got = torch.where(step.oracle.masks[name], got, value)
        flips = 2.0**-8 * (FLIPS / value.numel()) ** 0.5 if value.dtype == torch.bfloat16 else 0.0
        limit = SLACK * step.band[name] + flips + FLOOR
        assert distance(got, value) <= limit, (name, distance(got, value), step.band[name])
    for tie in step.oracle.ties:
        same = (step.got[IDS] == step.oracle.tensors[IDS]).all(-1)
        assert bool((same | tie.allowed).all()), "a routing that is no proved tie"
    for name, value in step.start.items():
        if name.startswith("states.") and name in step.oracle.masks:
            kept = ~step.oracle.masks[name]
            assert torch.equal(step.got[name][kept], value[kept]), name
        elif name not in step.oracle.tensors:
            assert torch.equal(step.got[name].view(torch.uint8), value.view(torch.uint8)), name
    assert not step.findings
