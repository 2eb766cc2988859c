"""One compile server for the seeds' tests; its store keeps what several tests compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox.compile_client import CompileClient, CompileSettings, NoIsolation


@pytest.fixture(scope="package")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompileClient]:
    settings = CompileSettings(tmp_path_factory.mktemp("store"), idle=1, jobs=1, deadline_s=280)
    client = CompileClient(settings)
    try:
        client.start()
    except NoIsolation:
        client.close()
        trusted = CompileSettings(
            settings.store, tier="none", idle=1, jobs=1, deadline_s=280, trust_this_code=True
        )
        client = CompileClient(trusted)  # the seeds are ours
    yield client
    client.close()
