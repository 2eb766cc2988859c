"""The same artifacts on a GPU and here: every kernel of the per-instruction tests and of other styles, and all seeds.

`pytest -m gpu`, on a machine with one. Integers, data movement and fma chains agree bit for bit, approximate functions
and sums inside mma within `compare.BOUNDS`. With KERNELGEN_DIFFERENTIAL=FILE all comparisons are written there as JSON.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.devices.cpu.device import CpuDevice
from sandbox.judge.case import load_reference
from targets.base import Options, find
from targets.reference import Tensors
from tests.sandbox.devices.cpu import harness
from tests.sandbox.devices.cpu.compare import FLOATS, Row, compare, rules_of, split_labels
from tests.sandbox.devices.cpu.twin import Twin
from tests.sandbox.judge.test_seeds import client, compiled

MODULES = (
    "test_basic",
    "test_integers",
    "test_floats",
    "test_conversions",
    "test_warps",
    "test_together",
    "test_styles",
)
# what a GPU decides in its own way: which lanes are together, and which of several orders an atomic sum has
FREE = {"test_activemask_of_a_divergent_branch"}
SEEDS = ("attn-res", "decode", "gemv", "kda", "latent-moe", "mla", "router")
SEED_BOUND = (
    2.0**-7
)  # of a tensor's largest value: one rounding of bf16, where a chain has approximate functions
Case = tuple[str, Callable[..., None], dict[str, Any]]


def cases() -> list[Case]:
    """Every test of the modules with every set of its parameters."""
    found: list[Case] = []
    for name in MODULES:
        module = importlib.import_module(f"tests.sandbox.devices.cpu.{name}")
        for test, function in inspect.getmembers(module, inspect.isfunction):
            if not test.startswith("test_") or test in FREE:
                continue
            marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
            axes = [_axis(*m.args[:2]) for m in marks]
            for n, chosen in enumerate(itertools.product(*axes)):
                found.append(
                    (f"{name}::{test}[{n}]", function, {k: v for d in chosen for k, v in d.items()})
                )
    return found


def _axis(names: str | tuple[str, ...], values: Any) -> list[dict[str, Any]]:
    split = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    return [dict(zip(split, v if len(split) > 1 else (v,), strict=True)) for v in values]


@pytest.fixture(scope="module")
def twin() -> Iterator[Twin]:
    made = Twin()
    yield made
    made.close()


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    made: list[Row] = []
    yield made
    where = os.environ.get("KERNELGEN_DIFFERENTIAL")
    if where:
        Path(where).write_text(json.dumps([{**asdict(r), "good": r.good} for r in made], indent=1))


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda c: c[0])
def test_gpu_and_cpu_agree(case: Case, twin: Twin, rows: list[Row]) -> None:
    name, function, given = case
    with harness.recording() as recorded:
        function(**given)
    found = []
    for i, r in enumerate(recorded):
        names = [f"workspace.b{k}" for k in range(len(r.before))]
        there = twin.run(r.artifact, dict(zip(names, r.before, strict=True)), ["step"])
        rules = rules_of(r.artifact.step.ptx)
        for k, after in enumerate(r.after):
            if not after.numel():
                continue
            other = torch.frombuffer(bytearray(there[names[k]]), dtype=after.dtype).reshape(
                after.shape
            )
            if r.labels and k == len(r.after) - 1:
                found += split_labels(r.labels, after.view(-1), other.view(-1))
            else:
                found.append(compare(f"{name} launch {i} buffer {k}", after, other, rules))
    rows += found
    assert all(r.good for r in found), [r for r in found if not r.good]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Artifact, Tensors]]:
    """Each seed at tiny, with the reference's weights, states and inputs, and everything else zero."""
    out = {}
    with client(tmp_path_factory.mktemp("store")) as compiler:
        for name in SEEDS:
            folder, w = compiled(compiler, f"kimi-k3-{name}", Options("tiny", rows=2))
            a = artifact_store.load(folder)
            reference = load_reference(find(f"kimi-k3-{name}").reference)
            given = {**reference.weights(w, 5, "cpu"), **reference.states(w, 6, "cpu"),
                     **reference.inputs(w, 7, 0, "cpu")}  # fmt: skip
            out[name] = (a, {b.name: _placed(b, given.get(b.name), a.constants) for b in a.buffers})
    return out


def _placed(b: Any, given: torch.Tensor | None, constants: Any) -> torch.Tensor:
    raw = torch.zeros(b.nbytes + 4096, dtype=torch.uint8)
    view = raw[-raw.data_ptr() % 4096 :][: b.nbytes]
    data = given.contiguous().view(-1).view(torch.uint8) if given is not None else None
    if data is None and b.name in constants:
        data = torch.frombuffer(bytearray(constants[b.name]), dtype=torch.uint8)
    if data is not None:
        view.copy_(data)
    return view


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEEDS)
def test_seeds_agree(
    name: str, twin: Twin, rows: list[Row], seeds: dict[str, tuple[Artifact, Tensors]]
) -> None:
    a, buffers = seeds[name]
    plans = ["prepare", "step"] if a.prepare is not None else ["step"]
    there = twin.run(a, buffers, plans)  # type: ignore[arg-type]
    program = CpuDevice().load(a)
    for plan in plans:
        program.bind(plan, buffers).launch()  # type: ignore[arg-type]
    found = []
    for b in a.buffers:
        dtype = FLOATS.get(b.dtype, torch.uint8)
        if b.group not in ("outputs", "states") or not b.nbytes:
            continue
        here = buffers[b.name].view(dtype)
        other = torch.frombuffer(bytearray(there[b.name]), dtype=torch.uint8).view(dtype)
        row = compare(f"seed {name} {b.name}", here, other, ())
        if row.different and dtype.is_floating_point:
            scale = here.double().nan_to_num(0, 0, 0).abs().max().clamp(min=1e-30)
            error = float(
                ((here.double() - other.double()).abs() / scale).nan_to_num(float("inf")).max()
            )
            row = Row(row.what, row.elements, row.different, error, SEED_BOUND, "seed")
        found.append(row)
    rows += found
    assert all(r.good for r in found), [r for r in found if not r.good][:5]
