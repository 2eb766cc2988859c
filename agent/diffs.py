"""Unified diffs, made and applied strictly: every context and removed line must match where the
hunk says.

One liberty: line numbers may be off if the hunk's old lines occur exactly once in the file, since
models miscount.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class BadDiff(ValueError):
    """The diff does not apply; the message names the hunk and the first line that does not
    match.
    """


@dataclass(frozen=True)
class Hunk:
    """`start` is the 1-based line that the header claims; `old` and `new` are lines without
    newline.
    """

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


def make(old: str, new: str, old_name: str = "a/kernel.py", new_name: str = "b/kernel.py") -> str:
    """Git-style unified diff, empty for equal texts."""
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), old_name, new_name, lineterm=""
    )
    text = "\n".join(lines)
    return f"{text}\n" if text else ""


def apply(source: str, diff: str) -> str:
    """`source` with the diff applied. Raises BadDiff."""
    lines = source.splitlines()
    out: list[str] = []
    at = 0
    hunks = parse(diff)
    if not hunks:
        raise BadDiff("the diff has no hunk (a line such as '@@ -10,3 +10,4 @@')")
    for number, hunk in enumerate(hunks, 1):
        start = _place(lines, hunk, at, number)
        out += lines[at:start]
        out += hunk.new
        at = start + len(hunk.old)
    out += lines[at:]
    return "\n".join(out) + "\n"


def parse(diff: str) -> tuple[Hunk, ...]:
    """The hunks of a diff of one file. Raises BadDiff for a second file or a line of no known
    kind.
    """
    hunks: list[Hunk] = []
    old: list[str] = []
    new: list[str] = []
    start = 0
    files = 0

    def close() -> None:
        if old or new:
            hunks.append(Hunk(start, tuple(old), tuple(new)))
        old.clear()
        new.clear()

    inside = False
    for line in diff.rstrip().splitlines():  # blank lines after the last hunk are no context
        if header := _HUNK.match(line):
            close()
            start, inside = int(header[1]), True
        elif line.startswith("--- ") and not (inside and _counts_open(diff, line)):
            close()
            files += 1
            inside = False
            if files > 1:
                raise BadDiff("the diff changes a second file; a candidate is one file")
        elif not inside or line.startswith("\\"):
            continue  # headers before the first hunk; "\ No newline at end of file"
        elif line[:1] == " " or line == "":
            old.append(line[1:])
            new.append(line[1:])
        elif line[0] == "-":
            old.append(line[1:])
        elif line[0] == "+":
            new.append(line[1:])
        else:
            raise BadDiff(f"a line starts with neither ' ', '-' nor '+': {line[:80]!r}")
    close()
    return tuple(hunks)


def _counts_open(diff: str, line: str) -> bool:
    """Inside a hunk `--- x` may be a removed line `-- x`; a file header is followed by `+++ `."""
    following = diff.split(line, 1)[1].lstrip("\n")
    return not following.startswith("+++ ")


def _place(lines: list[str], hunk: Hunk, at: int, number: int) -> int:
    claimed = hunk.start - 1 if hunk.old else hunk.start
    if claimed >= at and _fits(lines, hunk, claimed):
        return claimed
    found = [i for i in range(at, len(lines) - len(hunk.old) + 1) if _fits(lines, hunk, i)]
    if hunk.old and len(found) == 1:
        return found[0]
    if not hunk.old:
        raise BadDiff(f"hunk {number} adds lines at {hunk.start}, beyond the file")
    if len(found) > 1:
        raise BadDiff(
            f"hunk {number} fits at {len(found)} places and at none of them by its line number"
        )
    wrong = next(
        (i for i, x in enumerate(hunk.old) if claimed + i >= len(lines) or lines[claimed + i] != x),
        0,
    )
    have = lines[claimed + wrong] if 0 <= claimed + wrong < len(lines) else "the end of the file"
    raise BadDiff(
        f"hunk {number} expects line {claimed + wrong + 1} to be {hunk.old[wrong][:100]!r}, it is {have[:100]!r}"
    )


def _fits(lines: list[str], hunk: Hunk, at: int) -> bool:
    return 0 <= at <= len(lines) and tuple(lines[at : at + len(hunk.old)]) == hunk.old
