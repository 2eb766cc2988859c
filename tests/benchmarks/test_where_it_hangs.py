"""benchmarks/where_it_hangs.py without a GPU: what rows of marks of a stuck kernel say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sandbox.judge import timeline

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import where_it_hangs

    return where_it_hangs


def artifact() -> Any:
    launch = SimpleNamespace(grid=(3, 1, 1), relocations=(SimpleNamespace(buffer=timeline.ROWS),))
    names = json.dumps([["early", "work"], ["edge mix", "edge"], ["bring", "work"]]).encode()
    return SimpleNamespace(
        constants={timeline.NAMES: names}, step=SimpleNamespace(launches=(launch,))
    )


def marked(*tracks: list[tuple[int, int]]) -> torch.Tensor:
    """Rows of marks (phase from 1, layer); the count in the first row is written at the end, so it is missing here."""
    rows = torch.zeros((len(tracks), 8, 4), dtype=torch.int32)
    for track, marks in enumerate(tracks):
        for n, (phase, layer) in enumerate(marks, 1):
            rows[track, n] = torch.tensor([1000 + n, 0, n, phase | layer << 16])
    return rows


def test_the_phase_that_most_blocks_stand_in_comes_first_by_role(script: Any) -> None:
    rows = marked([(1, 0), (2, 1)], [(1, 0), (2, 1)], [(1, 0)], [(3, 4)], [], [(3, 4)])
    assert script.last_marks(rows, artifact()) == [
        "role 0: 2 blocks after 2 marks in 'edge mix' of layer 1, such as [0, 1]",
        "role 0: 1 blocks after 1 marks in 'early' of layer 0, such as [2]",
        "role 1: 2 blocks after 1 marks in 'bring' of layer 4, such as [0, 2]",
    ]
