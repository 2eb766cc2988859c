"""A choice of experts that follows from how the candidate rounded the instance before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sandbox.judge.locate import Where
from sandbox.judge.ties import Settled, settle
from sandbox.verdict import Failure
from targets import base
from targets.kimi_k3.maths.ffn import scores
from targets.kimi_k3.reference import IDS, KimiReference
from targets.reference import Tensors

torch.set_num_threads(1)
TOKEN, Y = 1, "outputs.y.0"
UNITS = 64
"""So many units of the last place, more than what any schedule differs by."""
WORKLOAD = base.find("kimi-k3-latent-moe").workload(base.Options(preset="tiny", layers=2, rows=2))
REFERENCE = KimiReference()


def score(given: Tensors, y: torch.Tensor) -> torch.Tensor:
    """Selection scores of the second instance for `TOKEN`."""
    x = (given["inputs.x.1"].double() + y.double()).to(torch.bfloat16).double()
    logits = x @ given["weights.layers.1.router"].double().T
    return scores(logits, given["weights.layers.1.router_bias"].double())[1][TOKEN]


def oracle(given: Tensors, **left: torch.Tensor) -> Tensors:
    """What it leaves; of the first instance it may have left something else."""
    more = {f"left.{Y}": left["y"]} if left else {}
    return REFERENCE.run(WORKLOAD, {**given, **more}, "oracle").tensors


@pytest.fixture(scope="module")
def near() -> tuple[Tensors, torch.Tensor]:
    """A problem whose last expert chosen and the next change places if y of the first instance is some units off in
    every element; and that y."""
    given = {
        **REFERENCE.weights(WORKLOAD, 3, "cpu"),
        **REFERENCE.inputs(WORKLOAD, 4, 0, "cpu"),
    }
    free = oracle(given)
    y, topk = free[Y], free[IDS].shape[-1]
    was = score(given, y)
    last, following = was.sort(descending=True).indices[topk - 1 : topk + 1].tolist()
    for units in (UNITS, -UNITS):  # one of them makes them change places
        off = y.clone()
        off[TOKEN] = (off[TOKEN].view(torch.int16) + units).view(torch.bfloat16)
        moved = score(given, off) - was
        if (shift := float(moved[last] - moved[following])) < -1e-3:
            break
    assert shift < -1e-3
    bias = given["weights.layers.1.router_bias"]
    bias[following] += float(was[last] - was[following]) + shift / 2
    return given, off


def judged(given: Tensors, after: Tensors) -> Settled | Failure:
    case: Any = SimpleNamespace(reference=REFERENCE, workload=WORKLOAD)
    return settle(case, given, after, Where(0, 0, axes=REFERENCE.axes))


def test_right_for_what_the_candidate_left(near: tuple[Tensors, torch.Tensor]) -> None:
    given, off = near
    after = oracle(given, y=off) | {Y: off}
    free = oracle(given)
    assert not torch.equal(after[IDS], free[IDS])
    got = judged(given, after)
    assert isinstance(got, Settled) and got.rows == 1
    assert torch.equal(
        got.expected.tensors[Y], free[Y]
    )  # its y is judged by the oracle's, not by its own
    refused = judged(given, after | {Y: free[Y]})
    assert isinstance(refused, Failure) and "no tie explains it" in refused.message


def test_wrong_for_what_the_candidate_left(near: tuple[Tensors, torch.Tensor]) -> None:
    given, off = near
    after = oracle(given, y=off) | {Y: off}
    for wrong in (int(score(given, off).argmin()), -1, 1 << 20, int(after[IDS][1, TOKEN, 0])):
        ids = after[IDS].clone()
        ids[1, TOKEN, -1] = wrong
        assert isinstance(judged(given, after | {IDS: ids}), Failure)
