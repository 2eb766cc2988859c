"""Runs a benchmark: compiles ahead, judges one workload after the other, and writes each row as soon as it is known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent import offline
from agent.bench import grid
from agent.bench.rows import Context, rows_of, unmeasured
from agent.offline import File, Setting
from agent.runner import Services
from sandbox.jobs import CompileOutcome, JudgeJob
from sandbox.verdict import Status, Tier
from targets.base import Workload


@dataclass(frozen=True)
class Plan:
    """`kernel`: a source, or artifacts by workload. `seed` is timed beside a kernel that is another."""

    target: str
    device: str
    arch: str
    kernel: File | dict[str, Path]
    seed: File
    baselines: tuple[str, ...]
    steps: int
    deadline_s: float
    context: Context

    @property
    def of_seed(self) -> bool:
        """Compiled here, or a folder of that name with its artifacts: then it is not timed a second time."""
        return self.context.kernel == grid.SEED


def measured(
    services: Services, plan: Plan, found: Sequence[Workload], parallel: int
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each workload in turn, while the next ones are compiled."""
    with ThreadPoolExecutor(max(1, parallel)) as pool:
        waiting = [_compiled(pool, services, plan, w) for w in found]
        try:
            for w, (kernel, seed) in zip(found, waiting, strict=True):
                yield _row(services, plan, w, (kernel, seed))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


Compiled = Future[CompileOutcome]


def _compiled(
    pool: ThreadPoolExecutor, services: Services, plan: Plan, w: Workload
) -> tuple[Compiled | Path | None, Compiled | None]:
    setting = Setting(plan.target, w, plan.device, plan.arch)
    if isinstance(plan.kernel, File):
        kernel: Compiled | Path | None = pool.submit(
            offline.compile_file, services, setting, plan.kernel
        )
    else:
        kernel = plan.kernel.get(grid.key(w.key))
    if plan.of_seed:
        return kernel, None
    return kernel, pool.submit(offline.compile_file, services, setting, plan.seed)


def _row(
    services: Services,
    plan: Plan,
    w: Workload,
    made: tuple[Compiled | Path | None, Compiled | None],
) -> list[dict[str, Any]]:
    kernel, seed = made
    isolation: dict[str, Any] = {}
    if isinstance(kernel, Future):
        outcome = kernel.result()
        isolation = dict(outcome.isolation)
        if outcome.artifact is None:
            why = outcome.failure.message if outcome.failure else "no artifact"
            return [_unmade(plan, w, outcome.status or Status.INFRA, why)]
        kernel = outcome.artifact
    if kernel is None:
        return [_unmade(plan, w, Status.UNSUPPORTED, "no artifact is for this workload")]
    job = JudgeJob(
        artifact=kernel.resolve(), target=plan.target, options=offline.options_json(w.options), device=plan.device,
        tier=Tier.SCREEN, incumbent=seed.result().artifact if seed else None, baselines=plan.baselines,
        deadline_s=plan.deadline_s, compile_isolation=isolation, steps=plan.steps,
    )  # fmt: skip
    return rows_of(services.judge.judge(job), w, plan.context)


def _unmade(plan: Plan, w: Workload, status: Status, why: str) -> dict[str, Any]:
    options = replace(w.options, layers=w.layers, context=w.context)
    return unmeasured(w.target, options, plan.context, (status, why))


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """JSON lines, flushed: what was measured survives whatever ends the run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.writelines(json.dumps(r, sort_keys=True, allow_nan=False) + "\n" for r in rows)
