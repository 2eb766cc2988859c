"""The torch baseline computes the same step as the reference, in place, through states, on every target."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from targets.base import find
from targets.kimi_k3 import disturb
from targets.kimi_k3.baseline import compiled
from targets.kimi_k3.baseline.graph import TorchGraphBaseline
from targets.kimi_k3.reference import DTYPES as REAL
from targets.kimi_k3.spec import KimiTarget
from targets.reference import Tensors
from tests.targets import triton_lite
from tests.targets.kimi import PARTS, rel, run, tensors, workload

LIMIT = 0.05


def with_outputs(w: object, t: Tensors) -> Tensors:
    """Clones of the states, and outputs full of NaN or -1."""
    out = dict(t)
    for b in w.buffers:  # type: ignore[attr-defined]
        if b.group == "outputs":
            out[b.name] = torch.full(
                b.shape, -1 if b.dtype == "i32" else float("nan"), dtype=REAL[b.dtype]
            )
        elif b.group == "states":
            out[b.name] = t[b.name].clone()
    return out


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("preset, rows", [("tiny", 1), ("tiny-tp2", 4)])
def test_baseline_agrees_with_the_oracle_over_three_steps(
    part: str, preset: str, rows: int
) -> None:
    w = workload(part, preset, rows=rows)
    t = tensors(w)
    mine = with_outputs(w, t)
    baseline = TorchGraphBaseline()
    baseline.prepare(w, mine)
    for step in range(3):
        inputs = {k: v for k, v in tensors(w, step=step).items() if k.startswith("inputs.")}
        for name, value in inputs.items():
            mine[name].copy_(value)
        before = {k: v.clone() for k, v in mine.items()}
        baseline.step()
        expected = run(w, before, ids=mine.get("outputs.ids"))
        for name, value in expected.tensors.items():
            if value.is_floating_point():
                assert rel(mine[name], value) < LIMIT, (name, step)
        for tie in expected.ties:
            differ = (mine["outputs.ids"] != expected.tensors["outputs.ids"]).any(-1)
            assert not (differ & ~tie.allowed).any()
        for name, mask in expected.masks.items():
            assert torch.equal(mine[name][~mask], before[name][~mask]), name


def test_padding_writes_nothing_and_gives_zero_attention() -> None:
    for part in ("kda", "mla"):
        w = workload(part, rows=4)
        t = disturb.apply(w, "null_request", 5, tensors(w))
        mine = with_outputs(w, t)
        baseline = TorchGraphBaseline()
        baseline.prepare(w, mine)
        baseline.step()
        assert all(mine[f"outputs.y.{i}"][0].abs().max() == 0 for i in range(w.layers))
        for name, mask in run(w, t).masks.items():
            assert torch.equal(mine[name][~mask], t[name][~mask])


def test_a_row_that_is_not_inserted_leaves_the_cache_alone() -> None:
    w = workload("mla", rows=2)
    t = disturb.apply(w, "no_insert", 5, tensors(w))
    mine = with_outputs(w, t)
    baseline = TorchGraphBaseline()
    baseline.prepare(w, mine)
    baseline.step()
    assert rel(mine["outputs.y.0"], run(w, t).tensors["outputs.y.0"]) < LIMIT
    changed = (mine["states.layers.0.kv"] != t["states.layers.0.kv"]).any(-1)
    assert int(changed.sum()) == 1


def test_targets_name_their_baselines() -> None:
    for part in PARTS:
        target = find(f"kimi-k3-{part}")
        assert isinstance(target, KimiTarget)
        with triton_lite.installed():
            for path in target.baselines.values():
                module, _, cls = path.partition(":")
                assert hasattr(getattr(importlib.import_module(module), cls), "step")


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_read_back_at_real_sizes(part: str) -> None:
    """Fake tensors have shapes and no data: a step that needs a value on the host, as no graph may, raises."""
    w = workload(part, "tp8", rows=8)
    with FakeTensorMode():
        t = {b.name: torch.empty(b.shape, dtype=REAL[b.dtype]) for b in w.buffers}
        baseline = TorchGraphBaseline()
        baseline.prepare(w, t)
        baseline.step()


def test_inputs_of_one_storage_are_taken_apart_for_the_compiler() -> None:
    whole = torch.zeros(1024, dtype=torch.uint8)
    part = whole[64:128].view(torch.bfloat16)
    alone = compiled.alone(part)
    alone.fill_(3.0)
    assert bool((part == 3.0).all()) and alone.untyped_storage().nbytes() < 1024
