"""Reads safetensors files: an 8-byte length, a JSON header, raw data. Tensors are views of mapped files until sliced.

Only what a checkpoint on disk needs; nothing is downloaded and nothing written.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_HEADER = 100 << 20
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8,
    "I8": torch.int8,
}  # fmt: skip


class CheckpointError(ValueError):
    """The folder does not hold what was asked of it; the message says what is missing or odd."""


@dataclass(frozen=True)
class Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Folder:
    """All tensors of the *.safetensors files of a folder, by name. Keeps its files mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._mapped: dict[Path, mmap.mmap] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"no *.safetensors in {folder}")
        for file in files:
            self.entries.update(read_header(file))

    def get(self, name: str) -> Tensor:
        """A view of the file: copy it before it is changed."""
        e = self.entries[name]
        if e.file not in self._mapped:
            with e.file.open("rb") as f:
                self._mapped[e.file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype = DTYPES[e.dtype]
        count = (e.end - e.start) // dtype.itemsize
        if not count:
            return torch.empty(e.shape, dtype=dtype)
        raw = torch.frombuffer(
            self._mapped[e.file], dtype=torch.uint8, count=e.end - e.start, offset=e.start
        )
        if e.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).reshape(e.shape)


def read_header(file: Path) -> dict[str, Entry]:
    """Names to entries, each checked against the file's size. Raises CheckpointError."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(MOST_HEADER, size - 8):
            raise CheckpointError(f"{file.name} is no safetensors file: a header of {length} bytes")
        try:
            header: dict[str, Any] = json.loads(f.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file.name}: the header is no JSON: {error}") from error
    return {
        n: _entry(file, n, e, (8 + length, size)) for n, e in header.items() if n != "__metadata__"
    }


def _entry(file: Path, name: str, e: Any, at: tuple[int, int]) -> Entry:
    base, size = at
    try:
        shape = tuple(int(x) for x in e["shape"])
        start, end = (base + int(x) for x in e["data_offsets"])
        wanted = DTYPES[e["dtype"]].itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file.name}: {name} is described by {e!r}") from error
    for extent in shape:
        wanted *= extent
    if not base <= start <= end <= size or end - start != wanted or min(shape, default=0) < 0:
        raise CheckpointError(
            f"{file.name}: {name} has {end - start} bytes at {start}, not {wanted}"
        )
    return Entry(file, str(e["dtype"]), shape, start, end)
