"""The filters, run by a small interpreter of classic BPF: every call on both architectures, without making one."""

from __future__ import annotations

import struct

import pytest

from sandbox.box import seccomp, syscalls
from sandbox.box.seccomp import BOX, COMPILE, box_filter, compile_filter

ALLOWED, KILLED = "allow", "kill"
ARCHES = ("x86_64", "aarch64")
AF_UNIX, AF_INET, AF_VSOCK = 1, 2, 40
THREAD = 0x003D0F00  # what glibc's pthread_create passes
FORK = 0x01200011  # and its fork


def decide(code: bytes, arch: str, number: int, *arguments: int) -> str | int:
    """What the kernel would do with this call: ALLOWED, KILLED or an error number."""
    data = struct.pack("=iIQ6Q", number if number < 1 << 31 else number - (1 << 32), syscalls.AUDIT_ARCH[arch], 0,
                       *arguments, *[0] * (6 - len(arguments)))  # fmt: skip
    program = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    value = at = 0
    while True:
        op, if_true, if_false, k = program[at]
        at += 1
        if op == seccomp.LOAD:
            (value,) = struct.unpack_from("=I", data, k)
        elif op == seccomp.RETURN:
            return {seccomp.ALLOW: ALLOWED, seccomp.KILL_PROCESS: KILLED}.get(k, k & 0xFFFF)
        else:
            test = {
                seccomp.EQUAL: value == k,
                seccomp.GREATER: value > k,
                seccomp.ANY_BIT: bool(value & k),
            }[op]
            at += if_true if test else if_false


def call(code: bytes, arch: str, name: str, *arguments: int) -> str | int:
    number = syscalls.number(name, arch)
    assert number is not None
    return decide(code, arch, number, *arguments)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_named_call_is_refused(arch: str) -> None:
    for code, names in ((box_filter(arch), BOX), (compile_filter(arch), BOX + COMPILE)):
        for name in names:
            if syscalls.number(name, arch) is not None and name != "socket":
                assert call(code, arch, name) == seccomp.EPERM, name


@pytest.mark.parametrize("arch", ARCHES)
def test_the_box_filter_leaves_what_a_gpu_driver_and_a_tool_need(arch: str) -> None:
    code = box_filter(arch)
    for name in (
        "memfd_create",
        "execve",
        "kill",
        "prctl",
        "ioctl",
        "socketpair",
        "connect",
        "mbind",
        "set_mempolicy",
    ):
        assert call(code, arch, name) == ALLOWED, name
    assert call(code, arch, "clone", FORK) == ALLOWED


@pytest.mark.parametrize("arch", ARCHES)
def test_sockets_by_family(arch: str) -> None:
    for family in (AF_INET, AF_VSOCK, 10, 16, 17, 38, 0, AF_UNIX + (1 << 31)):
        assert call(box_filter(arch), arch, "socket", family) == seccomp.EAFNOSUPPORT, family
    assert call(box_filter(arch), arch, "socket", AF_UNIX) == ALLOWED
    # the kernel takes an int: the upper half of the register must not hide the family
    assert call(box_filter(arch), arch, "socket", (1 << 32) + AF_UNIX) == ALLOWED
    assert call(box_filter(arch), arch, "socket", (1 << 32) + AF_INET) == seccomp.EAFNOSUPPORT
    assert call(compile_filter(arch), arch, "socket", AF_UNIX) == seccomp.EPERM


@pytest.mark.parametrize("arch", ARCHES)
def test_threads_but_no_processes_and_no_namespaces(arch: str) -> None:
    narrow, wide = compile_filter(arch), box_filter(arch)
    assert call(narrow, arch, "clone", THREAD) == ALLOWED
    assert call(narrow, arch, "clone", FORK) == seccomp.EPERM
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert call(wide, arch, "clone", FORK | flag) == seccomp.EPERM, hex(flag)
        assert call(narrow, arch, "clone", THREAD | flag) == seccomp.EPERM, hex(flag)
    # libc tries it first, and falls back to clone only when it does not exist
    assert call(wide, arch, "clone3") == call(narrow, arch, "clone3") == seccomp.ENOSYS


@pytest.mark.parametrize("arch", ARCHES)
def test_signals_by_input_and_terminals(arch: str) -> None:
    narrow, wide = compile_filter(arch), box_filter(arch)
    for command in (8, 10, 15):
        assert call(narrow, arch, "fcntl", 3, command) == seccomp.EPERM
    assert call(narrow, arch, "fcntl", 3, 4) == ALLOWED
    for request in (0x5412, 0x541C):
        assert call(wide, arch, "ioctl", 0, request) == seccomp.EPERM
    assert call(narrow, arch, "prlimit64", 0) == ALLOWED
    assert call(narrow, arch, "prlimit64", 4711) == seccomp.EPERM


def test_other_ways_into_the_kernel() -> None:
    for code in (box_filter("x86_64"), compile_filter("x86_64")):
        assert decide(code, "aarch64", 198) == KILLED
        assert decide(code, "x86_64", 0x40000000 + 41, AF_INET) == seccomp.ENOSYS
        assert decide(code, "x86_64", 0xFFFFFFFF) == seccomp.ENOSYS
        assert decide(code, "x86_64", syscalls.LAST_REVIEWED + 1) == seccomp.ENOSYS
    assert decide(box_filter("aarch64"), "x86_64", 41) == KILLED


@pytest.mark.parametrize("arch", ARCHES)
def test_everyday_calls_pass(arch: str) -> None:
    everyday = {
        "x86_64": (0, 1, 2, 3, 9, 10, 11, 12, 14, 60, 186, 202, 228, 231, 257, 262, 318, 334),
        "aarch64": (56, 57, 63, 64, 79, 93, 94, 98, 113, 134, 178, 214, 215, 222, 226, 278),
    }  # read, write, open, mmap, futex, exit, clocks, getrandom ...
    for number in everyday[arch]:
        assert decide(compile_filter(arch), arch, number) == ALLOWED, number


def test_programs_fit_the_kernel() -> None:
    for arch in ARCHES:
        assert len(compile_filter(arch)) // 8 <= 4096
        assert len(compile_filter(arch)) % 8 == 0


def test_an_unknown_architecture_is_an_error() -> None:
    assert not seccomp.supported("riscv64")
    with pytest.raises(KeyError):
        box_filter("riscv64")
