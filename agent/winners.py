"""kernels_out/<target>/<device>/<run>-<seq>/: the best verified kernel of a run, there however the
run ends.

Written as soon as a candidate is verified to beat the incumbent, under a temporary name and then
renamed; when its round is recorded the best one stays and the run's others are removed. It holds
what was verified and says what was not.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent import search
from agent.state import Deps
from agent.workspace import read_json, replace_folder
from sandbox.verdict import Verdict

MARK = "verdict.json"


def write_winner(deps: Deps, seq: int, alone: bool = False) -> Path:
    """Write the folder of candidate `seq`; `alone` drops the run's other ones. Raises OSError, Missing."""
    result = read_json(deps.files.result(seq))
    verdict = deps.workspace.verdict(result["verdict"])
    final = winner_folder(deps.out, deps.task.target, verdict.device, deps.task.run, seq)
    files = {
        "kernel.py": deps.workspace.get(result["source"]),
        "verdict.json": _pretty(verdict.to_json()),
        "notes.md": notes(deps, result, verdict).encode(),
    }
    if result["tunables"]:
        files["tunables.json"] = _pretty(result["tunables"])
    if not (
        final / MARK
    ).is_file():  # what is there is whole and the same: the result is the candidate's last word
        trees = {"artifact": deps.workspace.artifact(result["artifact"])}
        replace_folder(final, files, trees, MARK)
    # an unfinished one is what a kill left
    patterns = (f"{deps.task.run}-*", f".new-{deps.task.run}-*") if alone else ()
    for other in [o for p in patterns for o in final.parent.glob(p)]:
        if other != final:
            shutil.rmtree(other, ignore_errors=True)
    return final


def winner_folder(out: Path, target: str, device: Mapping[str, Any], run: str, seq: int) -> Path:
    return out / target_slug(target) / device_slug(device) / f"{run}-{seq}"


def target_slug(target: str) -> str:
    """A folder name; a user's `path/to/file.py:Name` gives `file-name`."""
    name = target.rpartition("/")[2].replace(".py:", "-")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-").lower() or "target"


def device_slug(device: Mapping[str, Any]) -> str:
    """`h200` or `cpu`."""
    slug = str(device.get("slug") or "")
    if not slug:
        words = str(device.get("name") or "").lower().replace("nvidia", "").split()
        slug = "cpu" if device.get("kind") == "cpu" else "-".join(words)
    return re.sub(r"[^a-z0-9_-]+", "-", slug.lower()).strip("-") or "device"


def notes(deps: Deps, result: Mapping[str, Any], verdict: Verdict) -> str:
    """What this kernel is, its numbers, what was checked and what was not."""
    row = search.workload(verdict)
    lines = [
        f"# {deps.task.target}, candidate {deps.task.run}-{result['seq']}", "",
        result["note"] or "(no note)", "",
        f"- device: {verdict.device.get('name', deps.task.device)}",
        f"- workload: {', '.join(f'{k}={v}' for k, v in deps.task.workload.items())}",
        f"- artifact: `{result['artifact']}`",
        f"- tunables: {json.dumps(result['tunables'], sort_keys=True)}",
        f"- judged at tier {verdict.tier}, trust {verdict.trust}, {verdict.date}",
    ]  # fmt: skip
    if row is not None and verdict.timing is not None:
        lines.append(f"- {verdict.timing.kind}: {row.us:.2f} us a step, {row.launches} launches")
        lines += [f"- {said}" for said in (search.shares(row),) if said]
        for what, ratio in search.ratios(row):
            lines.append(f"- {ratio.value:.4f} x {what} [{ratio.low:.4f}, {ratio.high:.4f}]")
    lines += ["", "Checked:", "", *[f"- {x}" for x in verdict.checked or ("(not listed)",)]]
    lines += [
        "",
        "Not verified:",
        "",
        *[f"- {x}" for x in verdict.not_verified or ("(nothing listed)",)],
    ]
    return "\n".join(lines) + "\n"


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
