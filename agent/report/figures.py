"""The plots of a run, each with units on its axes and intervals where the judge gave them.

Times are those of the judge; best-so-far follows its promotions, so nothing is ranked here. Every
number is also in a table beside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agent.report.drawing import BLUE, GREEN, GREY, ORANGE, WIDTH, legend_above, names
from agent.report.svg import INK, draw
from agent.report.views import Point, RunView
from agent.review.changes import Speedup
from agent.views import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

X_LABELS = {
    "seq": "candidate, number",
    "usd": "paid to models, $",
    "minutes": "minutes since the start, pauses included",
}
HEADROOM = 1.06


def convergence(view: RunView, x: str) -> str:
    """Time of each passed candidate, and the best so far, against candidates, dollars or minutes.
    Empty when there is nothing to draw.
    """
    points = [p for p in view.points if p.us is not None and getattr(p, x) is not None]
    if not points or (x == "usd" and not any(p.usd for p in points)):
        return ""

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        _tries(ax, points, x)
        best = [p for p in points if p.promoted]
        if best:
            last = max(getattr(p, x) for p in points)
            xs = [getattr(p, x) for p in best] + [last]
            ax.step(xs, [_us(p) for p in best] + [_us(best[-1])], where="post", color=BLUE, lw=2,
                    label="best so far")  # fmt: skip
            _bars(ax, best, x)
            floor = best[-1].fraction
            if floor:
                ax.axhline(_us(best[-1]) * floor, color=GREEN, ls="--", lw=1.2, label="byte floor")
        ax.set_xlabel(X_LABELS[x])
        ax.set_ylabel(f"time of a step, us ({' and '.join(view.kinds) or 'unknown'})")
        ax.set_ylim(0, HEADROOM * ax.get_ylim()[1])  # the highest point is no half one at the edge
        if x == "seq":
            ax.locator_params(axis="x", integer=True)
        legend_above(figure)

    return draw(f"convergence-{x}", f"time of a step against {X_LABELS[x]}", paint, (WIDTH, 3.2))


def _tries(ax: Axes, points: list[Point], x: str) -> None:
    others = [p for p in points if not p.promoted]
    if others:
        xs = [getattr(p, x) for p in others]
        ax.scatter(xs, [_us(p) for p in others], s=18, color=GREY, label="passed, not promoted")


def _bars(ax: Axes, best: list[Point], x: str) -> None:
    """Intervals of the paired speed-up over the incumbent, as times."""
    spread = [
        (max(0.0, _us(p) - p.low) if p.low else 0.0, max(0.0, p.high - _us(p)) if p.high else 0.0)
        for p in best
    ]
    xs = [getattr(p, x) for p in best]
    ax.errorbar(
        xs, [_us(p) for p in best], yerr=[[s[0] for s in spread], [s[1] for s in spread]], fmt="o",
        ms=5, capsize=3, color=BLUE, ecolor=INK, label="promoted, 95 % interval",
    )  # fmt: skip


def floors(view: RunView) -> str:
    """Share of the byte floor of the seed and everything promoted."""
    points = [p for p in view.points if p.promoted and p.fraction is not None]
    if not points:
        return ""

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        rows = range(len(points))
        for offset, key, colour, words in (
            (-0.2, "fraction_measured", BLUE, "of the measured streaming rate"),
            (0.2, "fraction_spec", ORANGE, "of the specification's bandwidth"),
        ):  # fmt: skip
            values = [100 * (getattr(p, key) or 0.0) for p in points]
            if any(values):
                spread = [_relative(p, v) for p, v in zip(points, values, strict=True)]
                ax.barh([r + offset for r in rows], values, 0.36, color=colour, label=words,
                        xerr=[[s[0] for s in spread], [s[1] for s in spread]], ecolor=INK, capsize=2)  # fmt: skip
        ax.axvline(100, color=GREEN, ls="--", lw=1.2)
        names(ax, ["seed" if p.seq == 0 else f"candidate {p.seq}" for p in points])
        ax.set_xlabel("share of the byte floor reached, % (100 = bound by memory alone)")
        legend_above(figure)

    return draw("floors", "share of the byte floor", paint, (WIDTH, 1.4 + 0.5 * len(points)))


def _relative(p: Point, value: float) -> tuple[float, float]:
    """The time's interval as one of the share: shorter times are larger shares."""
    if not (p.us and p.low and p.high):
        return (0.0, 0.0)
    return (max(0.0, value - value * p.us / p.high), max(0.0, value * p.us / p.low - value))


def speedups(rows: Iterable[tuple[str, Speedup]]) -> str:
    """Paired speed-ups with their 95 % intervals. `rows`: a label and a comparison."""
    found = list(rows)
    if not found:
        return ""

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        for i, (_, s) in enumerate(found):
            spread = [
                [max(0.0, s.ratio.value - s.ratio.low)],
                [max(0.0, s.ratio.high - s.ratio.value)],
            ]
            ax.errorbar([s.ratio.value], [i], xerr=spread, fmt="o", ms=5, capsize=3, color=BLUE)
        ax.axvline(1, color=INK, lw=1, ls="--")
        names(ax, [f"{label}: {clean(s.against)}"[:44] for label, s in found])
        ax.set_xlabel("ratio of times, 95 % interval (over 1: faster)")

    return draw("speedups", "paired speed-ups", paint, (WIDTH, 1.1 + 0.32 * len(found)))


def lineage(view: RunView) -> str:
    """Who came from whom: rounds to the right, promoted candidates filled."""
    points = view.points
    if len(points) < 2:
        return ""
    places = _places(points)
    rows = max(y for _, y in places.values()) + 1

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        for p in points:
            if p.parent in places:
                (x0, y0), (x1, y1) = places[p.parent], places[p.seq]
                ax.plot(
                    [x0, x1],
                    [y0, y1],
                    color=BLUE if p.promoted else GREY,
                    lw=1.6 if p.promoted else 0.8,
                    zorder=1,
                )
        for words, colour, group in (
            ("promoted", BLUE, [p for p in points if p.promoted]),
            ("passed", GREY, [p for p in points if not p.promoted and p.us is not None]),
            ("failed or not timed", ORANGE, [p for p in points if not p.promoted and p.us is None]),
        ):  # fmt: skip
            if group:
                xs, ys = zip(*(places[p.seq] for p in group), strict=True)
                ax.scatter(xs, ys, s=60, color=colour, label=words, zorder=2)
        for p in points:
            ax.annotate(
                f"{p.seq}",
                places[p.seq],
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        ax.set_xlabel("round")
        ax.set_yticks([])
        ax.set_ylim(-0.7, rows - 0.2)
        ax.locator_params(axis="x", integer=True)
        legend_above(figure)

    return draw("lineage", "lineage of candidates", paint, (WIDTH, 1.4 + 0.34 * rows))


def _places(points: tuple[Point, ...]) -> dict[int | None, tuple[float, float]]:
    """A row for each candidate of a round; the promoted one takes the lowest, so that its line is
    straight.
    """
    places: dict[int | None, tuple[float, float]] = {}
    taken: dict[int, int] = {}
    for p in sorted(points, key=lambda p: (p.round, not p.promoted, p.seq)):
        places[p.seq] = (p.round, taken.get(p.round, 0))
        taken[p.round] = taken.get(p.round, 0) + 1
    return places


def _us(p: Point) -> float:
    return p.us if p.us is not None else 0.0
