"""What this machine offers, probed once: boxes for tests that need one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sandbox import box

HERE = Path(__file__).parent


def spec(worker: str, **changes: object) -> box.Spec:
    return box.Spec(HERE / "workers" / f"{worker}.py", **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def choice() -> box.Choice:
    """The strongest isolation here; without one these tests say so and are skipped."""
    found = box.choose(spec("echo"), box.Settings())
    if isinstance(found, box.Refusal):
        pytest.skip(f"{found.sentence}: {'; '.join(found.tried)}")
    return found


@pytest.fixture(scope="session")
def offered() -> list[box.Choice]:
    return box.offered(spec("echo"), box.Settings())


@pytest.fixture
def python() -> str:
    return sys.executable
