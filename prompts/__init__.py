"""Prompt templates, one file each, and the one function that renders them.

`primer.md` and `playbook.md` are plain text; `*.j2` are Jinja2 templates that refuse missing names. No model is
called here.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import jinja2

# Tokens at 3.2 characters a token, checked by a test: the stable part must fit small contexts and be cheap to cache.
BUDGET_TOKENS = {"primer.md": 3000, "playbook.md": 1100}


@cache
def text(name: str) -> str:
    """A plain text such as `primer.md`."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def render(name: str, **values: object) -> str:
    """A template such as `plan.md.j2` with these values. Raises jinja2.UndefinedError for a missing one."""
    return _environment().from_string(text(name)).render(**values)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
