"""What a prompt says of candidates: their standing, where the time went, the history as a table.

Each text has a length limit of its own, so that no verdict can crowd the rest out of a prompt. What
is said is data from verdicts, never advice.
"""

from __future__ import annotations

from agent import waterfall
from agent.types import Tried
from sandbox.verdict import Verdict, short_name

LONGEST_MESSAGE = 8000
LONGEST_PROFILE = 16_000


def word(x: Tried) -> str:
    """A candidate's standing in one line."""
    v = x.verdict
    if x.twin is not None:
        return f"the same machine work as candidate {x.twin}: not judged again"
    if v.failure is not None:
        return f"{v.status}: {v.failure.rule}: {v.failure.message[:300]}"
    parts = [str(v.status) + (f"/{v.outcome}" if v.outcome else "")]
    if x.us is not None:
        kind = f" ({v.timing.kind})" if v.timing else ""
        parts.append(f"{x.us:.2f} us a step{kind}")
    if x.fraction is not None:
        parts.append(f"{x.fraction:.1%} of the floor")
    if x.speedup is not None:
        parts.append(f"{x.speedup:.3f}x the incumbent of then")
    return ", ".join(parts)


def profile(x: Tried) -> str:
    """Where the time went, resources and findings of a candidate, as far as its verdict holds them."""
    lines = [
        f"- {k['kernel']}: {k['calls']} launches, {k['us']:.1f} us, {k['share']:.0%} of the step"
        for k in x.verdict.profile.get("kernels", ())[:20]
    ]
    lines += waterfall.lines(x.verdict.profile, layers=False)
    for w in x.verdict.timing.workloads if x.verdict.timing else ():
        lines.append(
            f"- {w.regime}: {w.us:.2f} us a step, {w.gb_per_s:.0f} GB/s, {w.launches} launches"
        )
    for r in x.verdict.resources[:40]:
        spilled = r.spill_stores + r.spill_loads
        lines.append(
            f"- {short_name(r.kernel)}: {r.registers} registers, {r.smem_static} B static shared"
            + (f", spills {spilled} B" if spilled else "")
        )
    lines += [findings(x.verdict)] if x.verdict.findings else []
    text = "What is known of it:\n" + "\n".join(lines) if lines else ""
    return text[:LONGEST_PROFILE]


def findings(v: Verdict) -> str:
    return "\n".join(f"- {f.rule}: {f.message[:300]}" for f in v.findings[:12])


def table(rows: tuple[Tried, ...]) -> str:
    """The history as a compact table, oldest first."""
    head = "| # | parent | direction | predicted | result |\n|---|---|---|---|---|"
    body = [
        f"| {x.seq} | {'' if x.parent is None else x.parent} | {_cell(x.direction)} | "
        f"{x.predicted_gain or ''} | {_cell(word(x))}{' (promoted)' if x.promoted else ''} |"
        for x in rows
    ]
    return "\n".join([head, *body])


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:160]


def cut(text: object) -> str:
    """A compiler may say more than anybody reads."""
    words = str(text or "")
    half = LONGEST_MESSAGE // 2
    return words if len(words) <= LONGEST_MESSAGE else f"{words[:half]}\n[...]\n{words[-half:]}"
