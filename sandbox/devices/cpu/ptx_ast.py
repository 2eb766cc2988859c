"""Syntax tree of a PTX module, as far as executing, linting or counting it needs.

Names are resolved (inline-assembly scopes renamed apart); types, address spaces and legality are not checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class PtxError(ValueError):
    """The text is no PTX that we can read. `line` counts from one."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"line {line}: {message}")
        self.message, self.line = message, line


@dataclass(frozen=True)
class Reg:
    """A declared register, or `_`."""

    name: str


@dataclass(frozen=True)
class Special:
    """A read-only special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Imm:
    """A constant. `kind` is int, f32 or f64; `value` holds the bits of a float."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Sym:
    """A variable, parameter, function or label."""

    name: str


@dataclass(frozen=True)
class Mem:
    """`[base + offset]`; tensor copies have coordinates too."""

    base: Reg | Sym | Imm | Special
    offset: int = 0
    coords: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vec:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`d|p`: two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """`!p`."""

    reg: Reg


@dataclass(frozen=True)
class Group:
    """Parenthesised operands of a call."""

    items: tuple[Operand, ...]


Operand = Reg | Special | Imm | Sym | Mem | Vec | Pair | Not | Group


@dataclass(frozen=True)
class Instr:
    """One instruction. `parts` is the opcode split at dots; `source` is (file, line) where line info is present."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    negated: bool
    line: int
    source: tuple[str, int] | None = None

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Variable:
    """A variable in .shared, .local, .global or .const; `size` 0 and `extern` mean dynamic shared memory."""

    name: str
    space: str
    align: int
    size: int
    extern: bool = False
    data: bytes | None = None


@dataclass(frozen=True)
class Param:
    name: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Entry:
    """A kernel. `regs` maps register names to their declared types without the dot (b32, pred, ...)."""

    name: str
    params: tuple[Param, ...]
    regs: Mapping[str, str]
    body: tuple[Instr | Label, ...]
    variables: tuple[Variable, ...]
    tables: Mapping[str, tuple[str, ...]]
    directives: Mapping[str, tuple[int, ...]]
    line: int

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass(frozen=True)
class Module:
    version: str
    target: str
    entries: Mapping[str, Entry]
    variables: tuple[Variable, ...]
    functions: tuple[str, ...]
    files: Mapping[int, str] = field(default_factory=dict)
