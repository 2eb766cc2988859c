"""From a chosen isolation to the command that starts it: what the launcher does, what bubblewrap does, what is shown.

Pure functions of their arguments apart from looking at which paths exist; nothing is started here.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.box import bwrap, landlock, paths, seccomp
from sandbox.box.spec import BoxTier, Isolation, Spec

INSIDE = Path(__file__).parent / "inside"
LAUNCHER = INSIDE / "launcher.py"


@dataclass(frozen=True)
class Way:
    """One way to isolate on this machine. `drop`: the parent is root and the box gets another uid."""

    tier: BoxTier
    variant: str = ""
    drop: bool = False
    bwrap: bwrap.Bwrap | None = None
    nested: bool = False
    abi: int = 0


@dataclass(frozen=True)
class Wiring:
    """What exists for one box alone: its uid, result pipe, filter pipe, scratch folder and groups."""

    isolation: Isolation
    result_fd: int
    filter_fd: int
    scratch: str
    cgroups: tuple[str, ...] = ()


def command(spec: Spec, way: Way, wiring: Wiring) -> list[str]:
    """The launcher's command line; the rest is in its JSON argument."""
    plan: dict[str, Any] = {
        "cgroups": wiring.cgroups,
        "parent": os.getpid(),
        "rlimits": _rlimits(spec, way),
        "env": environment(spec, way, wiring),
        "argv": [str(spec.python), "-I", str(spec.worker), *spec.args],
    }
    if way.tier is BoxTier.STRICT:
        return _strict(plan, spec, way, wiring)
    plan["chdir"] = wiring.scratch
    if way.tier is not BoxTier.NONE:
        plan |= {"uid": wiring.isolation.uid if way.drop else None, "no_new_privs": True}
        plan["filter"] = seccomp.box_filter().hex()
    if way.tier is BoxTier.LANDLOCK:
        plan["landlock"] = landlock.rules(way.abi, shown(spec), wiring.scratch)
    return _launch(Path(sys.executable), plan)


def _strict(plan: dict[str, Any], spec: Spec, way: Way, wiring: Wiring) -> list[str]:
    """The launcher outside sets limits (A: and the uid), then bubblewrap; in B a second one inside drops the uid."""
    assert way.bwrap is not None
    box = bwrap.Box(way.bwrap.path, way.variant, wiring.filter_fd, way.nested)
    program: list[str] = plan["argv"]
    visible = shown(spec)
    if box.root:
        inner = {
            "uid": wiring.isolation.uid,
            "no_new_privs": True,
            "env": plan["env"],
            "argv": program,
        }
        program = _launch(spec.python, inner)
    else:
        plan["uid"] = wiring.isolation.uid if way.drop else None
    plan["argv"] = [*bwrap.arguments(box, spec, visible), *_setenv(plan["env"]), *program]
    plan["env"] = {}
    return _launch(Path(sys.executable), plan)


def shown(spec: Spec) -> list[Path]:
    return paths.needed(spec.python, (spec.worker, INSIDE, *spec.binds))


def environment(spec: Spec, way: Way, wiring: Wiring) -> dict[str, str]:
    """The whole environment inside the box: nothing of ours is inherited."""
    narrow = spec.narrow and way.tier is not BoxTier.NONE
    return {
        **spec.env,
        "PATH": "/usr/bin:/bin", "HOME": wiring.scratch, "TMPDIR": wiring.scratch, "USER": "box", "LANG": "C.UTF-8",
        "BOX_LIB": str(INSIDE), "BOX_RESULT_FD": str(wiring.result_fd),
        "BOX_ADDRESS_SPACE": str(spec.limits.address_space or 0),
        "BOX_FILTER": seccomp.compile_filter().hex() if narrow else "",
    }  # fmt: skip


def filters(spec: Spec, tier: BoxTier) -> int:
    """Seccomp programs that a worker of this spec ends up with, beside those that our own process has."""
    return 0 if tier is BoxTier.NONE else 2 if spec.narrow else 1


def _rlimits(spec: Spec, way: Way) -> dict[str, int]:
    limits = spec.limits
    out = {"CPU": limits.cpu_s, "FSIZE": limits.file_bytes, "NOFILE": limits.files, "CORE": 0}
    if way.drop:
        # Counts all processes of a uid: under the user's own it would count the user's, for uid 0 it does nothing.
        out["NPROC"] = limits.processes
    return out


def _setenv(env: dict[str, str]) -> list[str]:
    return [word for name, value in env.items() for word in ("--setenv", name, value)]


def _launch(python: Path, plan: dict[str, Any]) -> list[str]:
    return [str(python), "-I", "-S", str(LAUNCHER), json.dumps(plan)]
