"""The report as one HTML file: no script, no network, light and dark, readable at phone width.

Autoescape is on and undefined names are errors; a content policy in the file forbids everything but
its own style sheet.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agent.report.pages import run_page
from agent.report.views import RunView
from agent.views import clean

FOLDER = Path(__file__).with_name("templates")


def environment(*folders: Path) -> Environment:
    """Templates of the report, and of other folders that use its pieces."""
    made = Environment(
        loader=FileSystemLoader([*folders, FOLDER]), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters["clean"] = lambda text: clean(str(text))
    return made


@cache
def style() -> str:
    return FOLDER.joinpath("style.css").read_text(encoding="utf-8")


def html(view: RunView) -> str:
    """The whole document. Raises Unavailable without a plotting library."""
    css = style()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return (
        environment()
        .get_template("report.html.j2")
        .render(page=run_page(view), style=Markup(css), style_hash=Markup(digest))
    )
