"""The GPU between jobs: one lock per GPU, and waiting until the driver has forgotten a killed process.

The lock keeps out other judges that share the state folder, not other programs. nvidia-smi runs as a process of its
own, since driver queries can hang; where it is missing, a fixed wait takes its place.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

POLL_S = 0.1
ASK_S = 5.0
FORGET_S = 15.0
SETTLE_S = 2.0


class Busy(Exception):
    """Another process holds the GPU; the message names it."""


class Interrupted(Exception):
    """The caller no longer wants the lock."""


def token(device: str, visible: str | None) -> str:
    """The CUDA_VISIBLE_DEVICES entry that `cuda` or `cuda:N` means. Raises ValueError for another name."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ValueError(f"{device!r} is no device: cuda, cuda:N or cpu")
    n = int(index or 0)
    entries = [e.strip() for e in (visible or "").split(",") if e.strip()]
    if not entries:
        return str(n)
    if n >= len(entries):
        raise ValueError(f"{device} is not visible: CUDA_VISIBLE_DEVICES={visible}")
    return entries[n]


def tokens(device: str, visible: str | None, count: int) -> str:
    """As `token`, for `count` GPUs in a row from that one on, separated by commas. Raises ValueError."""
    first = int(device.partition(":")[2] or 0) if token(device, visible) else 0
    return ",".join(token(f"cuda:{first + k}", visible) for k in range(count))


@contextmanager
def hold(
    state: Path, gpus: str, seconds: float, unwanted: Callable[[], bool] = lambda: False
) -> Iterator[float]:
    """Hold the lock of each GPU of a comma list, always in one order, so that two who want several never wait for each
    other. Yields the seconds waited. Raises Busy after `seconds`, Interrupted, OSError."""
    with ExitStack() as stack:
        waited = 0.0
        for gpu in sorted(gpus.split(",")):
            waited += stack.enter_context(_hold(state, gpu, seconds - waited, unwanted))
        yield waited


@contextmanager
def _hold(
    state: Path, gpu: str, seconds: float, unwanted: Callable[[], bool] = lambda: False
) -> Iterator[float]:
    """Hold the GPU's lock; yields the seconds waited. Raises Busy after `seconds`, Interrupted, OSError."""
    folder = state / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{''.join(c if c.isalnum() or c in '-.' else '_' for c in gpu)}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        waited = _acquire(fd, seconds, unwanted)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        try:
            yield waited
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that would not die may hold the descriptor
    finally:
        os.close(fd)


def _acquire(fd: int, seconds: float, unwanted: Callable[[], bool]) -> float:
    begin = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.monotonic() - begin
        except BlockingIOError as error:
            if unwanted():
                raise Interrupted from error
            if time.monotonic() - begin > seconds:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace") or "?"
                message = f"the GPU is held by process {holder} for over {seconds:g} s"
                raise Busy(message) from error
        time.sleep(POLL_S)


def forgotten(pid: int, gpu: str, seconds: float = FORGET_S) -> bool:
    """Wait until the driver lists `pid` no more and memory use is steady. False if that did not happen in time.

    Where the driver cannot be asked: waits a fixed time, then True.
    """
    end = time.monotonic() + seconds
    before: int | None = None
    while time.monotonic() < end:
        asked = _ask(gpu)
        if asked is None:
            time.sleep(min(SETTLE_S, max(0.0, end - time.monotonic())))
            return True
        pids, used = asked
        if pid not in pids and before is not None and used >= before - (64 << 20):
            return True
        before = used
        time.sleep(POLL_S)
    return False


def _ask(gpu: str) -> tuple[set[int], int] | None:
    """Processes on the GPU and its used memory in bytes; None if nvidia-smi gives no answer."""
    processes = _smi(gpu, "--query-compute-apps=pid")
    memory = _smi(gpu, "--query-gpu=memory.used")
    if processes is None or not memory or not all(m.isdigit() for m in memory):
        return None
    return {int(p) for p in processes if p.isdigit()}, sum(map(int, memory)) << 20


def _smi(gpu: str, query: str) -> list[str] | None:
    command = ["nvidia-smi", f"--id={gpu}", query, "--format=csv,noheader,nounits"]
    try:
        asking = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
    try:
        text, _ = asking.communicate(timeout=ASK_S)
    except subprocess.TimeoutExpired:
        asking.kill()  # not waited for: it may be stuck in the driver
        return None
    if asking.returncode:
        return None
    return [line.strip() for line in text.splitlines() if line.strip()]
