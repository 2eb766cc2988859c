"""One compile server for the tests of this folder, in the strongest isolation that this machine offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.compile_client import CompileClient, CompileSettings, NoIsolation


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompileClient]:
    """A client with warm workers. Where nothing can be boxed, as in some containers, the sources here are trusted."""
    with start(tmp_path_factory.mktemp("store")) as client:
        yield client


def start(store: Path, deadline_s: float = 60.0) -> CompileClient:
    client = CompileClient(CompileSettings(store=store, jobs=2, deadline_s=deadline_s))
    try:
        client.start()
    except NoIsolation:
        client = CompileClient(
            CompileSettings(
                store=store, jobs=2, deadline_s=deadline_s, tier="none", trust_this_code=True
            )
        )
    return client
