"""How long a judgement takes, and how many a minute: the judge's server as `kernelgen` uses it.

    python benchmarks/judge_throughput.py ARTIFACT_FOLDER... [--device cuda] [--batch 100] [--seconds 90] [--json]

The first folder is judged warm at `screen` (median of five), then at `full` and `promote`; then a batch of `screen`
jobs goes round all folders, one after the other as a run has them. Wall time is measured at the client, so it has the
fork, opening the device, assembling, checking and timing in it. Other harnesses are looked for and
named: where none is installed there is nothing to compare with and the script says so. Artifacts come from
`kernelgen compile`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox import artifact_store
from sandbox.jobs import JudgeJob
from sandbox.judge_client import ClientOptions, JudgeClient
from sandbox.verdict import Tier, Verdict

WARM = 5
OTHERS = {
    "KernelBench": "kernelbench",
    "flashinfer-bench": "flashinfer_bench",
    "SOL-ExecBench": "sol_execbench",
    "BackendBench": "BackendBench",
}


def job_of(folder: Path, device: str, tier: Tier) -> JudgeJob:
    artifact = artifact_store.load(folder)
    extra = {k[2:]: v for k, v in artifact.workload.items() if k.startswith("x_")}
    options = {k: v for k, v in artifact.workload.items() if not k.startswith("x_")}
    names = {"preset", "layers", "rows", "context"}
    chosen = {k: v for k, v in options.items() if k in names} | {"extra": extra}
    return JudgeJob(
        folder.resolve(), artifact.target, chosen, device, tier, deadline_s=300.0,
        compile_isolation={"tier": "strict"},
    )  # fmt: skip


def judged(client: JudgeClient, job: JudgeJob) -> tuple[float, Verdict]:
    begin = time.monotonic()
    verdict = client.judge(job)
    return time.monotonic() - begin, verdict


def row(seconds: float, v: Verdict) -> dict[str, Any]:
    failure = v.failure.message[:200] if v.failure else ""
    parts = {k: round(x, 3) for k, x in v.seconds.items()}
    return {
        "wall_s": round(seconds, 3),
        "status": str(v.status),
        "failure": failure,
        "seconds": parts,
    }


def measure(
    client: JudgeClient, folders: Sequence[Path], asked: argparse.Namespace
) -> dict[str, Any]:
    first = job_of(folders[0], asked.device, Tier.SCREEN)
    cold = judged(client, first)
    warm = [judged(client, first) for _ in range(WARM)]
    out: dict[str, Any] = {
        "target": first.target,
        "cold_screen": row(*cold),
        "screen": row(*sorted(warm, key=lambda x: x[0])[WARM // 2]),
        "screen_all_s": [round(s, 3) for s, _ in warm],
    }
    for tier in (Tier.FULL, Tier.PROMOTE):
        out[str(tier)] = row(*judged(client, replace(first, tier=tier)))
    out["batch"] = batch(client, [job_of(f, asked.device, Tier.SCREEN) for f in folders], asked)
    return out


def batch(
    client: JudgeClient, jobs: Sequence[JudgeJob], asked: argparse.Namespace
) -> dict[str, Any]:
    """`--batch` screens, or as many as `--seconds` allow."""
    begin = time.monotonic()
    statuses: dict[str, int] = {}
    times = []
    while len(times) < asked.batch and time.monotonic() - begin < asked.seconds:
        seconds, verdict = judged(client, jobs[len(times) % len(jobs)])
        times.append(seconds)
        statuses[str(verdict.status)] = statuses.get(str(verdict.status), 0) + 1
    total = time.monotonic() - begin
    return {
        "candidates": len(times), "artifacts": len(jobs), "seconds": round(total, 2),
        "per_minute": round(60 * len(times) / total, 1), "median_s": round(statistics.median(times), 3),
        "worst_s": round(max(times), 3), "statuses": statuses,
    }  # fmt: skip


def others() -> dict[str, str]:
    """Harnesses to compare with: a version, or why there is none."""
    found = {}
    for name, module in OTHERS.items():
        if importlib.util.find_spec(module) is None:
            found[name] = "not installed here"
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "installed, version unknown"
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=90.0, help="for the batch at most")
    parser.add_argument("--state", type=Path, default=Path(".kernelgen-throughput"))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    with JudgeClient(ClientOptions(asked.state)) as client:
        probe = client.probe(asked.device)
        result = {
            "device": probe.get("facts", {}).get("name"),
            **measure(client, asked.folders, asked),
        }
        result["server_warm_s"] = client.ready.get("warm_s")
    result["others"] = others()
    print(json.dumps(result, indent=1) if asked.json else table(result))
    return 0


def table(r: Mapping[str, Any]) -> str:
    lines = [f"{r['device']}, {r['target']}"]
    for tier in ("screen", "full", "promote"):
        lines.append(f"  {tier:8} {r[tier]['wall_s']:7.2f} s wall ({r[tier]['status']})")
    b = r["batch"]
    lines.append(
        f"  batch    {b['candidates']} screens of {b['artifacts']} artifacts: {b['per_minute']} a minute, "
        f"median {b['median_s']} s, worst {b['worst_s']} s, {b['statuses']}"
    )
    lines += [f"  {name}: {said}" for name, said in r["others"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
