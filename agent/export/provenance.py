"""Where an exported kernel comes from: run, lineage, models, hashes, device, dates, and what was judged.

Facts of the record alone, as JSON and as Markdown. It names no prompt text and no key.
"""

from __future__ import annotations

import json
from typing import Any

from agent.export.rebuild import Rebuilt
from agent.export.subject import Subject
from agent.store import Queries
from agent.versions import versions
from sandbox.verdict import Ratio, WorkloadTiming


def provenance(queries: Queries, s: Subject, rebuilt: Rebuilt) -> dict[str, Any]:
    """All of it, in one document."""
    v = s.verdict
    return {
        "tool": versions(), "run": s.run["id"], "candidate": s.name, "target": s.artifact.target,
        "proposer": s.row["proposer"], "model": s.run["model"] or "", "started": s.run["started"],
        "models_called": _models(queries, s), "lineage": lineage(queries, s),
        "workload": dict(s.artifact.workload), "tunables": s.tunables,
        "hashes": {
            "artifact": s.artifact.sha256, "ptx": s.artifact.ptx_sha256,
            "source": s.artifact.source_sha256, "verdict": s.verdict_sha256,
        },
        "toolchain": dict(s.artifact.toolchain), "arch": s.artifact.arch, "device": dict(v.device),
        "judged": {
            "date": v.date, "commit": v.commit, "tier": str(v.tier), "trust": str(v.trust),
            "outcome": str(v.outcome), "checked": list(v.checked),
            "not_verified": not_verified(s),
        },
        "timing": timing(s), "review": s.reviewed, "reviewed": s.decision is not None,
        "rebuild": rebuilt.to_json(),
    }  # fmt: skip


def lineage(queries: Queries, s: Subject) -> list[dict[str, Any]]:
    """The candidate and its parents down to the seed."""
    rows = {r["seq"]: r for r in queries.candidates(s.run["id"])}
    out: list[dict[str, Any]] = []
    seq = s.row["seq"]
    while seq is not None and seq in rows and len(out) <= len(rows):
        row = rows[seq]
        out.append(
            {
                "candidate": seq, "proposer": row["proposer"], "direction": row["direction"] or "",
                "source": row["source"], "us": row["us"],
            }
        )  # fmt: skip
        seq = row["parent_seq"]
    return out


def _models(queries: Queries, s: Subject) -> list[str]:
    return sorted({c["model"] for c in queries.calls(s.run["id"]) if c["model"]})


def not_verified(s: Subject) -> list[str]:
    found = [*s.verdict.not_verified]
    if s.verdict.correctness:
        found += s.verdict.correctness.not_verified
    if s.verdict.timing and s.verdict.timing.kind == "modelled":
        found.append("times: they are modelled, nothing was measured")
    return list(dict.fromkeys(found))


def timing(s: Subject) -> list[dict[str, Any]]:
    if s.verdict.timing is None:
        return []
    return [
        {
            "kind": s.verdict.timing.kind, "preset": w.preset, "layers": w.layers, "rows": w.m,
            "context": w.context, "launches": w.launches, "us": w.us,
            "fraction_of_floor": w.fraction_of_floor_measured or w.fraction_of_floor_spec,
            "fraction_of_floor_spec": w.fraction_of_floor_spec,
            "speedup_incumbent": ratio(w.speedup_incumbent),
            "speedup_graph": ratio(w.speedup_graph), "speedup_best": ratio(w.speedup_best),
            "best_baseline": w.best_baseline,
        }
        for w in s.verdict.timing.workloads
    ]  # fmt: skip


def ratio(r: Ratio | None) -> list[float] | None:
    return [r.value, r.low, r.high] if r else None


def table(s: Subject) -> str:
    """Before and after, one line a workload. Empty without timing."""
    rows = s.verdict.timing.workloads if s.verdict.timing else ()
    if not rows or s.verdict.timing is None:
        return "No times were taken.\n"
    kind = s.verdict.timing.kind
    out = [
        f"| preset | rows | instances | launches | before, us | after, us ({kind}) | speed-up [95 %] |",
        "|---|---|---|---|---|---|---|",
    ]
    for w in rows:
        r, _ = against(w)
        before = f"{w.us * r.value:.2f}" if r else "not timed"
        said = f"{r.value:.3f} [{r.low:.3f}, {r.high:.3f}]" if r else "not timed"
        out.append(
            f"| {w.preset} | {w.m} | {w.layers} | {w.launches} | {before} | {w.us:.2f} | {said} |"
        )
    return "\n".join(out) + "\n\n" + _meaning(s) + "\n"


def against(w: WorkloadTiming) -> tuple[Ratio | None, str]:
    """What a claim is made against, and its name: the fastest baseline that was timed, else what there is."""
    if w.speedup_best:
        return w.speedup_best, f"`{w.best_baseline}`, the fastest baseline that was timed"
    if w.speedup_incumbent:
        return w.speedup_incumbent, "the run's incumbent, itself a generated kernel"
    if w.speedup_graph:
        return w.speedup_graph, "the torch graph, a slow opponent: no stronger one was timed"
    return None, "nothing"


def _meaning(s: Subject) -> str:
    base = "nothing" if s.timing is None else against(s.timing)[1]
    base += "" if base == "nothing" else "; not vLLM"
    where = s.verdict.device.get("name", "unknown device")
    return (
        f"Device: {where}. Before = {base}. Times are of the whole chain of instances, from the "
        "judge's interleaved blocks; the speed-up is paired."
    )


def markdown(p: dict[str, Any]) -> str:
    """PROVENANCE.md."""
    h = p["hashes"]
    lines = [
        "# Provenance", "",
        f"- Made by kernelgen {p['tool'].get('kernelgen', '')}, run `{p['run']}`, candidate "
        f"`{p['candidate']}`, target `{p['target']}`.",
        f"- Proposed by: {p['proposer']} {p['model']}".rstrip()
        + f"; models called in the run: {', '.join(p['models_called']) or 'none'}.",
        f"- Review: {p['review']}.",
        f"- Judged {p['judged']['date']} on {p['device'].get('name', 'unknown')}, tier "
        f"{p['judged']['tier']}, trust {p['judged']['trust']}.",
        f"- Source `{h['source']}`", f"- Artifact `{h['artifact']}`", f"- PTX `{h['ptx']}`",
        f"- Verdict `{h['verdict']}`",
        f"- Toolchain: {', '.join(f'{k} {v}' for k, v in sorted(p['toolchain'].items()))}",
        f"- Tunables: `{json.dumps(p['tunables'], sort_keys=True)}`", "", "## Lineage", "",
        *(
            f"- {x['candidate']}: {x['proposer']}, {' '.join(x['direction'].split()) or 'the seed'} "
            f"(`{x['source'][:12]}`)"
            for x in p["lineage"]
        ),
        "", "## Checked", "", *(f"- {x}" for x in p["judged"]["checked"] or ["(not listed)"]),
        "", "## Not verified", "",
        *(f"- {x}" for x in p["judged"]["not_verified"] or ["(nothing listed)"]),
        "", "## Third-party origins", "",
        "The record names none. Whoever submits this checks the source for adapted code and adds "
        "licence headers where there is any.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
