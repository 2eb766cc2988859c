"""The seccomp programs, built as classic BPF without a library.

`box_filter` goes on everything in a box: no socket but AF_UNIX, no namespaces, mounts, tracing, io_uring, keyrings
or kernel settings. `compile_filter` goes on top where no GPU is needed: no fork, exec, signal, memory file or link.
`judge_filter` is the box filter without connections.
What is not named is allowed, so neither guards files: that is for namespaces or Landlock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from sandbox.box import syscalls

EPERM, ENOSYS, EAFNOSUPPORT, ECONNREFUSED = 1, 38, 97, 111
KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, JUMP, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x05, 0x15, 0x25, 0x45, 0x06
NR, ARCH, ARGS = 0, 4, 16

AF_UNIX = 1
CLONE_THREAD = 0x00010000
# mount, cgroup, uts, ipc, user, pid and network namespaces
CLONE_NEW = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15

BOX = """
    io_uring_setup io_uring_enter io_uring_register unshare setns mount umount2 pivot_root chroot fsopen fsconfig
    fsmount fspick move_mount open_tree open_tree_attr mount_setattr mknod mknodat open_by_handle_at
    name_to_handle_at quotactl quotactl_fd swapon swapoff acct
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd kcmp bpf perf_event_open
    userfaultfd keyctl add_key request_key shmget semget msgget mq_open personality seccomp
    sched_setscheduler sched_setattr sched_setparam syslog iopl ioperm modify_ldt uselib lookup_dcookie nfsservctl
    init_module finit_module delete_module kexec_load kexec_file_load reboot vhangup
    settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname
""".split()
COMPILE = """
    fork vfork execve execveat socket socketpair connect bind memfd_create memfd_secret
    kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal prctl setsid setpgid
    symlink symlinkat link linkat inotify_init inotify_init1 fanotify_init setpriority sched_setaffinity ioprio_set
    io_setup timer_create mbind set_mempolicy set_mempolicy_home_node move_pages migrate_pages
""".split()


@dataclass(frozen=True)
class When:
    """Refuse `call` if argument `index` (its low 32 bits) has the relation `test` to `value`, or if not (`negate`)."""

    call: str
    index: int
    test: int
    value: int
    errno: int = EPERM
    negate: bool = False


# fcntl and ioctl: a terminal that is fed input, and SIGIO aimed at another process with a chosen signal (which is a
# kill without the kill system call). prlimit64: the limits of other processes of the same uid.
BOX_WHEN = (
    When("socket", 0, EQUAL, AF_UNIX, EAFNOSUPPORT, negate=True),
    When("clone", 0, ANY_BIT, CLONE_NEW),
    When("ioctl", 1, EQUAL, TIOCSTI),
    When("ioctl", 1, EQUAL, TIOCLINUX),
)
NOBODY_LISTENS = When("connect", 2, EQUAL, 0, ECONNREFUSED, negate=True)
COMPILE_WHEN = (
    When("clone", 0, ANY_BIT, CLONE_THREAD, negate=True),
    When("fcntl", 1, EQUAL, F_SETOWN),
    When("fcntl", 1, EQUAL, F_SETSIG),
    When("fcntl", 1, EQUAL, F_SETOWN_EX),
    When("prlimit64", 0, EQUAL, 0, negate=True),
)


def supported(arch: str | None = None) -> bool:
    return (arch or syscalls.machine()) in syscalls.AUDIT_ARCH


@lru_cache(maxsize=4)
def box_filter(arch: str | None = None) -> bytes:
    """Packed `struct sock_filter`s for everything in a box. Raises KeyError on an unknown architecture."""
    return _program(arch or syscalls.machine(), BOX, BOX_WHEN)


@lru_cache(maxsize=4)
def compile_filter(arch: str | None = None) -> bytes:
    """The stricter program of the compile jail; it includes the box filter's refusals."""
    return _program(arch or syscalls.machine(), BOX + COMPILE, COMPILE_WHEN + BOX_WHEN)


@lru_cache(maxsize=4)
def judge_filter(arch: str | None = None) -> bytes:
    """The box filter, and no socket is ever connected: for a judge's process, which may start programs. A GPU driver
    binds one of its own and looks for daemons; to it they are not running."""
    return _program(arch or syscalls.machine(), BOX, (*BOX_WHEN, NOBODY_LISTENS))


@lru_cache(maxsize=4)
def tool_filter(arch: str | None = None) -> bytes:
    """The box filter, but sockets are allowed: for a profiling tool that talks to its target over the loopback."""
    kept = tuple(w for w in BOX_WHEN if w.call != "socket")
    return _program(arch or syscalls.machine(), BOX, kept)


def _program(arch: str, refused: Iterable[str], conditions: Iterable[When]) -> bytes:
    """Architecture check, unknown calls, conditions, then one run of equal tests into a shared refusal."""
    numbers = [n for name in refused if (n := syscalls.number(name, arch)) is not None]
    code = [
        _op(LOAD, ARCH),
        _op(EQUAL, syscalls.AUDIT_ARCH[arch], 1, 0),
        _op(RETURN, KILL_PROCESS),
        _op(LOAD, NR),
        # also every x32 call: their numbers have bit 30 set
        _op(GREATER, syscalls.LAST_REVIEWED, 0, 1),
        _op(RETURN, ERRNO | ENOSYS),
        # its flags lie in memory, where a filter cannot look; libc falls back to clone
        _op(EQUAL, _known("clone3", arch), 0, 1),
        _op(RETURN, ERRNO | ENOSYS),
    ]
    for condition in conditions:
        code += _condition(condition, arch)
    for position, number in enumerate(numbers):
        code.append(_op(EQUAL, number, len(numbers) - position, 0))
    code += [_op(RETURN, ALLOW), _op(RETURN, ERRNO | EPERM)]
    return b"".join(code)


def _condition(when: When, arch: str) -> list[bytes]:
    hit, miss = (1, 0) if when.negate else (0, 1)
    return [
        _op(EQUAL, _known(when.call, arch), 0, 4),
        _op(LOAD, ARGS + 8 * when.index),
        _op(when.test, when.value, hit, miss),
        _op(RETURN, ERRNO | when.errno),
        _op(LOAD, NR),
    ]


def _known(name: str, arch: str) -> int:
    number = syscalls.number(name, arch)
    if number is None:
        raise KeyError(f"{name} on {arch}")
    return number


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
