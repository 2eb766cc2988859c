"""The device nodes of one GPU, which are all that a judging process may open of the devices, and its limits.

Limits of GPU memory are not made here: no group knows it, so the judge watches it per process.
"""

from __future__ import annotations

import re
from pathlib import Path

from sandbox.box.spec import GB, Limits

PROC = Path("/proc/driver/nvidia/gpus")
SHARED_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")

# No address space limit: CUDA reserves a multiple of the device's memory. The driver's own descriptors need more than a
# compile does.
LIMITS = Limits(address_space=None, file_bytes=4 * GB, files=8192)


def nodes(minor: int, dev: Path = Path("/dev")) -> tuple[Path, ...]:
    """Device nodes of the GPU with that minor number, as far as they exist.

    They must exist before the box starts: the set-uid helper that makes them is without force inside.
    """
    names = (f"nvidia{minor}", *SHARED_NODES)
    return tuple(dev / name for name in names if (dev / name).exists())


def nodes_of(visible: str | None, dev: Path = Path("/dev"), proc: Path = PROC) -> tuple[Path, ...]:
    """Nodes of the GPU that CUDA_VISIBLE_DEVICES names (an index in bus order or a UUID); of all where `visible` is
    None or nothing tells which it is."""
    minors = _minors(proc)
    minor = None
    if visible is not None and visible.isdigit() and int(visible) < len(minors):
        minor = minors[int(visible)][1]
    elif visible is not None:
        found = [
            m
            for uuid, m in minors
            if uuid == visible or (visible[:4] == "GPU-" and uuid.startswith(visible))
        ]
        minor = found[0] if len(found) == 1 else None
    if minor is not None and (dev / f"nvidia{minor}").exists():
        return nodes(minor, dev)
    every = sorted(p for p in dev.glob("nvidia*") if p.name.removeprefix("nvidia").isdigit())
    return (*every, *(dev / n for n in SHARED_NODES if (dev / n).exists()))


def _minors(proc: Path) -> list[tuple[str, int]]:
    """(UUID, device minor) of each GPU in bus order, as the driver lists them; empty where it does not."""
    found = []
    for folder in sorted(proc.glob("*")):
        try:
            text = (folder / "information").read_text(errors="replace")
        except OSError:
            return []
        uuid, minor = (
            re.search(r"GPU UUID:\s*(\S+)", text),
            re.search(r"Device Minor:\s*(\d+)", text),
        )
        if uuid is None or minor is None:
            return []
        found.append((uuid[1], int(minor[1])))
    return found
