"""The plots of one candidate's kernels: time by kernel before and after, and the launches in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agent import waterfall
from agent.report.drawing import BLUE, GREY, SERIES, WIDTH, legend_above, names, short
from agent.report.svg import INK, draw
from agent.review.changes import KernelTime, launches
from agent.review.dossier import Dossier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BLOCKS = 12


def kernel_bars(times: tuple[KernelTime, ...], name: str) -> str:
    """Time by kernel before and after."""
    shown = sorted(times, key=lambda k: -max(k.us or 0.0, k.us_before or 0.0))[:12]
    if not shown:
        return ""

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        rows = range(len(shown))
        for offset, values, colour, words in (
            (-0.2, [k.us_before or 0.0 for k in shown], GREY, "parent"),
            (0.2, [k.us or 0.0 for k in shown], BLUE, "this candidate"),
        ):  # fmt: skip
            ax.barh([r + offset for r in rows], values, 0.36, color=colour, label=words)
        names(ax, [short(k.kernel) for k in shown])
        ax.set_xlabel("time in a step, us")
        legend_above(figure)

    return draw(f"kernels-{name}", "time by kernel", paint, (WIDTH, 1.3 + 0.45 * len(shown)))


def parts(d: Dossier, name: str) -> str:
    """The waterfall: what a step is made of, the parent's above the candidate's."""
    sides = [("this candidate", waterfall.of(d.me.verdict.profile) if d.me.verdict else None)]
    if d.parent is not None and d.parent.verdict is not None:
        sides.append((f"parent {d.parent.seq}", waterfall.of(d.parent.verdict.profile)))
    found = [(word, waterfall.parts(fall)) for word, fall in sides if fall is not None]
    if not found:
        return ""
    colours = dict(zip(waterfall.WORDS.values(), (GREY, *SERIES), strict=False))

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        for lane, (_, rows) in enumerate(found):
            at = 0.0
            for (_, us, _), colour in zip(rows, colours.values(), strict=True):
                ax.barh([lane], [max(0.0, us)], 0.6, left=at, color=colour, edgecolor=INK, lw=0.3)
                at += max(0.0, us)
        names(ax, [word for word, _ in found], inverted=False)
        for words, colour in colours.items():
            ax.barh([0], [0], color=colour, label=words)
        ax.set_xlabel("a step, us: parts that add up")
        legend_above(figure)

    return draw(
        f"waterfall-{name}", "what a step is made of", paint, (WIDTH, 1.9 + 0.5 * len(found))
    )


def marks(d: Dossier, name: str) -> str:
    """Phases inside the kernel: a few blocks over the step, colours by phase."""
    found = d.me.verdict.profile.get("timeline") if d.me.verdict else None
    if not found:
        return ""
    tracks = [t for t in found["tracks"] if t["role"] == 0][:MOST_BLOCKS]
    kinds = [str(k) for _, k in found["phases"]]
    sums: dict[int, float] = {}
    for t in tracks:
        for (begin, phase, _), (end, _, _) in zip(t["marks"], t["marks"][1:], strict=False):
            sums[phase] = sums.get(phase, 0.0) + end - begin
    top = [p for p in sorted(sums, key=lambda p: -sums[p]) if kinds[p] == "work"][: len(SERIES)]
    colour = dict(zip(top, SERIES, strict=False))

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        for lane, t in enumerate(tracks):
            pairs = list(zip(t["marks"], t["marks"][1:], strict=False))
            spans = [(a[0], b[0] - a[0]) for a, b in pairs]
            faces = ["none" if kinds[a[1]] != "work" else colour.get(a[1], GREY) for a, _ in pairs]
            ax.broken_barh(spans, (lane - 0.4, 0.8), facecolors=faces, lw=0)
        names(ax, [f"block {t['block']}, SM {t['sm']}" for t in tracks])
        for phase in top:
            ax.barh([0], [0], color=colour[phase], label=short(str(found["phases"][phase][0])))
        ax.set_xlabel(f"time in the step, us ({found['kind']}); gaps are waiting")
        legend_above(figure)

    return draw(
        f"marks-{name}", "phases of blocks in time", paint, (WIDTH, 1.6 + 0.28 * len(tracks))
    )


def timeline(d: Dossier, name: str) -> str:
    """The launches of a step one after the other, the parent's above the candidate's."""
    lanes = [("this candidate", launches(d.me.verdict))]
    if d.parent is not None:
        lanes.append((f"parent {d.parent.seq}", launches(d.parent.verdict)))
    lanes = [(word, found) for word, found in lanes if found]
    if not lanes:
        return ""
    colours = _colours(x for _, found in lanes for x in found)
    edge = 0.3 if max(len(found) for _, found in lanes) <= 48 else 0.0  # edges would hide colours

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        for lane, (_, found) in enumerate(lanes):
            at = 0.0
            spans, faces = [], []
            for x in found:
                width = max(0.0, float(x.get("us") or 0.0))
                spans.append((at, width))
                faces.append(colours.get(str(x.get("kernel")), GREY))
                at += width
            ax.broken_barh(spans, (lane - 0.35, 0.7), facecolors=faces, edgecolor=INK, lw=edge)
        names(ax, [word for word, _ in lanes], inverted=False)
        for kernel, colour in colours.items():
            ax.barh([0], [0], color=colour, label=short(kernel))
        if len(_kernels(x for _, found in lanes for x in found)) > len(colours):
            ax.barh([0], [0], color=GREY, label="all others")
        ax.set_xlabel("time since the start of the step, us")
        legend_above(figure)

    return draw(
        f"timeline-{name}", "launches of a step in time", paint,
        (WIDTH, 1.5 + 0.5 * len(lanes) + 0.12 * len(colours)),
    )  # fmt: skip


def _kernels(found: Iterable[Mapping[str, Any]]) -> set[str]:
    return {str(x.get("kernel")) for x in found}


def _colours(found: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The costliest kernels have a colour of their own."""
    total: dict[str, float] = {}
    for x in found:
        name = str(x.get("kernel"))
        total[name] = total.get(name, 0.0) + float(x.get("us") or 0.0)
    top = sorted(total, key=lambda k: -total[k])[: len(SERIES)]
    return dict(zip(top, SERIES, strict=False))
