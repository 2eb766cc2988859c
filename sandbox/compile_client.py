"""CompileClient: the agent's hold on the compile server, a child process that speaks frames over its pipes.

    with CompileClient(CompileSettings(store=Path(".kernelgen"))) as compiler:
        outcome = compiler.compile(CompileJob(...))      # sandbox.jobs; artifact folder, or status and failure

It imports nothing of the compile side. Calls from several threads run at once. A server that dies costs the calls in
flight (`infra`); the next call starts another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sandbox import compile_wire as wire
from sandbox.box.frames import Caps, Reader, encode
from sandbox.jobs import CompileJob, CompileOutcome
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status

STOP_S = 15.0  # it ends its boxes first, and gives each of them ten


@dataclass(frozen=True)
class CompileSettings:
    """`store` holds artifacts and outcomes. `tier` None: the strongest isolation that works; `none` needs trust.

    `deadline_s`: processor time of one compile; three times that by the clock. `python`: an interpreter with another
    release of the DSL, that finds `sandbox` in the folder `path`.
    """

    store: Path = Path(".kernelgen")
    tier: str | None = None
    bwrap: Path | None = None
    trust_this_code: bool = False
    arch: str = "sm_90a"
    idle: int = 2
    jobs: int = max(1, os.cpu_count() or 1)
    deadline_s: float = 60.0
    python: Path | None = None
    path: Path | None = None

    def environment(self) -> dict[str, str]:
        return environment() | ({"PYTHONPATH": str(self.path)} if self.path else {})

    def command(self) -> list[str]:
        out = [
            str(self.python or sys.executable), "-m", "sandbox.compile.server", "--store", str(self.store.absolute()),
            "--arch", self.arch, "--idle", str(self.idle), "--jobs", str(self.jobs),
            "--deadline", str(self.deadline_s),
        ]  # fmt: skip
        out += ["--tier", self.tier] if self.tier else []
        out += ["--bwrap", str(self.bwrap)] if self.bwrap else []
        return out + (["--trust-this-code"] if self.trust_this_code else [])


def environment() -> dict[str, str]:
    """What the server inherits: where things are, never keys."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
    return {name: os.environ[name] for name in kept if name in os.environ}


class NoIsolation(RuntimeError):
    """No allowed isolation works on this machine; the message says why and what would help."""


class CompileClient:
    """Implements `sandbox.jobs.Compiler`. The server starts with the first job, or with `start`."""

    def __init__(self, settings: CompileSettings | None = None) -> None:
        self._settings = settings or CompileSettings()
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._closed = False

    def start(self) -> dict[str, Any]:
        """Start the server now, so that workers warm up. Its isolation, with a `sentence` for people and, in
        `passed_over`, why no stronger way is used. Raises NoIsolation, OSError."""
        server = self._running()
        return {**server.isolation, **server.about}

    def compile(self, job: CompileJob) -> CompileOutcome:
        """Compile a job; blocks. Raises NoIsolation when no job can run here; all else is in the outcome."""
        try:
            return self._call(job)
        except OSError as error:
            text = f"the compile server cannot be reached: {error.strerror or error}"
            status = Status.CANCELLED if self._closed else Status.INFRA
            return CompileOutcome(None, status=status, failure=Failure("server", text))

    def _call(self, job: CompileJob) -> CompileOutcome:
        try:
            return self._running().call(job)
        except _Gone:  # between two jobs, and its end was not seen yet: this one it never had
            return self._running().call(job)

    def close(self) -> None:
        """End the server and all workers. Calls in flight return `cancelled`. Harmless when repeated."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server:
            server.stop(Status.CANCELLED, "the compile client was closed")

    def __enter__(self) -> CompileClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _running(self) -> _Server:
        with self._lock:
            if self._closed:
                raise OSError("the compile client is closed")
            if self._server is None or self._server.ended:
                self._server = _Server(self._settings)
            return self._server


class _Server:
    """One server process, the jobs it works on, and the thread that reads its answers."""

    def __init__(self, settings: CompileSettings) -> None:
        self._stopped = self.ended = False
        self._process = subprocess.Popen(
            settings.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=settings.environment(),
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = Reader(Caps())
        self._lock = threading.Lock()
        self._waiting: dict[int, _Slot] = {}
        self._next = 0
        self._why = (Status.INFRA, "the compile server ended unexpectedly")
        hello = self._frame() or {}
        if "isolation" not in hello:
            self.stop(*self._why)
            raise NoIsolation(str(hello.get("refused", "the compile server did not start")))
        self.isolation, self.about = hello["isolation"], hello["about"]
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, job: CompileJob) -> CompileOutcome:
        slot = _Slot(threading.Event())
        with self._lock:
            if self.ended:
                raise _Gone("it has ended")
            self._next += 1
            number = self._next
            self._waiting[number] = slot
            try:
                self._stdin.write(encode({"id": number}, wire.job_blocks(job)))
                self._stdin.flush()
            # a ValueError: it is being stopped, its pipe is closed
            except (OSError, ValueError) as error:
                self.ended = True
                del self._waiting[number]
                raise _Gone(str(error)) from error
        slot.done.wait()
        outcome = slot.outcome
        # a server that is being stopped takes its boxes down: that is no fault of theirs
        if outcome is not None and not (self._stopped and outcome.status is Status.INFRA):
            return outcome
        status, text = self._why
        return CompileOutcome(None, status=status, failure=Failure("server", text))

    def stop(self, status: Status, why: str) -> None:
        """Close the server's stdin, wait for its end, release all callers."""
        self._why = (status, why)
        self._stopped = self.ended = True
        try:
            self._stdin.close()
        except OSError:
            pass  # it is gone already, which is what was wanted
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()

    def _read(self) -> None:
        while (body := self._frame()) is not None:
            with self._lock:
                slot = self._waiting.pop(body["id"], None)
            if slot:
                slot.outcome = wire.outcome_from_json(body["outcome"])
                slot.done.set()
        self.ended = True
        self._release()

    def _frame(self) -> dict[str, Any] | None:
        """The next answer; None when the server has ended."""
        while True:
            try:
                data = os.read(self._stdout.fileno(), max(1, self._reader.wanted))
                self._reader.feed(data)
                frame = self._reader.next()
            except (OSError, ValueError, Malformed):
                return None
            if frame is not None:
                return frame.body
            if not data:
                return None

    def _release(self) -> None:
        with self._lock:
            slots, self._waiting = list(self._waiting.values()), {}
        for slot in slots:
            slot.done.set()


class _Gone(OSError):
    """The server ended before it had the whole of a job."""


@dataclass
class _Slot:
    """A caller that waits."""

    done: threading.Event
    outcome: CompileOutcome | None = None
