"""A verdict as report rows, one for each arm that was timed, in the judge's schema with what people decide by.

Arithmetic only. tokens per second are of the whole model, extrapolated from the layers that ran. What was refused or
could not be compiled is a row too (`unmeasured`): a table of rows lists everything that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sandbox.verdict import Ratio, Status, Verdict, WorkloadTiming
from targets.base import Options, Workload

SCHEMA = 1
SEED = "seed"
ARMS = {"candidate": "kernel", "incumbent": SEED}
LATENCIES = (
    "p50_us",
    "p95_us",
    "p99_us",
    "isolated_us",
    "cold_us",
    "steps",
    "launches",
    "notes",
    "ready_s",
)


@dataclass(frozen=True)
class Context:
    """What every row says: the kernel's name, the command, the layers of the whole model (None: the slice is it; 0:
    a piece of a layer, of which no tokens a second follow)."""

    kernel: str
    command: str
    model_layers: int | None


def rows_of(verdict: Verdict, w: Workload, c: Context) -> list[dict[str, Any]]:
    """At least one row; a verdict without times gives one that says why."""
    common = _common(verdict, w, c)
    if verdict.status is not Status.PASSED or verdict.timing is None:
        failure = verdict.failure.message if verdict.failure else "nothing was timed"
        return [{**common, **_of_verdict(verdict), "arm": c.kernel, "failure": failure}]
    t = verdict.timing.workloads[0]
    own = _row(t, common, t.us, c) | {
        "arm": c.kernel,
        "launches": t.launches,
        "launches_per_layer": t.launches / max(1, t.layers),
    }
    detail: Mapping[str, Any] = t.detail
    arms: Mapping[str, Any] = detail.get("arms", {})
    own |= _figures(arms.get("candidate", {}), t, c)
    own |= {
        "speedup_incumbent": _ratio(t.speedup_incumbent), "speedup_graph": _ratio(t.speedup_graph),
        "speedup_best": _ratio(t.speedup_best), "regime": t.regime,
        "kind": verdict.timing.kind, "skipped": dict(detail.get("skipped", {})), **_of_verdict(verdict),
    }  # fmt: skip
    others = []
    for arm, us in detail.get("us", {}).items():
        if arm in ("candidate", "twin"):
            continue
        name = ARMS.get(arm, arm)
        row = _row(t, common, us, c) | {
            "arm": name,
            "regime": t.regime,
            "kind": verdict.timing.kind,
        }
        others.append({**row, **_figures(arms.get(arm, {}), t, c)})
    found = [own, *others]
    best = _best([r for r in found if r["arm"] != c.kernel or c.kernel == SEED], t)
    if best != t.best_baseline:
        own["speedup_best"] = own["speedup_incumbent"] if c.kernel != SEED else None
    return [{**r, "best_baseline": best} for r in found]


def unmeasured(target: str, o: Options, c: Context, why: tuple[Status, str]) -> dict[str, Any]:
    """The row of a workload that no verdict exists of: refused, or not compiled."""
    status, message = why
    return {
        "schema": SCHEMA, "target": target, "preset": o.preset, "layers": o.layers, "m": o.rows,
        "q": int(o.extra.get("q", 1)), "context": o.context or 0, "options": dict(o.extra), "arm": c.kernel,
        "status": str(status), "failure": message, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": c.command,
    }  # fmt: skip


def _of_verdict(v: Verdict) -> dict[str, Any]:
    """What the judge says of the kernel as a whole; rows of the other arms are without."""
    return {
        "outcome": None if v.outcome is None else str(v.outcome), "isolation": dict(v.isolation),
        "checked": list(v.checked), "not_verified": list(v.not_verified),
    }  # fmt: skip


def _best(opponents: Sequence[Mapping[str, Any]], t: WorkloadTiming) -> str:
    """The fastest baseline, the seed chain among them; none where the judge would name none."""
    if not t.best_baseline:
        return ""
    return str(min(opponents, key=lambda r: float(r["us"]))["arm"])


def _common(v: Verdict, w: Workload, c: Context) -> dict[str, Any]:
    o = w.options
    return {
        "schema": SCHEMA, "target": w.target, "preset": o.preset, "layers": w.layers, "m": w.rows, "q": w.q,
        "context": w.context, "ranks": w.ranks, "options": dict(o.extra), "status": str(v.status), "tier": str(v.tier),
        "artifact": v.artifact, "device": v.device.get("name", ""), "trust": str(v.trust), "date": v.date,
        "commit": v.commit, "command": c.command, "seconds": v.seconds.get("held"), "phases": dict(v.seconds),
        "findings": [f"{f.rule}: {f.message}" for f in v.findings],
    }  # fmt: skip


def _row(t: WorkloadTiming, common: Mapping[str, Any], us: float, c: Context) -> dict[str, Any]:
    """Times of one arm; the fractions follow from the candidate's by the ratio of the times."""
    per_layer = us / max(1, t.layers)
    layers = t.layers if c.model_layers is None else c.model_layers
    steps = 1e6 / (per_layer * layers) if per_layer > 0 and layers else None
    requests = t.m / max(1, t.q)
    scale = t.us / us if us > 0 else 0.0

    def scaled(x: float | None) -> float | None:
        return None if x is None else x * scale

    return {
        **common, "us": us, "us_per_layer": per_layer, "floor_bytes": t.floor_bytes, "gb_per_s": t.gb_per_s * scale,
        "fraction_of_floor_measured": scaled(t.fraction_of_floor_measured),
        "fraction_of_floor_spec": scaled(t.fraction_of_floor_spec),
        "tok_s_user": steps, "tok_s": None if steps is None else requests * steps, "model_layers": layers,
    }  # fmt: skip


def _figures(arm: Mapping[str, Any], t: WorkloadTiming, c: Context) -> dict[str, Any]:
    out = {k: arm[k] for k in LATENCIES if k in arm}
    if out.get("launches"):
        out["launches_per_layer"] = out["launches"] / max(1, t.layers)
    if "joules" in arm:
        layers = t.layers if c.model_layers is None else c.model_layers
        out["joules_per_step"] = arm["joules"]
        if layers:
            share = layers / max(1, t.layers)
            out["joules_per_token"] = arm["joules"] * share / max(1.0, t.m / max(1, t.q))
    return out


def _ratio(r: Ratio | None) -> list[float] | None:
    return None if r is None else [r.value, r.low, r.high]
