"""One kernel on its way from PTX to LLVM IR: registers, operands, records and suspension, as the `lower_*` modules use
them.

The kernel becomes `void kernel(thread, block, launch)`: it runs one thread from the resume point in its record until it
suspends or ends. Registers are allocas that LLVM turns into values; at a suspension those still needed are saved in
the thread's frame. Walking the instructions is `lowering`'s affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.cfg import Block, Graph
from sandbox.devices.cpu.emit import Text, Unsupported
from sandbox.devices.cpu.lower_special import special
from sandbox.devices.cpu.ptx_ast import Entry, Imm, Instr, Not, Operand, Reg, Sym

BITS = {
    "pred": 1, "b8": 8, "s8": 8, "u8": 8, "b16": 16, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "b32": 32, "s32": 32,
    "u32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32, "b64": 64, "s64": 64, "u64": 64, "f64": 64,
    "b128": 128,
    "s16x2": 32, "u16x2": 32, "f32x2": 64,
}  # fmt: skip
FLOATS = {"f32": "float", "f64": "double"}


@dataclass(frozen=True)
class Options:
    """How to lower. `exact`: every access calls the runtime, for the race check. `f16c`: the CPU converts halves."""

    exact: bool = False
    f16c: bool = True


@dataclass(frozen=True)
class Placed:
    """Where variables lie: static shared bytes, local bytes, and addresses of module variables."""

    shared: Mapping[str, int]
    static_bytes: int
    local: Mapping[str, int]
    local_bytes: int
    module: Mapping[str, int]


class Kernel(Text):
    """An entry being lowered: its text so far, `sites`, `effects` and the frame's size."""

    def __init__(self, entry: Entry, placed: Placed, options: Options) -> None:
        super().__init__()
        self.entry, self.placed, self.options = entry, placed, options
        self.graph = Graph(entry)
        self.params = {p.name: p for p in entry.params}
        self.sites: list[Instr | None] = []
        self.frame_bytes = 0
        self._frame: dict[str, int] = {}
        self.alloca = {name: f"%r{i}" for i, name in enumerate(entry.regs)}
        self.resumes: list[str] = []
        self.dirty = 0  # registers that may differ from the frame
        self.current: Instr | None = None
        self.away = 0  # registers whose value is in the frame alone
        self.live_after = 0
        self.block: Block = self.graph.blocks[0]
        self.effects = [False] * len(self.graph.blocks)

    # operands

    def bits_of(self, name: str) -> int:
        return BITS[self.entry.regs[name]]

    def word(self, op: Operand, bits: int, instr: Instr) -> str:
        """An operand as iN. A wider register is truncated, a narrower one extended with zeros."""
        if isinstance(op, Imm):
            if op.kind == "f32" and bits == 64 or op.kind == "f64" and bits != 64:
                raise Unsupported(instr, "a constant of another width")
            return str(_signed(op.value, bits))
        if isinstance(op, Reg):
            if op.name == "_":
                return "0"
            have = self.bits_of(op.name)
            value = self.let(f"load i{have}, ptr {self.alloca[op.name]}")
            return self.resize(value, have, bits)
        if isinstance(op, Sym) and op.name in self.placed.shared:
            # the own window begins where the block's rank says
            own = self.let(f"add i64 %lo, {self.placed.shared[op.name] - L.SMEM_START}")
            return self.resize(own, 64, bits)
        if isinstance(op, Sym):
            return str(_signed(self.symbol(op.name, instr), bits))
        return special(self, op, bits, instr)

    def resize(self, value: str, have: int, want: int, signed: bool = False) -> str:
        if have == want:
            return value
        if want < have:
            return self.let(f"trunc i{have} {value} to i{want}")
        return self.let(f"{'sext' if signed else 'zext'} i{have} {value} to i{want}")

    def symbol(self, name: str, instr: Instr) -> int:
        """Address of a variable in its own space; of a parameter in the generic window."""
        p = self.placed
        if name in p.shared:
            return p.shared[name]
        if name in p.local:
            return p.local[name]
        if name in p.module:
            return p.module[name]
        if name in self.params:
            return (L.PARAM_TAG << 32) + self.params[name].offset
        raise Unsupported(instr, f"symbol {name[:60]}")

    def real(self, op: Operand, kind: str, instr: Instr) -> str:
        """An operand as float or double."""
        bits = BITS[kind]
        if isinstance(op, Imm) and op.kind == "f32" and kind == "f64":
            wide = self.let(f"bitcast i32 {_signed(op.value, 32)} to float")
            return self.let(f"fpext float {wide} to double")
        return self.let(f"bitcast i{bits} {self.word(op, bits, instr)} to {FLOATS[kind]}")

    def flag(self, op: Operand, instr: Instr) -> str:
        if isinstance(op, Not):
            return self.let(f"xor i1 {self.flag(op.reg, instr)}, true")
        if isinstance(op, Imm):
            return "true" if op.value else "false"
        if isinstance(op, Reg) and op.name != "_" and self.entry.regs[op.name] == "pred":
            return self.let(f"load i1, ptr {self.alloca[op.name]}")
        raise Unsupported(instr, "operand is no predicate")

    def write(self, op: Operand, bits: int, value: str, instr: Instr, signed: bool = False) -> None:
        """Write an iN to a register, which may be wider."""
        if not isinstance(op, Reg):
            raise Unsupported(instr, "the result is no register")
        if op.name == "_":
            return
        have = self.bits_of(op.name)
        self.dirty |= 1 << self.graph.number[op.name]
        self.away &= ~(1 << self.graph.number[op.name])
        self.do(
            f"store i{have} {self.resize(value, bits, have, signed)}, ptr {self.alloca[op.name]}"
        )

    def write_real(self, op: Operand, kind: str, value: str, instr: Instr) -> None:
        bits = BITS[kind]
        self.write(op, bits, self.let(f"bitcast {FLOATS[kind]} {value} to i{bits}"), instr)

    # records

    def at(self, base: str, offset: int) -> str:
        return self.let(f"getelementptr i8, ptr {base}, i64 {offset}")

    def field(self, base: str, offset: int) -> str:
        return self.let(f"load i64, ptr {self.at(base, offset)}")

    def put(self, base: str, offset: int, value: str) -> None:
        self.do(f"store i64 {value}, ptr {self.at(base, offset)}")

    def runtime(self, name: str, *args: str) -> str:
        """Call a runtime function with the launch, block and thread before `args`."""
        text = "".join(f", i64 {a}" for a in args)
        return self.let(f"call i64 @{name}(i64 %ci, i64 %bi, i64 %ti{text})")

    def helper(self, name: str, *args: str) -> str:
        """Call a runtime function of 64-bit words."""
        return self.let(f"call i64 @{name}({', '.join(f'i64 {a}' for a in args)})")

    def check(self, value: str) -> None:
        """Leave the kernel if the runtime recorded a fault (returned 0)."""
        good = self.fresh("good")
        self.split(self.let(f"icmp ne i64 {value}, 0"), good, "fault", likely=True)
        self.place(good)

    def check_status(self) -> None:
        """Leave the kernel if a fault is recorded; for calls whose result may be 0."""
        good = self.fresh("good")
        status = self.field("%c", L.C_STATUS)
        self.split(self.let(f"icmp eq i64 {status}, 0"), good, "fault", likely=True)
        self.place(good)

    def site(self, instr: Instr) -> int:
        self.sites.append(instr)
        return len(self.sites) - 1

    def change(self) -> None:
        """This block changes memory that other threads see."""
        self.effects[self.block.index] = True

    # suspension

    def slot(self, name: str) -> int:
        if name not in self._frame:
            size = max(8, self.bits_of(name) // 8)
            self._frame[name] = self.frame_bytes
            self.frame_bytes += size
        return self._frame[name]

    def survivors(self, instr: Instr) -> int:
        """What must outlive a suspension: all that is live after the instruction but its own results."""
        written = self.graph.defs[id(instr)]
        return self.live_after & ~written if instr.guard is None else self.live_after

    def finish(self) -> None:
        """The thread has ended."""
        self.put("%t", L.T_STATE, str(L.DONE))
        self.do("ret void")

    def scratch(self, size: int) -> int:
        """Bytes of the frame for the kernel's own use; the offset."""
        self.frame_bytes += size
        return self.frame_bytes - size

    def suspend(self, instr: Instr, state: int, live: int, *, certain: bool) -> None:
        """Save `live`, leave in `state`, and go on here when resumed. `certain`: every path here suspends."""
        self._leave(self.site(instr), state, live)
        certain = certain and instr.guard is None
        self.place(self._resume(0 if certain else live & ~self.away))
        if certain:
            self.dirty &= ~live
            self.away = live

    def _leave(self, site: int, state: int, live: int) -> None:
        for name in self.graph.set_of(live & self.dirty & ~self.away):
            have = self.bits_of(name)
            value = self.let(f"load i{have}, ptr {self.alloca[name]}")
            if have < 64:
                value = self.let(f"zext i{have} {value} to i64")
            kind = "i128" if have == 128 else "i64"
            self.do(
                f"store {kind} {value}, ptr {self.at('%t', L.T_FRAME + self.slot(name))}, align 8"
            )
        self.put("%t", L.T_PC, str(len(self.resumes) + 1))
        self.put("%t", L.T_STATE, str(state))
        self.put("%t", L.T_SITE, str(site))
        self.do("ret void")

    def _resume(self, live: int) -> str:
        """Place the block that restores `live`; the label where the code goes on."""
        label, after = self.fresh("resume"), self.fresh("after")
        self.resumes.append(label)
        self.place(label)
        self._restore(live)
        self.go(after)
        return after

    def _restore(self, names: int) -> None:
        for name in self.graph.set_of(names):
            have = self.bits_of(name)
            kind = "i128" if have == 128 else "i64"
            value = self.let(
                f"load {kind}, ptr {self.at('%t', L.T_FRAME + self.slot(name))}, align 8"
            )
            if have < 64:
                value = self.let(f"trunc i64 {value} to i{have}")
            self.do(f"store i{have} {value}, ptr {self.alloca[name]}")

    def fetch(self, names: int) -> None:
        """Bring registers back from the frame before they are used."""
        self._restore(names & self.away)
        self.away &= ~names

    def dirty_all(self) -> None:
        self.dirty = (1 << len(self.alloca)) - 1

    # the whole

    @property
    def frame_size(self) -> int:
        """Bytes of saved registers, rounded so that local memory begins aligned."""
        return -(-self.frame_bytes // 16) * 16


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value
