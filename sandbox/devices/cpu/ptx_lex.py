"""Tokens of PTX text with their line numbers. Comments vanish; nothing is interpreted.

Linear in the text: every pattern is anchored and none backtracks over more than one token.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sandbox.devices.cpu.ptx_ast import PtxError

_TOKEN = re.compile(
    r"\s+"
    r"|(?P<comment>//.*)"
    r"|(?P<open>/\*)"
    r"|(?P<word>[A-Za-z_$%.][A-Za-z0-9_$.%]*(?:::[A-Za-z0-9_.]+)*)"
    r"|(?P<number>0[fF][0-9a-fA-F]{8}(?![0-9a-zA-Z_])|0[dD][0-9a-fA-F]{16}(?![0-9a-zA-Z_])"
    r"|0[xX][0-9a-fA-F]+U?|\d+\.\d+|\d+U?)"
    r'|(?P<string>"[^"]*")'
    r"|(?P<mark>[{}()\[\],;:<>|!@+\-=*&])"
)


class Token(NamedTuple):
    kind: str  # word, number, string or mark
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    """Raises PtxError at a character that starts no token or a comment that does not end."""
    out: list[Token] = []
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        at = 0
        if inside:
            end = line.find("*/")
            if end < 0:
                continue
            at, inside = end + 2, False
        while at < len(line):
            match = _TOKEN.match(line, at)
            if match is None:
                raise PtxError(f"unexpected character {line[at]!r}", number)
            at = match.end()
            kind = match.lastgroup
            if kind == "open":
                end = line.find("*/", at)
                if end < 0:
                    inside = True
                    break
                at = end + 2
            elif kind is not None and kind != "comment":
                out.append(Token(kind, match.group(), number))
    if inside:
        raise PtxError("a comment does not end", number)
    return out
