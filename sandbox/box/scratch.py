"""Scratch folders for boxes without a mount namespace: made private, measured while hostile code fills them, removed.

In the strict tier the scratch folder is a sized tmpfs inside the box and nothing of this is used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

from sandbox.box import procfs, uids

PREFIX = "kernelgen-box-"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make(uid: int) -> str:
    """A new empty folder of mode 0700 that belongs to `uid`."""
    _sweep()
    folder = tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-")
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
    """Remove `folder` and all below it: closed folders are opened, links not followed, any depth needs one descriptor.

    Call it only when no process of the box is left. Raises OSError when something cannot be removed.
    """
    if not os.path.isdir(folder):
        return
    fd = os.open(folder, FOLDER)
    try:
        # from `folder` down to fd: a name, and the folders in it that still stand
        pending = [("", _unlink_files(fd))]
        while True:
            name, below = pending[-1]
            if below:
                child = below.pop()
                fd = _move(fd, child)
                pending.append((child, _unlink_files(fd)))
                continue
            pending.pop()
            if not pending:
                break
            fd = _move(fd, "..")
            os.rmdir(name, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(folder)


def _unlink_files(fd: int) -> list[str]:
    """Remove all but folders from an open folder; returns the folders."""
    below = []
    if os.getuid():
        os.fchmod(fd, stat.S_IRWXU)
    with os.scandir(fd) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                below.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=fd)
    return below


def _move(fd: int, name: str) -> int:
    """The folder `name` of an open folder, which is closed when there is one."""
    try:
        found = os.open(name, FOLDER, dir_fd=fd)
    except PermissionError:
        os.chmod(name, stat.S_IRWXU, dir_fd=fd)
        found = os.open(name, FOLDER, dir_fd=fd)
    os.close(fd)
    return found


def _prefix() -> str:
    """Names the pid namespace: in another one the same number is another process, and /tmp may be shared."""
    return f"{PREFIX}{os.stat('/proc/self/ns/pid').st_ino}-"


@lru_cache(maxsize=1)
def _sweep() -> None:
    """Once a process: remove what boxes of a killed process left, if it is ours or of a uid that nobody has."""
    for folder in Path(tempfile.gettempdir()).glob(_prefix() + "*"):
        pid = folder.name.removeprefix(_prefix()).split("-")[0]
        try:
            owner = folder.lstat().st_uid
            unused = os.getuid() == 0 and owner in uids.RANGE and not procfs.owned_by(owner)
            if (
                pid.isdigit()
                and not Path(f"/proc/{pid}").exists()
                and (owner == os.getuid() or unused)
            ):
                wipe(str(folder))
        except OSError:
            continue  # another process sweeps, too, or it is not ours to remove
