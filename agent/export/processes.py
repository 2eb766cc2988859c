"""The processes that exports start: the assembler, the reference, the compiler, git and ruff.

Plain argv, no shell; the sandbox's get no keys. Nothing here decides what is exported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.export.subject import ExportRefused
from sandbox.compile_client import environment

DEADLINE_S = 900.0
FOREIGN = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_PREFIX",
)  # of a hook around us


TOOLS = ("KERNELGEN_PTXAS", "KERNELGEN_NVDISASM", "KERNELGEN_CACHE")
"""What the trusted side of the sandbox is told about its tools; a jail is told nothing."""


@dataclass(frozen=True)
class Done:
    """How a process ended."""

    code: int
    out: str
    err: str


def sandbox_json(module: str, *arguments: str) -> dict[str, Any]:
    """The one JSON document of a command of the sandbox. Raises ExportRefused with what it says."""
    tools = {k: os.environ[k] for k in TOOLS if k in os.environ}
    done = run([sys.executable, "-m", module, *arguments], Path.cwd(), {**environment(), **tools})
    try:
        answer: dict[str, Any] = json.loads(done.out.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        last = (done.err.strip().splitlines() or ["no message"])[-1][:300]
        raise ExportRefused(f"{module} ended with {done.code}: {last}") from error
    return answer


def git(
    folder: Path, *arguments: str, check: bool = True, env: Mapping[str, str] | None = None
) -> str:
    """Its output, less the last newline. Raises ExportRefused if git fails."""
    inherited = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    done = run(
        ["git", *arguments], folder, {**inherited, "GIT_TERMINAL_PROMPT": "0", **(env or {})}
    )
    if check and done.code:
        said = (done.err or done.out).strip().splitlines() or ["no message"]
        verb = next((a for a in arguments if a[0] != "-" and "=" not in a), "")
        raise ExportRefused(f"git {verb} in {folder}: {said[-1]}")
    return done.out.rstrip("\n") if done.code == 0 else ""


def ruff() -> list[str] | None:
    """The command, or None where ruff is not installed."""
    beside = Path(sys.executable).with_name("ruff")
    if beside.exists():
        return [str(beside)]
    if importlib.util.find_spec("ruff") is not None:
        return [sys.executable, "-m", "ruff"]
    found = shutil.which("ruff")
    return [found] if found else None


def run(command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> Done:
    """Raises ExportRefused if it cannot start or does not end."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, errors="replace",
            timeout=DEADLINE_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExportRefused(f"{command[0]}: {error}") from error
    return Done(done.returncode, done.stdout, done.stderr)
