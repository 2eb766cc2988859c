"""`judge --self-test`: planted kernels through the jail and the judge, and what that says of the judge."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from agent import scores, selftest
from agent.commands import common
from agent.ids import now
from agent.services import Wanted, new_judge, start
from agent.versions import version
from targets.planted import built_in


def self_test(asked: dict[str, Any]) -> int:
    """Exit code 0 if the judge is as good as it should be. Raises Usage, Unavailable."""
    device = asked["device"]
    try:
        todo = selftest.chosen(built_in(), asked["only"], device)
    except ValueError as error:
        raise common.Usage(str(error)) from error
    jobs = asked["jobs"] or os.cpu_count() or 1
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kernelgen-self-test-") as folder:
        place = common.place_of(Path(folder) / "runs.db", None)
        wanted = Wanted(device, parallel=jobs, deadline_s=300.0)
        services, facts = start(wanted, place.workspace)
        more = [new_judge() for _ in range(jobs - 1 if device == "cpu" else 0)]
        try:
            arch = str(facts.get("arch") or wanted.arch)
            bench = selftest.Bench(services.compiler, [services.judge, *more], device, arch, jobs)
            sized = [selftest.resized(p, asked["preset"]) for p in todo]
            rows = selftest.run(bench, sized, _progress(len(todo)))
        finally:
            services.close()
            for judge_ in more:
                judge_.close()
    data = scores.summary(rows)
    data |= {
        "device": facts.get("name", device), "preset": asked["preset"], "jobs": jobs, "date": now(),
        "version": version("kernelgen"), "wall_s": round(time.monotonic() - began, 1),
        "seconds": dict(selftest.spent(rows)), "rows": [r.to_json() for r in rows],
    }  # fmt: skip
    head = f"judge on {data['device']}, {data['preset']}, {len(rows)} kernels in {data['wall_s']:.0f} s"
    common.emit(asked["as_json"], data, f"{head}\n\n{scores.table(data)}")
    return 0 if data["ok"] else 1


def _progress(count: int) -> Callable[[scores.Row], None]:
    """One line a kernel on stderr, as they end."""
    done = iter(range(1, count + 1))

    def heard(row: scores.Row) -> None:
        end = f"{row.status} at {row.tier}, " if row.tier else ""
        spent = sum(row.seconds.values())
        text = f"[{next(done)}/{count}] {row.planted.name}: {row.fate} ({end}{spent:.1f} s) {row.message[:200]}"
        click.echo(text.rstrip(), err=True)

    return heard
