"""Children that are over their deadline, once they have begun: how long that takes is the machine's affair."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

from sandbox.judge import child
from sandbox.judge.child import Ended
from sandbox.judge.progress import Progress

LONGER = (1, 8, 64)


def overdue(
    work: Callable[[Progress, Callable[[], None]], Mapping[str, Any]], deadline_s: float
) -> Ended:
    """How `work` ends when it does not. It says when it has come to the point; where the deadline came before that,
    on a busy machine, a longer one is given."""
    there = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the child

    def begun() -> None:
        there[0] = 1

    for longer in LONGER:
        ended = child.run(lambda progress: work(progress, begun), longer * deadline_s)
        if there[0]:
            break
    return ended
