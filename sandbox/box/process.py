"""Boxed: the parent's hold on one running box. Frames in and out, capped output, deadlines, the end.

One thread drives it: `send` and `read` pump all pipes and look at the watchdog between reads. Every method returns
within its deadline, however the box behaves; none waits for end of file.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sandbox.box.frames import Broken, Caps, Frame, Oversized, Reader, encode
from sandbox.box.spec import Isolation, Limits
from sandbox.strict import Malformed

TICK_S = 0.025
CHUNK = 1 << 18


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

    def stop(self) -> None:
        """Kill everything in the box, reap it, and remove what the box needed on disk."""
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
        self._ended = False
        self._closed = False
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
        view = memoryview(encode(body, blocks))
        until = time.monotonic() + deadline_s
        while view:
            ready = self._wait(until, self._parts.stdin)
            if isinstance(ready, Broken):
                return ready
            if self._parts.stdin in ready:
                try:
                    view = view[os.write(self._parts.stdin, view[:CHUNK]) :]
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
            if self._parts.result not in ready:
                continue
            try:
                data = os.read(self._parts.result, min(reader.wanted, CHUNK))
            except BlockingIOError:
                continue
            if not data:
                return self._end("closed", "the worker ended without a result")
            try:
                reader.feed(data)
                frame = reader.next()
            except Oversized as error:
                return self._end("oversized", str(error))
            except Malformed as error:
                return self._end("malformed", str(error))
            if frame is not None:
                return frame

    def output(self, most: int = 4096) -> str:
        """The tail of what the box printed, cleaned: valid text, no control, bidi or escape characters."""
        return clean_text(bytes(self._output), most)

    def kill(self) -> None:
        """End the box and everything in it; returns when nothing of it is left. Harmless when repeated."""
        if not self._ended:
            self._ended = True
            self._parts.guard.stop()
        if not self._closed:
            self._closed = True
            self._drain()
            for fd in (self._parts.stdin, self._parts.result, self._parts.output):
                os.close(fd)

    def __enter__(self) -> Boxed:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _wait(self, until: float, fd: int) -> set[int] | Broken:
        """Descriptors that are ready within a tick; Broken when a limit or the deadline passed."""
        if self._ended:
            return Broken("box", "the box has ended")
        left = until - time.monotonic()
        if left <= 0:
            return self._end("timeout", "the deadline passed")
        with selectors.DefaultSelector() as selector:
            writing = fd == self._parts.stdin
            selector.register(fd, selectors.EVENT_WRITE if writing else selectors.EVENT_READ)
            if self._output_open:
                selector.register(self._parts.output, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(min(left, TICK_S))}
        if self._parts.output in ready:
            self._drain()
        if self._output_seen > self._parts.limits.output_flood:
            return self._end("output", "the worker printed more than its limit")
        broken = self._parts.guard.watch()
        return self._end(broken.reason, broken.detail) if broken else ready

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

    def _end(self, reason: Any, detail: str) -> Broken:
        """Kill the box; a limit that the kernel enforced explains a closed pipe better than the pipe does."""
        if reason == "closed":
            enforced = self._parts.guard.explain()
            reason, detail = (enforced.reason, enforced.detail) if enforced else (reason, detail)
        if not self._ended:
            self._ended = True
            self._parts.guard.stop()
            self._drain()
        return Broken(reason, detail)


def clean_text(data: bytes, most: int) -> str:
    """Text for people, stores and prompts: UTF-8 with replacements, printable characters, newlines and tabs."""
    text = data[-4 * most :].decode("utf-8", "replace")
    kept = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return kept[-most:]
