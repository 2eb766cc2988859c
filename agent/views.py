"""Verdicts and candidates as lines of plain text, for stdout. Untrusted text is cleaned of control
characters.
"""

from __future__ import annotations

from typing import Any

from agent import search
from sandbox.verdict import Verdict


def clean(text: str) -> str:
    """Printable text with line breaks kept: nothing that a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))


def verdict_lines(name: str, v: Verdict) -> list[str]:
    """Status, numbers, failure, resources, and what was not verified."""
    head = f"{name}: {v.status}" + (f", {v.outcome}" if v.outcome else "")
    lines = [
        f"{head}  (tier {v.tier}, trust {v.trust}, {v.device.get('name') or v.device.get('kind')})"
    ]
    if v.failure is not None:
        lines.append(f"  {v.failure.rule}: {clean(v.failure.message)}")
        if v.failure.where:
            where = ", ".join(f"{k}={x}" for k, x in v.failure.where.items())
            lines.append(f"  where: {clean(where)[:1000]}")
    for w in v.timing.workloads if v.timing else ():
        kind = v.timing.kind if v.timing else ""
        lines.append(
            f"  {kind}: {w.us:.2f} us a step, {w.us_per_layer:.2f} a layer, {w.launches} launches, "
            f"{w.gb_per_s:.0f} GB/s"
        )
        lines += [f"  {said}" for said in (search.shares(w),) if said]
        for what, ratio in search.ratios(w):
            lines.append(f"  {ratio.value:.4f} x {what} [{ratio.low:.4f}, {ratio.high:.4f}]")
    if v.correctness is not None:
        bad = [t for t in v.correctness.tensors if not t.ok]
        c = v.correctness
        lines.append(
            f"  {len(c.tensors)} tensors compared over {c.seeds} seeds, {c.steps} steps, {c.repeats} repeats"
        )
        lines += [
            f"  {t.name}: rel-L2 {t.rel_l2:.3g} over {t.rel_l2_bound:.3g} {clean(t.where)}"
            for t in bad[:5]
        ]
    for r in v.resources:
        spills = (
            f", {r.spill_stores + r.spill_loads} bytes spilled"
            if r.spill_stores or r.spill_loads
            else ""
        )
        lines.append(f"  {clean(r.kernel)[:60]}: {r.registers} registers{spills}")
    lines += [f"  finding {f.rule}: {clean(f.message)}" for f in v.findings[:8]]
    if v.not_verified:
        lines.append("  not verified: " + clean("; ".join(v.not_verified)))
    if v.seconds:
        lines.append("  seconds: " + ", ".join(f"{k} {s:.2f}" for k, s in v.seconds.items()))
    return lines


def columns(rows: list[dict[str, Any]], names: dict[str, str]) -> str:
    """A plain table: `names` maps keys to headings; None is blank."""
    cells = [list(names.values())]
    cells += [[_cell(row.get(key)) for key in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = clean(str(value)).replace("\n", " ")
    return text if len(text) <= 60 else text[:59] + "…"
