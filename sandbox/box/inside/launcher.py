"""The last steps before a boxed program: limits, another uid, Landlock, seccomp, then exec. It never forks.

Runs as `python -I -S launcher.py JSON`, standard library only. The same file serves outside bubblewrap (limits, uid of
variant A, Landlock) and inside it (uid of variant B). A step that fails ends the launcher with status 97 and a line on
stderr: the program never runs with less than was asked for.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = (
    1,
    22,
    24,
    38,
    47,
)
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CAPABILITY_VERSION_3 = 0x20080522
FAILED = 97


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.syscall.restype = ctypes.c_long


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def die_with_parent(parent: int) -> None:
    """Asked for after the uid drop, which would clear it. The parent may have died before."""
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with the parent")
    if os.getppid() != parent:
        raise OSError(0, "the parent is gone")


def join_cgroups(files: list[str]) -> None:
    for name in files:
        with open(name, "w") as file:
            file.write(str(os.getpid()))


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        hard = (
            value + 1 if name == "CPU" else value
        )  # at the hard limit of it there is only SIGKILL
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))


def drop_uid(uid: int) -> None:
    """Become `uid` for good, without groups, capabilities or a way back."""
    libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)  # clear all; absent before Linux 4.3
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    header, none = struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    checked(libc.capset(header, none), "capset")  # the inheritable set survives a change of uid
    try:
        os.setresuid(0, 0, 0)
    except OSError:
        return
    raise OSError(0, "the uid drop can be undone")


def restrict(rules: dict[str, Any]) -> None:
    """Landlock. `handled`: [fs, net, scope] rights of the ABI; `paths`: [path, rights]; a missing path is skipped."""
    attributes = struct.pack("=QQQ", *rules["handled"])[: rules["size"]]
    ruleset = checked(libc.syscall(CREATE_RULESET, attributes, len(attributes), 0), "Landlock")
    for path, rights in rules["paths"]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            rights &= rules["file_rights"]
        rule = struct.pack("=Qi", rights, fd)
        checked(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule for {path}")
        os.close(fd)
    checked(libc.syscall(RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def load_filter(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    checked(libc.prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program), 0, 0), "seccomp")


def run(plan: dict[str, Any]) -> None:
    join_cgroups(plan.get("cgroups", []))
    set_limits(plan.get("rlimits", {}))
    if plan.get("uid") is not None:
        drop_uid(plan["uid"])
    if plan.get("parent"):
        die_with_parent(plan["parent"])
    if plan.get("no_new_privs"):
        checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if plan.get("chdir"):
        os.chdir(plan["chdir"])
    if plan.get("landlock"):
        restrict(plan["landlock"])
    if plan.get("filter"):
        load_filter(bytes.fromhex(plan["filter"]))
    os.execve(plan["argv"][0], plan["argv"], plan["env"])


if __name__ == "__main__":
    try:
        run(json.loads(sys.argv[1]))
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"box: {error}\n")
        sys.stderr.flush()
        os._exit(FAILED)
