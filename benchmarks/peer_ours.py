"""Our fused kernels on two GPUs: compiled without one, then compared, timed and judged. Rows as `peer.py` says.

The judgement is in this process, which is not confined; `kernelgen judge` confines.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from peer_common import say
from peer_pair import Pair
from peer_repeat import repeated


def compile_all(options: argparse.Namespace) -> None:
    """The target's seed for each number of rows, machine code included (it is kept in KERNELGEN_CACHE)."""
    from sandbox import artifact_store
    from sandbox.compile_client import CompileClient, CompileSettings
    from sandbox.devices.cuda_toolchain import build
    from sandbox.jobs import CompileJob
    from targets.base import Options, find

    target = find(f"kimi-k3-{options.target}")
    extra = {"mode": "peer2"} if options.target == "decode" and not options.one else {}
    source = target.seed_source()
    if options.source:
        source = _source(options)
    settings = CompileSettings(
        options.output, idle=1, jobs=1, deadline_s=280, tier="none", trust_this_code=True
    )
    with CompileClient(settings) as compiler:
        for rows in options.rows:
            w = target.workload(Options(options.preset, options.layers, rows, extra=extra))
            job = CompileJob(source, w.target, w.key, w.dims, w.buffers, tunables=dict(options.set))
            found = compiler.compile(job)
            if found.artifact is None:
                raise SystemExit(f"does not compile: {found.failure}")
            build(artifact_store.load(found.artifact))
            say(what="compiled", artifact=str(found.artifact), rows=rows, set=dict(options.set))


def _source(options: argparse.Namespace) -> str:
    from targets.kimi_k3 import seeds
    from targets.kimi_k3.seeds import persistent

    if options.source == "persistent":
        return persistent.source(options.target)
    file = Path(options.source)
    return file.read_text() if file.is_file() else seeds.source(f"kimi-k3-{options.source}")


def workload_of(artifact: Any) -> Any:
    """The workload that an artifact was compiled for."""
    from targets.base import Options, find

    key = artifact.workload
    extra = {k[2:]: v for k, v in key.items() if k.startswith("x_")}
    options = Options(key["preset"], key["layers"], key["rows"], key["context"], extra)
    return find(artifact.target).workload(options)


def fused(options: argparse.Namespace) -> None:
    import torch

    from sandbox import artifact_store
    from sandbox.devices.base import Faulted, Refused
    from sandbox.devices.cuda_ranks import CudaRanks
    from targets.kimi_k3.reference import KimiReference

    device = CudaRanks.open(2)
    device.hang_s = 5.0
    with torch.inference_mode():
        for folder in options.artifacts:
            begin = time.perf_counter()
            artifact = artifact_store.load(Path(folder))
            w = workload_of(artifact)
            tunables = dict(artifact.tunables)
            row: dict[str, Any] = {
                "what": "fused", "target": w.target, "preset": w.options.preset, "rows": w.rows, "layers": w.layers,
                "launches": len(artifact.step.of(0).launches), "tunables": tunables,
            }  # fmt: skip
            try:
                pair = Pair(device, artifact, w, KimiReference())
                if tunables.get("paired", True) and not options.no_compare:
                    row |= pair.compare()
                row |= pair.times()
                for steps in options.repeat:
                    row[f"repeat {steps}"] = repeated(pair, steps, 64)
            except (Refused, Faulted) as end:
                say(**row, failed=f"{end.status}: {end.failure.message}")
                if isinstance(end, Faulted) and end.status != "infra":
                    return  # the contexts are of no further use
                continue
            row |= {
                "us": row["step_us"] / w.layers,
                "gpu": device.facts().name,
                "commit": options.commit,
            }
            say(**row, seconds=round(time.perf_counter() - begin, 2))
        for folder in options.judge:
            judged(device, Path(folder), options)


def judged(device: Any, folder: Path, given: argparse.Namespace) -> None:
    """Judge an artifact at tier screen in this process, which is not confined; the verdict goes into a file."""
    from sandbox import artifact_store
    from sandbox.jobs import JudgeJob
    from sandbox.judge import judge

    begin = time.perf_counter()
    artifact = artifact_store.load(folder)
    o = workload_of(artifact).options
    fields = {
        "preset": o.preset, "layers": o.layers, "rows": o.rows, "context": o.context, "extra": dict(o.extra),
    }  # fmt: skip
    named = tuple(given.baselines)
    job = JudgeJob(folder, artifact.target, fields, "cuda", baselines=named)
    verdict = judge.run(job, device)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / f"{artifact.sha256[:12]}.json").write_text(
        json.dumps(verdict.to_json(), indent=1)
    )
    timing = verdict.timing.workloads[0] if verdict.timing else None
    say(
        what="judged", target=artifact.target, workload=dict(artifact.workload), status=str(verdict.status),
        failure=verdict.failure.message[:600] if verdict.failure else None, us=timing.us if timing else None,
        checked=list(verdict.checked), best_baseline=timing.best_baseline if timing else None,
        skipped=dict(timing.detail.get("skipped", {})) if timing else None, ranks=verdict.profile.get("ranks"),
        seconds=round(time.perf_counter() - begin, 2),
    )  # fmt: skip
