"""The pool of warm workers, with workers that are made in no time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sandbox import box
from sandbox.compile.pool import Pool


class Worker(box.Boxed):
    """A box that holds nothing."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.killed = False

    def kill(self) -> None:
        self.killed = True


class Factory:
    """Makes workers, or breaks; remembers them. `gate` holds a start up until it is set."""

    def __init__(self) -> None:
        self.made: list[Worker] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def __call__(self, arch: str) -> box.Boxed | box.Broken:
        self.gate.wait(60)
        if self.broken:
            return box.Broken("box", "cannot start")
        self.made.append(Worker(arch))
        return self.made[-1]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_worker_is_taken_once_and_replaced() -> None:
    factory = Factory()
    pool = Pool(factory, idle=2)
    pool.refill("sm_90a")
    wait_for(lambda: len(factory.made) == 2)
    taken = [pool.take("sm_90a") for _ in range(2)]
    assert taken[0] is not taken[1] and set(map(id, taken)) == set(map(id, factory.made))
    pool.refill("sm_90a")
    wait_for(lambda: len(factory.made) == 4)
    pool.refill("sm_90a")
    assert len(factory.made) == 4


def test_architectures_do_not_share_workers() -> None:
    factory = Factory()
    pool = Pool(factory, idle=1)
    pool.refill("sm_90a")
    wait_for(lambda: len(factory.made) == 1)
    other = pool.take("sm_100a")
    assert isinstance(other, Worker) and other.arch == "sm_100a"


def test_a_caller_waits_for_the_worker_that_is_starting() -> None:
    factory = Factory()
    factory.gate.clear()
    pool = Pool(factory, idle=1)
    pool.refill("sm_90a")
    got: list[object] = []
    caller = threading.Thread(target=lambda: got.append(pool.take("sm_90a")))
    caller.start()
    time.sleep(0.05)
    factory.gate.set()
    caller.join(60)
    assert got == factory.made and len(got) == 1


def test_a_start_that_breaks_is_reported_to_the_caller() -> None:
    factory = Factory()
    factory.broken = True
    pool = Pool(factory, idle=1)
    pool.refill("sm_90a")
    found = pool.take("sm_90a")
    assert isinstance(found, box.Broken) and found.detail == "cannot start"


def test_closing_kills_the_idle_and_those_that_come_too_late() -> None:
    factory = Factory()
    pool = Pool(factory, idle=1)
    pool.refill("sm_90a")
    wait_for(lambda: len(factory.made) == 1)
    used = pool.take("sm_90a")
    factory.gate.clear()
    pool.refill("sm_90a")
    pool.close()
    factory.gate.set()
    wait_for(lambda: len(factory.made) == 2 and factory.made[1].killed)
    assert isinstance(used, Worker) and not used.killed
    assert isinstance(pool.take("sm_90a"), box.Broken)
