"""Start a box: pipes, environment, launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sandbox.box.frames import Broken
from sandbox.box.guard import ProcessGuard
from sandbox.box.process import Boxed, Parts
from sandbox.box.spec import BoxTier, Spec
from sandbox.box.tiers import Choice

INSIDE = Path(__file__).parent / "inside"


def start(spec: Spec, choice: Choice) -> Boxed | Broken:
    """Start the worker in exactly the isolation that was chosen. Broken("box") when it cannot be had."""
    if choice.isolation.tier is not BoxTier.NONE:
        return Broken("box", f"the tier {choice.isolation.tier} is not available")
    scratch = tempfile.mkdtemp(prefix="kernelgen-box-")
    fds: list[int] = []
    try:
        for _ in range(3):
            fds += os.pipe2(os.O_CLOEXEC)
        stdin_r, stdin_w, result_r, result_w, output_r, output_w = fds
        plan = {
            "rlimits": rlimits(spec),
            "no_new_privs": True,
            "chdir": scratch,
            "env": environment(spec, scratch, result_w),
            "argv": [str(spec.python), "-I", str(spec.worker), *spec.args],
        }
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(INSIDE / "launcher.py"), json.dumps(plan)],
            stdin=stdin_r, stdout=output_w, stderr=output_w, pass_fds=(result_w,), env={}, cwd="/",
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        for fd in fds:
            os.close(fd)
        return Broken("box", f"cannot start: {error.strerror}")
    for fd in (stdin_r, result_w, output_w):
        os.close(fd)
    guard = ProcessGuard(child, spec.limits, choice.isolation)
    return Boxed(Parts(child, stdin_w, result_r, output_r, spec.limits, choice.isolation, guard))


def rlimits(spec: Spec) -> dict[str, int]:
    limits = spec.limits
    return {
        "CPU": limits.cpu_s, "FSIZE": limits.file_bytes, "NOFILE": limits.files, "CORE": 0,
    }  # fmt: skip


def environment(spec: Spec, scratch: str, result: int) -> dict[str, str]:
    """The whole environment inside the box: nothing of ours is inherited."""
    fixed: dict[str, Any] = {
        "PATH": "/usr/bin:/bin", "HOME": scratch, "TMPDIR": scratch, "USER": "box", "LANG": "C.UTF-8",
        "BOX_LIB": str(INSIDE), "BOX_RESULT_FD": str(result),
        "BOX_ADDRESS_SPACE": str(spec.limits.address_space or 0),
    }  # fmt: skip
    return {**spec.env, **fixed}
