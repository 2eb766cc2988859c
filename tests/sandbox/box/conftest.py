"""What this machine offers, probed once: boxes for tests that need one."""

from __future__ import annotations

import pytest

from sandbox import box
from tests.sandbox.box.specs import spec


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
