"""What the plots share: colours that read on light and dark, short names, legends out of the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.views import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.6  # inches; narrow, so that text stays readable on a phone
BLUE, ORANGE, GREEN, GREY = "#2b7fc4", "#d1742a", "#2e9e63", "#8a8f98"
SERIES = (BLUE, ORANGE, GREEN, "#b0508f", "#9a8a2a", "#6a6fd0", "#3a9ea5", "#c45a5a")
LONGEST_NAME = 26


def names(ax: Axes, words: list[str], inverted: bool = True) -> None:
    ax.set_yticks(range(len(words)), words)
    ax.grid(visible=False, axis="y")
    if inverted:
        ax.invert_yaxis()


def short(kernel: str) -> str:
    text = " ".join(clean(kernel).split())
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def legend_above(figure: Figure) -> None:
    figure.legend(loc="outside upper center", ncols=2, fontsize=8.5)
