"""Lowering of atom and red, scalar and vector. One native thread runs a launch, so a load and a store make an atomic.

An atomic in a loop that changes nothing and sees what it saw last time is a poll, as in `lower_memory`.
"""

from __future__ import annotations

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.access import Access, address, locate
from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.float_ops import flush, pick
from sandbox.devices.cpu.kernel import BITS, FLOATS, Kernel
from sandbox.devices.cpu.lower_half import narrow, widen
from sandbox.devices.cpu.modifiers import HINT_PREFIXES, elements, order_of, space_of, vector_of
from sandbox.devices.cpu.ptx_ast import Instr
from sandbox.devices.cpu.registry import lowers

OPS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@lowers(
    "atom",
    "atom{.sem}{.scope}{.space}.{add,min,max,and,or,xor,exch,cas,inc,dec}{.noftz}{.v2,.v4,.v8}.type",
)
@lowers("red", "red{.sem}{.scope}{.space}.op.type, as atom without exch and cas")
def atomic(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    if "async" in m.rest:
        raise Unsupported(instr)
    kind = m.kind()
    order = order_of(m)
    space = space_of(m)
    op = m.need(*OPS)
    count = vector_of(m)
    m.drop("noftz")
    m.prefix(*HINT_PREFIXES)
    m.end()
    if kind not in BITS or kind == "pred":
        raise Unsupported(instr, f"type .{kind}")
    bits = BITS[kind]
    returns = instr.parts[0] == "atom"
    mem = instr.operands[1] if returns else instr.operands[0]
    args = instr.operands[2 if returns else 1 :]
    size = bits // 8 * count
    addr = address(k, mem, instr, space)
    where = locate(k, instr, addr, Access(space, size, L.LOAD | L.STORE | L.ATOMIC))
    k.change()
    if k.options.exact:
        k.runtime("rt_race_atomic", k.let(f"ptrtoint ptr {where} to i64"), str(_order_bits(order)))
    values = [k.word(v, bits, instr) for v in elements(args[0], count, instr)]
    swap = k.word(args[1], bits, instr) if op == "cas" else ""
    if returns and count == 1 and size <= 8 and k.graph.in_loop[k.block.index]:
        where = _poll(k, instr, where, (op, kind, values[0], swap))
        values = [k.word(v, bits, instr) for v in elements(args[0], count, instr)]
        swap = k.word(args[1], bits, instr) if op == "cas" else ""
    dest = elements(instr.operands[0], count, instr) if returns else ()
    for i, value in enumerate(values):
        p = k.at(where, i * bits // 8) if i else where
        old = k.let(f"load i{bits}, ptr {p}, align {min(8, bits // 8)}")
        new = combine(k, instr, (op, kind, value, swap), old)
        k.do(f"store i{bits} {new}, ptr {p}, align {min(8, bits // 8)}")
        if returns:
            k.write(dest[i], bits, old, instr)


def _order_bits(order: str) -> int:
    """1 acquires, 2 releases."""
    return {"acquire": 1, "release": 2, "acq_rel": 3, "sc": 3}.get(order, 0)


def _poll(k: Kernel, instr: Instr, where: str, what: tuple[str, str, str, str]) -> str:
    """Wait if this atomic would change nothing and sees what it saw last time. Operands are read again afterwards."""
    bits = BITS[what[1]]
    slot = L.T_FRAME + k.scratch(16)
    host = k.let(f"ptrtoint ptr {where} to i64")
    old = k.let(f"load i{bits}, ptr {where}, align {bits // 8}")
    new = combine(k, instr, what, old)
    value = k.resize(old, bits, 64)
    same = k.let(f"icmp eq i64 {k.field('%t', slot)}, {host}")
    equal = k.let(f"icmp eq i64 {k.field('%t', slot + 8)}, {value}")
    idle = k.let(f"icmp eq i{bits} {old}, {new}")
    k.put("%t", slot, host)
    k.put("%t", slot + 8, value)
    wait, join = k.fresh("wait"), k.fresh("seen")
    k.split(k.let(f"and i1 {idle}, {k.let(f'and i1 {same}, {equal}')}"), wait, join)
    k.place(wait)
    k.put("%t", L.T_A, host)
    k.put("%t", L.T_B, value)
    k.put("%t", L.T_MASK, str(bits // 8))
    live = k.live_after | k.graph.uses[id(instr)]
    k.suspend(instr, L.WATCH, live, certain=False)
    k.go(join)
    k.place(join)
    return k.let(f"inttoptr i64 {k.field('%t', slot)} to ptr")


def combine(k: Kernel, instr: Instr, what: tuple[str, str, str, str], old: str) -> str:
    """The new value of a word."""
    op, kind, value, swap = what
    bits = BITS[kind]
    if op == "exch":
        return value
    if op == "cas":
        return k.let(
            f"select i1 {k.let(f'icmp eq i{bits} {old}, {value}')}, i{bits} {swap}, i{bits} {old}"
        )
    if kind in FLOATS:
        return _float(k, instr, op, kind, old, value)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half(k, instr, op, kind, old, value)
    if op in ("and", "or", "xor"):
        return k.let(f"{op} i{bits} {old}, {value}")
    if op == "add":
        return k.let(f"add i{bits} {old}, {value}")
    if op in ("min", "max"):
        sign = "s" if kind[0] == "s" else "u"
        return k.let(f"call i{bits} @llvm.{sign}{op}.i{bits}(i{bits} {old}, i{bits} {value})")
    if op == "inc":
        over = k.let(f"icmp uge i{bits} {old}, {value}")
        return k.let(f"select i1 {over}, i{bits} 0, i{bits} {k.let(f'add i{bits} {old}, 1')}")
    zero = k.let(f"icmp eq i{bits} {old}, 0")
    over = k.let(f"icmp ugt i{bits} {old}, {value}")
    wrap = k.let(f"or i1 {zero}, {over}")
    return k.let(f"select i1 {wrap}, i{bits} {value}, i{bits} {k.let(f'sub i{bits} {old}, 1')}")


def _float(k: Kernel, instr: Instr, op: str, kind: str, old: str, value: str) -> str:
    t, bits = FLOATS[kind], BITS[kind]
    a, b = (k.let(f"bitcast i{bits} {v} to {t}") for v in (old, value))
    if op == "add":
        result = k.let(f"fadd {t} {a}, {b}")
        if kind == "f32" and "global" in instr.parts:
            result = flush(
                k, kind, result
            )  # atom.add.f32 on global memory flushes subnormal results
    elif op in ("min", "max"):
        result = pick(k, kind, op, a, b, nan=False)
    else:
        raise Unsupported(instr, f"{op} of .{kind}")
    return k.let(f"bitcast {t} {result} to i{bits}")


def _half(k: Kernel, instr: Instr, op: str, kind: str, old: str, value: str) -> str:
    if op not in ("add", "min", "max"):
        raise Unsupported(instr, f"{op} of .{kind}")
    bits, out = BITS[kind], ""
    for i in range(bits // 16):
        parts = []
        for word in (old, value):
            piece = k.let(f"lshr i{bits} {word}, {16 * i}") if i else word
            parts.append(widen(k, kind, k.resize(piece, bits, 16)))
        real = (
            k.let(f"fadd float {parts[0]}, {parts[1]}")
            if op == "add"
            else pick(k, "f32", op, parts[0], parts[1], nan=False)
        )
        piece = k.resize(narrow(k, kind, real), 16, bits)
        if i:
            piece = k.let(f"shl i{bits} {piece}, {16 * i}")
        out = k.let(f"or i{bits} {out}, {piece}") if out else piece
    return out
