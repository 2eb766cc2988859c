"""PTX as text: which kernels a module has, what parameters they take, and one copy of kernels that are the same.

A splitter, not a parser: enough to capture, validate and lint. `sandbox.devices.cpu` has the full parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"^[ \t]*(?:\.visible[ \t]+|\.weak[ \t]+)?\.entry[ \t]+([\w$]+)", re.M)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s*(?:\.ptr\b[^,\[\)]*?)?\s+[\w$]+\s*(?:\[(\d+)\])?\s*(?=,|$)"
)
_ARCH = re.compile(r"^\.target\s+(\w+)", re.M)
# Labels and the (single) dynamic shared memory base carry the kernel's number in the module.
_NUMBERED = re.compile(r"(\$L__BB|\$L__tmp|\$L__func_begin|\$L__func_end|__dynamic_shmem__)\d+")
_VERSION = re.compile(r"^\.version\s+([\d.]+)", re.M)
_SILENT = re.compile(r'/\*.*?\*/|//[^\n]*|"[^"\n]*"', re.S)


class PtxError(ValueError):
    """The text is not PTX of the form that compilers emit."""


@dataclass(frozen=True)
class Param:
    """One kernel parameter: offset, size and alignment in bytes."""

    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class Entry:
    """A kernel: `start:end` is its text in the module, from `.visible .entry` to the closing brace."""

    name: str
    params: tuple[Param, ...]
    start: int
    end: int

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


def target(ptx: str) -> str:
    """The architecture of `.target`, such as `sm_90a`. Raises PtxError."""
    found = _ARCH.search(ptx)
    if not found:
        raise PtxError("no .target")
    return found[1]


def version(ptx: str) -> str:
    """The ISA version of `.version`, such as `9.4`. Raises PtxError."""
    found = _VERSION.search(ptx)
    if not found:
        raise PtxError("no .version")
    return found[1]


def bare(ptx: str) -> str:
    """The text without comments and strings, with single spaces where they or others stood."""
    return re.sub(r"\s+", " ", _SILENT.sub(" ", ptx))


def entries(ptx: str) -> tuple[Entry, ...]:
    """Every kernel in order of appearance. Raises PtxError for unbalanced braces or a parameter of unknown form."""
    out = []
    for match in _ENTRY.finditer(ptx):
        opening = ptx.find("{", match.end())
        header = ptx[match.end() : opening]
        if opening < 0:
            raise PtxError(f"kernel {match[1]} has no body")
        out.append(
            Entry(match[1], _params(header, match[1]), match.start(), _closing(ptx, opening) + 1)
        )
    if len({e.name for e in out}) != len(out):
        raise PtxError("two kernels of one name")
    return tuple(out)


def dedupe(ptx: str) -> tuple[str, dict[str, str]]:
    """Keep one of the kernels whose text differs in their own name only.

    Returns the shorter module and kept names by old name. The DSL emits a kernel for each launch, so a chain of equal
    layers would be assembled, linted and translated as often as it has layers.
    """
    kept: dict[str, str] = {}
    names: dict[str, str] = {}
    drop: list[Entry] = []
    for entry in entries(ptx):
        text = re.sub(
            re.escape(entry.name) + r"(?![0-9A-Za-z$])", "@", ptx[entry.start : entry.end]
        )
        text = _NUMBERED.sub(r"\1", text)
        first = kept.setdefault(text, entry.name)
        names[entry.name] = first
        if first != entry.name:
            drop.append(entry)
    for entry in reversed(drop):
        ptx = ptx[: entry.start] + ptx[entry.end :].lstrip("\n")
        ptx = re.sub(rf"^[ \t]*// \.globl\t{re.escape(entry.name)}\n+", "", ptx, flags=re.M)
    return ptx, names


def _params(header: str, kernel: str) -> tuple[Param, ...]:
    opening = header.find("(")
    if opening < 0:
        return ()
    body = header[opening + 1 : header.rindex(")")]
    out: list[Param] = []
    offset = 0
    for piece in filter(str.strip, body.split(",")):
        found = _PARAM.search(piece.strip())
        if not found:
            raise PtxError(f"kernel {kernel} has a parameter of unknown form: {piece.strip()[:80]}")
        item = int(found[3]) // 8
        size = int(found[4]) * item if found[4] else item
        align = int(found[1]) if found[1] else item
        offset = -(-offset // align) * align
        out.append(Param(offset, size, align))
        offset += size
    return tuple(out)


def _closing(ptx: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]|//[^\n]*|\"[^\"\n]*\"").finditer(ptx, opening):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    raise PtxError("a kernel body does not end")
