"""The wire log of one attempt at a paid call: the question, then each event of the answer as it
arrived, written before anybody reads it.

A process killed at any moment leaves the log behind: a whole answer in it is never asked for again,
a response's id lets it be fetched, and what is left over is known to be lost. Lines go to the
operating system at once, so a kill loses none; only the question, the id and the end are also
flushed to the disk against a power cut. It interprets nothing; keys are hidden.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agent.models.keys import hidden

Event = Mapping[str, Any]


class Wire(Protocol):
    """Where an adapter puts what the provider sends. `key`: the attempt's name, for providers and
    gateways that honour Idempotency-Key.
    """

    @property
    def key(self) -> str: ...

    def event(self, event: Event, flush: bool = False) -> None: ...


@dataclass
class Loose:
    """A wire that remembers and writes nothing down: for a call outside a run."""

    key: str = ""
    events: list[Event] = field(default_factory=list)

    def event(self, event: Event, flush: bool = False) -> None:
        self.events.append(event)


@dataclass
class WireLog:
    """`question`: what was asked, with the estimate it was charged at. `end`: the row of an attempt
    that has one.
    """

    path: Path
    question: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        return str(self.question["key"])

    @staticmethod
    def begin(path: Path, question: dict[str, Any]) -> WireLog:
        """On disk before the request leaves. Raises OSError, FileExistsError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        log = WireLog(path, question)
        log._append("question", question, flush=True)
        return log

    @staticmethod
    def read(path: Path) -> WireLog | None:
        """None for a log that was cut off before its question was whole: nothing was sent then."""
        log: WireLog | None = None
        for line in path.read_bytes().split(b"\n"):
            try:
                kind, value = json.loads(line)
            except ValueError:
                continue  # torn by the kill, or the empty last one
            if kind == "question":
                log = WireLog(path, value)
            elif log is not None and kind == "event":
                log.events.append(value)
            elif log is not None:
                log.end = value
        return log

    def event(self, event: Event, flush: bool = False) -> None:
        event = hidden(event)
        self._append("event", event, flush)
        self.events.append(event)

    def finish(self, row: dict[str, Any]) -> None:
        self._append("end", row, flush=True)
        self.end = row

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _append(self, kind: str, value: Any, flush: bool) -> None:
        data = (json.dumps([kind, value], default=str) + "\n").encode()
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            while data:
                data = data[os.write(fd, data) :]
            if flush:
                os.fsync(fd)
        finally:
            os.close(fd)
