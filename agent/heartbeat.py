"""The minutes of a session, written to a small file every few seconds: a killed run has spent them
all the same.

Only time is kept this way; money, tokens and GPU seconds lie with the calls and verdicts they
bought.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.budget import Ledger
from agent.workspace import read_json, write_json

BEAT_S = 5.0


@contextmanager
def beating(ledger: Ledger, path: Path, every: float = BEAT_S) -> Iterator[None]:
    """While the block runs, at most `every` seconds are lost to a kill."""
    over = threading.Event()

    def beat() -> None:
        while True:
            with suppress(OSError):  # a full disk is met, and said, by whatever writes next
                write_json(path, {"elapsed": ledger.elapsed})
            if over.wait(every):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def elapsed_of(path: Path) -> float:
    """Seconds; 0 without a file."""
    found = read_json(path)
    return float(found["elapsed"]) if found else 0.0
