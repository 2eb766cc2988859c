"""Proposer `external`: a coding agent or a person writes the file. A folder is the whole interface.

The loop writes `task.md`, `guide.md`, `signature.json`, `best.py`, `feedback.md` and `history/`;
the author puts `candidate.py` there (and, optionally first, `candidate.json` with note,
predicted_gain, tunables), or several authors queue submissions (`agent.models.inbox`). A taken file
moves to `taken/`. Nothing in the folder is executed; whoever can write there can only propose.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from agent.claims import MAX_SOURCE_BYTES, docstring, predicted_gain
from agent.models import inbox
from agent.models.base import Model, NoProposal, Request, Waiting
from agent.models.folder import write_folder
from agent.types import Direction, Proposal, Situation, Task
from agent.workspace import Workspace, write_bytes
from sandbox import strict
from sandbox.verdict import Verdict

POLL_S = 0.5


@dataclass(frozen=True)
class External:
    """`sleep(seconds)` returns True when the run is asked to stop. `wait` False: no proposal, no
    waiting.
    """

    folder: Path
    workspace: Workspace
    wait: bool
    sleep: Callable[[float], bool]
    say: Callable[[str], None]
    check: Callable[[], None]
    guide: Callable[[Task], str] = field(default=lambda task: "")
    name: str = "external"
    lock: Lock = field(default_factory=Lock)

    def plan(self, s: Situation, calls: Model | None) -> tuple[Direction, ...]:
        """Always one direction a place: the author decides. Refreshes the folder."""
        self._refresh(s)
        return tuple(Direction("the author's choice", parent=s.incumbent.seq) for _ in range(s.k))

    def propose(self, r: Request) -> Proposal:
        """Raises Waiting, NoProposal for a file that cannot be taken, StopRun when time is up
        meanwhile.
        """
        told = fresh = False
        while True:
            found = self._take(r.seq)
            if found is not None:
                return found
            if not fresh:  # a reviewer may have sent something back since the round was planned
                with self.lock:
                    self._refresh(r.situation)
                fresh = True
            if not self.wait:
                raise Waiting(f"put the next kernel at {self.folder / 'candidate.py'}")
            if not told:
                self.say(f"waiting for {self.folder / 'candidate.py'} (read task.md there)")
                told = True
            self.check()
            if self.sleep(POLL_S):
                raise Waiting(f"stopped while waiting for {self.folder / 'candidate.py'}")

    def repair(self, r: Request, source: str, failed: Verdict) -> Proposal | None:
        """None: the author sees the verdict in feedback.md and the mended file is the next
        candidate.
        """
        return None

    def reflect(self, s: Situation, calls: Model | None) -> tuple[str, ...]:
        self._refresh(s)
        return ()

    def _refresh(self, s: Situation) -> None:
        write_folder(self.folder, s, self.workspace, self.guide(s.task))

    def _take(self, seq: int) -> Proposal | None:
        """The proposal for `seq`: one taken before a kill, or the file that lies there now."""
        taken = self.folder / "taken"
        source, claims = taken / f"{seq}.py", taken / f"{seq}.json"
        with self.lock:
            if not source.exists() and not inbox.claim(self.folder, seq):
                incoming = self.folder / "candidate.py"
                if not self._settled(incoming):
                    return None
                taken.mkdir(parents=True, exist_ok=True)
                if (self.folder / "candidate.json").exists():
                    os.replace(self.folder / "candidate.json", claims)
                os.replace(incoming, source)
        return _read(source, claims)

    def _settled(self, path: Path) -> bool:
        """There, and not still growing. Without waiting it is taken as it is."""
        try:
            before = path.stat()
        except FileNotFoundError:
            return False
        if not self.wait:
            return True
        self.sleep(POLL_S)
        try:
            after = path.stat()
        except FileNotFoundError:
            return False
        return (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def offer(folder: Path, source: str, claims: dict[str, Any] | None = None) -> Path:
    """Put a proposal there as an author would, whole or not at all. Raises OSError."""
    if claims:
        write_bytes(folder / "candidate.json", json.dumps(claims).encode())
    write_bytes(folder / "candidate.py", source.encode())
    return folder / "candidate.py"


def _plain(path: Path, name: str) -> bytes:
    """A file's content; a link, folder or pipe, which the author may put there, is none. Raises NoProposal."""
    refused = NoProposal(
        f"{name} is no plain file (a link?) or larger than {MAX_SOURCE_BYTES >> 20} MB"
    )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise refused from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_SOURCE_BYTES:
        os.close(fd)
        raise refused
    with os.fdopen(fd, "rb") as file:
        return file.read(MAX_SOURCE_BYTES)


def _read(source: Path, claims: Path) -> Proposal:
    try:
        text = _plain(source, "candidate.py").decode()
        there = os.path.lexists(claims)
        data = _plain(claims, "candidate.json") if there else b"{}"
        said = strict.parse(data, "candidate.json", MAX_SOURCE_BYTES)
        gain = said.get("predicted_gain") if isinstance(said, dict) else None
        known = float(gain) if isinstance(gain, (int, float)) else None
        if known is not None and not math.isfinite(known):
            raise ValueError("predicted_gain is no finite number")
        json.dumps(
            said, ensure_ascii=False
        ).encode()  # half a surrogate pair can be written nowhere
    except (ValueError, OverflowError) as error:
        raise NoProposal(f"candidate.py or candidate.json cannot be read: {error}") from error
    if not isinstance(said, dict) or not isinstance(said.get("tunables", {}), dict):
        raise NoProposal("candidate.json is no object with note, predicted_gain and tunables")
    note = str(said.get("note") or docstring(text))
    known = predicted_gain(note) if known is None else known
    return Proposal(text, note, known, said.get("tunables", {}))
