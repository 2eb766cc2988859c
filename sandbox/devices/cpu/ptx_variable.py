"""Reading declarations of variables: type, alignment, size, initial bytes. Raises PtxError.

Where a variable will lie is for `translate` to say.
"""

from __future__ import annotations

from sandbox.devices.cpu.ptx_ast import PtxError, Variable
from sandbox.devices.cpu.ptx_cursor import Cursor
from sandbox.devices.cpu.ptx_lex import Token

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def type_bytes(word: Token) -> int:
    """Bytes of a fundamental type such as `.b32`. Raises PtxError."""
    if word.text == ".pred":
        return 1
    try:
        return _SIZES[word.text[1:].lstrip("bsufpred")]
    except KeyError as error:
        raise PtxError(f"unknown type {word.text[:40]!r}", word.line) from error


def variable(c: Cursor, space: str, extern: bool = False) -> Variable:
    """`.align 16 .b8 name[64] = {..};` after the state space."""
    line = c.line
    align, item, name = 1, 0, ""
    while not name:
        word = c.next()
        if word.text == ".align":
            align = c.integer()
        elif word.text.startswith(".attribute"):
            c.skip_to(")")
        elif word.text.startswith("."):
            item = type_bytes(word)
        else:
            name = word.text
    count = 1
    while c.accept("["):
        count *= 0 if c.peek() == "]" else c.integer()
        c.expect("]")
    data = _initializer(c, item) if c.accept("=") else None
    c.expect(";")
    if count * item > 1 << 28:
        raise PtxError(f"variable {name[:60]} is too large", line)
    size = max(count * item, len(data or b""))
    if data is not None:
        data = data.ljust(size, b"\0")
    return Variable(name, space, max(align, item), size, extern, data)


def _initializer(c: Cursor, item: int) -> bytes:
    if not c.accept("{"):
        return _constant(c, item)
    out = bytearray()
    while not c.accept("}"):
        out += _constant(c, item)
        c.accept(",")
    return bytes(out)


def _constant(c: Cursor, item: int) -> bytes:
    token = c.items[c.at] if not c.done else c.next()
    if token.kind == "number" and token.text[:2].lower() in ("0f", "0d"):
        c.next()
        return int(token.text[2:], 16).to_bytes(item, "little")
    return (c.integer() & ((1 << 8 * item) - 1)).to_bytes(item, "little")
