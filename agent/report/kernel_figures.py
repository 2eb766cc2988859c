"""The plots of one candidate's kernels: time by kernel before and after, and the launches in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agent.report.drawing import BLUE, GREY, SERIES, WIDTH, legend_above, names, short
from agent.report.svg import INK, draw
from agent.review.changes import KernelTime, launches
from agent.review.dossier import Dossier

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
