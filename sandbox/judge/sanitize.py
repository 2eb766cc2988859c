"""compute-sanitizer over a winner: memcheck, racecheck, synccheck and initcheck on a replay of its plans.

A tool counts only if it was armed: in the same process it must complain about a control kernel of ours, and memcheck
and initcheck, run again with memory cut short or unwritten, about the candidate's own kernels. What memcheck or
synccheck find breaks the candidate; racecheck and initcheck have false alarms (async copies, masked lanes), so what
they find is a finding for people. Where the tool is missing, refuses or takes too long the verdict says `not verified`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.judge.sanitizer_report import read
from sandbox.verdict import Failure, Status, Verdict

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
BREAKING = ("memcheck", "synccheck")
ARMED_BY = {"memcheck": "cut", "initcheck": "unset"}
RUN_S = 75.0
TOTAL_S = 300.0
MOST_BYTES = 8 << 30
MOST_OUTPUT = 4 << 20
CONTROL = "kernelgen_control"
CLONE_NEWNET = 0x40000000
STEPS = 2
"""That a replay launches (`sandbox.judge.replay`)."""


@dataclass(frozen=True)
class Outcome:
    """Of one tool. `state`: clean, found, unarmed, or failed (with why in `text`)."""

    tool: str
    state: str
    text: str = ""
    count: int = 0


def find() -> Path | None:
    """KERNELGEN_COMPUTE_SANITIZER, else the PATH, else the toolkit's usual place."""
    chosen = os.environ.get("KERNELGEN_COMPUTE_SANITIZER")
    names = [chosen] if chosen else ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"]
    for name in names:
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def kernels_of(artifact: Artifact) -> list[str]:
    plans = [artifact.step, *([artifact.prepare] if artifact.prepare else [])]
    return list(dict.fromkeys(x.kernel for p in plans for x in p.launches))


def run(
    tool: Path, folder: Path, names: Sequence[str] = TOOLS, total_s: float = TOTAL_S
) -> list[Outcome]:
    """The named tools over the replay that `folder` describes. Takes at most `total_s` and a little."""
    artifact = artifact_store.load(Path((folder / "artifact").read_text()))
    kernels = kernels_of(artifact)
    until = time.monotonic() + total_s
    out = []
    for name in names:
        left = until - time.monotonic()
        out.append(
            _one((tool, name), folder, kernels, left)
            if left > 1
            else Outcome(name, "failed", "no time left")
        )
    return out


def _one(tool: tuple[Path, str], folder: Path, kernels: list[str], left: float) -> Outcome:
    name = tool[1]
    text, ended = _call(tool, folder, "control", min(RUN_S, left))
    report = read(text, [*kernels, CONTROL])
    mine = report.about(kernels)
    if mine:
        return Outcome(name, "found", mine[0].text, len(mine))
    if ended or not report.finished:
        return Outcome(name, "failed", ended or report.trouble or _last(text))
    if not report.about([CONTROL]):
        return Outcome(
            name, "unarmed", report.trouble or "it did not complain about the control kernel"
        )
    if name in ARMED_BY:
        text, ended = _call(tool, folder, ARMED_BY[name], min(RUN_S, left))
        if not read(text, kernels).about(kernels):
            why = (
                ended
                or f"it did not complain about the candidate's kernels with memory {ARMED_BY[name]}"
            )
            return Outcome(name, "unarmed", why)
    return Outcome(name, "clean")


def _call(tool: tuple[Path, str], folder: Path, mode: str, seconds: float) -> tuple[str, str]:
    """What it printed, and why it ended if that was not by itself."""
    command = [
        str(tool[0]), "--tool", tool[1], "--destroy-on-device-error", "kernel", "--report-api-errors", "no",
        "--demangle", "no", "--print-limit", "100", "--show-backtrace", "no",
        sys.executable, "-P", "-m", "sandbox.judge.replay", str(folder), mode,
    ]  # fmt: skip
    log = folder / f"{tool[1]}-{mode}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            cwd=folder,
        )  # fmt: skip
        try:
            process.wait(seconds)
            ended = ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"stopped after {seconds:.0f} s"
    with log.open("rb") as written:
        return written.read(MOST_OUTPUT).decode("utf-8", "replace"), ended


def _last(text: str) -> str:
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    return f"it ended early: {lines[-1][:200]}" if lines else "it printed nothing"


def own_network() -> bool:
    """A network of this process's own with a loopback alone, where the kernel lets us: the tool talks to its target
    over it. False: it shares the machine's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        up = struct.pack("16sH14x", b"lo", 1)
        try:
            fcntl.ioctl(s, 0x8914, up)
        except OSError:
            return False
    return True


def to_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(o) for o in outcomes]


def from_json(found: object) -> list[Outcome]:
    """Inverse of `to_json`; what is malformed is left out."""
    out = []
    for item in found if isinstance(found, list) else []:
        if isinstance(item, dict) and item.get("tool") in TOOLS:
            out.append(
                Outcome(
                    str(item["tool"]),
                    str(item.get("state")),
                    str(item.get("text"))[:300],
                    int(item.get("count", 0)),
                )
            )
    return out


def merge(verdict: Verdict, outcomes: Sequence[Outcome], isolation: Mapping[str, Any]) -> Verdict:
    """The verdict of a winner with what the tools say. A breaking finding takes the verdict away."""
    checked, unsure, findings = (
        list(verdict.checked),
        list(verdict.not_verified),
        list(verdict.findings),
    )
    for o in outcomes:
        label = f"compute-sanitizer {o.tool}"
        if o.state == "clean":
            proof = "a control kernel" + (
                " and this kernel with too little memory" if o.tool == "memcheck" else ""
            )
            proof += " and this kernel with unwritten inputs" if o.tool == "initcheck" else ""
            checked.append(
                f"{label}: no complaint over {STEPS} steps; armed, since it complains about {proof}"
            )
        elif o.state == "found":
            findings.append(Failure(o.tool, f"{label}: {o.count} complaints, first: {o.text}"))
            if o.tool not in BREAKING:
                unsure.append(
                    f"{label}: it complains ({o.count}); see the findings, it has false alarms"
                )
        else:
            unsure.append(f"{label}: {o.state}: {o.text}")
    profile = {
        **verdict.profile,
        "sanitizer": to_json(outcomes),
        "sanitizer_isolation": dict(isolation),
    }
    out = replace(
        verdict,
        checked=tuple(checked),
        not_verified=tuple(unsure),
        findings=tuple(findings),
        profile=profile,
    )
    broken = next((o for o in outcomes if o.state == "found" and o.tool in BREAKING), None)
    if broken is None:
        return out
    failure = Failure(
        broken.tool, f"compute-sanitizer {broken.tool}: {broken.text}", {"complaints": broken.count}
    )
    return replace(
        out, status=Status.FAULT, outcome=None, timing=None, correctness=None, failure=failure
    )


def absent(verdict: Verdict, why: str) -> Verdict:
    return replace(
        verdict, not_verified=(*verdict.not_verified, f"compute-sanitizer: not available: {why}")
    )
