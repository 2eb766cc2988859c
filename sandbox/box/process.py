"""Boxed: the parent's hold on one running box. Frames in and out, capped output, deadlines, the end.

One thread drives it: `send` and `read` pump all pipes and look at the watchdog between reads. Every method returns
within its deadline, however the box behaves; none waits for end of file.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sandbox.box.frames import Broken, Caps, Frame, Oversized, Reader, Reason, encode
from sandbox.box.spec import Isolation, Limits
from sandbox.box.text import clean_text
from sandbox.strict import Malformed

TICK_S = 0.025
CHUNK = 1 << 18
EXIT_S = 2.0  # to be told by bubblewrap how the worker ended, on a busy machine


class Guard(Protocol):
    """How one box is watched and ended."""

    def verify(self) -> Broken | None:
        """Whether the kernel says of the box's processes what it should."""
        ...

    def watch(self) -> Broken | None:
        """A limit that was passed, if any. Called every tick, so it paces itself."""
        ...

    def explain(self) -> Broken | None:
        """The kernel-enforced limit that ended the worker, if one did."""
        ...

    def stop(self) -> Broken | None:
        """Kill everything in the box, reap it, remove what the box needed on disk. Called once."""
        ...


@dataclass(frozen=True)
class Parts:
    """What `start` wired together for one box: the child, its pipes, its limits and its guard."""

    child: subprocess.Popen[bytes]
    stdin: int
    result: int
    output: int
    limits: Limits
    isolation: Isolation
    guard: Guard


