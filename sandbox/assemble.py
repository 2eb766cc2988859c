"""PTX to machine code on the trusted side, with ptxas of the pinned `nvidia-cuda-nvcc`, and its resource report.

Only what this module assembled is ever launched. It runs ptxas as a process with a deadline and memory bound, because
PTX is hostile text; it does not lint and does not touch a GPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from sandbox.verdict import Failure, KernelResources

DEADLINE_S = 120
MEMORY_BYTES = 8 << 30
_FUNCTION = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Assembled:
    """Machine code of one PTX module for one architecture."""

    cubin: bytes
    resources: tuple[KernelResources, ...]
    ptxas: str


class ToolchainMissing(RuntimeError):
    """ptxas or nvdisasm is not installed; the message says what to install."""


class AssemblyFailed(Exception):
    """ptxas refused the PTX, ran out of time or memory. `failure` says what, with the PTX line."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def tool(name: str) -> Path:
    """Path of `ptxas` or `nvdisasm`: KERNELGEN_PTXAS / KERNELGEN_NVDISASM, then the pinned packages.

    Raises ToolchainMissing. The PATH is not searched: an older ptxas there refuses the DSL's PTX.
    """
    chosen = os.environ.get(f"KERNELGEN_{name.upper()}")
    if chosen:
        if os.access(chosen, os.X_OK):
            return Path(chosen)
        raise ToolchainMissing(f"KERNELGEN_{name.upper()} names {chosen}, which is no program")
    package = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}[name]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError as error:
        raise ToolchainMissing(f"{name} is missing: pip install '{package}>=13.5,<14'") from error
    for file in files:
        if file.name == name and file.parent.name == "bin":
            return Path(str(file.locate()))
    raise ToolchainMissing(f"the package {package} holds no {name}")


@cache
def version(name: str = "ptxas") -> str:
    """Version text of a tool, such as `13.5.37`. Raises ToolchainMissing."""
    text = subprocess.run(
        [tool(name), "--version"], capture_output=True, text=True, timeout=30
    ).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else "unknown"


def assemble(ptx: str, arch: str) -> Assembled:
    """Assemble one module. Results are cached on disk where KERNELGEN_CACHE names a folder.

    Raises AssemblyFailed for the PTX's faults, ToolchainMissing and OSError for ours.
    """
    command = [str(tool("ptxas")), f"--gpu-name={arch}", "--verbose", "--warn-on-spills"]
    folder = os.environ.get("KERNELGEN_CACHE")
    key = hashlib.sha256(f"{version()}\0{arch}\0{ptx}".encode()).hexdigest()
    stored = Path(folder, "cubin", key) if folder else None
    if stored and (hit := _read(stored)):
        return hit
    with tempfile.TemporaryDirectory(prefix="kernelgen-ptxas-") as work:
        source, cubin = Path(work, "kernel.ptx"), Path(work, "kernel.cubin")
        source.write_text(ptx)
        report = _run([*command, "-o", str(cubin), str(source)], work)
        out = Assembled(cubin.read_bytes(), tuple(_resources(report)), version())
        if stored:
            _write(stored, out.cubin, report)
    return out


def _run(command: list[str], work: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S, cwd=work,
            env={"PATH": "/usr/bin:/bin", "TMPDIR": work, "LANG": "C.UTF-8"}, preexec_fn=_limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise AssemblyFailed(
            Failure("ptxas-deadline", f"ptxas did not end within {DEADLINE_S} s")
        ) from error
    report = done.stdout + done.stderr
    if done.returncode:
        raise AssemblyFailed(_failure(report, done.returncode))
    return report


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _failure(report: str, code: int) -> Failure:
    lines = [x for x in report.splitlines() if "error" in x or "fatal" in x]
    first = (
        re.sub(r"^ptxas \S*kernel\.ptx, ", "", lines[0]) if lines else f"ptxas ended with {code}"
    )
    found = re.search(r"line (\d+)", first)
    return Failure("ptxas", first[:400], {"ptx_line": int(found[1])} if found else {})


def _resources(report: str) -> list[KernelResources]:
    out = []
    for piece in re.split(r"(?=ptxas info\s+: Compiling entry function)", report):
        name, frame, used = _FUNCTION.search(piece), _PROPERTIES.search(piece), _USED.search(piece)
        if not (name and frame and used):
            continue
        smem = _SMEM.search(piece)
        stack, stores, loads = (int(x) for x in frame.groups())
        out.append(
            KernelResources(
                name[1], int(used[1]), stack, stores, loads, int(smem[1]) if smem else 0
            )
        )
    return out


def _read(stored: Path) -> Assembled | None:
    try:
        report = stored.with_suffix(".txt").read_text()
        return Assembled(
            stored.with_suffix(".cubin").read_bytes(), tuple(_resources(report)), version()
        )
    except OSError:
        return None


def _write(stored: Path, cubin: bytes, report: str) -> None:
    stored.parent.mkdir(parents=True, exist_ok=True)
    for suffix, data in (
        (".cubin", cubin),
        (".txt", report.encode()),
    ):  # the report last: it makes a hit
        temporary = stored.with_suffix(f".{os.getpid()}.new")
        temporary.write_bytes(data)
        temporary.replace(stored.with_suffix(suffix))
