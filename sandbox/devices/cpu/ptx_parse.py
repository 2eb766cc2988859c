"""Parser of PTX modules as NVVM and inline assembly write them. Raises PtxError for anything it does not know.

It reads declarations, kernels and instructions. Types and semantics are for whoever lowers the tree; the text is
untrusted, so recursion is bounded and every loop consumes tokens.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from sandbox.devices.cpu.ptx_ast import (
    Entry,
    Group,
    Imm,
    Instr,
    Label,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Param,
    PtxError,
    Reg,
    Special,
    Sym,
    Variable,
    Vec,
)  # fmt: skip
from sandbox.devices.cpu.ptx_body import Body
from sandbox.devices.cpu.ptx_lex import Token, tokens

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_LINKAGE = (".visible", ".weak", ".extern", ".common")
_PTR_SPACES = (".global", ".const", ".shared", ".local", ".param")


def type_bytes(name: str) -> int:
    """Bytes of a fundamental type given without its dot. Raises KeyError."""
    return _SIZES[name.lstrip("bsufpred")] if name != "pred" else 1


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


def parse(text: str) -> Module:
    """Parse one module."""
    c = Cursor(tokens(text))
    version = target = ""
    entries: dict[str, Entry] = {}
    variables: list[Variable] = []
    functions: list[str] = []
    files: dict[int, str] = {}
    while not c.done:
        word = c.next()
        if word.text == ".version":
            version = c.next().text
        elif word.text == ".target":
            target = ",".join(t.text for t in c.rest_of_line() if t.text != ",")
        elif word.text == ".address_size":
            if c.integer() != 64:
                raise PtxError("only 64-bit addresses are read", word.line)
        elif word.text == ".file":
            number = c.integer()
            files[number] = c.next().text.strip('"')
            c.rest_of_line()
        elif word.text == ".section":
            c.skip_to("{")
            _skip_block(c)
        elif word.text == ".pragma":
            c.skip_to(";")
        elif word.text in (*_LINKAGE, ".entry", ".func", ".shared", ".global", ".const"):
            c.at -= 1
            _declaration(c, entries, variables, functions)
        elif word.text != ";":
            raise PtxError(f"unknown directive {word.text[:40]!r}", word.line)
    return Module(version, target, {k: _with_files(e, files) for k, e in entries.items()},
                  tuple(variables), tuple(functions), files)  # fmt: skip


def _with_files(entry: Entry, files: dict[int, str]) -> Entry:
    """Line info names files by number until the whole module is read."""

    def named(item: Instr | Label) -> Instr | Label:
        if isinstance(item, Label) or item.source is None:
            return item
        return replace(item, source=(files.get(int(item.source[0]), "?"), item.source[1]))

    return replace(entry, body=tuple(named(i) for i in entry.body))


def _skip_block(c: Cursor) -> None:
    """Skip to the brace that closes the one just read."""
    depth = 1
    while depth:
        text = c.next().text
        depth += (text == "{") - (text == "}")


def _declaration(
    c: Cursor, entries: dict[str, Entry], variables: list[Variable], functions: list[str]
) -> None:
    extern = False
    while c.peek() in _LINKAGE:
        extern |= c.next().text == ".extern"
    word = c.next()
    if word.text == ".entry":
        entry = _entry(c, word.line)
        if entry.name in entries:
            raise PtxError(f"entry {entry.name[:60]} is defined twice", word.line)
        entries[entry.name] = entry
    elif word.text == ".func":
        functions.append(_function(c))
    else:
        variables.append(variable(c, word.text[1:], extern))


def _function(c: Cursor) -> str:
    """Name of a function; its body is skipped, a call of it is refused where it is lowered."""
    if c.accept("("):
        c.skip_to(")")
    name = c.next().text
    while c.peek() not in (";", "{"):
        c.next()
    if c.next().text == "{":
        _skip_block(c)
    return name


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
            try:
                item = type_bytes(word.text[1:])
            except KeyError as error:
                raise PtxError(f"unknown type {word.text[:40]!r}", word.line) from error
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


def _params(c: Cursor) -> tuple[Param, ...]:
    out: list[Param] = []
    end = 0
    if not c.accept("("):
        return ()
    while not c.accept(")"):
        c.accept(",")
        c.expect(".param")
        align = item = 0
        name = ""
        pointer = False
        while not name:
            word = c.next()
            if word.text == ".ptr":
                pointer = True
            elif word.text == ".align":
                value = c.integer()
                align = align if pointer else value
            elif word.text in _PTR_SPACES and pointer:
                continue
            elif word.text.startswith("."):
                try:
                    item = type_bytes(word.text[1:])
                except KeyError as error:
                    raise PtxError(f"unknown type {word.text[:40]!r}", word.line) from error
            else:
                name = word.text
        size = item
        if c.accept("["):
            size = item * c.integer()
            c.expect("]")
        align = max(align, item, 1)
        end = -(-end // align) * align
        out.append(Param(name, size, align, end))
        end += size
    return tuple(out)


def _entry(c: Cursor, line: int) -> Entry:
    name = c.next().text
    params = _params(c)
    directives: dict[str, tuple[int, ...]] = {}
    while not c.accept("{"):
        word = c.next()
        values = []
        while c.items[min(c.at, len(c.items) - 1)].kind == "number":
            values.append(c.integer())
            if not c.accept(","):
                break
        directives[word.text[1:]] = tuple(values)
    body = Body(c, {p.name for p in params}).read()
    return Entry(name, params, body.regs, tuple(body.items), tuple(body.variables), body.tables, directives,
                 line, c.items[c.at - 1].line)  # fmt: skip


__all__ = [
    "Cursor", "Group", "Imm", "Mem", "Module", "Not", "Operand", "Pair", "Reg", "Special", "Sym", "Vec",
    "parse", "struct", "type_bytes", "variable",
]  # fmt: skip
