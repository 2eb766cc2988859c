"""Views as pages want them: titles, tables of words, drawn plots, diffs as kinds and lines.

One content for the report and for `serve`. Values are plain text; templates escape them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from agent.report import figures, kernel_figures
from agent.report.roofline import Spot, roof, roofline
from agent.report.views import Point, RunView
from agent.review.dossier import Dossier
from agent.review.proof import WORD, Section, headline, sections
from agent.review.sides import Row, counts, side_by_side

HEAD = (
    "candidate", "round", "parent", "result", "us a step", "95 % interval", "of floor", "vs best then",
    "predicted", "decision", "direction",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A diff against the `word` (parent, seed): `lines` are (css class or "", text); `tuned`: changed tunables."""

    word: str
    name: str
    added: int
    removed: int
    lines: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    tuned: str


@dataclass(frozen=True)
class DossierPage:
    name: str
    seq: int
    headline: str
    source: str
    sections: tuple[Section, ...]
    comparisons: tuple[Comparison, ...]
    waterfall: Markup
    marks: Markup
    timeline: Markup
    kernels: Markup


@dataclass(frozen=True)
class Plots:
    by_candidates: Markup
    by_usd: Markup
    by_minutes: Markup
    floors: Markup
    roofline: Markup
    speedups: Markup
    lineage: Markup


@dataclass(frozen=True)
class RunPage:
    title: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    plots: Plots
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lessons: tuple[str, ...]
    dossiers: tuple[DossierPage, ...]


def run_page(view: RunView, whole: bool = True) -> RunPage:
    """`whole`: with a page for every promoted candidate. Raises Unavailable without a plotting
    library.
    """
    return RunPage(
        title=f"{view.run['target']}: run {view.run['id']}", summary=summary(view),
        facts=tuple(facts(view)), plots=plots(view), head=HEAD,
        rows=tuple(candidate_row(p) for p in view.points), lessons=view.lessons,
        dossiers=tuple(dossier_page(d) for d in view.dossiers) if whole else (),
    )  # fmt: skip


def summary(view: RunView) -> str:
    """The outcome in a sentence."""
    if view.best is None:
        return f"{len(view.points)} candidates; nothing but the seed was promoted."
    return f"Best of {len(view.points)} candidates: {view.best.me.name}: {headline(view.best)}."


def facts(view: RunView) -> Iterator[tuple[str, str]]:
    run, spent = view.run, view.spent
    yield "target", run["target"]
    yield "workload", ", ".join(f"{k}={v}" for k, v in view.workload.items())
    yield "state", ", ".join(filter(None, (run["state"], run["stop"])))
    if run["message"]:
        yield "message", run["message"]
    devices = {
        str(d.me.verdict.device.get("name") or d.me.verdict.device.get("kind"))
        for d in view.dossiers
        if d.me.verdict
    }
    yield "device", ", ".join(sorted(devices)) or run["device"]
    yield "times are", " and ".join(view.kinds) or "missing: nothing was timed"
    yield "proposer", " ".join(filter(None, (run["proposer"], run["model"])))
    yield "started", run["started"]
    yield (
        "spent",
        (
            f"{spent.minutes:.1f} minutes at work, {spent.calls} model calls, {spent.tokens:,} tokens, "
            f"${spent.usd:.2f}"
            + (f" and {spent.unpriced} unpriced calls" if spent.unpriced else "")
        ),
    )
    yield "rounds", f"{run['rounds']}"


def candidate_row(p: Point) -> tuple[str, ...]:
    interval = f"{p.low:.2f} to {p.high:.2f}" if p.low is not None and p.high is not None else ""
    return (
        f"{p.seq}" + (" (promoted)" if p.promoted else ""), f"{p.round}",
        "" if p.parent is None else f"{p.parent}", p.result, "" if p.us is None else f"{p.us:.2f}",
        interval, "" if p.fraction is None else f"{p.fraction:.1%}",
        "" if p.speedup is None else f"{p.speedup[0]:.4f}",
        "" if p.predicted is None else f"{p.predicted:.3f}", WORD.get(p.word, ""), p.direction[:200],
    )  # fmt: skip


def plots(view: RunView) -> Plots:
    paired = [(f"{d.me.seq}", s) for d in reversed(view.dossiers) for s in d.speedups]
    drawn = [figures.convergence(view, x) for x in ("seq", "usd", "minutes")]
    drawn += [
        figures.floors(view),
        _roofline(view),
        figures.speedups(paired),
        figures.lineage(view),
    ]
    return Plots(*(Markup(x) for x in drawn))  # our own SVG, escaped by the XML writer


def _roofline(view: RunView) -> str:
    """Seed and everything promoted, the best last; of the best's verdict."""
    v = view.best.me.verdict if view.best else None
    if v is None or v.timing is None or not v.timing.workloads:
        return ""
    device = str(v.device.get("name") or v.device.get("kind") or "")
    spots = [
        Spot("seed" if p.seq == 0 else f"candidate {p.seq}", p.us)
        for p in view.points
        if p.promoted and p.us
    ]
    found = roof(v.target, view.workload, v.timing.workloads[0], device)
    return roofline(found, spots, " and ".join(view.kinds))


def dossier_page(d: Dossier) -> DossierPage:
    return DossierPage(
        name=d.me.name, seq=d.me.seq, headline=headline(d), source=d.me.source,
        sections=sections(d), comparisons=tuple(_comparisons(d)),
        waterfall=Markup(kernel_figures.parts(d, f"{d.me.seq}")),
        marks=Markup(kernel_figures.marks(d, f"{d.me.seq}")),
        timeline=Markup(kernel_figures.timeline(d, f"{d.me.seq}")),
        kernels=Markup(kernel_figures.kernel_bars(d.kernel_times, f"{d.me.seq}")),
    )  # fmt: skip


def _comparisons(d: Dossier) -> Iterator[Comparison]:
    for word, base in d.bases:
        diff = d.diff(base)
        added, removed = counts(diff)
        lines = tuple((_kind(x), x) for x in diff.removesuffix("\n").split("\n")) if diff else ()
        rows = tuple(side_by_side(base.source, d.me.source))
        yield Comparison(word, base.name, added, removed, lines, rows, d.tuned(base))


def _kind(line: str) -> str:
    if line.startswith(("diff --git ", "--- ", "+++ ", "@@", "\\")):
        return "hunk"
    return {"+": "add", "-": "remove"}.get(line[:1], "")
