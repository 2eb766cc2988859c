"""One forked child, supervised: its result as one frame, its death, its deadline. Knows nothing of judging.

The child leads its own session; when it is over, by whatever means, its whole group is killed. What it prints goes to
a file in memory whose end is kept for failures. A child that cannot be killed is reported, not waited for.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from sandbox import judge_wire
from sandbox.judge import liveness
from sandbox.judge.progress import Progress
from sandbox.strict import Malformed

LOG_TAIL = 2000
REAP_S = 10.0  # the driver tears a context down while the process dies; longer means trouble

Work = Callable[[Progress], Mapping[str, Any]]
Cause = Literal["result", "died", "deadline", "cancelled", "garbled"]


@dataclass(frozen=True)
class Watch:
    """A descriptor to watch meanwhile. `ready` is called when it can be read; True cancels the child."""

    fd: int
    ready: Callable[[], bool]


@dataclass(frozen=True)
class Ended:
    """How a child ended. `result` with cause `result` alone; `signal`: death by signal; `log`: what it printed last;
    `isolation`: what it had given up by then; `kernel`: progress words of the kernel (`sandbox.judge.liveness`), read
    twice before a child over its deadline was killed."""

    cause: Cause
    result: Mapping[str, Any] | None
    phase: str
    in_flight: bool
    launches: int
    seconds: float
    pid: int
    reaped: bool
    signal: int | None = None
    code: int | None = None
    log: str = ""
    isolation: Mapping[str, Any] = field(default_factory=dict)
    kernel: tuple[liveness.Rows, liveness.Rows] = ((), ())


def run(work: Work, deadline_s: float, watch: Watch | None = None) -> Ended:
    """Fork, do `work` in the child, and wait for its frame, its end, the deadline or a cancellation.

    Call it from a process with one thread. Raises OSError if the child cannot be started.
    """
    progress = Progress()
    log = os.memfd_create("judge-child-log", os.MFD_CLOEXEC)
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    begin = time.monotonic()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(work, progress, write_end, log)
    try:
        os.close(write_end)
        frames = judge_wire.Frames(read_end)
        try:
            cause, result = _wait(frames, begin + deadline_s, watch)
        except BaseException:  # we are told to stop: not without the child
            _end(pid, "cancelled")
            raise
        phase, in_flight, launches = progress.read()
        kernel = _kernel_words(progress) if cause == "deadline" and in_flight else ([], [])
        reaped, sig, code = _end(pid, cause)
        assert os.getpid() == parent
        return Ended(
            cause, result, phase, in_flight, launches, time.monotonic() - begin, pid, reaped, sig, code,
            _tail(log), progress.isolation(), kernel,
        )  # fmt: skip
    finally:
        os.close(read_end)
        os.close(log)
        progress.close()


def _child(work: Work, progress: Progress, write_end: int, log: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        progress.result_fd = write_end
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        result = work(progress)
        progress.enter("report")
        judge_wire.write(write_end, result)
        code = 0
    except (
        BaseException
    ):  # this process ends here whatever happens; its parent makes a verdict of it
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        # No interpreter shutdown: destructors would talk to a context that may be broken.
        os._exit(code)


def _kernel_words(
    progress: Progress,
) -> tuple[liveness.Rows, liveness.Rows]:
    before = progress.kernel_rows()
    if before:
        time.sleep(liveness.APART_S)
    return before, progress.kernel_rows()


def _wait(
    frames: judge_wire.Frames, deadline: float, watch: Watch | None
) -> tuple[Cause, Mapping[str, Any] | None]:
    with selectors.DefaultSelector() as selector:
        selector.register(frames.fd, selectors.EVENT_READ)
        if watch:
            selector.register(watch.fd, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if watch and key.fd == watch.fd:
                    if watch.ready():
                        return "cancelled", None
                    continue
                try:
                    frames.pump()
                    result = frames.next()
                except Malformed:
                    return "garbled", None
                if result is not None:
                    return "result", result
                if frames.closed:
                    return "died", None
    return "deadline", None


def _end(pid: int, cause: Cause) -> tuple[bool, int | None, int | None]:
    """Kill the group and reap the child. A dead child is reaped first, so that its own signal is seen."""
    if cause == "died":
        status = _reap(pid, 1.0)
        _kill(pid)
        status = _reap(pid, REAP_S) if status is None else status
    else:
        _kill(pid)
        status = _reap(pid, REAP_S)
    if status is None:
        return False, None, None
    if os.WIFSIGNALED(status):
        return True, os.WTERMSIG(status), None
    return True, None, os.WEXITSTATUS(status)


def _kill(pid: int) -> None:
    for kill in (
        os.killpg,
        os.kill,
    ):  # the group, and the child itself in case it had not made its session yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _reap(pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if found:
            return status
        if time.monotonic() > end:
            return None
        time.sleep(0.002)


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    text = os.pread(log, LOG_TAIL, max(0, size - LOG_TAIL)).decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text).strip()
