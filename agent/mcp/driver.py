"""The thread that lets a run advance while the server answers: whenever there is a submission, it is
compiled, judged and recorded by the run's own graph.

The run is held only while it works, so that several servers can share it: whoever is free takes the
next step, and what a killed one left is taken up by another. It decides nothing itself.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent import seats
from agent.locks import RunBusy, hold
from agent.mcp.desk import ENDED, Desk
from agent.models import inbox
from agent.models.base import StopRun, Unavailable
from agent.runner import Run, Services, Session, advance, load_settings, make_ledger
from agent.store import Corrupt
from agent.store.queries import NotFound
from agent.workspace import Missing, Place
from sandbox.compile_client import NoIsolation
from sandbox.judge_client import JudgeFailed
from sandbox.strict import Malformed
from sandbox.verdict import Verdict

POLL_S = 0.25
BUSY_S = 1.0
FAILED_S = 30.0
SETTLED_S = 1.0
LOOK_S = 5.0
EXPECTED = (
    OSError, sqlite3.Error, LookupError, Corrupt, Missing, Unavailable, NoIsolation, JudgeFailed,
    StopRun, NotFound, Malformed,
)  # fmt: skip
log = logging.getLogger("kernelgen.mcp")


@dataclass(frozen=True)
class Opened:
    """A run with what drives it. `services` None: another process does; `reopen`: let a run that
    had ended decide again, under other limits.
    """

    run: str
    services: Services | None
    reopen: bool = False


class Lines:
    """Progress to the log, which is on stderr: stdout may be the protocol's. `begun` is called when
    a round begins.
    """

    def __init__(self, begun: Callable[[], None]) -> None:
        self.begun = begun

    def say(self, text: str) -> None:
        log.info("%s", text)

    def round(self, number: int, candidates: list[int]) -> None:
        log.info("round %d: candidates %s", number, candidates)
        self.begun()

    def status(self, seq: int, text: str) -> None:
        log.info("candidate %d: %s", seq, text)

    def verdict(self, seq: int, step: int, verdict: Verdict) -> None:
        log.info("candidate %d: %s", seq, verdict.outcome or verdict.status)

    def promoted(self, seq: int, reason: str) -> None:
        log.info("candidate %d is the best now: %s", seq, reason)


class Driver:
    """`begin` starts the services and names the run; it may take long and is called once, on the
    thread.
    """

    def __init__(self, place: Place, begin: Callable[[], Opened]) -> None:
        self.place = place
        self.ready = threading.Event()
        self.trouble = ""
        self._begin = begin
        self._desk: Desk | None = None
        self._stopping = threading.Event()
        self._session: Session | None = None
        self._look = 0.0
        # A daemon: a second interrupt must end the process; all that was finished is on disk.
        self._thread = threading.Thread(target=self._work, name="driver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Drain: what is running is finished and recorded as far as the next quiet point."""
        self._stopping.set()
        if self._session is not None:
            self._session.stop()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def desk(self, timeout_s: float) -> Desk | None:
        """The run's desk once it is open; None while that takes, or if it failed (`trouble`)."""
        return self._desk if self.ready.wait(timeout_s) else None

    def _work(self) -> None:
        try:
            opened = self._begin()
            self._desk = Desk.of(self.place, opened.run)
        except Exception as error:
            if not isinstance(error, EXPECTED):
                log.exception("the run could not be opened")
            self.trouble = str(error)
            self.ready.set()
            return
        if opened.services is None:
            self.ready.set()
            return
        if not opened.reopen:  # else the record says that the run has ended, until a round begins
            self.ready.set()
        try:
            self._loop(opened, opened.services)
        except Exception as error:
            log.exception("the driver ended")
            self.trouble = f"an error of kernelgen itself ended the work on the run: {error}"
        finally:
            self.ready.set()
            opened.services.close()

    def _loop(self, opened: Opened, services: Services) -> None:
        """The first step judges the seed, or goes on with what was left."""
        due = opened.reopen or not self._ended()
        while not self._stopping.is_set():
            pause = POLL_S
            if due:
                pause = self._step(opened.run, services)
                self.ready.set()
            if self._stopping.wait(pause):
                return
            due = self._due()

    def _step(self, run: str, services: Services) -> float:
        """One session, until the run waits for proposals. Returns the seconds to pause."""
        self._session = session = Session(self.place, Lines(self.ready.set))
        if self._stopping.is_set():  # `stop` came before it could see this session
            return 0.0
        before = self._pending()
        try:
            with hold(self.place.workspace.run(run)):
                settings = replace(load_settings(self.place, run), wait=False)
                ledger = make_ledger(self.place, run, settings)
                party = seats.seat(run, settings, session, ledger.check)
                advance(Run(run, settings, session, services, party, ledger))
            self.trouble = ""
        except RunBusy:
            return BUSY_S
        except EXPECTED as error:
            log.error("the run stands still: %s", error)
            self.trouble = f"the run stands still: {error}"
            return FAILED_S
        return BUSY_S if before and self._pending() == before else POLL_S

    def _due(self) -> bool:
        """Whether a step can bring anything: something was handed in, or was left by a killed
        process.
        """
        pending = bool(self._pending())
        if not pending and time.monotonic() < self._look:
            return False
        self._look = time.monotonic() + LOOK_S
        state = self._state()
        return state not in ENDED and (state != "waiting" or pending)

    def _ended(self) -> bool:
        return self._state() in ENDED

    def _state(self) -> str:
        assert self._desk is not None
        return str(self._desk.queries.run(self._desk.run)["state"])

    def _pending(self) -> list[str]:
        """Submissions, and a `candidate.py` that has stopped growing."""
        assert self._desk is not None
        folder = self._desk.folder
        found = inbox.waiting(folder)
        try:
            age = time.time() - (folder / "candidate.py").stat().st_mtime
        except FileNotFoundError:
            return found
        return [*found, "candidate.py"] if age > SETTLED_S else found
