"""Ctrl-C and SIGTERM: once drains, twice stops at once with exit code 130. Nothing recorded is lost
either way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

DRAINING = "finishing what is running; the run can be resumed. Ctrl-C again stops at once."


@contextmanager
def draining(stop: Callable[[], None], abandon: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """`stop` is called at the first signal, `abandon` at the second, after which the process ends.

    Yields a function that says whether a signal came.
    """
    seen = [0]

    def handle(number: int, frame: FrameType | None) -> None:
        seen[0] += 1
        if seen[0] == 1:
            os.write(2, f"\nkernelgen: {DRAINING}\n".encode())
            # On a thread: the interrupted code may hold a lock that `stop` needs.
            threading.Thread(target=stop, daemon=True).start()
            return
        try:
            abandon()
        finally:
            # Threads of the graph may wait for the GPU; what they finished is on disk already.
            show_cursor()
            os._exit(130)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen[0] > 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_cursor() -> None:
    """The live table hides it."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")
