"""The rows of a benchmark as a plot: % of the floor against M and step time against context, two panels a preset.

matplotlib is loaded only when a plot is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

INCH = (11.0, 4.2)
STYLES = ("-", "--", ":", "-.")
Rows = Sequence[Mapping[str, Any]]
Points = Mapping[tuple[str, int], list[tuple[float, float]]]


def plot(rows: Rows, file: Path) -> None:
    """Raises ImportError, OSError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    timed = [r for r in rows if r.get("us")]
    presets = list(dict.fromkeys(str(r["preset"]) for r in timed)) or [""]
    arms = list(dict.fromkeys(str(r["arm"]) for r in timed))
    colors = {arm: f"C{i % 10}" for i, arm in enumerate(arms)}
    size = (INCH[0], INCH[1] * len(presets) + 0.5)
    figure, panels = plt.subplots(len(presets), 2, figsize=size, squeeze=False)
    for preset, (left, right) in zip(presets, panels, strict=True):
        of = [r for r in timed if str(r["preset"]) == preset]
        _share(left, lines(of, "context", ("m", "fraction_of_floor_measured")), colors)
        _times(right, lines(of, "m", ("context", "us")), colors)
        left.set_title(preset, fontsize=9)
        right.set_title(preset, fontsize=9)
    names = [Line2D([], [], color=colors[a], marker="o", label=a) for a in arms]
    if names:
        figure.legend(handles=names, loc="lower center", ncol=len(names), fontsize=8)
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    figure.savefig(file, dpi=130)
    plt.close(figure)


def lines(rows: Rows, fixed: str, of: tuple[str, str]) -> Points:
    """(arm, value of `fixed`) -> points (`of`[0], `of`[1]) in order."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    along, value = of
    for r in rows:
        if r.get(value) is not None:
            key = (str(r["arm"]), int(r[fixed]))
            found.setdefault(key, []).append((float(r[along]), float(r[value])))
    return {key: sorted(points) for key, points in found.items()}


def _share(axes: Any, points: Points, colors: Mapping[str, str]) -> None:
    contexts = sorted({context for _, context in points})
    style = {c: STYLES[i % len(STYLES)] for i, c in enumerate(contexts)}
    for (arm, context), at in points.items():
        x, y = [p[0] for p in at], [100 * p[1] for p in at]
        axes.plot(x, y, color=colors[arm], linestyle=style[context], marker="o", markersize=3)
    for context in contexts:
        axes.plot(
            [], [], color="grey", linestyle=style[context], label=f"context {tokens(context)}"
        )
    _finish(axes, {p[0] for at in points.values() for p in at}, str)
    axes.set(xlabel="rows M", ylabel="% of the floor at the measured rate", ylim=(0, 100))
    if contexts:
        axes.legend(fontsize=7)


def _times(axes: Any, points: Points, colors: Mapping[str, str]) -> None:
    for (arm, m), at in points.items():
        axes.plot(
            [p[0] for p in at], [p[1] for p in at], color=colors[arm], marker="o", markersize=3
        )
        axes.annotate(f" M={m}", at[-1], fontsize=6, color=colors[arm], va="center")
    _finish(axes, {p[0] for at in points.values() for p in at}, tokens)
    axes.set(xlabel="context, tokens", ylabel="us a step", yscale="log")


def _finish(axes: Any, ticks: set[float], said: Callable[[int], str]) -> None:
    """A logarithmic axis that names the values there are."""
    axes.grid(alpha=0.3)
    if not ticks:
        return
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [said(int(x)) for x in sorted(ticks)], minor=False)
    axes.margins(x=0.08)


def tokens(n: int) -> str:
    """8192 is 8k."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return str(n)