class Boxed:
    """A started box. Use as a context manager, or call `kill` when done: a box is used for one source and dropped."""

    def __init__(self, parts: Parts) -> None:
        self.isolation = parts.isolation
        self.pid = parts.child.pid
        self._parts = parts
        self._output = bytearray()
        self._output_seen = 0
        self._output_open = True
        self._sent = False
        self._ended = False
        self._left: Broken | None = None
        self._lock = threading.RLock()
        self._end_wanted = threading.Event()
        for fd in (parts.stdin, parts.result, parts.output):
            os.set_blocking(fd, False)

    def wait_ready(self, deadline_s: float) -> dict[str, Any] | Broken:
        """The worker's READY facts. A failure here is ours (`infra`), not the candidate's."""
        frame = self.read(Caps(), deadline_s)
        if isinstance(frame, Broken):
            return Broken("box", f"not ready: {frame.detail}: {self.output()[-600:]}")
        if frame.body.pop("ready", None) is not True:
            return Broken("box", "the worker's first frame is not READY")
        return frame.body

    def verify(self) -> Broken | None:
        """Look at the worker from outside, before it gets the source: uid, capabilities, privileges, filters."""
        return self._parts.guard.verify()

    def send(
        self, body: Mapping[str, Any], blocks: Mapping[str, bytes], deadline_s: float
    ) -> Broken | None:
        """Hand a job to the worker. None when all of it is in the pipe."""
        self._sent = True
        view = memoryview(encode(body, blocks))
        until, fd = time.monotonic() + deadline_s, self._parts.stdin
        while view:
            ready = self._wait(until, fd)
            if isinstance(ready, Broken):
                return ready
            if fd in ready:
                try:
                    with self._lock:
                        view = view[0 if self._ended else os.write(fd, view[:CHUNK]) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    return self._end("closed", "the worker ended before it read its job")
        return None

    def read(self, caps: Caps, deadline_s: float) -> Frame | Broken:
        """The next frame, or why there is none; after Broken the box is dead."""
        reader = Reader(caps)
        until = time.monotonic() + deadline_s
        while True:
            ready = self._wait(until, self._parts.result)
            if isinstance(ready, Broken):
                return ready
            data = self._take(reader.wanted) if self._parts.result in ready else None
            if data is None:
                continue
            if not data:
                return self._end("closed", "the worker ended without a result")
            try:
                reader.feed(data)
                frame = reader.next()
            except Oversized as error:
                return self._end(
                    "oversized", clean_text(str(error).encode("utf-8", "replace"), 300)
                )
            except Malformed as error:
                return self._end(
                    "malformed", clean_text(str(error).encode("utf-8", "replace"), 300)
                )
            if frame is not None:
                return frame

    def _take(self, most: int) -> bytes | None:
        """What lies in the result pipe; None when nothing does."""
        with self._lock:
            try:
                return None if self._ended else os.read(self._parts.result, min(most, CHUNK))
            except BlockingIOError:
                return None

    def output(self, most: int = 4096) -> str:
        """The tail of what the box printed, cleaned: valid text, no control, bidi or escape characters."""
        return clean_text(bytes(self._output), most)

    def kill(self) -> Broken | None:
        """End the box and everything in it; None when nothing of it is left. Harmless when repeated.

        A second thread may call it while the first is in `send` or `read`: that one then gets Broken.
        """
        self._end_wanted.set()
        with self._lock:
            if self._ended:
                return self._left
            self._ended = True
            self._left = self._parts.guard.stop()
            self._drain()
            for fd in (self._parts.stdin, self._parts.result, self._parts.output):
                os.close(fd)
            return self._left

    def __enter__(self) -> Boxed:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _wait(self, until: float, fd: int) -> set[int] | Broken:
        """Descriptors that are ready within a tick; Broken when a limit or the deadline passed."""
        left = until - time.monotonic()
        if self._end_wanted.is_set():
            self.kill()
            return Broken("box", "the box has ended")
        if left <= 0:
            return self._end("timeout", "the deadline passed")
        with self._lock:
            if self._ended:
                return Broken("box", "the box has ended")
            gone = self._parts.child.poll() is not None
            ready = self._select(fd, 0.0 if gone else min(left, TICK_S))
            if self._parts.output in ready:
                self._drain()
        if gone and fd not in ready:
            # A process that it left behind may hold the pipe open: its end is not waited for.
            return self._end("closed", "the worker ended without a result")
        if self._output_seen > self._parts.limits.output_flood:
            return self._end("output", "the worker printed more than its limit")
        # Until a job has gone in only our own code runs inside.
        broken = self._parts.guard.watch() if self._sent else None
        return self._end(broken.reason, broken.detail) if broken else ready

    def _select(self, fd: int, wait_s: float) -> set[int]:
        with selectors.DefaultSelector() as selector:
            writing = fd == self._parts.stdin
            selector.register(fd, selectors.EVENT_WRITE if writing else selectors.EVENT_READ)
            if self._output_open:
                selector.register(self._parts.output, selectors.EVENT_READ)
            return {key.fd for key, _ in selector.select(wait_s)}

    def _drain(self) -> None:
        """Take what lies in the output pipe, at most 4 MB at a time, and keep the last of it."""
        cap = self._parts.limits.output
        for _ in range(16):
            try:
                data = os.read(self._parts.output, CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._output_open = False
                return
            self._output_seen += len(data)
            self._output += data
            if len(self._output) > cap:
                del self._output[:-cap]

    def _end(self, reason: Reason, detail: str) -> Broken:
        """Kill the box. What the kernel enforced explains a closed pipe better than the pipe does."""
        if self._ended:
            return Broken("box", "the box has ended")
        broken = Broken(reason, detail)
        if reason == "closed":
            broken = self._parts.guard.explain() or _exit_of(self._parts.child, broken)
        self.kill()
        return broken


def _exit_of(child: subprocess.Popen[bytes], broken: Broken) -> Broken:
    """Add the exit status, if it comes at once; 128 + signal is how bubblewrap passes a signal on."""
    try:
        status = child.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        return broken
    number = -status if status < 0 else status - 128
    if number == signal.SIGXCPU:
        return Broken("timeout", "the limit of processor time passed")
    if number in signal.valid_signals():
        return Broken(broken.reason, f"{broken.detail} ({signal.Signals(number).name})")
    return Broken(broken.reason, f"{broken.detail} (exit status {status})")
