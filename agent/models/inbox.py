"""Submissions to a run that `external` drives: files in `queue/`, taken in order, each once.

One rename binds a submission to the number of a candidate, so a kill on either side loses and
repeats none. The same text submitted again is the same submission. Beside `candidate.py`, for
several authors; nothing here reads or judges a source.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.claims import docstring
from agent.models.base import NoProposal
from agent.workspace import read_json, write_bytes, write_json


@dataclass(frozen=True)
class Offer:
    """What an author hands in. `predicted_gain` is a claim: the speed-up over the parent."""

    source: str
    note: str = ""
    predicted_gain: float | None = None
    tunables: Mapping[str, Any] = field(default_factory=dict)
    author: str = ""

    @property
    def digest(self) -> str:
        said = json.dumps([self.source, dict(self.tunables)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Place:
    """Where a submission is: `ahead` others wait before it, or it is candidate `seq`."""

    ticket: str
    seq: int | None = None
    ahead: int = 0


def submit(folder: Path, offer: Offer, again: Callable[[int], bool]) -> Place:
    """Queue it, or say where the same text is already. `again(seq)`: that candidate ended for no
    fault of its own, so that the text may be tried once more. Raises OSError.
    """
    with _locked(folder):
        for n in itertools.count():
            ticket = f"{offer.digest}-{n}"
            at = find(folder, ticket)
            if at is None:
                break
            if at.seq is None or not again(at.seq):
                return at
        said = {
            "ticket": ticket, "source": offer.source, "note": offer.note, "author": offer.author,
            "predicted_gain": offer.predicted_gain, "tunables": dict(offer.tunables),
        }  # fmt: skip
        write_json(folder / "queue" / f"{time.time_ns():020d}-{ticket}.json", said)
        return Place(ticket, ahead=len(waiting(folder)) - 1)


def find(folder: Path, ticket: str) -> Place | None:
    """None if it was never submitted here."""
    queue = waiting(folder)
    if ticket in queue:
        return Place(ticket, ahead=queue.index(ticket))
    seq = next((seq for seq, name in taken(folder).items() if name == ticket), None)
    return None if seq is None else Place(ticket, seq)


def waiting(folder: Path) -> list[str]:
    """Tickets in order."""
    return [path.stem.partition("-")[2] for path in _queue(folder)]


def taken(folder: Path) -> dict[int, str]:
    """Candidate numbers and their tickets."""
    found = {}
    for path in (folder / "taken").glob("*@*.json"):
        seq, _, ticket = path.stem.partition("@")
        if seq.isdigit():
            found[int(seq)] = ticket
    return found


def claim(folder: Path, seq: int) -> bool:
    """Make the next submission candidate `seq`, as `taken/SEQ.py` and `.json`; False without one.

    A `candidate.py` that lay there first goes first. Raises NoProposal for a file that is none.
    """
    with _locked(folder):
        mine = next((folder / "taken").glob(f"{seq}@*.json"), None)
        if mine is None:
            queue = _queue(folder)
            if not queue or _older(folder / "candidate.py", queue[0]):
                return False
            mine = folder / "taken" / f"{seq}@{queue[0].stem.partition('-')[2]}.json"
            mine.parent.mkdir(parents=True, exist_ok=True)
            os.replace(queue[0], mine)
        _unpack(mine, seq)
    return True


def _unpack(mine: Path, seq: int) -> None:
    """The claims first: the source's presence says that all is there."""
    try:
        said = read_json(mine)
        source = said["source"].encode()
        note = said["note"] or docstring(said["source"])
        claims = {
            "note": f"[{said['author']}] {note}" if said["author"] else note,
            "predicted_gain": said["predicted_gain"], "tunables": said["tunables"],
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoProposal(f"the submission {mine.name} cannot be read") from error
    write_json(mine.with_name(f"{seq}.json"), claims)
    write_bytes(mine.with_name(f"{seq}.py"), source)


def _queue(folder: Path) -> list[Path]:
    """By name, which begins with the time; temporary names begin with a dot."""
    return sorted((folder / "queue").glob("[0-9]*-*.json"))


def _older(file: Path, ticket: Path) -> bool:
    try:
        return file.stat().st_mtime_ns < int(ticket.name.partition("-")[0])
    except FileNotFoundError:
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Among processes and threads; dropped by the kernel when a process dies."""
    (folder / "queue").mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "queue" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
