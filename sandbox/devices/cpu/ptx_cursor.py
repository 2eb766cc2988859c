"""A position in the tokens of a PTX module, and the steps that parsers take from it. Raises PtxError.

It knows no grammar.
"""

from __future__ import annotations

from sandbox.devices.cpu.ptx_ast import PtxError
from sandbox.devices.cpu.ptx_lex import Token


class Cursor:
    """A position in the token list."""

    def __init__(self, items: list[Token]) -> None:
        self.items = items
        self.at = 0

    @property
    def done(self) -> bool:
        return self.at >= len(self.items)

    @property
    def line(self) -> int:
        if not self.items:
            return 1
        return self.items[min(self.at, len(self.items) - 1)].line

    def peek(self, ahead: int = 0) -> str:
        i = self.at + ahead
        return self.items[i].text if i < len(self.items) else ""

    def next(self) -> Token:
        if self.done:
            raise PtxError("the text ends too early", self.line)
        self.at += 1
        return self.items[self.at - 1]

    def accept(self, text: str) -> bool:
        if self.peek() == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        token = self.next()
        if token.text != text:
            raise PtxError(f"expected {text!r}, found {token.text[:40]!r}", token.line)

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "number" or token.text[:2].lower() in ("0f", "0d") or "." in token.text:
            raise PtxError(f"expected an integer, found {token.text[:40]!r}", token.line)
        text = token.text.rstrip("U")
        base = 16 if text[:2].lower() == "0x" else 8 if len(text) > 1 and text[0] == "0" else 10
        try:
            return sign * int(text, base)
        except ValueError as error:
            raise PtxError(f"{token.text[:40]!r} is no integer", token.line) from error

    def rest_of_line(self) -> list[Token]:
        line = self.items[self.at - 1].line
        out = []
        while not self.done and self.items[self.at].line == line:
            out.append(self.next())
        return out

    def skip_to(self, text: str) -> None:
        while not self.accept(text):
            self.next()
