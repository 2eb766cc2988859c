"""The rows of a benchmark as a plain table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.views import columns

ABOUT = (
    "tok/s and J/token: of the whole model, extrapolated from the layers that ran, without embedding, lm_head, "
    "sampling and the wires between ranks. % of floor: of the measured and of the specified rate of the memory. "
    "Time to first token belongs to prefill; ask the serving engine for it."
)
HEADINGS = {
    "preset": "preset", "m": "M", "context": "context", "arm": "arm", "us_per_layer": "us/layer",
    "launches_per_layer": "launches/layer", "gb_per_s": "GB/s", "measured": "% floor", "spec": "% spec",
    "tok_s_user": "tok/s/user", "tok_s": "tok/s", "p50_us": "P50 us", "p95_us": "P95", "p99_us": "P99",
    "steps": "steps", "us": "chained us", "isolated_us": "isolated us", "cold_us": "cold L2 us",
    "joules_per_token": "J/token", "note": "",
}  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    return columns([_shown(r) for r in rows], HEADINGS)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    def percent(name: str) -> float | None:
        value = row.get(name)
        return None if value is None else 100 * float(value)

    notes = [row.get("failure", "")]
    if row.get("best_baseline") == row["arm"]:
        notes.append("best baseline")
    notes += [f"{k} skipped: {v}" for k, v in (row.get("skipped") or {}).items()]
    without = [n.split(":")[0] for n in row.get("notes") or () if ": skipped" in n]
    notes.append(f"without {', '.join(without)}" if without else "")
    note = "; ".join(filter(None, notes))
    measured, spec = percent("fraction_of_floor_measured"), percent("fraction_of_floor_spec")
    return {**row, "measured": measured, "spec": spec, "note": note}
