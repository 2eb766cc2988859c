"""The rows of a benchmark as a plain table and as a plot. matplotlib is loaded only when a plot is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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
    "steps": "steps", "isolated_us": "isolated us", "cold_us": "cold L2 us", "joules_per_token": "J/token", "note": "",
}  # fmt: skip
INCH = (11.0, 4.5)


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


def plot(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """% of floor against M, and step time against context, a line for each arm. Raises ImportError, OSError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [r for r in rows if r.get("us")]
    figure, (left, right) = plt.subplots(1, 2, figsize=INCH)
    for label, points in _lines(timed, "context", "m", "fraction_of_floor_measured").items():
        left.plot([p[0] for p in points], [100 * p[1] for p in points], marker="o", label=label)
    for label, points in _lines(timed, "m", "context", "us").items():
        right.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=label)
    left.set(xlabel="rows M", ylabel="% of the floor at the measured rate", xscale="log")
    right.set(xlabel="context, tokens", ylabel="us a step", xscale="log", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _lines(
    rows: Sequence[Mapping[str, Any]], fixed: str, along: str, value: str
) -> dict[str, list[tuple[float, float]]]:
    """Points of each (preset, arm, value of `fixed`), in the order of `along`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        if r.get(value) is not None:
            label = f"{r['preset']} {r['arm']} {fixed} {r[fixed]}"
            found.setdefault(label, []).append((float(r[along]), float(r[value])))
    return {label: sorted(points) for label, points in found.items()}
