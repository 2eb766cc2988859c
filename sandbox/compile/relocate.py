"""Which bytes of a launch's parameters are addresses: two recordings with different tensor addresses are compared.

Equal bytes are literals. A 64-bit word that names the same buffer and offset in both is a relocation. Bytes that no
instruction reads are cleared, since structs carry uninitialised padding. Any other difference is an error: it would
vary from run to run. Pure functions over untrusted bytes; nothing here runs code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.artifact import Buffer, Relocation
from sandbox.ptx import Entry, Param

# (base, stride): buffer i of the job lies at base + i * stride. The strides differ in size and sign, so a difference of
# two addresses is not the same in both recordings either. No window reaches the next: a buffer has at most 2^40 bytes.
SENTINELS = ((0x2100_0000_0000_0000, 1 << 41), (0x6F00_0000_0000_0000, -(3 << 40)))

# Bounded, so that hostile text cannot make the search quadratic: NVVM's own lines are far shorter.
_LOAD = (
    r"ld\.param(?:\.v([248]))?\.[a-z]+(\d+)[ \t][^;\[\n]{{0,256}}\[{name}_param_(\d+)(?:\+(\d+))?\]"
)


class Unstable(ValueError):
    """Parameters cannot be told apart into literals and addresses; the message says which and what to do."""


@dataclass(frozen=True)
class Block:
    """The parameter block of one launch, relocated words and unread bytes zero."""

    data: bytes
    relocations: tuple[Relocation, ...]


def block(
    entry: Entry,
    used: Sequence[frozenset[int]],
    raw: tuple[bytes, bytes],
    buffers: Sequence[Buffer],
) -> Block:
    """Build a launch's block from both recordings: bytes of all parameters, one after the other without gaps.

    Raises Unstable.
    """
    data = bytearray(entry.param_bytes)
    relocations: list[Relocation] = []
    at = 0
    for index, param in enumerate(entry.params):
        pair = tuple(r[at : at + param.size] for r in raw)
        at += param.size
        words = _Words(param, used[index], (pair[0], pair[1]), buffers)
        try:
            literal, found = words.split()
        except Unstable as error:
            raise Unstable(f"parameter {index} of kernel {entry.name[:120]}: {error}") from None
        data[param.offset : param.offset + param.size] = literal
        relocations += found
    return Block(bytes(data), tuple(relocations))


def read_bytes(entry: Entry, ptx: str) -> tuple[frozenset[int], ...]:
    """For each parameter, which of its bytes the kernel reads: all of them where that is not plain to see."""
    text = ptx[entry.start : entry.end]
    body = text[text.find("{") :]
    name = re.escape(entry.name)
    seen: dict[int, set[int]] = {}
    loads: dict[int, int] = {}
    for match in re.finditer(_LOAD.format(name=name), body):
        vector, bits, index, offset = match.groups()
        start = int(offset or 0)
        size = int(vector or 1) * int(bits) // 8
        seen.setdefault(int(index), set()).update(range(start, start + size))
        loads[int(index)] = loads.get(int(index), 0) + 1
    mentions: dict[int, int] = {}
    for index in re.findall(rf"{name}_param_(\d+)\b", body):
        mentions[int(index)] = mentions.get(int(index), 0) + 1
    named = len(re.findall(rf"{name}_param_\d+\b", text[: text.find("{")])) == len(entry.params)
    out = []
    for i, param in enumerate(entry.params):
        plain = named and mentions.get(i, 0) == loads.get(i, 0)
        out.append(frozenset(seen.get(i, ()) if plain else range(param.size)))
    return tuple(out)


def resolve(value: int, recording: int, buffers: Sequence[Buffer]) -> tuple[Buffer, int] | None:
    """The buffer whose window an address lies in, and the offset there; None outside of all."""
    base, stride = SENTINELS[recording]
    width = abs(stride)
    steps = (value - base) // width
    index = steps if stride > 0 else -steps
    if not 0 <= index < len(buffers):
        return None
    return buffers[index], value - (base + index * stride)


@dataclass(frozen=True)
class _Words:
    """One parameter in both recordings."""

    param: Param
    used: frozenset[int]
    raw: tuple[bytes, bytes]
    buffers: Sequence[Buffer]

    def split(self) -> tuple[bytes, list[Relocation]]:
        literal = bytearray(self.param.size)
        found = []
        for at in range(0, self.param.size, 8):
            first, second = (r[at : at + 8] for r in self.raw)
            relocation = self._relocation(at, first, second) if first != second else None
            if relocation:
                found.append(relocation)
                continue
            for i in range(len(first)):
                if at + i not in self.used:
                    continue
                if first[i] != second[i]:
                    raise Unstable(
                        f"byte {at + i} differs between two runs of the host code and is no address of a buffer; "
                        "pass tensors and compile-time constants, never pointers taken apart or host state"
                    )
                literal[at + i] = first[i]
        return bytes(literal), found

    def _relocation(self, at: int, first: bytes, second: bytes) -> Relocation | None:
        if len(first) != 8 or (self.param.offset + at) % 8:
            return None
        a = resolve(int.from_bytes(first, "little"), 0, self.buffers)
        b = resolve(int.from_bytes(second, "little"), 1, self.buffers)
        if a is None or b is None or a != b:
            return None
        buffer, addend = a
        if addend >= buffer.nbytes:
            if self.used.isdisjoint(range(at, at + 8)):
                return None
            raise Unstable(
                f"it points {addend} bytes into {buffer.name}, which has {buffer.nbytes}"
            )
        return Relocation(self.param.offset + at, buffer.name, addend)
