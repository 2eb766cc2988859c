"""Lowering of loads, stores, polls and address conversions.

A load with an ordering (acquire, relaxed, volatile, .cv; .cg in a tight loop) in a loop is a poll: when it sees the
address and the value that it saw last time, the thread waits until the word changes or nothing else can run. Cache
hints change nothing here.
"""

from __future__ import annotations

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.access import Access, address, locate
from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import BITS, Kernel
from sandbox.devices.cpu.lower_async import store_async
from sandbox.devices.cpu.modifiers import HINT_PREFIXES, elements, order_of, space_of, vector_of
from sandbox.devices.cpu.ptx_ast import Instr
from sandbox.devices.cpu.registry import lowers

HINTS = ("ca", "cg", "cs", "lu", "wb", "wt", "nc", "weak", "unified", "noftz")


@lowers(
    "ld",
    "ld{.weak,.volatile,.relaxed,.acquire}{.scope}{.space}{.cop}{.nc}{.v2,.v4}.type (up to 16 bytes)",
)
@lowers("ldu", "ldu...")
def load(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    order = order_of(m)
    space = space_of(m)
    count = vector_of(m)
    poll = order != "weak" or "cv" in m.rest or ("cg" in m.rest and _spins(k))
    m.take("cv")
    m.drop(*HINTS)
    m.prefix(*HINT_PREFIXES)
    m.end()
    if kind not in BITS or kind == "pred":
        raise Unsupported(instr, "type")
    bits = BITS[kind]
    size = bits // 8 * count
    if size > 16:
        raise Unsupported(instr, "more than 16 bytes")
    addr = address(k, instr.operands[1], instr, space)
    strong = L.STRONG if order != "weak" else 0
    where = locate(k, instr, addr, Access(space, size, L.LOAD | strong))
    if poll and space != L.PARAM and k.graph.in_loop[k.block.index]:
        where = _poll(k, instr, where, size)
    if k.options.exact and order != "weak":
        k.runtime(
            "rt_race_load",
            k.let(f"ptrtoint ptr {where} to i64"),
            str(int(order in ("acquire", "sc"))),
        )
    dest = elements(instr.operands[0], count, instr)
    signed = kind[0] == "s"
    align = min(size, 8) if space != L.LOCAL else 1
    for i, d in enumerate(dest):
        p = k.at(where, i * bits // 8) if i else where
        k.write(
            d, bits, k.let(f"load i{bits}, ptr {p}, align {min(align, bits // 8)}"), instr, signed
        )


def _spins(k: Kernel) -> bool:
    """Whether the block looks like a spin: short and branching to itself. Data too are read with .cg in loops."""
    return k.block.index in k.block.succs and len(k.block.instrs) <= 16


def fold(k: Kernel, where: str, size: int) -> str:
    """The polled bytes as one word; the same as rt_read."""
    if size <= 8:
        return k.resize(k.let(f"load i{8 * size}, ptr {where}, align 1"), 8 * size, 64)
    low = k.let(f"load i64, ptr {where}, align 1")
    high = k.let(f"load i64, ptr {k.at(where, 8)}, align 1")
    return k.let(f"xor i64 {low}, {k.let(f'mul i64 {high}, 2654435769')}")


def _poll(k: Kernel, instr: Instr, where: str, size: int) -> str:
    """Suspend if this load sees what it saw last time. The pointer to load from, before or after."""
    slot = L.T_FRAME + k.scratch(16)
    host = k.let(f"ptrtoint ptr {where} to i64")
    value = fold(k, where, size)
    same = k.let(f"icmp eq i64 {k.field('%t', slot)}, {host}")
    equal = k.let(f"icmp eq i64 {k.field('%t', slot + 8)}, {value}")
    k.put("%t", slot, host)
    k.put("%t", slot + 8, value)
    wait, join = k.fresh("wait"), k.fresh("seen")
    k.split(k.let(f"and i1 {same}, {equal}"), wait, join)
    k.place(wait)
    before = k.fresh("before")
    k.go(before)
    k.place(before)
    k.put("%t", L.T_A, host)
    k.put("%t", L.T_B, value)
    k.put("%t", L.T_MASK, str(size))
    written = k.graph.defs[id(instr)]
    live = k.live_after if instr.guard is not None else k.live_after & ~written
    k.suspend(instr, L.WATCH, live, certain=False)
    again = k.let(f"inttoptr i64 {k.field('%t', L.T_A)} to ptr")
    k.put("%t", slot + 8, fold(k, again, size))
    resumed = k.fresh("resumed")
    k.go(resumed)
    k.place(resumed)
    k.go(join)
    k.place(join)
    # the entry block of `join` is whatever branched to it before `wait`: an alloca keeps the text simple
    return _merge(k, slot)


def _merge(k: Kernel, slot: int) -> str:
    return k.let(f"inttoptr i64 {k.field('%t', slot)} to ptr")


@lowers(
    "st",
    "st{.weak,.volatile,.relaxed,.release}{.scope}{.space}{.cop}{.v2,.v4}.type (up to 16 bytes)",
)
def store(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    if "async" in m.rest or "bulk" in m.rest:
        store_async(k, instr)
        return
    kind = m.kind()
    order = order_of(m)
    space = space_of(m)
    count = vector_of(m)
    m.drop(*HINTS)
    m.prefix(*HINT_PREFIXES)
    m.end()
    if kind not in BITS or kind == "pred":
        raise Unsupported(instr, "type")
    bits = BITS[kind]
    size = bits // 8 * count
    if size > 16:
        raise Unsupported(instr, "more than 16 bytes")
    items = elements(instr.operands[1], count, instr)
    values = [k.word(v, bits, instr) for v in items]
    addr = address(k, instr.operands[0], instr, space)
    strong = L.STRONG if order != "weak" else 0
    where = locate(k, instr, addr, Access(space, size, L.STORE | strong))
    if space != L.LOCAL:
        k.change()
    if k.options.exact and order != "weak":
        k.runtime(
            "rt_race_store", k.let(f"ptrtoint ptr {where} to i64"), str(int(order == "release"))
        )
    align = min(bits // 8, 8) if space != L.LOCAL else 1
    for i, value in enumerate(values):
        p = k.at(where, i * bits // 8) if i else where
        k.do(f"store i{bits} {value}, ptr {p}, align {align}")


@lowers("cvta", "cvta{.to}.{global,shared,shared::cta,shared::cluster,local,const,param}.{u64,u32}")
def cvta(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    bits = BITS[m.kind()]
    back = m.take("to")
    space = space_of(m)
    m.end()
    value = k.word(instr.operands[1], bits, instr)
    if space in (L.SHARED, L.LOCAL, L.PARAM):
        tag = {L.SHARED: L.SHARED_TAG, L.LOCAL: L.LOCAL_TAG, L.PARAM: L.PARAM_TAG}[space]
        if bits != 64:
            raise Unsupported(instr, "32-bit generic addresses")
        value = k.let(f"and i64 {value}, 4294967295")
        if not back:
            value = k.let(f"or i64 {value}, {tag << 32}")
    k.write(instr.operands[0], bits, value, instr)


@lowers("isspacep", "isspacep.{global,shared,shared::cta,shared::cluster,local,const,param}")
def isspacep(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    name = m.need("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    m.drop("entry")
    m.end()
    tag = k.let(f"lshr i64 {k.word(instr.operands[1], 64, instr)}, 32")
    if name == "global":
        value = k.let(f"icmp ult i64 {tag}, 65536")
    elif name == "const":
        value = "false"
    else:
        want = {"local": L.LOCAL_TAG, "param": L.PARAM_TAG}.get(name, L.SHARED_TAG)
        value = k.let(f"icmp eq i64 {tag}, {want}")
    if name in ("shared", "shared::cta"):
        low = k.resize(k.word(instr.operands[1], 64, instr), 64, 32)
        rank = k.let(f"lshr i32 {low}, {L.RANK_SHIFT}")
        mine = k.let(f"lshr i32 %lo32, {L.RANK_SHIFT}")
        value = k.let(f"and i1 {value}, {k.let(f'icmp eq i32 {rank}, {mine}')}")
    k.write(instr.operands[0], 1, value, instr)


@lowers("mapa", "mapa{.shared::cluster}.{u32,u64}")
def mapa(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    bits = BITS[m.kind()]
    m.drop("shared::cluster")
    m.end()
    addr = k.word(instr.operands[1], bits, instr)
    rank = k.word(instr.operands[2], 32, instr)
    mask = (1 << L.RANK_SHIFT) - 1
    if bits == 64:
        mask |= ~0xFFFFFFFF
    rank = k.let(f"shl i32 {rank}, {L.RANK_SHIFT}")
    off = k.let(f"and i{bits} {addr}, {mask}")
    k.write(instr.operands[0], bits, k.let(f"or i{bits} {off}, {k.resize(rank, 32, bits)}"), instr)


@lowers("getctarank", "getctarank{.shared::cluster}.{u32,u64}")
def getctarank(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    bits = BITS[m.kind()]
    m.drop("shared::cluster")
    m.end()
    low = k.resize(k.word(instr.operands[1], bits, instr), bits, 32)
    k.write(instr.operands[0], 32, k.let(f"lshr i32 {low}, {L.RANK_SHIFT}"), instr)


@lowers("createpolicy", "createpolicy... (a hint)")
def createpolicy(k: Kernel, instr: Instr) -> None:
    k.write(instr.operands[0], 64, "0", instr)
