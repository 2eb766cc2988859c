"""A generated source in the house style of another project: licence header, 88 columns, ruff's format.

Only comments, docstrings and layout change; the export compiles the result again and compares the
machine work. It does not judge style beyond what ruff reports.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from pathlib import Path

from agent.export import marks
from agent.export.processes import ruff, run
from agent.export.subject import ExportRefused

HEADER = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
WIDTH = 88
_CONTROL = re.compile(r"\s*#\s*(fmt|ruff|isort):.*$")


def device_file(source: str) -> str:
    """The candidate's source with the header, without marks, long comments and docstrings wrapped."""
    return HEADER + _wrap_docstrings(_wrap_comments(marks.without(source))).lstrip("\n")


def _wrap_comments(source: str) -> str:
    lines = source.splitlines()
    found = [
        t
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    ]
    for t in reversed(found):
        row, column = t.start[0] - 1, t.start[1]
        code = lines[row][:column].rstrip()
        if _CONTROL.match(t.string):
            lines[row : row + 1] = [code] if code else []
            continue
        if len(lines[row]) <= WIDTH:
            continue
        indent = re.match(r"\s*", lines[row]).group()  # type: ignore[union-attr]
        words = t.string.lstrip("#").strip()
        above = textwrap.wrap(
            words, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        lines[row : row + 1] = [*above, code] if code else above
    return "\n".join(lines) + "\n"


def _wrap_docstrings(source: str) -> str:
    lines = source.splitlines()
    spans = [
        (n.body[0].lineno - 1, n.body[0].end_lineno or n.body[0].lineno)
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef)
        and ast.get_docstring(n, clean=False) is not None
    ]
    for begin, end in sorted(spans, reverse=True):
        lines[begin:end] = [x for line in lines[begin:end] for x in _wrap_line(line)]
    return "\n".join(lines) + "\n"


def _wrap_line(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    indent = re.match(r"\s*", line).group()  # type: ignore[union-attr]
    # Room for closing quotes, which ruff moves up to the last line.
    return textwrap.wrap(
        line.strip(), WIDTH - 3, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def polish(root: Path, files: list[str], generated: str) -> str:
    """Format and check files with the checkout's own settings; a sentence on the outcome.

    In the `generated` file, what ruff cannot settle without touching code is marked with noqa.
    Raises ExportRefused if findings remain.
    """
    command = ruff()
    if command is None:
        return "ruff is not installed here: format and lint were NOT run"
    run([*command, "format", "-q", *files], root)
    run([*command, "check", "-q", "--fix", "--select", "I,F401,D", *files], root)
    run([*command, "check", "-q", "--add-noqa", generated], root)
    run([*command, "format", "-q", *files], root)
    done = run([*command, "check", "--output-format", "concise", *files], root)
    layout = run([*command, "format", "--check", *files], root)
    if done.code or layout.code:
        said = (done.out + layout.out).strip().splitlines()[:6]
        raise ExportRefused("the exported files do not pass ruff: " + "; ".join(said))
    version = run([*command, "--version"], root).out.strip()
    return f"{version} with the checkout's settings: format and lint clean"
