"""What a cubin of ours needs and keeps, read from its ELF tables: undefined functions and module variables.

PTX text can be dressed up so that a search in it finds nothing; the assembler's output cannot. Reads symbol and section
tables only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SYMBOLS = 2
_FUNCTION, _SECTION_SYMBOL, _FILE = 2, 3, 4
_VARIABLES = (".nv.global",)


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int
    entry: int


class NotElf(ValueError):
    """The bytes are no 64-bit little-endian ELF file with sane tables."""


def sections(cubin: bytes) -> tuple[Section, ...]:
    """All sections by index. Raises NotElf."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise NotElf("no 64-bit little-endian ELF")
    try:
        (start,) = struct.unpack_from("<Q", cubin, 0x28)
        size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
        rows = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]
        table = rows[names]
        return tuple(
            Section(_text(cubin, table[4] + r[0]), r[1], r[4], r[5], r[6], r[9]) for r in rows
        )
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise NotElf(str(error)) from error


def undefined(cubin: bytes) -> tuple[str, ...]:
    """Names that the driver would have to supply: functions of the device runtime. Raises NotElf."""
    return tuple(sorted({name for name, _, where in _symbols(cubin) if name and where == 0}))


def variables(cubin: bytes) -> tuple[str, ...]:
    """Sections of module-scope variables in global memory that are not empty. Raises NotElf."""
    return tuple(s.name for s in sections(cubin) if s.name.startswith(_VARIABLES) and s.size > 0)


def _symbols(cubin: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, type, section index) of every symbol that names code or data."""
    found = sections(cubin)
    try:
        for s in found:
            if s.kind != _SYMBOLS or s.entry < 24:
                continue
            strings = found[s.link].offset
            for at in range(s.offset, s.offset + s.size - s.entry + 1, s.entry):
                name, info, _, where = struct.unpack_from("<IBBH", cubin, at)
                if info & 15 not in (_SECTION_SYMBOL, _FILE):
                    yield _text(cubin, strings + name), info & 15, where
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise NotElf(str(error)) from error


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode("ascii", "replace")
