"""Specs of the small workers beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandbox import box

HERE = Path(__file__).parent


def spec(worker: str, **changes: Any) -> box.Spec:
    return box.Spec(HERE / "workers" / f"{worker}.py", **changes)
