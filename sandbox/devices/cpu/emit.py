"""Text of an LLVM function under construction, and the one error of lowering.

Only bookkeeping: names, labels and lines. What to emit is decided in the `lower_*` modules.
"""

from __future__ import annotations

from sandbox.devices.cpu.ptx_ast import Instr


class Unsupported(Exception):
    """This device does not run the instruction; the message says which part of it."""

    def __init__(self, instr: Instr, why: str = "") -> None:
        super().__init__(f"{instr.opcode}{': ' + why if why else ''}")
        self.instr, self.why = instr, why


class Text:
    """Lines of a function body."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def let(self, code: str) -> str:
        """Emit `%n = code`; the name."""
        self._count += 1
        name = f"%x{self._count}"
        self.lines.append(f"  {name} = {code}")
        return name

    def do(self, code: str) -> None:
        self.lines.append("  " + code)

    def fresh(self, stem: str) -> str:
        """A new label, not yet placed."""
        self._count += 1
        return f"{stem}.{self._count}"

    def place(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def go(self, label: str) -> None:
        self.do(f"br label %{label}")

    def split(self, condition: str, yes: str, no: str, *, likely: bool = False) -> None:
        hint = ", !prof !0" if likely else ""
        self.do(f"br i1 {condition}, label %{yes}, label %{no}{hint}")


class Mods:
    """The modifiers of an opcode. A handler takes what it knows; `end` refuses the rest."""

    def __init__(self, instr: Instr, skip: int = 1) -> None:
        self.instr = instr
        self.rest = list(instr.parts[skip:])

    def take(self, name: str) -> bool:
        if name in self.rest:
            self.rest.remove(name)
            return True
        return False

    def one(self, *names: str) -> str:
        """The first of the names that is present, removed; empty if none is."""
        for name in names:
            if self.take(name):
                return name
        return ""

    def need(self, *names: str) -> str:
        found = self.one(*names)
        if not found:
            raise Unsupported(self.instr, f"none of .{', .'.join(names[:8])}")
        return found

    def drop(self, *names: str) -> None:
        """Accept hints that change no result."""
        for name in names:
            while self.take(name):
                continue

    def prefix(self, *starts: str) -> None:
        """Accept hints by the beginning of their names."""
        self.rest = [r for r in self.rest if not r.startswith(starts)]

    def kind(self) -> str:
        """The last modifier: the type."""
        if not self.rest:
            raise Unsupported(self.instr, "no type")
        return self.rest.pop()

    def end(self) -> None:
        if self.rest:
            raise Unsupported(self.instr, f"modifier .{self.rest[0]}")
