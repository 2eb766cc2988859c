"""Why a kernel does not end, from the words that it wrote on the way: deadlock, stuck blocks, or still moving.

A candidate may declare `"progress": ("i32", (blocks, 4), "zero", "persistent")` as workspace. Each block writes its
row: the phase it has entered (from 1 on), 1 once it waits at the end of that phase else 0, what it waits for, what it
saw last. On cuda the judge clears it before a step and puts it into host memory that its parent shares, so the words
can be read while the kernel hangs and after it was killed. They are the candidate's word: they explain a hang, they
never decide one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.verdict import Failure

NAME = "workspace.progress"
COLUMNS = 4
MOST_BYTES = 64 << 10
APART_S = 0.25
SHOWN = 6
ADVICE = (
    "to learn where it waits, declare workspace progress ('i32', (blocks, 4), 'zero', 'persistent') and write "
    "(phase, waiting, wanted, seen) of each block"
)
Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Kind:
    """`name`: deadlock, stuck, moving or unknown."""

    name: str
    text: str
    where: dict[str, Any]


def classify(before: Rows, after: Rows) -> Kind:
    """From two readings some time apart."""
    if not after:
        return Kind("unknown", ADVICE, {})
    if [list(r) for r in before] != [list(r) for r in after]:
        moved = [
            i for i, (a, b) in enumerate(zip(before, after, strict=True)) if list(a) != list(b)
        ]
        text = f"it is still moving: {_blocks(moved)} changed within {APART_S:g} s; an endless loop, or far too slow"
        return Kind("moving", text, {"blocks": moved[:SHOWN], "phases": _span(after)})
    silent = [i for i, r in enumerate(after) if r[0] == 0]
    if len(silent) == len(after):
        text = (
            "no block has written its progress: it hangs before the first phase, or never started"
        )
        return Kind("stuck", text, {"blocks": silent[:SHOWN]})
    waiting = [i for i, r in enumerate(after) if r[0] != 0 and r[1]]
    working = [i for i, r in enumerate(after) if r[0] != 0 and not r[1]]
    if not silent and not working:
        return _deadlock(after)
    return _stuck(after, (waiting, working, silent))


def _deadlock(rows: Rows) -> Kind:
    """Everybody waits, so nobody will come."""
    phases = sorted({r[0] for r in rows})
    last = [i for i, r in enumerate(rows) if r[0] == phases[0]]
    if len(phases) == 1:
        text = f"deadlock: all {len(rows)} blocks wait at the end of phase {phases[0]}, {_counts(rows[0])}"
    else:
        text = (
            f"deadlock: all {len(rows)} blocks wait, but at the ends of phases {', '.join(map(str, phases[:SHOWN]))}: "
            f"{_blocks(last)} in phase {phases[0]}, {_counts(rows[last[0]])}"
        )
    return Kind(
        "deadlock", text, {"phases": phases[:SHOWN], "behind": last[:SHOWN], "waiting": len(rows)}
    )


def _stuck(rows: Rows, groups: tuple[list[int], list[int], list[int]]) -> Kind:
    waiting, working, silent = groups
    parts = []
    if working:
        phases = sorted({rows[i][0] for i in working})
        inside = f"phase {phases[0]}" if len(phases) == 1 else f"phases {phases[0]} to {phases[-1]}"
        parts.append(f"{_blocks(working)} never came to the end of {inside}")
    if silent:
        parts.append(f"{_blocks(silent)} never started")
    if waiting:
        parts.append(f"{len(waiting)} wait, {_counts(rows[waiting[0]])}")
    where = {
        "working": working[:SHOWN], "silent": silent[:SHOWN], "waiting": len(waiting), "phases": _span(rows),
    }  # fmt: skip
    return Kind("stuck", f"stuck: {'; '.join(parts)}", where)


def _counts(row: Sequence[int]) -> str:
    return f"{row[3]} seen of {row[2]} wanted"


def _span(rows: Rows) -> list[int]:
    phases = [r[0] for r in rows]
    return [min(phases), max(phases)]


def _blocks(which: Sequence[int]) -> str:
    shown = ", ".join(map(str, which[:SHOWN]))
    word = "block" if len(which) == 1 else "blocks"
    return f"{word} {shown}" + (f" and {len(which) - SHOWN} more" if len(which) > SHOWN else "")


def explain(
    failure: Failure, read: Callable[[], Rows], pause: Callable[[float], None] = time.sleep
) -> Failure:
    """The same hang, with what the words say. Reads twice."""
    before = read()
    if before:
        pause(APART_S)
    kind = classify(before, read())
    where = {
        **failure.where,
        "liveness": kind.name,
        **{f"progress_{k}": v for k, v in kind.where.items()},
    }
    return Failure(failure.rule, f"{failure.message}; {kind.text}", where)
