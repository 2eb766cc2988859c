"""Scratch folders for boxes without a mount namespace: made private, measured while hostile code fills them, removed.

In the strict tier the scratch folder is a sized tmpfs inside the box and nothing of this is used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def make(uid: int) -> str:
    """A new empty folder of mode 0700 that belongs to `uid`."""
    folder = tempfile.mkdtemp(prefix="kernelgen-box-")
    if uid != os.getuid():
        os.chown(folder, uid, uid)
    return folder


def measure(folder: str, most_bytes: int, most_entries: int) -> tuple[int, int]:
    """Bytes on disk and entries below `folder`; stops counting past either limit. Links are not followed."""
    size = entries = 0
    pending = [folder]
    while pending and size <= most_bytes and entries <= most_entries:
        try:
            with os.scandir(pending.pop()) as found:
                for entry in found:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if size > most_bytes or entries > most_entries:
                        break
        except FileNotFoundError:
            continue
        except OSError as error:
            # A path too long to open, or a folder that its owner closed to us: neither has an honest use here.
            if error.errno is not None:
                return size, most_entries + 1
    return size, entries


def wipe(folder: str) -> None:
    """Remove `folder` and all below it, however deep; folders are lifted to the top one by one, so depth costs nothing.

    Call it only when no process of the box is left. Raises OSError when something cannot be removed.
    """
    if not os.path.isdir(folder):
        return
    serial = 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, stat.S_IRWXU)
            for below in list(os.scandir(entry.path)):
                if below.is_dir(follow_symlinks=False):
                    os.chmod(below.path, stat.S_IRWXU)
                    serial += 1
                    os.rename(below.path, Path(folder) / f"..lifted{serial}")
                else:
                    os.unlink(below.path)
            os.rmdir(entry.path)
    os.rmdir(folder)
