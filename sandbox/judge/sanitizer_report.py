"""What compute-sanitizer printed, read as claims about kernels: which records name the candidate's, which ours.

Text in, records out. The tool runs beside the candidate's kernels and prints what they cannot influence but for their
names, which the plan's schema has checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sandbox.verdict import short_name

MARK = "========="
_SUMMARY = re.compile(r"^(?:ERROR|RACECHECK) SUMMARY", re.I)
_NOISE = ("COMPUTE-SANITIZER", "LEAK SUMMARY", "Host Frame", "Saved host backtrace")
_REFUSED = re.compile(
    r"(?i)not supported|unable to|failed to|incompatible|no attachable|target application returned an error"
)
MOST_TEXT = 300


@dataclass(frozen=True)
class Record:
    """One complaint: its text on one line, with kernels' own names so that all places fit, and the kernel it names."""

    text: str
    kernel: str


@dataclass(frozen=True)
class Report:
    """`records`: complaints that name a kernel we asked about. `finished`: the tool wrote its summary. `trouble`: the
    first line in which the tool says that it could not work."""

    records: tuple[Record, ...]
    finished: bool
    trouble: str = ""

    def about(self, kernels: Iterable[str]) -> list[Record]:
        wanted = set(kernels)
        return [r for r in self.records if r.kernel in wanted]


def read(text: str, kernels: Iterable[str]) -> Report:
    """`kernels`: names to look for. A record starts at a marked line that is not indented further."""
    names = sorted(set(kernels), key=len, reverse=True)
    pattern = re.compile(r"(?<![\w$.])(" + "|".join(map(re.escape, names)) + r")(?![\w$.])")
    records: list[Record] = []
    block: list[str] = []
    finished, trouble = False, ""

    def close() -> None:
        found = pattern.search(" ".join(block))
        if found is not None and block and not block[0].startswith(_NOISE):
            said = [pattern.sub(lambda m: short_name(m[1]), line) for line in block]
            records.append(Record(_short(said), found[1]))
        block.clear()

    for line in text.splitlines():
        if not line.startswith(MARK):
            continue
        body = line[len(MARK) :]
        words = body.strip()
        if not words or not body.startswith("     "):
            close()
        if _SUMMARY.match(words):
            finished = True
            continue
        if words.startswith(("Error:", "Internal", "Warning:")) and _REFUSED.search(words):
            trouble = trouble or words[:MOST_TEXT]
        if words:
            block.append(words)
    close()
    return Report(tuple(records), finished, trouble)


def _short(block: list[str]) -> str:
    kept = [x for x in block if not x.startswith(("Host Frame", "Saved host", "Device Frame"))]
    return "; ".join(kept[:4])[:MOST_TEXT]
