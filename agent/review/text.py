"""A dossier as plain text and as JSON: what `review` prints in a pipe, in the shape of `git show`.

Diffs carry git's headers, so that `| delta` and other diff viewers colour them and pass the rest on.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from agent.review.dossier import Dossier
from agent.review.proof import Section, headline, sections
from agent.views import clean


def plain(d: Dossier, against: tuple[str, ...] = ("parent", "seed")) -> str:
    """Proof first, then the diffs against the versions asked for."""
    return f"{proof(d)}\n{diffs(d, against)}"


def proof(d: Dossier) -> str:
    lines = [f"candidate {d.me.name}: {clean(headline(d))}", ""]
    for s in sections(d):
        lines += [s.title, *_body(s), ""]
    return "\n".join(lines)


def diffs(d: Dossier, against: tuple[str, ...]) -> str:
    parts = []
    for word, base in d.bases:
        if word in against:
            diff = d.diff(base)
            tuned = f"; tunables {clean(d.tuned(base))}" if d.tuned(base) else ""
            head = f"Against the {word}, candidate {base.name}"
            parts.append(
                f"{head}{tuned}\n\n{clean(diff)}" if diff else f"{head}: the same source{tuned}\n"
            )
    return "\n".join(parts)


def as_json(d: Dossier) -> dict[str, Any]:
    v = d.me.verdict
    return {
        "candidate": d.me.name, "seq": d.me.seq, "headline": headline(d),
        "parent": d.parent.name if d.parent else None, "hashes": dict(d.hashes),
        "risks": [asdict(r) for r in d.risks], "speedups": [asdict(s) for s in d.speedups],
        "kernels": [asdict(k) for k in d.kernel_times],
        "resources": [asdict(r) for r in d.resources],
        "checked": list(v.checked) if v else [],
        "not_verified": list(v.not_verified) if v else [],
        "lessons": list(d.lessons), "decisions": [asdict(x) for x in d.decisions],
        "standing": asdict(d.standing) if d.standing else None,
        "tunables_changed": {word: d.tuned(base) for word, base in d.bases},
        "diffs": {word: d.diff(base) for word, base in d.bases},
        "verdict": v.to_json() if v else None,
    }  # fmt: skip


def _body(s: Section) -> list[str]:
    lines = [f"  - {' '.join(clean(x).split())}" for x in s.lines]
    cells = [tuple(_cell(c) for c in row) for row in (s.head, *s.rows) if row]
    if not s.rows:
        return lines
    widths = [max(len(row[i]) for row in cells) for i in range(len(s.head))]
    return lines + [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _cell(text: str) -> str:
    line = " ".join(clean(text).split())
    return line if len(line) <= 100 else line[:99] + "…"
