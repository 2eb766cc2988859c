"""Lowering of mov, and of vectors packed into a register and unpacked from one.

Loads and stores are in `lower_memory`.
"""

from __future__ import annotations

from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import BITS, Kernel
from sandbox.devices.cpu.ptx_ast import Instr, Sym, Vec
from sandbox.devices.cpu.registry import lowers


@lowers("mov", "mov.type, vectors packed and unpacked too")
def mov(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    kind = m.kind()
    m.end()
    dest, source = instr.operands
    if kind == "pred":
        k.write(dest, 1, k.flag(source, instr), instr)
        return
    bits = BITS[kind]
    if isinstance(dest, Vec):
        _unpack(k, instr, dest, k.word(source, bits, instr), bits)
    elif isinstance(source, Vec):
        k.write(dest, bits, _pack(k, instr, source, bits), instr)
    else:
        if isinstance(source, Sym) and source.name in k.params and bits != 64:
            raise Unsupported(instr, "address of a parameter")
        k.write(dest, bits, k.word(source, bits, instr), instr)


def _unpack(k: Kernel, instr: Instr, dest: Vec, value: str, bits: int) -> None:
    part = bits // len(dest.items)
    for i, d in enumerate(dest.items):
        piece = k.let(f"lshr i{bits} {value}, {i * part}") if i else value
        k.write(d, part, k.resize(piece, bits, part), instr)


def _pack(k: Kernel, instr: Instr, source: Vec, bits: int) -> str:
    part = bits // len(source.items)
    value = ""
    for i, s in enumerate(source.items):
        piece = k.resize(k.word(s, part, instr), part, bits)
        if i:
            piece = k.let(f"shl i{bits} {piece}, {i * part}")
        value = k.let(f"or i{bits} {value}, {piece}") if value else piece
    return value
