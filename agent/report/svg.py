"""From a matplotlib figure to SVG that can stand in a page: no inline styles, no scripts, ids of its own.

Black becomes `currentColor`, so that one drawing serves light and dark; text stays text.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from agent.models.base import Unavailable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
XLINK = "{http://www.w3.org/1999/xlink}href"
INK = "#000000"
KEPT = frozenset((
    "fill", "fill-opacity", "fill-rule", "stroke", "stroke-width", "stroke-dasharray",
    "stroke-dashoffset", "stroke-linecap", "stroke-linejoin", "stroke-opacity", "opacity",
    "font-size", "font-weight", "font-style", "text-anchor",
))  # fmt: skip
_LOCK = threading.Lock()  # matplotlib's settings are global
_SIZE = re.compile(r"([\d.]+)px")


def draw(
    name: str, title: str, paint: Callable[[Figure], None], inches: tuple[float, float]
) -> str:
    """SVG markup of what `paint` draws. `name`: unique in a page. Raises Unavailable without
    matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unavailable(
            "plots need matplotlib: pip install 'kernelgen[report]', or take --format md"
        ) from error
    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False,
        "axes.spines.top": False, "axes.spines.right": False, "font.size": 9.5,
        "axes.grid": True, "grid.alpha": 0.25, "grid.color": INK, "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }  # fmt: skip
    with _LOCK, matplotlib.rc_context(settings):
        figure = Figure(figsize=inches)
        FigureCanvasSVG(figure)
        paint(figure)
        out = io.BytesIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return inline(out.getvalue(), name, title)


def inline(svg: bytes, name: str, title: str) -> str:
    """The `<svg>` element alone, named for readers of the page and free of what a strict policy
    forbids.
    """
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{SVG}}}")
        _attributes(element, name)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {
        "role": "img", "aria-label": title, "class": "plot", "stroke-linejoin": "round",
        "stroke-linecap": "butt",
    }  # fmt: skip
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _attributes(element: ElementTree.Element, name: str) -> None:
    """Styles become attributes; ids and what refers to them get the figure's name."""
    found = element.attrib
    for rule in found.pop("style", "").split(";"):
        key, _, value = (x.strip() for x in rule.partition(":"))
        if key == "font":
            size = _SIZE.search(value)
            key, value = "font-size", f"{size[1]}px" if size else "10px"
        if key in KEPT:
            found[key] = "currentColor" if value == INK else value
    if "id" in found:
        found["id"] = f"{name}-{found['id']}"
    target = found.pop(XLINK, "")
    if target.startswith("#"):
        found["href"] = f"#{name}-{target[1:]}"
    if "clip-path" in found:
        found["clip-path"] = found["clip-path"].replace("url(#", f"url(#{name}-")
