"""The worker's side of a box: narrow this process, say READY, receive jobs, send results.

Standard library only and one file, because it runs inside the box, where the project does not exist:

    sys.path.insert(0, os.environ["BOX_LIB"])
    import boxed
    boxed.narrow()                      # after the heavy imports: compile filter and RLIMIT_AS
    boxed.ready({"versions": {...}})
    body, blocks = boxed.receive()
    boxed.send({"status": "done"}, {"ptx.step": b"..."})

Nothing here protects the worker from the candidate that it runs: whatever leaves through `send` is a claim, and
`sandbox.box.frames` reads it as hostile input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Mapping
from typing import Any

PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
Blocks = Mapping[str, bytes]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def load_filter(code: bytes) -> None:
    """Put a seccomp program (packed `struct sock_filter`) on this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    for option, first, second in (
        (PR_SET_NO_NEW_PRIVS, 1, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program)),
    ):
        if libc.prctl(option, first, second, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def narrow() -> None:
    """Apply what the box still owes: the compile filter and the address space limit. Once, after the imports."""
    space = int(os.environ.pop("BOX_ADDRESS_SPACE", "0"))
    if space:
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    code = bytes.fromhex(os.environ.pop("BOX_FILTER", ""))
    if code:
        load_filter(code)


def ready(facts: Mapping[str, Any] | None = None) -> None:
    """Tell the parent that a job may come. What fails before this is not the candidate's fault."""
    send({"ready": True, **(facts or {})})


def send(body: Mapping[str, Any], blocks: Blocks | None = None) -> None:
    """One frame on the result pipe. Raises OSError when the parent is gone, ValueError for NaN or infinity.

    What was printed before is flushed first: after its result a worker is killed, not asked to end.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a candidate may have put anything there
            stream.flush()
    _write(int(os.environ["BOX_RESULT_FD"]), encode(body, blocks or {}))


def receive() -> tuple[dict[str, Any], dict[str, bytes]]:
    """The next job from the parent, which is trusted. Raises EOFError when the parent closed the pipe."""
    (length,) = struct.unpack(">I", _read(4))
    header = json.loads(_read(length))
    return header["body"], {name: _read(size) for name, size in header["blocks"]}


def encode(body: Mapping[str, Any], blocks: Blocks) -> bytes:
    """Four bytes of length, a JSON header, then the blocks in the header's order."""
    sizes = [[name, len(block)] for name, block in blocks.items()]
    header = json.dumps({"body": dict(body), "blocks": sizes}, allow_nan=False).encode()
    return b"".join([struct.pack(">I", len(header)), header, *blocks.values()])


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            raise EOFError("the parent closed the job pipe")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
