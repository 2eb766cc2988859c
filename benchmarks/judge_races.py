"""Whether accesses of an artifact race, on the cpu device: one step in several orders of blocks and warps, every access
followed by vector clocks through barriers, mbarriers, bulk copies, atomics and fences.

    python benchmarks/judge_races.py ARTIFACT_FOLDER... [--orders 2] [--json FILE]

The judge does this at tier `promote` on `cpu`; here it is done for artifacts at real sizes, such as winners that were
judged on a GPU, where compute-sanitizer has the word. It compares no numbers with the oracle, and a kernel with more
warps or memory than the race check can follow is said to be so. Needs a few GB of memory and minutes per artifact.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from sandbox.devices.base import Faulted, Refused
from sandbox.devices.cpu import CpuDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import rig as rigs
from sandbox.judge.case import Case, open_case, read_artifact
from sandbox.verdict import Tier


def job_of(folder: Path) -> JudgeJob:
    manifest = json.loads((folder / "manifest.json").read_text())
    workload = manifest["workload"]
    extra = {k.removeprefix("x_"): v for k, v in workload.items() if k.startswith("x_")}
    names = ("preset", "layers", "rows", "context")
    options = {k: workload[k] for k in names if k in workload} | {"extra": extra}
    return JudgeJob(folder.resolve(), manifest["target"], options, "cpu", Tier.SCREEN, seed=1)


def one_order(case: Case, job: JudgeJob, weights: dict[str, torch.Tensor], order: int) -> Any:
    """Rules and messages of what one step shows in that order. Raises Refused, Faulted."""
    artifact = read_artifact(job.artifact, case)
    program = case.device.load(artifact)
    rig = rigs.build(case, artifact, program, f"races {order}")
    rig.load_weights(weights)
    rig.set_states(case.reference.states(case.workload, 1, "cpu"))
    rig.set_inputs(case.reference.inputs(case.workload, 1, 0, "cpu"))
    rig.dirty("random", order)
    rig.launch(f"order {order}")
    return [{"rule": f.rule, "message": f.message} for f in program.findings()]


def checked(folder: Path, orders: int) -> dict[str, Any]:
    """What every order shows, and how long it took."""
    job = job_of(folder)
    rows: list[dict[str, Any]] = []
    weights: dict[str, torch.Tensor] = {}
    for order in range(1, orders + 1):
        began = time.monotonic()
        row: dict[str, Any] = {"order": order}
        try:
            case = open_case(job, CpuDevice(order, "exact"))
            weights = weights or dict(case.reference.weights(case.workload, 1, "cpu"))
            row["findings"] = one_order(case, job, weights, order)
        except (Refused, Faulted) as end:
            row["ended"] = {"status": str(end.status), "message": end.failure.message}
        row["seconds"] = round(time.monotonic() - began, 1)
        rows.append(row)
        print(json.dumps(row)[:2000], flush=True)
    return {
        "artifact": folder.resolve().name,
        "target": job.target,
        "options": dict(job.options),
        "orders": rows,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("folders", nargs="+", type=Path)
    p.add_argument(
        "--orders", type=int, default=2, help="odd ones let copies complete at once, even ones late"
    )
    p.add_argument("--json", type=Path)
    asked = p.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = [checked(folder, asked.orders) for folder in asked.folders]
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
