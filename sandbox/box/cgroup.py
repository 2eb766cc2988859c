"""Control groups of one box, where this process may make them: memory and process limits, and one-blow kill.

Version 2 with delegated controllers, else version 1; a version 2 group without controllers still kills whole trees.
Where nothing is writable the watchdog of `sandbox.box.guard` does the limiting.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from sandbox.box.spec import Limits

PREFIX = "kernelgen-box-"
_numbers = itertools.count()


@dataclass
class Groups:
    """The folders of one box's groups. `memory` says which version limits memory, or ""."""

    folders: list[Path] = field(default_factory=list)
    memory: str = ""

    @property
    def entries(self) -> list[str]:
        """Files to which the box's first process writes its pid."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def kill(self) -> None:
        for folder in self.folders:
            _write(folder / "cgroup.kill", "1")

    def members(self) -> list[int]:
        """Processes in any of the groups, zombies included."""
        found: set[int] = set()
        for folder in self.folders:
            found.update(map(int, _read(folder / "cgroup.procs").split()))
        return sorted(found)

    def out_of_memory(self) -> bool:
        """Whether the kernel killed something in the box for its memory limit."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                match = re.search(r"^oom_kill (\d+)", _read(folder / name), re.MULTILINE)
                if match and int(match[1]):
                    return True
        return False

    def remove(self, wait_s: float = 2.0) -> None:
        """Remove the empty groups; the kernel needs a moment after the last process has gone."""
        until = time.monotonic() + wait_s
        while self.folders:
            self.folders = [folder for folder in self.folders if not _remove(folder)]
            if time.monotonic() > until:
                return
            if self.folders:
                time.sleep(0.002)


def make(limits: Limits) -> Groups:
    """Groups with the limits set, as many as this machine grants; empty where it grants none."""
    groups = Groups()
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    memory = {
        "memory.max": limits.memory, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": limits.processes,
    }  # fmt: skip
    unified = _make_unified(name)
    if unified is not None:
        groups.folders.append(unified)
        for file, value in memory.items():
            _write(unified / file, str(value))
        if _read(unified / "memory.max").strip() == str(limits.memory):
            groups.memory = "cgroup v2"
    if groups.memory:
        return groups
    for controller, files in (
        ("memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),
        ("pids", ("pids.max",)),
    ):
        folder = next((f for p in _places(controller) if (f := _make(p / name))), None)
        if folder is None:
            continue
        groups.folders.append(folder)
        value = limits.processes if controller == "pids" else limits.memory
        set_ok = [_write(folder / file, str(value)) for file in files]
        if controller == "memory" and set_ok[0]:
            groups.memory = "cgroup v1"
    return groups


def _make_unified(name: str) -> Path | None:
    """A version 2 group, with the memory controller if any place grants it."""
    spare: Path | None = None
    for place in _places(""):
        # a move needs write access to the common ancestor, which is `place` for a child and for a sibling of ours
        folder = _make(place / name) if os.access(place / "cgroup.procs", os.W_OK) else None
        if folder is None:
            continue
        if (folder / "memory.max").exists():
            if spare is not None:
                _remove(spare)
            return folder
        if spare is None:
            spare = folder
        else:
            _remove(folder)
    return spare


def _places(controller: str) -> list[Path]:
    """Folders in which a group could be made: this process's own group, then its parent. "" means version 2."""
    own = None
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers == "" and controller == "") or controller in controllers.split(",") != [""]:
            own = path
    mount = _mount(controller)
    if own is None or mount is None:
        return []
    root, point = mount
    relative = own[len(root) :] if root != "/" and own.startswith(root) else own
    folder = Path(point) / relative.strip("/")
    places = [folder] if folder == Path(point) else [folder, folder.parent]
    for place in places:
        _sweep(place)
    return places


def _mount(controller: str) -> tuple[str, str] | None:
    """Root inside the hierarchy and mount point of a controller's hierarchy."""
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        fields = left.split()
        if kind == "cgroup2" and not controller:
            return fields[3], fields[4]
        if kind == "cgroup" and controller and controller in options.split(","):
            return fields[3], fields[4]
    return None


@lru_cache(maxsize=8)
def _sweep(place: Path) -> None:
    """Once a process: remove groups that killed processes of ours left here or one level below."""
    for folder in (*place.glob(PREFIX + "*"), *place.glob(f"*/{PREFIX}*")):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove(folder)


def _make(folder: Path) -> Path | None:
    try:
        folder.mkdir()
        return folder
    except OSError:
        return None


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
        return True
    except OSError:
        return False
