"""Frames: the only way out of a box. Four bytes of length, a JSON header of at most 1 MB, then raw blocks.

The header declares the blocks' names and sizes, `Caps` bounds them before a byte of them is read. Everything here
is form: what a body means is checked by its reader (`sandbox.strict`). Nothing waits for end of file or is unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox import strict
from sandbox.box.inside.boxed import encode
from sandbox.strict import Malformed

__all__ = ["Broken", "Caps", "Frame", "Reader", "Reason", "encode"]

MAX_HEADER = 1 << 20

# timeout: the deadline passed. closed: the worker ended or closed the pipe before a whole frame. malformed, oversized:
# the frame breaks the format or the caps. memory, processes, disk, output: a limit of the box was passed.
# box: ours, before or after the candidate (could not start, verify or send).
Reason = Literal[
    "timeout", "closed", "malformed", "oversized", "memory", "processes", "disk", "output", "box"
]


@dataclass(frozen=True)
class Broken:
    """Why there is no frame. `detail` is a clean sentence of ours, never text from the box."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Frame:
    body: dict[str, Any]
    blocks: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Caps:
    """Largest sum of bytes over all blocks of a kind; a block's kind is its name up to the first dot."""

    kinds: Mapping[str, int] = field(default_factory=dict)
    header: int = MAX_HEADER
    count: int = 1024


class Reader:
    """Turns bytes into frames. `feed` what arrived; `next` gives a frame, None for more bytes, or raises Malformed."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 4
        self._header: tuple[dict[str, Any], list[tuple[str, int]]] | None = None
        self._length: int | None = None

    @property
    def wanted(self) -> int:
        """Bytes still missing for the next step: the most that is worth reading now."""
        return max(0, self._need - self._have)

    def feed(self, data: bytes) -> None:
        self._parts.append(data)
        self._have += len(data)

    def next(self) -> Frame | None:
        while self._have >= self._need:
            frame = self._step(self._take(self._need))
            if frame is not None:
                return frame
        return None

    def _take(self, size: int) -> bytes:
        data = b"".join(self._parts)
        self._parts = [data[size:]] if len(data) > size else []
        self._have = len(data) - size
        return data[:size]

    def _step(self, data: bytes) -> Frame | None:
        if self._length is None:
            (self._length,) = struct.unpack(">I", data)
            if not 0 < self._length <= self._caps.header:
                raise Oversized("frame", f"declares a header of {self._length} bytes")
            self._need = self._length
            return None
        if self._header is None:
            body, sizes = read_header(data, self._caps)
            self._header, self._need = (body, sizes), sum(size for _, size in sizes)
            return None
        body, sizes = self._header
        blocks, at = {}, 0
        for name, size in sizes:
            blocks[name] = data[at : at + size]
            at += size
        self._length, self._header, self._need = None, None, 4
        return Frame(body, blocks)


class Oversized(Malformed):
    """A frame that declares more than the caps allow."""


def read_header(data: bytes, caps: Caps) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Body and declared blocks of a header. Raises Malformed, or Oversized past a cap."""
    header = strict.keys(strict.parse(data, "frame", caps.header), "frame", {"body", "blocks"})
    if not isinstance(header["body"], dict):
        raise Malformed("frame.body", "is no object")
    sizes: list[tuple[str, int]] = []
    totals: dict[str, int] = {}
    for item in strict.items(header["blocks"], "frame.blocks", caps.count):
        pair = strict.items(item, "frame.blocks", 2)
        if len(pair) != 2:
            raise Malformed("frame.blocks", "has an entry that is not [name, size]")
        name = strict.name(pair[0], "frame.blocks")
        size = strict.integer(pair[1], f"frame.blocks.{name}", 0, 1 << 40)
        kind = name.split(".", 1)[0]
        if kind not in caps.kinds:
            raise Malformed("frame.blocks", f"has the unknown kind {kind}")
        totals[kind] = totals.get(kind, 0) + size
        if totals[kind] > caps.kinds[kind]:
            raise Oversized(f"frame.blocks.{kind}", f"has more than {caps.kinds[kind]} bytes")
        sizes.append((name, size))
    if len(dict(sizes)) != len(sizes):
        raise Malformed("frame.blocks", "has two blocks of one name")
    return header["body"], sizes
