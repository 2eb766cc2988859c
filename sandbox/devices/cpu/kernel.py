"""One kernel in LLVM IR: registers, suspension points, memory checks. The instructions are in the `lower_*` modules.

The kernel becomes `void kernel(thread, block, launch)`: it runs one thread from the resume point in its record until it
suspends or ends. Registers are allocas that LLVM turns into values; at a suspension those still needed are saved in
the thread's frame. Bounds are checked inline against the buffer that the same instruction hit last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.cfg import Block, Graph
from sandbox.devices.cpu.emit import Text, Unsupported
from sandbox.devices.cpu.ptx_ast import Entry, Imm, Instr, Mem, Not, Operand, Reg, Sym, Variable

BITS = {
    "pred": 1, "b8": 8, "s8": 8, "u8": 8, "b16": 16, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "b32": 32, "s32": 32,
    "u32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32, "b64": 64, "s64": 64, "u64": 64, "f64": 64,
    "b128": 128,
    "s16x2": 32, "u16x2": 32, "f32x2": 64,
}  # fmt: skip
FLOATS = {"f32": "float", "f64": "double"}
Handler = Callable[["Kernel", Instr], None]


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
    """Lowers an entry. After `lower`: `text`, `sites`, `effects` and the frame's size."""

    def __init__(self, entry: Entry, placed: Placed, options: Options) -> None:
        super().__init__()
        self.entry, self.placed, self.options = entry, placed, options
        self.graph = Graph(entry)
        self.params = {p.name: p for p in entry.params}
        self.sites: list[Instr | None] = []
        self.frame_bytes = 0
        self._frame: dict[str, int] = {}
        self._alloca = {name: f"%r{i}" for i, name in enumerate(entry.regs)}
        self._resumes: list[str] = []
        self._dirty = 0  # registers that may differ from the frame
        self.current: Instr | None = None
        self._away = 0  # registers whose value is in the frame alone
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
            value = self.let(f"load i{have}, ptr {self._alloca[op.name]}")
            return self.resize(value, have, bits)
        if isinstance(op, Sym) and op.name in self.placed.shared:
            # the own window begins where the block's rank says
            own = self.let(f"add i64 %lo, {self.placed.shared[op.name] - L.SMEM_START}")
            return self.resize(own, 64, bits)
        if isinstance(op, Sym):
            return str(_signed(self.symbol(op.name, instr), bits))
        from sandbox.devices.cpu.lower_special import special

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
            return self.let(f"load i1, ptr {self._alloca[op.name]}")
        raise Unsupported(instr, "operand is no predicate")

    def write(self, op: Operand, bits: int, value: str, instr: Instr, signed: bool = False) -> None:
        """Write an iN to a register, which may be wider."""
        if not isinstance(op, Reg):
            raise Unsupported(instr, "the result is no register")
        if op.name == "_":
            return
        have = self.bits_of(op.name)
        self._dirty |= 1 << self.graph.number[op.name]
        self._away &= ~(1 << self.graph.number[op.name])
        self.do(
            f"store i{have} {self.resize(value, bits, have, signed)}, ptr {self._alloca[op.name]}"
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

    def scratch(self, size: int) -> int:
        """Bytes of the frame for the kernel's own use; the offset."""
        self.frame_bytes += size
        return self.frame_bytes - size

    def suspend(self, instr: Instr, state: int, live: int, *, certain: bool) -> None:
        """Save `live`, leave in `state`, and go on here when resumed. `certain`: every path here suspends."""
        self._leave(self.site(instr), state, live)
        certain = certain and instr.guard is None
        self.place(self._resume(0 if certain else live & ~self._away))
        if certain:
            self._dirty &= ~live
            self._away = live

    def _leave(self, site: int, state: int, live: int) -> None:
        for name in self.graph.set_of(live & self._dirty & ~self._away):
            have = self.bits_of(name)
            value = self.let(f"load i{have}, ptr {self._alloca[name]}")
            if have < 64:
                value = self.let(f"zext i{have} {value} to i64")
            kind = "i128" if have == 128 else "i64"
            self.do(
                f"store {kind} {value}, ptr {self.at('%t', L.T_FRAME + self.slot(name))}, align 8"
            )
        self.put("%t", L.T_PC, str(len(self._resumes) + 1))
        self.put("%t", L.T_STATE, str(state))
        self.put("%t", L.T_SITE, str(site))
        self.do("ret void")

    def _resume(self, live: int) -> str:
        """Place the block that restores `live`; the label where the code goes on."""
        label, after = self.fresh("resume"), self.fresh("after")
        self._resumes.append(label)
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
            self.do(f"store i{have} {value}, ptr {self._alloca[name]}")

    def fetch(self, names: int) -> None:
        """Bring registers back from the frame before they are used."""
        self._restore(names & self._away)
        self._away &= ~names

    def dirty_all(self) -> None:
        self._dirty = (1 << len(self._alloca)) - 1

    # the whole

    @property
    def frame_size(self) -> int:
        """Bytes of saved registers, rounded so that local memory begins aligned."""
        return -(-self.frame_bytes // 16) * 16

    def lower(self, handlers: Mapping[str, Handler]) -> str:
        """The module's text."""
        from sandbox.devices.cpu.lower_flow import finish

        for block in self.graph.blocks:
            self.block = block
            self._dirty = self.graph.dirty_in[block.index]
            self._away = 0
            self.place(f"bb{block.index}")
            self._count_block(block)
            after = self._live_afters(block)
            for i, instr in enumerate(block.instrs):
                self.live_after = after[i]
                if i == len(block.instrs) - 1 and instr.parts[0] in (
                    "bra",
                    "brx",
                    "ret",
                    "exit",
                    "trap",
                ):
                    self.fetch(after[i])
                self.fetch(self.graph.uses[id(instr)])
                self._instr(instr, handlers)
            self.fetch(self.graph.live_out[block.index])
            finish(self, block)
        return self._module()

    def _count_block(self, block: Block) -> None:
        p = self.at("%counters", 8 * block.index)
        old = self.let(f"load i64, ptr {p}")
        self.do(f"store i64 {self.let(f'add i64 {old}, 1')}, ptr {p}")

    def _live_afters(self, block: Block) -> list[int]:
        live = self.graph.live_out[block.index]
        out = []
        for instr in reversed(block.instrs):
            out.append(live)
            live = self.graph.before(instr, live)
        return out[::-1]

    def _instr(self, instr: Instr, handlers: Mapping[str, Handler]) -> None:
        self.current = instr
        handler = handlers.get(instr.parts[0])
        if handler is None:
            raise Unsupported(instr)
        if instr.guard is None or instr.parts[0] in ("bra", "brx"):
            handler(self, instr)
            return
        guard = self.flag(Not(instr.guard) if instr.negated else instr.guard, instr)
        yes, no = self.fresh("do"), self.fresh("skip")
        self.split(guard, yes, no)
        self.place(yes)
        handler(self, instr)
        self.go(no)
        self.place(no)

    def _begin(self) -> list[str]:
        """Where a thread starts: what may be read before anything writes it holds noise, all else zero."""
        lines = ["begin:"]
        for name in self.graph.unset():
            n, bits, alloca = self.graph.number[name], self.bits_of(name), self._alloca[name]
            call = f"call i64 @rt_unset(i64 %ci, i64 %bi, i64 %ti, i64 {n})"
            value = f"%u{n}"
            lines += [f"  {value} = {call}"]
            if bits != 64:
                how = "trunc" if bits < 64 else "sext"
                value = f"%w{n}"
                lines += [f"  {value} = {how} i64 %u{n} to i{bits}"]
            lines += [f"  store i{bits} {value}, ptr {alloca}"]
        return [*lines, "  br label %bb0"]

    def _module(self) -> str:
        from sandbox.devices.cpu.lower_flow import FLOAT_DECLARATIONS, prologue
        from sandbox.devices.cpu.runtime import runtime_declarations
        from sandbox.devices.cpu.subset_ops import DECLARATIONS

        cases = "\n".join(f"    i64 {i + 1}, label %{r}" for i, r in enumerate(self._resumes))
        allocas = []
        for name, alloca in self._alloca.items():
            bits = self.bits_of(name)
            allocas += [f"  {alloca} = alloca i{bits}", f"  store i{bits} 0, ptr {alloca}"]
        head = "define void @kernel(ptr noalias %t, ptr noalias %b, ptr noalias %c) nounwind {"
        return "\n".join([
            DECLARATIONS, FLOAT_DECLARATIONS, runtime_declarations(), head, "entry:", *allocas, *prologue(),
            f"  %local = getelementptr i8, ptr %t, i64 {L.T_FRAME + self.frame_size}",
            f"  switch i64 %pc, label %begin [\n{cases}\n  ]", *self._begin(), *self.lines, "fault:", "  ret void", "}",
            '!0 = !{!"branch_weights", i32 1000, i32 1}', "",
        ])  # fmt: skip


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


__all__ = ["BITS", "FLOATS", "Kernel", "Mem", "Options", "Placed", "Variable"]
