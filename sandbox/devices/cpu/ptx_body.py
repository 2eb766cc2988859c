"""Reading a kernel's body: scopes, register declarations, labels and instructions.

Inline assembly opens scopes of its own; their registers and labels are renamed apart, so the result is one flat list.
"""

from __future__ import annotations

from sandbox.devices.cpu.ptx_ast import (
    Group,
    Imm,
    Instr,
    Label,
    Mem,
    Not,
    Operand,
    Pair,
    PtxError,
    Reg,
    Special,
    Sym,
    Variable,
    Vec,
)  # fmt: skip
from sandbox.devices.cpu.ptx_cursor import Cursor
from sandbox.devices.cpu.ptx_variable import variable

MAX_DEPTH = 16
MAX_REGISTERS = 1 << 17
REG_TYPES = {
    "pred", "b8", "b16", "b32", "b64", "b128", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64",
    "f16", "f16x2", "bf16", "f32", "f64",
}  # fmt: skip


class Body:
    """Collects a body. After `read`: regs, items, variables and branch tables."""

    def __init__(self, cursor: Cursor, params: set[str]) -> None:
        self.c = cursor
        self.regs: dict[str, str] = {}
        self.items: list[Instr | Label] = []
        self.variables: list[Variable] = []
        self.tables: dict[str, tuple[str, ...]] = {}
        self._params = params
        self._scopes: list[dict[str, str]] = [{}]
        self._ids = [0]
        self._last_id = 0
        self._labels: dict[tuple[int, str], str] = {}
        self._pending: list[tuple[int, tuple[int, ...]]] = []
        self._table_scopes: dict[str, tuple[int, ...]] = {}
        self._source: tuple[str, int] | None = None

    def read(self) -> Body:
        while self._scopes:
            self._statement()
        for index, chain in self._pending:
            item = self.items[index]
            assert isinstance(item, Instr)
            self.items[index] = Instr(
                item.parts, tuple(self._label_operand(o, chain, item.line) for o in item.operands),
                item.guard, item.negated, item.line, item.source,
            )  # fmt: skip
        for name, chain in self._table_scopes.items():
            self.tables[name] = tuple(self._find(t, chain, self.c.line) for t in self.tables[name])
        return self

    def _label_operand(self, operand: Operand, chain: tuple[int, ...], line: int) -> Operand:
        if isinstance(operand, Sym) and operand.name not in self.tables:
            return Sym(self._find(operand.name, chain, line))
        return operand

    def _find(self, name: str, chain: tuple[int, ...], line: int) -> str:
        for scope in chain:
            if (scope, name) in self._labels:
                return self._labels[scope, name]
        raise PtxError(f"label {name[:60]} is not defined", line)

    def _chain(self) -> tuple[int, ...]:
        return tuple(reversed(self._ids))

    def _statement(self) -> None:
        c = self.c
        token = c.next()
        text = token.text
        if text == "{":
            if len(self._scopes) >= MAX_DEPTH:
                raise PtxError("scopes are nested too deeply", token.line)
            self._last_id += 1
            self._scopes.append({})
            self._ids.append(self._last_id)
        elif text == "}":
            self._scopes.pop()
            self._ids.pop()
        elif text == ";":
            return
        elif text == "@":
            negated = c.accept("!")
            guard = self._register(c.next().text, token.line)
            self._instruction(c.next().text, guard, negated, token.line)
        elif text.startswith("."):
            self._directive(text, token.line)
        elif c.peek() == ":":
            c.next()
            if c.peek() == ".branchtargets":
                self._table(text)
            else:
                self._label(text, token.line)
        elif token.kind == "word":
            self._instruction(text, None, False, token.line)
        else:
            raise PtxError(f"unexpected {text[:40]!r}", token.line)

    def _label(self, name: str, line: int) -> None:
        scope = self._ids[-1]
        full = name if scope == 0 else f"{name}@{scope}"
        if (scope, name) in self._labels:
            raise PtxError(f"label {name[:60]} is defined twice", line)
        self._labels[scope, name] = full
        self.items.append(Label(full))

    def _table(self, name: str) -> None:
        self.c.next()
        names = []
        while not self.c.accept(";"):
            names.append(self.c.next().text)
            self.c.accept(",")
        self.tables[name] = tuple(names)
        self._table_scopes[name] = self._chain()

    def _directive(self, text: str, line: int) -> None:
        c = self.c
        if text == ".reg":
            self._registers(line)
        elif text == ".loc":
            numbers = c.rest_of_line()
            if len(numbers) >= 2 and numbers[0].text.isdigit() and numbers[1].text.isdigit():
                self._source = (numbers[0].text, int(numbers[1].text))
        elif text == ".pragma":
            c.skip_to(";")
        elif text in (".local", ".shared"):
            self.variables.append(variable(c, text[1:]))
        else:
            raise PtxError(f"unknown directive {text[:40]!r} in a kernel", line)

    def _registers(self, line: int) -> None:
        c = self.c
        kind = c.next().text[1:]
        if kind not in REG_TYPES:
            raise PtxError(f"unknown register type {kind[:40]!r}", line)
        while True:
            name = c.next().text
            names = [name]
            if c.accept("<"):
                count = c.integer()
                if not 0 <= count <= MAX_REGISTERS:
                    raise PtxError("too many registers", line)
                names = [f"{name}{i}" for i in range(count)]
                c.expect(">")
            scope = self._ids[-1]
            for n in names:
                full = n if scope == 0 else f"{n}@{scope}"
                self._scopes[-1][n] = full
                self.regs[full] = kind
            if len(self.regs) > MAX_REGISTERS:
                raise PtxError("too many registers", line)
            if c.accept(";"):
                return
            c.expect(",")

    def _register(self, name: str, line: int) -> Reg:
        for scope in reversed(self._scopes):
            if name in scope:
                return Reg(scope[name])
        raise PtxError(f"register {name[:60]} is not declared", line)

    def _instruction(self, opcode: str, guard: Reg | None, negated: bool, line: int) -> None:
        c = self.c
        operands: list[Operand] = []
        while not c.accept(";"):
            operands.append(self._operand(line))
            if not c.accept(","):
                c.expect(";")
                break
        parts = tuple(opcode.split("."))
        if parts[0] in ("bra", "brx"):
            self._pending.append((len(self.items), self._chain()))
        self.items.append(Instr(parts, tuple(operands), guard, negated, line, self._source))

    def _operand(self, line: int) -> Operand:
        c = self.c
        if c.accept("["):
            return self._memory(line)
        if c.accept("{"):
            return Vec(self._list("}", line))
        if c.accept("("):
            return Group(self._list(")", line))
        if c.accept("!"):
            return Not(self._register(c.next().text, line))
        first = self._simple()
        if c.accept("|"):
            return Pair(first, self._simple())
        return first

    def _list(self, end: str, line: int) -> tuple[Operand, ...]:
        out: list[Operand] = []
        while not self.c.accept(end):
            out.append(self._simple())
            if not self.c.accept(",") and self.c.peek() != end:
                raise PtxError(f"expected {end!r}", line)
        return tuple(out)

    def _simple(self) -> Operand:
        c = self.c
        text = c.peek()
        if text[:2].lower() == "0f" and len(text) == 10:
            return Imm(int(c.next().text[2:], 16), "f32")
        if text[:2].lower() == "0d" and len(text) == 18:
            return Imm(int(c.next().text[2:], 16), "f64")
        if text == "-" or text[:1].isdigit():
            return Imm(c.integer())
        name = c.next().text
        if name == "_":
            return Reg("_")
        for scope in reversed(self._scopes):
            if name in scope:
                return Reg(scope[name])
        if name.startswith("%"):
            return Special(name)
        return Sym(name)

    def _memory(self, line: int) -> Mem:
        c = self.c
        base = self._simple()
        offset = 0
        coords: tuple[Operand, ...] = ()
        if c.accept("+"):
            offset = c.integer()
        elif c.peek() == "-":
            offset = c.integer()
        if c.accept(","):
            c.expect("{")
            coords = self._list("}", line)
        c.expect("]")
        if not isinstance(base, Reg | Sym | Imm | Special):
            raise PtxError("odd address", line)
        return Mem(base, offset, coords)
