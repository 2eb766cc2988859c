"""Control flow and liveness of a kernel: basic blocks, loops, what each instruction reads and writes.

Sets of registers are Python integers used as bit sets. Nothing is executed or lowered here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sandbox.devices.cpu.ptx_ast import (
    Entry,
    Group,
    Instr,
    Label,
    Mem,
    Not,
    Operand,
    Pair,
    PtxError,
    Reg,
    Sym,
    Vec,
)  # fmt: skip

NO_RESULT = {
    "st", "red", "bar", "barrier", "membar", "fence", "cp", "bra", "brx", "ret", "exit", "trap", "prefetch",
    "prefetchu",
    "nanosleep", "griddepcontrol", "stmatrix", "setmaxnreg", "call", "discard", "applypriority", "pmevent", "brkpt",
    "wgmma", "multimem",
}  # fmt: skip


def registers(operand: Operand) -> Iterator[str]:
    """Names of the registers in an operand, in order."""
    if isinstance(operand, Reg):
        if operand.name != "_":
            yield operand.name
    elif isinstance(operand, Not):
        yield operand.reg.name
    elif isinstance(operand, Vec | Group):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Mem):
        yield from registers(operand.base)
        for item in operand.coords:
            yield from registers(item)


MEETS = {
    "shfl",
    "vote",
    "redux",
    "match",
    "elect",
    "activemask",
    "mma",
    "ldmatrix",
    "stmatrix",
    "movmatrix",
}


def always_waits(instr: Instr) -> bool:
    """Whether a thread that executes the instruction leaves the kernel every time, so that its registers are saved."""
    if instr.guard is not None:
        return False
    op, rest = instr.parts[0], instr.parts[1:]
    if op in ("bar", "barrier"):
        return "wait" in rest if "cluster" in rest else "sync" in rest or "red" in rest
    return op in MEETS


def has_result(instr: Instr) -> bool:
    """Whether the first operand is written."""
    if not instr.operands:
        return False
    if instr.parts[0] == "mbarrier":
        return isinstance(instr.operands[0], Reg)
    if instr.parts[0] in ("bar", "barrier"):
        return "red" in instr.parts
    return instr.parts[0] not in NO_RESULT


@dataclass
class Block:
    """Straight-line code. `target` is the block of its last branch, `next` the one it falls into (or None)."""

    index: int
    labels: list[str] = field(default_factory=list)
    instrs: list[Instr] = field(default_factory=list)
    succs: list[int] = field(default_factory=list)
    next: int | None = None


class Graph:
    """Blocks of an entry with liveness: `live_in[b]`, `live_out[b]`; `in_loop[b]`: the block can reach itself."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.number = {name: i for i, name in enumerate(entry.regs)}
        self.names = list(entry.regs)
        self.blocks = _split(entry)
        self.label = {name: b.index for b in self.blocks for name in b.labels}
        self._connect()
        self.defs: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        for block in self.blocks:
            for instr in block.instrs:
                self._effects(instr)
        self.live_in = [0] * len(self.blocks)
        self.live_out = [0] * len(self.blocks)
        self._liveness()
        self.in_loop = self._loops()
        self.dirty_in = self._dirty()

    def _connect(self) -> None:
        for block in self.blocks:
            last = block.instrs[-1] if block.instrs else None
            falls = True
            if last is not None:
                op = last.parts[0]
                for name in self.branch_targets(last):
                    block.succs.append(self.label[name])
                falls = last.guard is not None or op not in ("bra", "brx", "ret", "exit", "trap")
            if falls and block.index + 1 < len(self.blocks):
                block.next = block.index + 1
                block.succs.append(block.next)

    def unset(self) -> list[str]:
        """Registers that some path reads before it writes them. That may be right: paths that no thread takes, values
        that no result depends on."""
        return self.set_of(self.live_in[0])

    def branch_targets(self, instr: Instr) -> tuple[str, ...]:
        if instr.parts[0] == "bra":
            names: tuple[str, ...] = tuple(o.name for o in instr.operands if isinstance(o, Sym))
        elif instr.parts[0] == "brx":
            table = instr.operands[1] if len(instr.operands) == 2 else None
            names = self.entry.tables.get(table.name, ()) if isinstance(table, Sym) else ()
        else:
            return ()
        if not names or any(n not in self.label for n in names):
            raise PtxError("a branch leads nowhere", instr.line)
        return names

    def bits(self, operands: Iterator[str] | list[str]) -> int:
        out = 0
        for name in operands:
            out |= 1 << self.number[name]
        return out

    def set_of(self, bits: int) -> list[str]:
        """Names of a bit set, in declaration order."""
        out = []
        while bits:
            low = bits & -bits
            out.append(self.names[low.bit_length() - 1])
            bits ^= low
        return out

    def _effects(self, instr: Instr) -> None:
        operands = list(instr.operands)
        written = 0
        if has_result(instr):
            written = self.bits(registers(operands.pop(0)))
        read = 0
        for o in operands:
            read |= self.bits(registers(o))
        if instr.guard is not None:
            read |= self.bits(registers(instr.guard)) | written
        self.defs[id(instr)] = written
        self.uses[id(instr)] = read

    def before(self, instr: Instr, after: int) -> int:
        """Live registers before an instruction, given those after it."""
        return (after & ~self.defs[id(instr)]) | self.uses[id(instr)]

    def _liveness(self) -> None:
        gen, kill = [], []
        for block in self.blocks:
            g = k = 0
            for instr in block.instrs:
                g |= self.uses[id(instr)] & ~k
                k |= self.defs[id(instr)] & ~(
                    self.uses[id(instr)] if instr.guard is not None else 0
                )
            gen.append(g)
            kill.append(k)
        changed = True
        while changed:
            changed = False
            for block in reversed(self.blocks):
                out = 0
                for s in block.succs:
                    out |= self.live_in[s]
                into = gen[block.index] | (out & ~kill[block.index])
                if out != self.live_out[block.index] or into != self.live_in[block.index]:
                    self.live_out[block.index], self.live_in[block.index] = out, into
                    changed = True

    def _dirty(self) -> list[int]:
        """Registers that may differ from what the frame holds, at the start of each block."""
        everything = (1 << len(self.names)) - 1
        into = [0] * len(self.blocks)
        into[0] = everything
        work = list(range(len(self.blocks)))
        seen = [False] * len(self.blocks)
        while work:
            index = work.pop()
            out = self._dirty_out(self.blocks[index], into[index])
            for s in self.blocks[index].succs:
                if out & ~into[s] or not seen[s]:
                    into[s] |= out
                    seen[s] = True
                    work.append(s)
        return into

    def _dirty_out(self, block: Block, dirty: int) -> int:
        live = self.live_out[block.index]
        after = []
        for instr in reversed(block.instrs):
            after.append(live)
            live = self.before(instr, live)
        for instr, alive in zip(block.instrs, reversed(after), strict=True):
            if always_waits(instr):
                dirty &= ~(alive & ~self.defs[id(instr)])
            dirty |= self.defs[id(instr)]
        return dirty

    def _loops(self) -> list[bool]:
        """Blocks on a cycle, by Tarjan's components, without recursion."""
        n = len(self.blocks)
        index, low = [-1] * n, [0] * n
        on, stack, out = [False] * n, [], [False] * n
        count = 0
        for root in range(n):
            if index[root] >= 0:
                continue
            work = [(root, 0)]
            while work:
                v, i = work.pop()
                if i == 0:
                    index[v] = low[v] = count
                    count += 1
                    stack.append(v)
                    on[v] = True
                succs = self.blocks[v].succs
                pushed = False
                for j in range(i, len(succs)):
                    w = succs[j]
                    if index[w] < 0:
                        work.append((v, j + 1))
                        work.append((w, 0))
                        pushed = True
                        break
                    if on[w]:
                        low[v] = min(low[v], low[w])
                if pushed:
                    continue
                if low[v] == index[v]:
                    members = []
                    while True:
                        w = stack.pop()
                        on[w] = False
                        members.append(w)
                        if w == v:
                            break
                    if len(members) > 1 or v in self.blocks[v].succs:
                        for w in members:
                            out[w] = True
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[v])
        return out


def _split(entry: Entry) -> list[Block]:
    blocks = [Block(0)]
    for item in entry.body:
        if isinstance(item, Label):
            if blocks[-1].instrs:
                blocks.append(Block(len(blocks)))
            blocks[-1].labels.append(item.name)
            continue
        blocks[-1].instrs.append(item)
        if item.parts[0] in ("bra", "brx", "ret", "exit", "trap"):
            blocks.append(Block(len(blocks)))
    return blocks
