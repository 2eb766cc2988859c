"""Baseline `nccl` of the pieces on two GPUs, on CPU tensors: a stand-in for Triton, and a sum in the place of NCCL."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from targets.base import Options, find
from targets.kimi_k3.baseline.graph import TorchGraphBaseline
from targets.kimi_k3.reference import KimiReference
from tests.targets import triton_lite
from tests.targets.kimi import rel
from tests.targets.test_kimi_baseline import LIMIT


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    with triton_lite.installed():
        yield


def summed(partials: Sequence[Tensor]) -> None:
    total = sum(p.float() for p in partials)
    for p in partials:
        p.copy_(total)


def follow(part: str, reduce: Any) -> dict[str, float]:
    """Distance from the oracle of every output of a step."""
    w = find(f"kimi-k3-{part}").workload(Options("tiny-tp2", 2, 1))
    r = KimiReference()
    given = {**r.weights(w, 1, "cpu"), **r.inputs(w, 1, 0, "cpu")}
    outputs = {
        b.name: torch.zeros(b.shape, dtype=torch.bfloat16)
        for b in w.buffers
        if b.group == "outputs"
    }
    module = importlib.import_module("targets.kimi_k3.baseline.peers")
    baseline = module.NcclBaseline(reduce)
    baseline.prepare(w, {**given, **outputs})
    baseline.step()
    wanted = r.run(w, given, "oracle").tensors
    assert set(wanted) == set(outputs)
    return {n: float(rel(outputs[n], wanted[n])) for n in outputs}


@pytest.mark.parametrize("part", ["allreduce-attn-res", "oproj-allreduce"])
def test_a_step_agrees_with_the_oracle_on_both_ranks(part: str) -> None:
    found = follow(part, summed)
    assert len(found) == 8 and max(found.values()) < LIMIT, found


def test_without_the_sum_it_does_not() -> None:
    assert max(follow("oproj-allreduce", lambda partials: None).values()) > LIMIT


def test_the_decode_step_is_refused() -> None:
    w = find("kimi-k3-decode").workload(Options("tiny-tp2", 2, 1, extra={"mode": "peer2"}))
    module = importlib.import_module("targets.kimi_k3.baseline.peers")
    with pytest.raises(NotImplementedError, match="only allreduce-attn-res and oproj-allreduce"):
        module.NcclBaseline(summed).prepare(w, {})


def test_the_torch_operations_of_a_whole_step_say_that_they_are_for_one_gpu() -> None:
    options = Options("tiny-tp2", 2, 1, extra={"mode": "peer2"})
    w = find("kimi-k3-decode").workload(options)
    with pytest.raises(NotImplementedError, match="one GPU"):
        TorchGraphBaseline().prepare(w, {})
