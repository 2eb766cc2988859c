"""Judgements of these tests draw their masters from the test's name, so that a failure happens again when it is looked
for. `KERNELGEN_TEST_SEED` draws others: a test must pass with any. Judges in processes of their own stay secret.
"""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest

from sandbox.judge import seeds


@pytest.fixture(autouse=True)
def masters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(f"{request.node.nodeid} {os.environ.get('KERNELGEN_TEST_SEED', '')}")
    monkeypatch.setattr(seeds, "secrets", SimpleNamespace(randbits=drawn.getrandbits))
