"""Checked addresses: the inline test against the last buffer hit, and the call of the runtime when it fails.

`locate` returns a pointer that is good for the whole access; a bad address never gets that far.
"""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.emit import Unsupported
from sandbox.devices.cpu.kernel import Kernel
from sandbox.devices.cpu.ptx_ast import Instr, Mem, Operand, Reg, Sym


@dataclass(frozen=True)
class Access:
    """What is accessed: the space, all bytes at once, and LOAD, STORE, ATOMIC flags."""

    space: int
    size: int
    flags: int


def address(k: Kernel, op: Operand, instr: Instr, space: int) -> str:
    """Effective address as i64; shared addresses are their low 32 bits."""
    if not isinstance(op, Mem):
        raise Unsupported(instr, "operand is no address")
    if isinstance(op.base, Sym) and space == L.PARAM and op.base.name in k.params:
        return str(k.params[op.base.name].offset + op.offset)
    narrow = isinstance(op.base, Reg) and op.base.name != "_" and k.bits_of(op.base.name) == 32
    bits = 32 if narrow else 64
    base = k.word(op.base, bits, instr)
    if op.offset:
        base = k.let(f"add i{bits} {base}, {op.offset}")
    if space == L.SHARED and bits == 64:
        return k.let(f"and i64 {base}, 4294967295")
    return k.resize(base, bits, 64)


def locate(k: Kernel, instr: Instr, addr: str, access: Access) -> str:
    """Pointer to the accessed bytes; after a fault to spare ones, until the thread suspends and is stopped."""
    if access.space == L.PARAM:
        return _param(k, instr, addr, access)
    if access.space == L.LOCAL:
        return _local(k, instr, addr, access)
    site = k.site(instr)
    if k.options.exact:
        return _call(k, "rt_place", site, addr, access)
    if not k.graph.in_loop[k.block.index]:
        # straight-line code runs once a thread: a call keeps the text short
        return _call(
            k,
            "rt_shared_place" if access.space == L.SHARED else "rt_global_place",
            site,
            addr,
            access,
        )
    slow, join = k.fresh("slow"), k.fresh("join")
    if access.space == L.SHARED:
        fast, label = _shared_fast(k, addr, access, slow)
    else:
        fast, label = _global_fast(k, site, addr, access, slow)
    k.go(join)
    k.place(slow)
    pointer = _call(k, "rt_place", site, addr, access)
    k.go(join)
    k.place(join)
    return k.let(f"phi ptr [ {fast}, %{label} ], [ {pointer}, %{slow} ]")


def _call(k: Kernel, name: str, site: int, addr: str, access: Access) -> str:
    flags = access.flags | access.space
    host = k.runtime(name, str(site), addr, str(access.size), str(flags))
    return k.let(f"inttoptr i64 {host} to ptr")


def _log2(size: int) -> int:
    return size.bit_length() - 1


def _shared_fast(k: Kernel, addr: str, access: Access, slow: str) -> tuple[str, str]:
    """Own shared memory. Loads also look at the shadow; stores mark it."""
    shift = _log2(access.size)
    off = k.let(f"sub i32 {k.let(f'trunc i64 {addr} to i32')}, %lo32")
    turned = k.let(f"call i32 @llvm.fshr.i32(i32 {off}, i32 {off}, i32 {shift})") if shift else off
    inside, good = k.fresh("inside"), k.fresh("fast")
    k.split(k.let(f"icmp ult i32 {turned}, %count{shift}"), inside, slow, likely=True)
    k.place(inside)
    wide = k.let(f"zext i32 {off} to i64")
    shadow = k.let(f"getelementptr i8, ptr %shadow, i64 {wide}")
    pointer = k.let(f"getelementptr i8, ptr %smem, i64 {wide}")
    bits = 8 * access.size
    if access.flags & L.LOAD:
        marks = k.let(f"load i{bits}, ptr {shadow}, align {access.size}")
        k.split(k.let(f"icmp eq i{bits} {marks}, -1"), good, slow, likely=True)
        k.place(good)
        inside = good
    if access.flags & L.STORE:
        k.do(f"store i{bits} -1, ptr {shadow}, align {access.size}")
    return pointer, inside


def _global_fast(k: Kernel, site: int, addr: str, access: Access, slow: str) -> tuple[str, str]:
    """The buffer that this instruction hit last."""
    shift = _log2(access.size)
    cell = k.at("%sites", 16 * site)
    low = k.let(f"load i64, ptr {cell}")
    count = k.let(f"load i64, ptr {k.at(cell, 8)}")
    off = k.let(f"sub i64 {addr}, {low}")
    turned = k.let(f"call i64 @llvm.fshr.i64(i64 {off}, i64 {off}, i64 {shift})") if shift else off
    inside = k.fresh("inside")
    k.split(k.let(f"icmp ult i64 {turned}, {count}"), inside, slow, likely=True)
    k.place(inside)
    return k.let(f"inttoptr i64 {addr} to ptr"), inside


def _param(k: Kernel, instr: Instr, addr: str, access: Access) -> str:
    if access.flags & L.STORE:
        raise Unsupported(instr, "store to a parameter")
    if addr.isdigit():
        if int(addr) + access.size > k.entry.param_bytes or int(addr) % access.size:
            raise Unsupported(instr, "outside the parameters")
        return k.let(f"getelementptr i8, ptr %params, i64 {addr}")
    return _call(k, "rt_place", k.site(instr), addr, access)


def _local(k: Kernel, instr: Instr, addr: str, access: Access) -> str:
    """Local memory lies behind the frame, whose size is known only at the end: `%local` is set in the prologue."""
    off = k.let(f"and i64 {addr}, 4294967295")
    room = k.placed.local_bytes - access.size
    slow, good = k.fresh("slow"), k.fresh("fast")
    low = k.let(f"and i64 {off}, {access.size - 1}")
    fits = k.let(f"icmp sle i64 {off}, {room}")
    both = k.let(f"and i1 {fits}, {k.let(f'icmp eq i64 {low}, 0')}")
    k.split(both, good, slow, likely=True)
    k.place(slow)
    k.check(
        k.runtime(
            "rt_access", str(k.site(instr)), addr, str(access.size), str(access.size), str(L.LOCAL)
        )
    )
    k.go("fault")
    k.place(good)
    return k.let(f"getelementptr i8, ptr %local, i64 {off}")
