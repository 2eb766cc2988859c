"""The agent's side of judging: starts `python -m sandbox.judge.server` and asks it. Implements `sandbox.jobs.Judge`.

The server gets a small environment without secrets, its own session (so Ctrl-C does not reach it), and a log file for
what it prints. A server that dies or stays silent costs its job an `infra` verdict and is started again for the next.
This module imports neither torch nor the judge.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import platformdirs

from sandbox import judge_wire
from sandbox.jobs import JudgeJob
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status, Verdict

# Nothing else of the agent's environment reaches the process that runs candidates.
KEEP = (
    "PATH", "HOME", "LANG", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PYTHONPATH",
    "KERNELGEN_PTXAS", "KERNELGEN_NVDISASM", "KERNELGEN_CACHE", "KERNELGEN_CPU_CACHE",
    "KERNELGEN_COMPUTE_SANITIZER", "KERNELGEN_NCU", "KERNELGEN_COUNTERS", "OMP_NUM_THREADS",
)  # fmt: skip
START_S = 180.0
STOP_S = 15.0
# Over a job's own deadline, which may be used twice: canaries, teardown, device start.
SLACK_S = 900.0
LOG_TAIL = 2000


describe_isolation = judge_wire.describe_isolation


class JudgeFailed(RuntimeError):
    """The judge's server cannot be started or does not understand us; the message says what it printed."""


@dataclass(frozen=True)
class ClientOptions:
    """`command` starts the server; `lock_s` is how long it may wait for a GPU that another judge holds; `log` is the
    name of its log below `state`."""

    state: Path
    lock_s: float = 600.0
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "sandbox.judge.server")
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    log: str = "judge-server.log"


def state_folder() -> Path:
    """Locks and device facts are the machine's, not the project's: one lock per GPU for this user."""
    chosen = os.environ.get("KERNELGEN_STATE")
    return Path(chosen) if chosen else Path(platformdirs.user_state_dir("kernelgen")) / "judge"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The server's environment out of ours: a few names, and this package's parent on the path."""
    env = {k: given[k] for k in KEEP if k in given}
    env.setdefault("LANG", "C.UTF-8")
    here = str(Path(__file__).resolve().parent.parent)
    paths = [here, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env


class JudgeClient:
    """One server, started when first needed. `judge` and `probe` may be called from any thread, one at a time each."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: judge_wire.Frames | None = None
        self._turn = threading.Lock()
        self._sending = threading.Lock()
        self._next_id = 0
        self._current: int | None = None
        self.ready: Mapping[str, Any] = {}
        self.isolation: dict[str, Mapping[str, Any]] = {}
        """How judging processes are confined, by device, as the last probe said."""

    def judge(self, job: JudgeJob) -> Verdict:
        """The verdict. A dead, silent or garbling server is an `infra` verdict, never an exception."""
        limit = 2 * job.deadline_s + self.options.lock_s + SLACK_S
        begin = time.monotonic()
        try:
            request = judge_wire.job_to_json(job)
            judge_wire.job_from_json(request)  # what the server would refuse is refused here
            reply = self._ask({"op": "judge", "job": request}, limit)
            if "error" in reply:
                raise JudgeFailed(f"the judge's server refused the job: {reply['error']}")
            return judge_wire.verdict_from_json(reply.get("verdict"))
        except (JudgeFailed, Malformed, OSError) as error:
            seconds = {"client": time.monotonic() - begin}
            failure = Failure("judge-server", str(error)[:500])
            return judge_wire.without_judging(job, Status.INFRA, failure, seconds)

    def probe(self, device: str) -> Mapping[str, Any]:
        """Device facts, canary and isolation, as the server sees them. Raises JudgeFailed."""
        try:
            reply = self._ask({"op": "probe", "device": device}, self.options.lock_s + SLACK_S)
        except (Malformed, OSError) as error:
            raise JudgeFailed(str(error)) from error
        found = reply.get("probe")
        if not isinstance(found, dict):
            raise JudgeFailed(f"the judge's server sent no probe: {str(reply)[:200]}")
        isolation = found.get("isolation")
        if isinstance(isolation, dict):
            self.isolation[device] = isolation
        return found

    def cancel(self) -> None:
        """Cancel the job that another thread waits for; its verdict comes as `cancelled`."""
        current, process = self._current, self._process
        if current is not None and process is not None:
            with contextlib.suppress(OSError, ValueError), self._sending:
                self._send(process, {"op": "cancel", "id": current})

    def close(self) -> None:
        """End the server: closing its stdin is enough, a kill follows if it is not."""
        process, self._process, self._frames = self._process, None, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._kill(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any], limit: float) -> dict[str, Any]:
        with self._turn:
            done = False
            try:
                try:
                    self._hand_over(request)
                # between two jobs, and its end was not seen: this one it never had
                except BrokenPipeError:
                    self._abandon()
                    self._hand_over(request)
                reply = self._receive(time.monotonic() + limit)
                if reply.get("id") != self._current:
                    raise JudgeFailed("the judge's server answered another question")
                done = True
                return reply
            finally:
                self._current = None
                if not done:  # also for Ctrl-C: a server in an unknown state is of no use
                    self._abandon()

    def _hand_over(self, request: Mapping[str, Any]) -> None:
        process = self._started()
        self._next_id += 1
        self._current = self._next_id
        with self._sending:
            self._send(process, {**request, "id": self._current})

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._abandon()
        self.options.state.mkdir(parents=True, exist_ok=True)
        command = [
            *self.options.command, "--state", str(self.options.state.resolve()),
            "--lock-seconds", str(self.options.lock_s), *self.options.extra,
        ]  # fmt: skip
        env = {**environment(os.environ), **self.options.environment}
        with self._log().open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self._frames = judge_wire.Frames(self._process.stdout.fileno())
        hello = self._receive(time.monotonic() + START_S)
        if "ready" not in hello:
            raise JudgeFailed(f"the judge's server did not start: {hello.get('failed', hello)}")
        self.ready = hello["ready"]
        return self._process

    def _send(self, process: subprocess.Popen[bytes], body: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        judge_wire.write(process.stdin.fileno(), body)

    def _receive(self, deadline: float) -> dict[str, Any]:
        frames = self._frames
        assert frames is not None
        with selectors.DefaultSelector() as selector:
            selector.register(frames.fd, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                body = frames.next()
                if body is not None:
                    return body
                if frames.closed:
                    raise JudgeFailed(f"the judge's server ended: {self._last_words()}")
                if selector.select(left):
                    frames.pump()
        raise JudgeFailed("the judge's server gave no answer in time")

    def _abandon(self) -> None:
        process, self._process, self._frames = self._process, None, None
        if process is None:
            return
        self._kill(process)
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM lets it kill its child first; its children die with it in any case."""
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)

    def _log(self) -> Path:
        return self.options.state / self.options.log

    def _last_words(self) -> str:
        try:
            data = self._log().read_bytes()[-LOG_TAIL:]
        except OSError:
            data = b""
        lines = data.decode("utf-8", "replace").strip().splitlines()
        text = lines[-1] if lines else "it printed nothing"
        return "".join(c if c.isprintable() else "?" for c in text)[:300]
