"""The judge's server: a warm process that forks one child for each job. `python -m sandbox.judge.server --state DIR`.

Requests and replies are frames on stdin and stdout (`sandbox.judge_wire`); everything printed goes to stderr. It
imports torch and the judge once and never opens CUDA, so that children can. It ends when stdin closes, and takes its
child along.

    {"op": "judge", "id": 1, "job": {...}}  ->  {"id": 1, "verdict": {...}}
    {"op": "probe", "id": 2, "device": "cuda"}  ->  {"id": 2, "probe": {...}}
    {"op": "cancel", "id": 1}  (no reply of its own: the job's verdict comes as `cancelled`)
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sandbox import judge_wire
from sandbox.strict import Malformed

DEFAULT_RUNNER = "sandbox.judge.judge:run"
DEFAULT_OPENER = "sandbox.judge.rounds:open_device"
_WARM = (
    "numpy",
    "torch",
    "sandbox.canary",
    "sandbox.judge.rounds",
    "sandbox.devices.cuda",
    "sandbox.devices.cpu",
    "targets",
)


class Channel:
    """Requests from one descriptor, replies to another. While a job runs, `ready` looks for its cancellation."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.frames = judge_wire.Frames(read_fd)
        self.write_fd = write_fd
        self.current: object = None
        self.waiting: deque[dict[str, Any]] = deque()

    def take(self) -> dict[str, Any] | None:
        """The next request; None when there will be no more. Raises Malformed."""
        while not self.waiting and not self.frames.closed:
            self._pump()
        return self.waiting.popleft() if self.waiting else None

    def ready(self) -> bool:
        """Read what is there. True if the running job is cancelled or the other side has gone."""
        import select

        if not self.frames.closed and select.select([self.frames.fd], [], [], 0)[0]:
            self._pump()
        return self.frames.closed or any(
            r.get("op") == "cancel" and r.get("id") == self.current for r in self.waiting
        )

    def reply(self, body: Mapping[str, Any]) -> None:
        judge_wire.write(self.write_fd, body)

    def _pump(self) -> None:
        self.frames.pump()
        while (request := self.frames.next()) is not None:
            self.waiting.append(request)


def serve(channel: Channel, keeper: Any) -> None:
    """Answer requests one after the other until there are no more. Raises Malformed for a broken stream."""
    while (request := channel.take()) is not None:
        channel.current = request.get("id")
        reply = answer(request, keeper)
        if reply is not None:
            channel.reply({"id": request.get("id"), **reply})


def answer(request: Mapping[str, Any], keeper: Any) -> Mapping[str, Any] | None:
    op = request.get("op")
    if op == "cancel":  # of a job that has ended
        return None
    if op == "probe":
        return {"probe": keeper.probe(str(request.get("device")))}
    if op != "judge":
        return {"error": f"unknown request {str(op)[:40]!r}"}
    try:
        job = judge_wire.job_from_json(request.get("job"))
    except Malformed as error:
        return {"error": str(error)}
    return {"verdict": keeper.judge(job).to_json()}


def claim_descriptors() -> tuple[int, int]:
    """Keep stdin and stdout for the protocol before any import can print; give /dev/null and stderr in their place."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return read_fd, write_fd


def warm(*entries: str) -> list[Any]:
    """Import what children need and find `module:function` entry points. CUDA must stay unopened.

    Raises ImportError, AttributeError, RuntimeError.
    """
    for name in _WARM:
        importlib.import_module(name)
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        print(f"cuda.bindings cannot be imported, only cpu works: {error}", file=sys.stderr)
    try:
        importlib.import_module("sandbox.assemble").version()  # kept, so that no child asks again
    except (RuntimeError, OSError) as error:
        print(f"no assembler, only cpu works: {error}", file=sys.stderr)
    importlib.import_module("sandbox.judge.report").commit()  # children cannot read the repository
    found = []
    for entry in entries:
        module, _, attribute = entry.partition(":")
        found.append(getattr(importlib.import_module(module), attribute))
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "importing the judge opened CUDA; children of this process could not use it"
        )
    gc.collect()
    gc.freeze()  # children share these pages as long as nobody writes to them
    return found


def _stop(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sandbox.judge.server", allow_abbrev=False)
    option = parser.add_argument
    option("--state", type=Path, required=True, help="folder for locks and device facts")
    option("--runner", default=DEFAULT_RUNNER, help="module:function that judges a job")
    option("--opener", default=DEFAULT_OPENER, help="module:function that opens a device")
    option("--lock-seconds", type=float, help="how long to wait for a GPU in use")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    read_fd, write_fd = claim_descriptors()
    options = arguments(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # an inherited "ignore" would hide how children end
    # Availability checks must not call cuInit in this process: a context does not survive fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Machine code is kept, so that an incumbent is not assembled again for each of its rivals. The folders are made
    # here: a child that has narrowed itself may fill them, not make them.
    cache = options.state.resolve() / "cache"
    for name, folder in (("KERNELGEN_CACHE", cache), ("KERNELGEN_CPU_CACHE", cache / "cpu")):
        with suppress(OSError):
            Path(os.environ.setdefault(name, str(folder))).mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    channel = Channel(read_fd, write_fd)
    try:
        runner, opener = warm(options.runner, options.opener)
    except (ImportError, AttributeError, RuntimeError) as error:
        channel.reply({"failed": f"{type(error).__name__}: {str(error)[:300]}"})
        return 1
    from sandbox.judge.child import Watch
    from sandbox.judge.keeper import LOCK_S, Keeper, Settings

    settings = Settings(
        state=options.state.resolve(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        lock_s=LOCK_S if options.lock_seconds is None else options.lock_seconds,
        opener=opener,
    )
    keeper = Keeper(settings, runner, Watch(read_fd, channel.ready))
    try:
        channel.reply({"ready": {"pid": os.getpid(), "warm_s": time.monotonic() - begin}})
        serve(channel, keeper)
    except (Malformed, BrokenPipeError) as error:
        print(f"the judge's client went away: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # nothing to tear down, and torch takes its time to do so
