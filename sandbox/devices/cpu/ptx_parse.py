"""Parser of PTX modules as NVVM and inline assembly write them. Raises PtxError for anything it does not know.

It reads declarations, kernels and instructions. Types and semantics are for whoever lowers the tree; the text is
untrusted, so recursion is bounded and every loop consumes tokens.
"""

from __future__ import annotations

from dataclasses import replace

from sandbox.devices.cpu.ptx_ast import (
    Entry,
    Instr,
    Label,
    Module,
    Param,
    PtxError,
    Variable,
)  # fmt: skip
from sandbox.devices.cpu.ptx_body import Body
from sandbox.devices.cpu.ptx_cursor import Cursor
from sandbox.devices.cpu.ptx_lex import tokens
from sandbox.devices.cpu.ptx_variable import type_bytes, variable

_LINKAGE = (".visible", ".weak", ".extern", ".common")
_PTR_SPACES = (".global", ".const", ".shared", ".local", ".param")


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
                item = type_bytes(word)
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
                 line)  # fmt: skip
