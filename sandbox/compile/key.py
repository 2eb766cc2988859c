"""The cache key of a compile: everything that shapes its outcome, computed before the worker sees the source.

Versions are read from the installed packages by the trusted side, never from a worker.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from sandbox.artifact import buffer_dict, canonical
from sandbox.jobs import CompileJob

SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}
PACKAGES = {"cutlass_dsl": "nvidia-cutlass-dsl", "llvmlite": "llvmlite", "numpy": "numpy"}


class ToolchainMissing(RuntimeError):
    """A package of the compile side is not installed; the message says what to install."""


@cache
def toolchain() -> dict[str, str]:
    """Versions of what shapes the output. Raises ToolchainMissing."""
    out = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name, package in PACKAGES.items():
        try:
            out[name] = metadata.version(package)
        except metadata.PackageNotFoundError as error:
            raise ToolchainMissing(
                f"{package} is not installed: install kernelgen's dependencies"
            ) from error
    return out


@cache
def own_code() -> str:
    """Hash of this package's own sources: a changed capture must not serve old results."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def sms(job: CompileJob) -> int:
    """SM count that `cfg.sms` shows: the job's, or the architecture's largest common part."""
    return job.sms or SMS.get(job.arch, 0)


def cache_key(job: CompileJob, tier: str) -> str:
    """`tier`: results of another isolation are kept apart."""
    value = {
        "source": hashlib.sha256(job.source.encode("utf-8", "surrogatepass")).hexdigest(),
        "target": job.target,
        "workload": dict(job.workload),
        "dims": dict(job.dims),
        "buffers": [buffer_dict(b) for b in job.buffers],
        "arch": job.arch,
        "sms": sms(job),
        "tunables": dict(job.tunables),
        "filename": job.filename,
        "toolchain": toolchain(),
        "code": own_code(),
        "tier": tier,
    }
    return hashlib.sha256(canonical(value).encode()).hexdigest()
