"""Two versions side by side, and unified with git's headers: rows of text, without colour or markup."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

CONTEXT = 4


@dataclass(frozen=True)
class Row:
    """One line of a side-by-side diff. `left` or `right` is None where that side has no line; a
    `skip` row stands for equal lines that are left out, `count` of them.
    """

    kind: Literal["same", "change", "add", "remove", "skip"]
    left_no: int | None = None
    left: str | None = None
    right_no: int | None = None
    right: str | None = None
    count: int = 0


def unified(old: tuple[str, str], new: tuple[str, str]) -> str:
    """Git-style diff of (name, text) pairs, empty for equal texts. Every line ends; a missing
    newline at the end is said as git says it.
    """
    before, after = kept_lines(old[1]), kept_lines(new[1])
    body = list(difflib.unified_diff(before, after, f"a/{old[0]}", f"b/{new[0]}"))
    if not body:
        return ""
    whole = [x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in body]
    return f"diff --git a/{old[0]} b/{new[0]}\n" + "".join(whole)


def kept_lines(text: str) -> list[str]:
    """Lines with their newline, split as git does: a form feed or a Unicode separator ends none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def bare_lines(text: str) -> list[str]:
    return [x.removesuffix("\n") for x in kept_lines(text)]


def counts(diff: str) -> tuple[int, int]:
    """Lines added and removed."""
    lines = diff.split("\n")
    added = sum(x.startswith("+") and not x.startswith("+++ b/") for x in lines)
    return added, sum(x.startswith("-") and not x.startswith("--- a/") for x in lines)


def side_by_side(old: str, new: str, context: int = CONTEXT) -> list[Row]:
    """Aligned rows; runs of equal lines keep `context` lines around changes."""
    a, b = bare_lines(old), bare_lines(new)
    matcher = difflib.SequenceMatcher(None, a, b)
    ops = matcher.get_opcodes()
    if all(op[0] == "equal" for op in ops):
        return []
    rows: list[Row] = []
    for tag, i1, i2, j1, j2 in ops:
        if tag == "equal":
            rows += _equal(a, (i1, j1), i2 - i1, (i1 > 0, i2 < len(a)), context)
            continue
        for k in range(max(i2 - i1, j2 - j1)):
            left, right = i1 + k < i2, j1 + k < j2
            rows.append(
                Row(
                    "change" if left and right else "remove" if left else "add",
                    i1 + k + 1 if left else None, a[i1 + k] if left else None,
                    j1 + k + 1 if right else None, b[j1 + k] if right else None,
                )
            )  # fmt: skip
    return rows


def _equal(
    a: list[str], at: tuple[int, int], n: int, around: tuple[bool, bool], context: int
) -> list[Row]:
    """Equal lines from `at` on; `around`: whether changes come before and after."""
    head = context if around[0] else 0
    tail = context if around[1] else 0
    same = [Row("same", at[0] + k + 1, a[at[0] + k], at[1] + k + 1, a[at[0] + k]) for k in range(n)]
    if n <= head + tail + 1:
        return same
    return [*same[:head], Row("skip", count=n - head - tail), *same[n - tail :]]
