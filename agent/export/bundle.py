"""`--to bundle`: a folder with a Python package that runs the judged kernel from plain torch.

It holds machine code, launch plans, a loader, a recorded result, the source, a README and a manifest
of hashes. Written under a temporary name and renamed. It installs nothing and runs nothing on a GPU.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from agent.export import texts
from agent.export.parts import Parts, collect
from agent.export.provenance import markdown, provenance
from agent.export.rebuild import Rebuilt
from agent.export.subject import ExportRefused, Subject, pretty
from agent.store import Queries
from agent.workspace import put_in_place
from sandbox.artifact import digest

SCHEMA = 1
OWN = ("README.md", "PROVENANCE.md", "pyproject.toml", "source/kernel.py")
MODULES = ("__init__", "__main__", "check", "driver", "loader", "op", "plan")


@dataclass(frozen=True)
class Bundle:
    """A written bundle."""

    folder: Path
    package: str
    manifest: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Where to write, and architectures beyond the judged one."""

    folder: Path
    archs: tuple[str, ...] = ()
    rebuilt: Rebuilt = field(default_factory=lambda: Rebuilt(None, ("it was not asked for",)))


def write(queries: Queries, s: Subject, wanted: Wanted) -> Bundle:
    """Raises ExportRefused, NoIsolation, OSError."""
    final = wanted.folder
    _may_replace(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(
        f".new-{final.name}"
    )  # the next export clears away what a kill left
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        package = temporary / s.slug
        (package / "data").mkdir(parents=True)
        for name in MODULES:
            (package / f"{name}.py").write_text(template(f"bundle/{name}.py.tmpl"))
        parts = collect(s, package / "data", wanted.archs)
        origin = provenance(queries, s, wanted.rebuilt)
        manifest = _manifest(s, parts, origin, package)
        (package / "manifest.json").write_bytes(pretty(manifest))
        _documents(temporary, s, manifest, wanted.rebuilt)
        temporary.chmod(0o755)
        put_in_place(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Bundle(final, s.slug, manifest, tuple(parts.notes))


def template(name: str) -> str:
    """A file of `templates/`."""
    return (files("agent.export") / "templates" / name).read_text()


def _may_replace(folder: Path) -> None:
    """Only a bundle of ours, or nothing, is replaced."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    ours = all((folder / name).is_file() for name in OWN) and any(folder.glob("*/loader.py"))
    if folder.is_symlink() or (folder.exists() and not ours):
        raise ExportRefused(f"{folder} exists and is no bundle: choose another -o")


def _manifest(s: Subject, parts: Parts, origin: dict[str, Any], package: Path) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "name": s.slug, "parts": parts.parts, "record": parts.record,
        "ptxas": parts.ptxas, "provenance": origin, "notes": parts.notes,
        "files": {
            str(p.relative_to(package)): digest(p.read_bytes())
            for p in sorted(package.rglob("*")) if p.is_file()
        },
    }  # fmt: skip


def _documents(folder: Path, s: Subject, manifest: dict[str, Any], rebuilt: Rebuilt) -> None:
    source = folder / "source"
    source.mkdir()
    (source / "kernel.py").write_text(s.source)
    (source / "tunables.json").write_bytes(pretty(s.tunables))
    (folder / "README.md").write_text(texts.readme(s, manifest, rebuilt))
    (folder / "PROVENANCE.md").write_text(markdown(manifest["provenance"]))
    (folder / "pyproject.toml").write_text(texts.pyproject(s))
    if texts.is_whole_stack(s):
        (folder / "RFC.md").write_text(texts.rfc(s))
