"""Proved ties: which integer choices are accepted, and that no invalid one reaches the reference."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sandbox.judge.locate import Where
from sandbox.judge.ties import Settled, settle
from sandbox.verdict import Failure
from targets.reference import Expected, Tie

OURS = torch.tensor([[[4, 2], [1, 0]], [[3, 5], [6, 7]]], dtype=torch.int32)
"""[layer, row, rank]"""


class Layers:
    """Two layers: forcing another choice in layer 0 of row 0 changes layer 1 of that row to (0, 1)."""

    schedules = ("a",)

    def __init__(self, eligible: bool = True) -> None:
        self.eligible, self.forced_with = eligible, []  # type: ignore[var-annotated]

    def run(
        self, w: Any, tensors: Any, schedule: str, forced: Mapping[str, torch.Tensor] | None = None
    ) -> Expected:
        own = OURS.clone()
        if schedule == "a":
            own[0, 0] = torch.tensor([4, 7])
        if forced is not None:
            self.forced_with.append(forced["ids"])
            assert int(forced["ids"].min()) >= 0 and int(forced["ids"].max()) < 8
            if not torch.equal(forced["ids"][0, 0], OURS[0, 0]):
                own[1, 0] = torch.tensor([0, 1])
        allowed = torch.tensor([[True, False], [False, False]])
        eligible = torch.zeros(2, 2, 8, dtype=torch.bool)
        eligible[0, 0, [2, 7]] = True
        return Expected({"ids": own}, (Tie("ids", allowed, eligible if self.eligible else None),))


def settled(
    change: Mapping[tuple[int, int], tuple[int, int]], eligible: bool = True
) -> Settled | Failure:
    theirs = OURS.clone()
    for (layer, row), ids in change.items():
        theirs[layer, row] = torch.tensor(ids)
    case: Any = SimpleNamespace(reference=Layers(eligible), workload=None)
    return settle(case, {}, {"ids": theirs}, Where(0, 0, axes={"ids": ("layer", "row", "rank")}))


def test_equal_choices_need_no_proof() -> None:
    got = settled({})
    assert isinstance(got, Settled) and got.rows == 0


@pytest.mark.parametrize("eligible", [True, False])
def test_a_tie_is_taken_over_with_what_follows_from_it(eligible: bool) -> None:
    change = {(0, 0): (4, 7)} | ({(1, 0): (0, 1)} if eligible else {})
    got = settled(change, eligible)
    if not eligible:  # layer 1 of the forced run is (0, 1), which the candidate did not follow
        assert isinstance(got, Failure)
        return
    assert isinstance(got, Settled) and got.rows >= 1
    assert got.expected.tensors["ids"][0, 0].tolist() == [4, 7]
    assert got.choices["ids"][1, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({(0, 1): (1, 2)}, "layer 0, row 1, rank 1: 2 instead of 0"),  # no tie in that row
        (
            {(0, 0): (4, 6), (1, 0): (0, 1)},
            "layer 0, row 0, rank 1: 6 instead of 2",
        ),  # not eligible
        ({(0, 0): (4, 4)}, "row 0"),  # one choice twice
        ({(0, 0): (4, -1)}, "row 0"),
        ({(0, 0): (4, 1 << 30)}, "row 0"),
        ({(1, 0): (0, 1)}, "layer 1, row 0, rank 0: 0 instead of 3"),  # follows from nothing
        ({(0, 0): (4, 7), (1, 0): (5, 3)}, "layer 1, row 0"),  # wrong after a tie
        ({(0, 0): (4, 7), (1, 0): (0, 1), (1, 1): (7, 6)}, "layer 1, row 1"),
    ],
)
def test_unproved_choices_fail(
    change: Mapping[tuple[int, int], tuple[int, int]], said: str
) -> None:
    got = settled(change)
    assert isinstance(got, Failure) and said in got.message, got


class Closer(Layers):
    """More schedules show that row 1 of layer 0 may choose 2 instead of 0."""

    looked = 0

    def closely(
        self, w: Any, tensors: Any, after: Any, forced: Mapping[str, torch.Tensor] | None = None
    ) -> Expected:
        assert "ids" in after
        self.looked += 1
        own = self.run(w, tensors, "oracle", forced)
        tie = own.ties[0]
        assert tie.eligible is not None
        tie.allowed[0, 1] = True
        tie.eligible[0, 1, 2] = True
        return own


def looked_at(change: Mapping[tuple[int, int], tuple[int, int]]) -> tuple[Settled | Failure, int]:
    theirs = OURS.clone()
    for (layer, row), ids in change.items():
        theirs[layer, row] = torch.tensor(ids)
    reference = Closer()
    case: Any = SimpleNamespace(reference=reference, workload=None)
    got = settle(case, {}, {"ids": theirs}, Where(0, 0, axes={"ids": ("layer", "row", "rank")}))
    return got, reference.looked


def test_what_few_schedules_do_not_explain_gets_a_second_look() -> None:
    got, looked = looked_at({(0, 1): (1, 2)})
    assert isinstance(got, Settled) and got.rows == 1 and looked == 2
    assert got.expected.tensors["ids"][0, 1].tolist() == [1, 2]
    got, looked = looked_at({(0, 1): (1, 3)})  # not among what they show either
    assert isinstance(got, Failure) and "3 instead of 0" in got.message and looked == 2
    got, looked = looked_at({(0, 0): (4, 7), (1, 0): (0, 1)})
    assert isinstance(got, Settled) and looked == 0  # explained at once


def test_many_wrong_choices_get_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.judge.ties.FEW", 0)
    got, looked = looked_at({(0, 1): (1, 2)})
    assert isinstance(got, Failure) and looked == 0
