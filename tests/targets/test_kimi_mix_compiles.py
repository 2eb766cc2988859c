"""The mix's Triton kernels compile for an H200 without one. Skipped where the triton package is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_every_kernel_compiles_and_none_spills_much(rows: int) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.triton_offline",
        "--rows",
        str(rows),
        "--context",
        "8192",
    ]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in said.splitlines()]
    names = {f["kernel"] for f in found}
    assert {"linear_kernel", "kda_kernel", "attention_kernel", "middle_kernel"} <= names
    if rows > 1:
        assert {"group_kernel", "grouped_up_kernel", "grouped_down_kernel"} <= names
    for f in found:
        assert f["spilled"] <= 256 and f["shared"] <= 227 << 10, f
