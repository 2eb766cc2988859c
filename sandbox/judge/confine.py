"""What a judging child gives up before it looks at an artifact, and what the verdict says about it.

The child is forked from a warm process, so it narrows itself (`sandbox.box.narrow`): no network, no capabilities, files
only as granted here, temporary files in a folder of its own. It can read the interpreter, the project's packages, the
artifacts of its job and the target's folder, write the judge's state folder, and use its GPU. `level` is how much of
that a device has been found to work under; the keeper steps down only before a GPU was ever proven, and visibly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sandbox.box import gpu, paths
from sandbox.box.narrow import Grant, narrow
from sandbox.jobs import JudgeJob

UNBOXED = {"tier": "none"}
"""Of a child that died before it could say."""
LEVELS = ("one gpu", "all gpus", "no file rules", "bare")
"""Landlock with the nodes of one GPU or of all; seccomp without Landlock; no new privileges alone."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_PROJECT = Path(__file__).resolve().parents[2]
_PACKAGES = ("sandbox", "targets")
_ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTHONPATH",
                "KERNELGEN_PTXAS", "KERNELGEN_NVDISASM", "KERNELGEN_CACHE", "KERNELGEN_CPU_CACHE",
                "OMP_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA_MODULE_LOADING")  # fmt: skip


@dataclass(frozen=True)
class Room:
    """What a child works with: its own folder for temporary files, the state folder, the GPU it was given, or several
    with commas (None for the cpu device), further folders that it may read, the level (an index of LEVELS),
    descriptors to keep, and folders of programs that it starts."""

    scratch: Path
    state: Path
    gpu: str | None = None
    read: tuple[Path, ...] = ()
    level: int = 0
    keep: tuple[int, ...] = ()
    run: tuple[Path, ...] = ()


def confine(parent: int, room: Room, talks: bool = False) -> dict[str, Any]:
    """Apply to this process, forked from `parent`. Returns the `isolation` entry of the judge for verdicts.

    `talks`: a tool will be started that speaks to its target over the loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    follows = libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    level = LEVELS[room.level]
    if level == "bare":
        locked = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        why = ["all else left out: the device did not open under it"]
        return {
            **UNBOXED,
            "no_new_privs": locked,
            "dies_with_parent": follows,
            "uid": os.getuid(),
            "missing": why,
        }
    _close_but(room.keep)
    _settle(room)
    done = narrow(grant(room), files=level != "no file rules", talks=talks)
    said = done.to_json() | {"dies_with_parent": follows, "private_tmp": True}
    return said if room.gpu is None else {**said, "devices": LEVELS[min(room.level, 1)]}


def _close_but(kept: tuple[int, ...]) -> None:
    """Nothing of the parent's stays open here: its client's pipe, locks, files. Standard streams stay."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with suppress(OSError):  # the descriptor of the listing itself is gone already
                os.close(fd)


def _settle(room: Room) -> None:
    """Home, temporary files and environment are the child's own."""
    kept = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
    here = str(room.scratch)
    os.environ.clear()
    os.environ.update(
        {**kept, "HOME": here, "TMPDIR": here, "USER": "judge", "CUDA_CACHE_DISABLE": "1"}
    )
    tempfile.tempdir = None  # asked anew: the parent's answer is another folder
    os.chdir(here)


def grant(room: Room) -> Grant:
    devices: tuple[Path, ...] = ()
    if room.gpu is not None:
        named = room.gpu.split(",") if room.level == 0 else [None]
        devices = tuple(dict.fromkeys(node for one in named for node in gpu.nodes_of(one)))
    caches = [
        Path(os.environ[k]) for k in ("KERNELGEN_CACHE", "KERNELGEN_CPU_CACHE") if os.environ.get(k)
    ]
    return Grant(
        run=(*_programs(), *room.run),
        read=room.read,
        names=(_PROJECT,),
        own=(room.scratch, room.state, *caches),
        devices=devices,
        limits=(("CORE", 0), ("FSIZE", gpu.LIMITS.file_bytes), ("NOFILE", gpu.LIMITS.files)),
    )


@cache
def _programs() -> tuple[Path, ...]:
    """The interpreter with its packages, the project's, what is on the module path, the assembler, driver libraries."""
    more = [_PROJECT / name for name in _PACKAGES]
    more += [p for p in map(Path, filter(None, sys.path)) if p != _PROJECT]
    for name in ("KERNELGEN_PTXAS", "KERNELGEN_NVDISASM"):
        more += [Path(os.environ[name]).resolve()] if name in os.environ else []
    more += [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]
    return tuple(paths.needed(Path(sys.executable), tuple(more)))


def folders_of(job: JudgeJob) -> tuple[Path, ...]:
    """What this job's child must read: its artifacts, the folder of a target that is a file, and a checkpoint."""
    found = [p for p in (job.artifact, job.incumbent, job.timeline) if p is not None]
    return tuple([*found, *_target_folders(job), *_weight_folders(job)])


def _target_folders(job: JudgeJob) -> Iterable[Path]:
    file, _, name = job.target.rpartition(":")
    return [Path(file).resolve().parent] if name and file.endswith(".py") else []


def _weight_folders(job: JudgeJob) -> Iterable[Path]:
    """`--weights`: real folders, as what a link points at is what is opened."""
    named = dict(job.options.get("extra") or {}).get("weights")
    folder = Path(str(named)) if named else None
    if folder is None or not folder.is_dir():
        return []
    return sorted({folder.resolve(), *(f.resolve().parent for f in folder.glob("*.safetensors"))})
