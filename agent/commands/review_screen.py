"""A dossier on a terminal: rich colours, tables and side-by-side diffs, through a pager; plain text in a pipe.

Text of candidates is cleaned of control characters and never read as markup.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from agent.review import text
from agent.review.dossier import Dossier
from agent.review.proof import Section, headline, sections
from agent.review.sides import Row, side_by_side
from agent.views import clean

THEME = "ansi_dark"


def page(shown: list[Dossier], against: tuple[str, ...], side: bool, pager: bool) -> None:
    """Write dossiers to stdout: coloured when it is a terminal (or FORCE_COLOR asks), plain else."""
    console = Console(file=sys.stdout, highlight=False)
    plain = not console.is_terminal
    if plain and not side:
        click.echo("\n".join(text.plain(d, against) for d in shown), nl=False)
        return
    if pager and not side and not _pager_is_less():
        # delta, bat and the like colour git's diffs themselves, and `more` shows escapes as letters.
        click.echo_via_pager("\n".join(text.plain(d, against) for d in shown), color=False)
        return
    body = Group(*(part for d in shown for part in _parts(d, against, side)))
    if plain or not pager:
        console.print(body, soft_wrap=False)
        return
    written = io.StringIO()
    Console(
        file=written, force_terminal=True, width=console.width, highlight=False,
        color_system="auto",
    ).print(body)  # fmt: skip
    # None: click asks less for colours (-R) unless LESS says something else. True would not ask.
    click.echo_via_pager(written.getvalue(), color=None if console.color_system else False)


def _pager_is_less() -> bool:
    words = shlex.split(os.environ.get("PAGER", ""))
    return not words or Path(words[0]).stem == "less"


def _parts(d: Dossier, against: tuple[str, ...], side: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [
        Text(f"candidate {d.me.name}: {clean(headline(d))}", "bold"), Text("")
    ]  # fmt: skip
    for s in sections(d):
        parts += [
            Text(s.title, "bold red" if s.tone == "warn" else "bold cyan"),
            *_section(s),
            Text(""),
        ]
    for word, base in d.bases:
        if word not in against:
            continue
        parts.append(Text(f"Against the {word}, candidate {base.name}", "bold cyan"))
        if tuned := clean(d.tuned(base)):
            parts.append(Text(f"tunables {tuned}", "yellow"))
        diff = clean(d.diff(base))
        if not diff:
            parts.append(Text("the same source"))
        elif side:
            parts.append(_sides(d, base.source, (base.name, d.me.name)))
        else:
            parts.append(
                Syntax(diff, "diff", theme=THEME, background_color="default", word_wrap=True)
            )
        parts.append(Text(""))
    return parts


def _section(s: Section) -> list[RenderableType]:
    out: list[RenderableType] = [
        Text(f"  - {' '.join(clean(x).split())}", "yellow" if x.startswith("look: ") else "")
        for x in s.lines
    ]
    if s.rows:
        table = Table(box=None, pad_edge=True, padding=(0, 2, 0, 0))
        for name in s.head:
            table.add_column(name, overflow="fold")
        for row in s.rows:
            table.add_row(*(Text(" ".join(clean(c).split())) for c in row))
        out.append(table)
    return out


def _sides(d: Dossier, before: str, names: tuple[str, str]) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0))
    table.add_column("", justify="right", style="dim", no_wrap=True)
    table.add_column(names[0], ratio=1, overflow="fold")
    table.add_column("", justify="right", style="dim", no_wrap=True)
    table.add_column(names[1], ratio=1, overflow="fold")
    for row in side_by_side(clean(before), clean(d.me.source)):
        table.add_row(*_side_cells(row))
    return table


def _side_cells(row: Row) -> list[RenderableType]:
    if row.kind == "skip":
        words = Text(f"… {row.count} equal lines", "dim")
        return ["", words, "", words]
    left = _line(row.left, "red" if row.kind in ("change", "remove") else "")
    right = _line(row.right, "green" if row.kind in ("change", "add") else "")
    return [f"{row.left_no or ''}", left, f"{row.right_no or ''}", right]


def _line(line: str | None, style: str) -> RenderableType:
    """Python colours on unchanged lines; changed ones carry the colour of the change."""
    if line is None:
        return Text("")
    if style:
        return Text(line, style)
    found = Syntax("", "python", theme=THEME, background_color="default").highlight(line)
    found.rstrip()
    return found
