"""Nsight Compute over a replay of an artifact's step: what the hardware counted, kernel by kernel.

Only the plan's kernels, clocks left alone, in a process of its own (`sandbox.judge.replay`). Hosts without the tool or
without permission to read counters, as many clouds are, are told so in a sentence. It decides nothing.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.verdict import short_name

SECONDS = 120.0
MOST_LAUNCHES = 24
MOST_OUTPUT = 8 << 20
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__bytes_read.sum": "memory read, bytes",
    "dram__bytes_write.sum": "memory written, bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory throughput, %",
    "lts__t_bytes.sum": "L2 traffic, bytes",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 throughput, %",
    "l1tex__t_sector_hit_rate.pct": "L1 hit, %",
    "lts__t_sector_hit_rate.pct": "L2 hit, %",
    "sm__issue_active.avg.pct_of_peak_sustained_elapsed": "issue slots used, %",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor pipe, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, %",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stall long scoreboard",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "stall barrier",
    "smsp__average_warps_issue_stalled_membar_per_issue_active.ratio": "stall membar",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": "stall short scoreboard",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "stall wait",
}
"""Metrics and what a profile calls them. Stalls are warps that wait for that reason, a warp that issues."""
SCALE = {
    "": 1.0, "%": 1.0, "ratio": 1.0, "inst": 1.0, "warp": 1.0, "nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0,
    "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip
_REFUSED = (
    ("ERR_NVGPUCTRPERM", "this user may not read the GPU's performance counters"),
    ("insufficient privileges", "this user may not read the GPU's performance counters"),
    ("No kernels were profiled", "no kernel of the plan was seen"),
    ("another instance", "another profiler holds the counters"),
    ("Failed to prepare", "the counters could not be set up"),
)


class Unreadable(ValueError):
    """The tool's output is no table of metrics; the message says why, as far as the tool did."""


def find() -> Path | None:
    """KERNELGEN_NCU, else the PATH, else the toolkit's usual place."""
    chosen = os.environ.get("KERNELGEN_NCU")
    for name in [chosen] if chosen else ["ncu", "/usr/local/cuda/bin/ncu"]:
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def command(tool: Path, artifact: Artifact, replay: Sequence[str]) -> list[str]:
    """The second step of a replay: the first one loads code and fills nothing that counts."""
    names = dict.fromkeys(x.kernel for x in artifact.step.launches)
    regex = "|".join(re.escape(n) for n in names)
    count = len(artifact.step.launches)
    return [
        str(tool), "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
        "--kernel-name-base", "mangled", "--kernel-name", f"regex:^({regex})$", "--launch-skip", str(count),
        "--launch-count", str(min(count, MOST_LAUNCHES)), "--metrics", ",".join(METRICS), *replay,
    ]  # fmt: skip


def collect(tool: Path, folder: Path, seconds: float = SECONDS) -> dict[str, Any]:
    """Metrics by kernel, or `unavailable` with the reason. `folder`: what `sandbox.judge.replay` reads."""
    artifact = artifact_store.load(Path((folder / "artifact").read_text()))
    replay = [sys.executable, "-P", "-m", "sandbox.judge.replay", str(folder), "plain"]
    log = folder / "ncu.csv"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(tool, artifact, replay), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=folder,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {"unavailable": f"ncu was stopped after {seconds:.0f} s"}
    with log.open("rb") as written:
        text = written.read(MOST_OUTPUT).decode("utf-8", "replace")
    try:
        return by_kernel(parse(text))
    except Unreadable as error:
        return {"unavailable": str(error)}


def parse(text: str) -> list[dict[str, Any]]:
    """Rows of the raw page: `kernel` and the metrics that were there, in base units. Raises Unreadable."""
    lines = text.splitlines()
    start = next((i for i, x in enumerate(lines) if x.startswith('"ID"')), None)
    if start is None:
        raise Unreadable(_why(text))
    table = list(csv.reader(io.StringIO("\n".join(x for x in lines[start:] if x.startswith('"')))))
    head = table[0]
    if len(table) < 3 or "Kernel Name" not in head:
        raise Unreadable(_why(text))
    name = head.index("Kernel Name")
    units = dict(zip(head, table[1], strict=False))
    out = []
    for row in table[2:]:
        found: dict[str, Any] = {"kernel": short_name(row[name])}
        for metric, value in zip(head, row, strict=False):
            number = _number(value)
            if metric in METRICS and number is not None:
                found[METRICS[metric]] = number * SCALE.get(units.get(metric, ""), 1.0)
        out.append(found)
    return out


def _why(text: str) -> str:
    for mark, words in _REFUSED:
        if mark in text:
            return f"no counters on this host: {words}"
    said = [x for x in text.splitlines() if x.startswith("==ERROR==")] or text.splitlines()[-1:]
    return f"ncu gave no metrics: {said[0][:200] if said else 'it printed nothing'}"


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def by_kernel(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One entry a kernel: bytes and times add up, everything else is weighted by time."""
    out: dict[str, Any] = {}
    for kernel in dict.fromkeys(r["kernel"] for r in rows):
        same = [r for r in rows if r["kernel"] == kernel]
        weight = [float(r.get("us", 0.0)) or 1.0 for r in same]
        entry: dict[str, float] = {"launches": len(same)}
        for label in METRICS.values():
            pairs = [(r[label], w) for r, w in zip(same, weight, strict=True) if label in r]
            if not pairs:
                continue
            if label == "us" or label.endswith("bytes"):
                entry[label] = round(sum(v for v, _ in pairs), 3)
            else:
                entry[label] = round(sum(v * w for v, w in pairs) / sum(w for _, w in pairs), 3)
        if entry.get("us"):
            moved = entry.get("memory read, bytes", 0.0) + entry.get("memory written, bytes", 0.0)
            entry["memory, GB/s"] = round(moved / entry["us"] / 1e3, 1)
        out[kernel] = entry
    return out
