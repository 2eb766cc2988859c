"""The report as Markdown for a pull request: numbers, risks, what was and was not verified, the diff.

Text of candidates and models is defused: no markup, no mention, no link comes out of it. Kept below
the size that hosts accept for a comment.
"""

from __future__ import annotations

import re

from agent.report.pages import HEAD, candidate_row, facts, summary
from agent.report.views import RunView
from agent.review.dossier import Dossier
from agent.review.proof import Section, headline, sections
from agent.views import clean

MOST_CHARS = 60_000
KEPT = (
    "risks",
    "speedups",
    "waterfall",
    "kernels",
    "resources",
    "checked",
    "not_verified",
    "about",
    "decisions",
)
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$])")


def markdown(view: RunView) -> str:
    lines = [
        f"## {safe(view.run['target'])}: run {view.run['id']}", "", safe(summary(view)), "",
        *_table(("what", "value"), tuple(facts(view))), "",
        "### Candidates", "", *_table(HEAD, tuple(candidate_row(p) for p in view.points)), "",
    ]  # fmt: skip
    if view.lessons:
        lines += ["### Lessons", "", *[f"- {safe(x)}" for x in view.lessons], ""]
    for d in view.dossiers[:1]:
        lines += _candidate(d)
    head = "\n".join(lines)
    room = MOST_CHARS - len(head)
    return head + "\n" + "\n".join(_diffs(view.dossiers[0], room) if view.dossiers else ())


def safe(text: str) -> str:
    """One line that Markdown shows as it is."""
    line = " ".join(clean(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(r"\\\1", line)
    # A word joiner keeps hosts from making mentions and links of it.
    line = line.replace("@", "@\u2060").replace("://", ":\u2060//")
    return re.sub(r"\bwww\.", "www\u2060.", line, flags=re.I)


def fenced(text: str, kind: str = "diff") -> str:
    """A code block that its content cannot close."""
    longest = max((len(x) for x in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{clean(text).rstrip()}\n{fence}"


def _candidate(d: Dossier) -> list[str]:
    lines = [f"### Candidate {d.me.name}", "", safe(headline(d)), ""]
    for s in sections(d):
        if s.key in KEPT:
            lines += [f"#### {s.title}", "", *_section(s), ""]
    return lines


def _section(s: Section) -> list[str]:
    lines = [f"- {safe(x)}" for x in s.lines]
    return lines + ([""] if lines and s.rows else []) + (_table(s.head, s.rows) if s.rows else [])


def _table(head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(safe(c) or " " for c in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]


def _diffs(d: Dossier, room: int) -> list[str]:
    """The diff to the parent, whole or with what is missing said."""
    out: list[str] = []
    for word, base in d.bases[:1]:
        diff = d.diff(base)
        if len(diff) + 400 > room:
            kept = diff[: max(0, room - 400)].rpartition("\n")[0]
            left = diff.count("\n") - kept.count("\n")
            out += [f"The diff is long: its last {left} lines are left out here.", ""]
            diff = kept
        title = f"Diff against the {word}, candidate {base.name}"
        if d.tuned(base):
            out += [f"Tunables against the {word}: {safe(d.tuned(base))}", ""]
        out += [f"<details><summary>{title}</summary>", "", fenced(diff), "", "</details>", ""]
    return out
