"""A node's artifacts on disk: the least recently used go when they become too many.

Content is verified by its readers (`sandbox.workers.parcel.held`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

MOST_BYTES = 8 << 30


def touch(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(folder)


def drop(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def prune(root: Path, most: int = MOST_BYTES) -> int:
    """Remove the folders used longest ago until the rest has at most `most` bytes; returns how many went."""
    found: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            with contextlib.suppress(OSError):
                size = sum(f.stat().st_size for f in folder.iterdir())
                found.append((folder.stat().st_mtime, size, folder))
    total, gone = sum(size for _, size, _ in found), 0
    for _, size, folder in sorted(found):
        if total <= most:
            break
        drop(folder)
        total -= size
        gone += 1
    return gone
