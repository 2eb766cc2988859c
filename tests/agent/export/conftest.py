"""Bundles of a small target, made once, imported as the packages that they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agent.export import bundle, subject
from tests.agent.export import small


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> bundle.Bundle:
    folder = tmp_path_factory.mktemp("export")
    _, queries, run = small.record(folder, small.artifact(), small.SOURCE)
    found = subject.find(queries, f"{run}-0", force=False)
    return bundle.write(queries, found, bundle.Wanted(folder / "out" / "small"))


@pytest.fixture
def package(made: bundle.Bundle, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(made.folder))
    try:
        yield importlib.import_module(made.package)
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == made.package]:
            if not name.endswith(".op"):  # its operator is registered once in a process
                del sys.modules[name]


@pytest.fixture
def copied(made: bundle.Bundle, tmp_path: Path) -> Path:
    """The package's folder, to be damaged."""
    import shutil

    return Path(shutil.copytree(made.folder, tmp_path / "copy") / made.package)
