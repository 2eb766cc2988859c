"""Machine code as text, by kernel, with nvdisasm of the pinned package. For lint and profiles; runs nothing."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sandbox.assemble import tool

DEADLINE_S = 60
_SECTION = re.compile(r"^\.text\.([\w$]+):", re.M)
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][\w.]*)(.*?);", re.M)
_LABEL = re.compile(r"^(\.L_x_\d+):", re.M)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"\bR(\d+)\b")
_ORDERS = ("BRA", "BAR", "RET", "EXIT", "FENCE", "SYNCS.PHASECHK")


@dataclass(frozen=True)
class Instruction:
    """`offset` in bytes from the kernel's start; `operands` as printed."""

    offset: int
    opcode: str
    operands: str


@dataclass(frozen=True)
class Code:
    """One kernel's instructions and the loops in them as (first offset, offset of the backward branch)."""

    kernel: str
    instructions: tuple[Instruction, ...]
    loops: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        return self.instructions[-1].offset + 16 if self.instructions else 0

    def histogram(self) -> Counter[str]:
        """Count by opcode without modifiers, such as LDG or HMMA."""
        return Counter(i.opcode.split(".", 1)[0] for i in self.instructions)


def disassemble(cubin: bytes) -> tuple[Code, ...]:
    """Every kernel of a cubin. Raises ToolchainMissing, subprocess.SubprocessError."""
    return parse(text_of(cubin))


def text_of(cubin: bytes) -> str:
    """What nvdisasm prints. Raises ToolchainMissing, subprocess.SubprocessError."""
    with tempfile.TemporaryDirectory(prefix="kernelgen-sass-") as work:
        file = Path(work, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run(
            [tool("nvdisasm"), "-c", str(file)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
    return done.stdout


def parse(text: str) -> tuple[Code, ...]:
    pieces = _SECTION.split(text)
    return tuple(_code(name, body) for name, body in zip(pieces[1::2], pieces[2::2], strict=True))


def _code(kernel: str, body: str) -> Code:
    instructions = []
    labels: dict[str, int] = {}
    pending: list[str] = []
    for line in body.splitlines():
        if label := _LABEL.match(line):
            pending.append(label[1])
        elif found := _LINE.match(line):
            offset = int(found[1], 16)
            labels.update((name, offset) for name in pending)
            pending.clear()
            instructions.append(Instruction(offset, found[2], found[3].strip()))
    loops = tuple(
        (labels[t[1]], i.offset)
        for i in instructions
        if i.opcode.startswith("BRA")
        and (t := _TARGET.search(i.operands))
        and labels.get(t[1], 1 << 60) <= i.offset
    )
    # The padding after EXIT branches to itself; it is no loop of the kernel.
    return Code(kernel, tuple(instructions), tuple(x for x in loops if x[0] != x[1]))


def early_arrivals(code: Code) -> tuple[int, ...]:
    """Offsets of arrivals on an mbarrier that wait for no load of shared memory issued before them, in the same run of
    instructions: nothing has used its registers, and no fence or barrier stands between. Such a load may still be on
    its way when somebody who waits for the arrival has that memory filled again by a bulk copy."""
    found = []
    loading: set[int] = set()
    for i in code.instructions:
        if i.opcode.startswith(_ORDERS):
            loading.clear()
        elif i.opcode.startswith("SYNCS.ARRIVE"):
            if loading and "A1T0" in i.opcode:
                found.append(i.offset)
        else:
            touched = {int(r) + k for r in _REGISTER.findall(i.operands) for k in range(_span(i))}
            loading -= touched
            if i.opcode.startswith("LDS"):
                first = _REGISTER.match(i.operands)
                loading |= {int(first[1]) + k for k in range(_span(i))} if first else set()
    return tuple(found)


def _span(i: Instruction) -> int:
    """Registers that an operand may stand for."""
    if ".128" in i.opcode or i.opcode.startswith("HMMA"):
        return 4
    return 2 if ".64" in i.opcode or "WIDE" in i.opcode else 1
