"""What the model needs of a kernel's text: per basic block its operations with latency class, registers and order.

Plain data, made once a kernel. Which memory an access goes to is known only for a launch and is not in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.devices.cpu.cfg import Graph
from sandbox.devices.cpu.kernel import BITS
from sandbox.devices.cpu.ptx_ast import Instr

SPECIAL = {"ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"}
MEETINGS = {"shfl", "vote", "redux", "match", "elect", "movmatrix"}
FREE = {"mov", "cvta", "ret", "exit", "bra", "brx", "nanosleep"}
ORDERED = {"acquire", "release", "acq_rel", "relaxed", "volatile", "sc"}


@dataclass(frozen=True)
class Op:
    """`kind` is the latency class; `defs`, `uses` are register numbers; `bytes` of one thread; `site`: first site.
    `order`: nothing after it starts before it; `ends`: it waits for all earlier memory operations."""

    kind: str
    defs: tuple[int, ...]
    uses: tuple[int, ...]
    bytes: int = 0
    site: int = -1
    order: bool = False
    releases: bool = False
    flops: float = 0.0
    store: bool = False


@dataclass(frozen=True)
class Code:
    """`blocks[b]` and its successors. `pressure`: 32-bit registers alive at once at most, by the text."""

    blocks: tuple[tuple[Op, ...], ...]
    succs: tuple[tuple[int, ...], ...]
    pressure: int


def access_bytes(instr: Instr) -> int:
    """Bytes that one thread moves in an ld, st, atom, red or cp.async."""
    if instr.parts[:2] == ("cp", "async"):
        sizes = [o.value for o in instr.operands[2:3] if hasattr(o, "value")]
        return int(sizes[0]) if sizes else 16
    count = next((int(p[1:]) for p in instr.parts if p in ("v2", "v4", "v8")), 1)
    return BITS.get(instr.parts[-1], 32) // 8 * count


def mma_flops(instr: Instr) -> float:
    """Of one thread: a multiply-add counts as two."""
    for part in instr.parts:
        if part[0] == "m" and "n" in part and "k" in part and part[1:2].isdigit():
            m, rest = part[1:].split("n")
            n, k = rest.split("k")
            return 2.0 * int(m) * int(n) * int(k) / 32
    return 0.0


def kind_of(instr: Instr) -> str:
    """The latency class."""
    op, parts = instr.parts[0], instr.parts
    shared = any(p.startswith("shared") for p in parts)
    if op in ("ld", "ldu"):
        return (
            "param"
            if "param" in parts
            else "local"
            if "local" in parts
            else "shared"
            if shared
            else "global"
        )
    if op == "st":
        return "store shared" if shared else "store"
    if op in ("atom", "red"):
        return "atom shared" if shared else "atom" if op == "atom" else "store"
    if op == "cp":
        return (
            "copy"
            if "bulk" not in parts and "wait_group" not in parts and "wait_all" not in parts
            else "bulk"
        )
    if op in ("bar", "barrier"):
        return "cluster" if "cluster" in parts else "warp" if "warp" in parts else "barrier"
    if op in ("membar", "fence"):
        wide = any(p in ("gpu", "gl", "sys", "cluster") for p in parts)
        return "fence" if wide and "proxy" not in parts else "alu"
    if op in ("mma", "ldmatrix", "stmatrix", "mbarrier"):
        return op
    if op in MEETINGS:
        return "shuffle"
    if op in SPECIAL or (op == "div" and parts[-1] in ("f32", "f64")):
        return "special"
    if op in ("div", "rem"):
        return "divide"
    if any(p == "f64" for p in parts):
        return "double"
    if op == "cvt" or op == "popc" or op == "bfind":
        return "convert"
    return "free" if op in FREE else "alu"


def code_of(graph: Graph, sites: Sequence[Instr | None]) -> Code:
    first: dict[int, int] = {}
    for i, instr in enumerate(sites):
        if instr is not None:
            first.setdefault(id(instr), i)
    blocks = tuple(
        tuple(_op(x, graph, first.get(id(x), -1)) for x in b.instrs) for b in graph.blocks
    )
    return Code(blocks, tuple(tuple(b.succs) for b in graph.blocks), _pressure(graph))


def _numbers(bits: int) -> tuple[int, ...]:
    out = []
    while bits:
        low = bits & -bits
        out.append(low.bit_length() - 1)
        bits ^= low
    return tuple(out)


def _op(instr: Instr, graph: Graph, site: int) -> Op:
    kind = kind_of(instr)
    memory = instr.parts[0] in ("ld", "ldu", "st", "atom", "red") or kind == "copy"
    strong = bool(ORDERED & set(instr.parts)) and instr.parts[0] in ("ld", "st", "atom", "red")
    releases = kind == "atom" and bool({"release", "acq_rel"} & set(instr.parts))
    return Op(
        kind, _numbers(graph.defs[id(instr)]), _numbers(graph.uses[id(instr)]),
        access_bytes(instr) if memory else 0, site,
        strong or kind in ("barrier", "cluster", "fence", "mbarrier", "bulk"), releases,
        mma_flops(instr) if kind == "mma" else 0.0, instr.parts[0] in ("st", "red"),
    )  # fmt: skip


def _pressure(graph: Graph) -> int:
    wide = sum(1 << i for i, n in enumerate(graph.names) if BITS[graph.entry.regs[n]] == 64)
    flags = sum(1 << i for i, n in enumerate(graph.names) if graph.entry.regs[n] == "pred")
    most = 0
    for block in graph.blocks:
        live = graph.live_out[block.index]
        for instr in reversed(block.instrs):
            live = graph.before(instr, live)
            most = max(most, (live & ~flags).bit_count() + (live & wide).bit_count())
    return most
