"""Supervised children: results, deaths, deadlines, cancellations, and nothing left behind."""

import faulthandler
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import pytest

from sandbox.judge import child
from sandbox.judge.child import Watch
from sandbox.judge.keeper import explain
from sandbox.judge.progress import Progress
from sandbox.verdict import Status
from tests.sandbox.judge.overdue import overdue


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or between the two
        return False


def children() -> set[int]:
    """Processes started by this process's main thread."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))


def pipes() -> dict[int, int]:
    """Inode -> last descriptor of every pipe that this process has open."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            info = os.fstat(fd)
            if stat.S_ISFIFO(info.st_mode):
                found[info.st_ino] = max(fd, found.get(info.st_ino, fd))
    return found


def test_a_result_comes_back_with_the_phase() -> None:
    def work(progress: Progress) -> Mapping[str, object]:
        progress.enter("compare")
        return {"pid": os.getpid(), "session": os.getsid(0)}

    ended = child.run(work, 10)
    assert ended.cause == "result"
    assert ended.result is not None
    assert ended.result["pid"] == ended.result["session"] == ended.pid != os.getpid()
    assert (ended.phase, ended.in_flight, ended.launches) == ("report", False, 0)
    assert not alive(ended.pid)


def test_a_large_result_is_whole() -> None:
    ended = child.run(lambda progress: {"data": "x" * 5_000_000}, 20)
    assert ended.result is not None
    assert len(ended.result["data"]) == 5_000_000


@pytest.mark.parametrize(("in_flight", "status"), [(True, Status.FAULT), (False, Status.INFRA)])
def test_death_by_signal_counts_against_kernels_in_flight_only(
    in_flight: bool, status: Status
) -> None:
    def work(progress: Progress) -> Mapping[str, object]:
        progress.enter("check")
        progress.launching()
        if not in_flight:
            progress.landed()
        faulthandler.disable()  # pytest's would print a page
        os.kill(os.getpid(), signal.SIGBUS)
        return {}

    ended = child.run(work, 10)
    assert (ended.cause, ended.signal, ended.launches) == ("died", signal.SIGBUS, 1)
    found, failure = explain(ended, 10)
    assert (found, failure.rule, failure.where["phase"]) == (status, "crash", "check")


@pytest.mark.parametrize(("in_flight", "status"), [(True, Status.HANG), (False, Status.INFRA)])
def test_the_deadline_kills_and_tells_a_hang_from_slow_host_work(
    in_flight: bool, status: Status
) -> None:
    def work(progress: Progress, begun: Callable[[], None]) -> Mapping[str, object]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if in_flight:
            progress.launching()
        begun()
        time.sleep(600)
        return {}

    ended = overdue(work, 0.3)
    assert (ended.cause, ended.reaped) == ("deadline", True)
    assert not alive(ended.pid)
    assert explain(ended, 0.3)[0] is status


def test_an_exception_is_told_with_its_last_line() -> None:
    def work(progress: Progress) -> Mapping[str, object]:
        raise KeyError("missing tensor")

    ended = child.run(work, 10)
    assert (ended.cause, ended.code) == ("died", 1)
    status, failure = explain(ended, 10)
    assert status is Status.INFRA
    assert "KeyError: 'missing tensor'" in failure.message


def test_a_result_without_finite_numbers_is_still_a_result() -> None:
    ended = child.run(lambda progress: {"a": float("nan"), "b": [float("-inf")]}, 10)
    assert ended.result is not None
    assert ended.result["a"] > 1e300
    assert ended.result["b"][0] < -1e300


def test_bytes_that_are_no_frame_are_garbled() -> None:
    before = pipes()

    def work(progress: Progress) -> Mapping[str, object]:
        for inode, fd in pipes().items():
            if inode not in before:
                with suppress(OSError):
                    os.write(fd, b"\xff" * 64)
        time.sleep(60)
        return {}

    ended = child.run(work, 10)
    assert ended.cause == "garbled"
    assert explain(ended, 10)[0] is Status.INFRA


def test_grandchildren_die_with_their_group() -> None:
    def work(progress: Progress) -> Mapping[str, object]:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return {"pid": pid}

    ended = child.run(work, 10)
    assert ended.result is not None
    end = time.monotonic() + 60
    while alive(ended.result["pid"]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(ended.result["pid"])


def test_a_watched_descriptor_can_cancel() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"x")
    ended = child.run(lambda progress: time.sleep(60) or {}, 30, Watch(read_end, lambda: True))
    assert (ended.cause, explain(ended, 30)[0]) == ("cancelled", Status.CANCELLED)
    assert ended.seconds < 30
    os.close(read_end)
    os.close(write_end)


def test_an_interrupted_supervisor_takes_its_child_along() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"x")
    before = children()  # other tests may have some
    pids: set[int] = set()

    def stop() -> bool:
        pids.update(children() - before)
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        child.run(lambda progress: time.sleep(60) or {}, 30, Watch(read_end, stop))
    assert pids
    assert not any(alive(p) for p in pids)
    os.close(read_end)
    os.close(write_end)
