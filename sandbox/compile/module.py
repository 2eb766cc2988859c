"""The PTX of a plan as hostile text: bounded, its file names normalised, equal kernels kept once.

What costs more than linear time is bounded before it runs, since the server reads what a candidate may have written.
It does not parse instructions and does not say that the module assembles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sandbox import ptx
from sandbox.artifact import MAX_LAUNCHES, MAX_PTX_BYTES
from sandbox.compile import relocate
from sandbox.strict import Malformed

MAX_HEADER_PIECE = 8192
MAX_DEDUPE_WORK = 1 << 28
_FILE = re.compile(r'^([ \t]{0,8}\.file[ \t]{1,8}\d{1,8}[ \t]{1,8})"([^"\n]{0,4096})"', re.M)
_ENTRY = re.compile(r"\.entry\b")
_SPACES = re.compile(r"\s{65}")


@dataclass(frozen=True)
class Module:
    """PTX with each kernel once. `entries`: of the text as it came, by name; `kept`: first names by name."""

    text: str
    entries: Mapping[str, ptx.Entry]
    kept: Mapping[str, str]
    _final: Mapping[str, ptx.Entry]
    _used: dict[str, tuple[frozenset[int], ...]] = field(default_factory=dict)

    def used(self, kernel: str) -> tuple[frozenset[int], ...]:
        """Which bytes of each parameter a kernel reads."""
        name = self.kept[kernel]
        if name not in self._used:
            self._used[name] = relocate.read_bytes(self._final[name], self.text)
        return self._used[name]


def read(data: bytes, at: str) -> Module:
    """Check and split a module. Raises Malformed, or PtxError for text of another form than compilers write."""
    if len(data) > MAX_PTX_BYTES:
        raise Malformed(at, "is larger than 16 MB")
    try:
        text = data.decode("ascii").rstrip("\0")
    except UnicodeDecodeError as error:
        raise Malformed(at, "is not ASCII") from error
    if sum(1 for _ in _ENTRY.finditer(text)) > MAX_LAUNCHES:
        raise Malformed(at, f"has more than {MAX_LAUNCHES} kernels")
    for piece in _header_pieces(text):
        if len(piece) > MAX_HEADER_PIECE or _SPACES.search(piece):
            raise Malformed(at, "has a kernel header that no compiler writes")
    # The box's folder has a random name: only file names may reach the artifact, or no two compiles would be equal.
    text = _FILE.sub(lambda m: f'{m[1]}"{m[2].rsplit("/", 1)[-1]}"', text)
    entries = {e.name: e for e in ptx.entries(text)}
    if len(entries) * len(text) > MAX_DEDUPE_WORK:
        return Module(text, entries, {name: name for name in entries}, entries)
    shorter, kept = ptx.dedupe(text)
    return Module(shorter, entries, kept, {e.name: e for e in ptx.entries(shorter)})


def _header_pieces(text: str) -> Iterator[str]:
    """What stands between commas in kernel headers: bounded before the splitter's patterns meet it."""
    at = text.find(".entry")
    while at >= 0:
        end = text.find("{", at)
        end = len(text) if end < 0 else end
        yield from text[at:end].split(",")
        at = text.find(".entry", end)
