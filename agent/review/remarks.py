"""What reviewers said, as sentences for the proposer's next round.

Pure: rows of `Queries.decisions` in, text out. Approvals say nothing to a proposer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WORDS = {"send_back": "sent back", "reject": "rejected"}


def remarks(decisions: Iterable[Mapping[str, Any]]) -> list[str]:
    """In order of appearance, each once."""
    said = [
        f"A reviewer {WORDS[d['kind']]} candidate {d['seq']}: {' '.join(d['reason'].split())}"
        for d in decisions
        if d["kind"] in WORDS and d.get("who")
    ]
    return list(dict.fromkeys(said))
