"""`targets` and `runs`: what can be optimised, and what was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agent.commands import common
from agent.locks import state_of
from agent.store import Queries, Store
from agent.views import columns
from agent.workspace import Place
from targets.base import Options, UnknownOption, Workload, find, names


@click.command()
@click.argument("target", required=False)
@click.option("--seed", is_flag=True, help="Print the seed kernel's source.")
@click.option("--preset", default=None, help="One preset only.")
@common.json_option
def targets(target: str | None, seed: bool, preset: str | None, as_json: bool) -> int:
    """List targets, or show one: presets, sizes, buffers, byte floors, or its seed's source.

    \b
    Examples:
      kernelgen targets
      kernelgen targets kimi-k3-decode
      kernelgen targets kimi-k3-decode --seed > mine.py
    """
    if target is None:
        if seed:
            raise common.Usage("--seed needs a target")
        rows = [
            {"name": t.name, "presets": ", ".join(t.presets), "summary": t.summary}
            for t in map(find, names())
        ]
        text = columns(rows, {"name": "target", "presets": "presets", "summary": "summary"})
        common.emit(as_json, {"targets": rows}, text)
        return 0
    found = common.find_target(target)
    if seed:
        source = found.seed_source()
        common.emit(as_json, {"target": found.name, "seed": source}, source)
        return 0
    if preset is not None and preset not in found.presets:
        raise UnknownOption(f"no preset {preset!r}; there are {', '.join(found.presets)}")
    works = [found.workload(Options(p)) for p in found.presets if preset in (None, p)]
    data = {
        "target": found.name, "summary": found.summary, "reference": found.reference,
        "workloads": [_workload(w) for w in works],
    }  # fmt: skip
    common.emit(as_json, data, _text(found.name, found.summary, works))
    return 0


def _workload(w: Workload) -> dict[str, Any]:
    return {
        **w.key, "dims": dict(w.dims), "floor_bytes": w.floor.bytes, "floor_read": w.floor.read_bytes,
        "floor_write": w.floor.write_bytes, "flops": w.floor.flops,
        "buffers": [{"name": b.name, "dtype": b.dtype, "shape": list(b.shape)} for b in w.buffers],
    }  # fmt: skip


def _text(name: str, summary: str, works: list[Workload]) -> str:
    rows = [
        {**w.key, "buffers": len(w.buffers), "bytes": f"{sum(b.nbytes for b in w.buffers):,}",
         "floor": f"{w.floor.bytes:,}"}
        for w in works
    ]  # fmt: skip
    heads = {k: k for k in ("preset", "layers", "rows", "context", "ranks", "buffers", "bytes")}
    return f"{name}\n{summary}\n\n" + columns(rows, {**heads, "floor": "byte floor a step"})


@click.command()
@click.option("--target", default=None, help="Of one target only.")
@click.option("--limit", type=click.IntRange(1), default=50, help="At most so many, newest first.")
@common.db_option
@common.json_option
def runs(target: str | None, limit: int, db: Path, as_json: bool) -> int:
    """List recorded runs, newest first.

    \b
    Examples:
      kernelgen runs
      kernelgen runs --target kimi-k3-decode --json
    """
    place = common.place_of(db, None)
    rows = _runs(place, target, limit) if db.exists() else []
    text = columns(
        rows,
        {"id": "run", "started": "started", "kind": "kind", "target": "target", "device": "device",
         "proposer": "proposer", "state": "state", "stop": "stop", "candidates": "candidates",
         "promotions": "promoted", "usd": "$"},
    )  # fmt: skip
    common.emit(as_json, {"runs": rows}, text if rows else "no runs recorded")
    return 0


def _runs(place: Place, target: str | None, limit: int) -> list[dict[str, Any]]:
    name = common.full_name(target) if target else None
    rows = Queries(Store(place.db), place.workspace).runs(name, limit)
    for row in rows:
        row["state"] = state_of(place.workspace, row)
    return rows
