"""Content addresses of results: what shapes one, hashed, so that it is never computed twice.

`scope` is the run: within it a result stands, another run measures afresh, because times are of a machine on a day.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sandbox.artifact import canonical
from sandbox.jobs import CompileJob, JudgeJob

PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "llvmlite", "torch", "numpy", "cuda-bindings")
_ROOT = Path(__file__).resolve().parents[2]
_OWN = ("sandbox", "targets")


@cache
def versions() -> Mapping[str, str]:
    """What must be the same on all machines of one run: the interpreter, the packages that shape results, our code."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    digest = hashlib.sha256()
    for folder in _OWN:
        for file in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(_ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return {**found, "code": digest.hexdigest()}


def differing(theirs: Mapping[str, Any]) -> str:
    """How a worker's versions differ from ours, in words; '' if they do not."""
    ours = versions()
    odd = [
        f"{name} {theirs.get(name, 'none')} instead of {value}"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    return "; ".join(o if len(o) < 80 else f"{o[:18]}... differs" for o in odd)


def target_hash(target: str) -> str:
    """Of a user's target file; '' for a built-in one. Raises OSError."""
    path, colon, _ = target.rpartition(":")
    if not colon or not path.endswith(".py"):
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def compile_key(job: CompileJob, jail: Mapping[str, Any]) -> str:
    """`jail`: how it is confined and for how long it may run."""
    source = hashlib.sha256(job.source.encode("utf-8", "surrogatepass")).hexdigest()
    fields = dataclasses.asdict(dataclasses.replace(job, source=source))
    return _digest(
        {"what": "compile", "versions": dict(versions()), "jail": dict(jail), "job": fields}
    )


def judge_key(job: JudgeJob, artifacts: Mapping[str, str | None], look: Mapping[str, Any]) -> str:
    """`artifacts`: hashes, for every field of the job that is a folder. `look`: scope, kind of device, whether fresh.

    Of the compile's isolation its tier counts: the user id of a box says nothing about what was in it.
    """
    fields = {k: v for k, v in dataclasses.asdict(job).items() if k not in artifacts}
    fields["compile_isolation"] = job.compile_isolation.get("tier")
    said = {"what": "judge", "versions": dict(versions()), "artifacts": dict(artifacts)}
    return _digest({**said, "look": dict(look), "file": target_hash(job.target), "job": fields})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()
