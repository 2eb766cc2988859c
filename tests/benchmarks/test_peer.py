"""benchmarks/peer.py without a GPU: its sums are checked before they are timed, and its commands are what they were."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module, in a group of one process."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import peer_others

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield peer_others
    dist.destroy_process_group()


def test_a_reduction_that_makes_a_wrong_sum_is_said_and_left_out(
    others: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    t = torch.zeros(2, 64, dtype=torch.bfloat16)
    right = (t, lambda: None, t)
    wrong = (t, lambda: t.mul_(1.5), t)
    monkeypatch.setattr(others, "_symmetric", lambda *_: {"right": right, "wrong": wrong})
    found = others._reductions(SimpleNamespace(plain=t), 2, 0)
    assert set(found) == {"nccl", "right"}
    assert '"wrong": 0.5' in capsys.readouterr().out.replace("0.4999", "0.5")[:400]


def test_symmetric_memory_that_is_missing_is_said_and_nccl_stays(
    others: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    t = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert set(others._reductions(SimpleNamespace(plain=t), 2, 0)) == {"nccl"}
    assert '"name": "symmetric memory", "failed":' in capsys.readouterr().out


def test_help_says_what_it_measures() -> None:
    command = [sys.executable, str(FOLDER / "peer.py"), "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "{compile,fused,unfused,latency}" in said and "--judge" in said
