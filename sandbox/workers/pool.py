"""Who does what: gives each job to a worker, and decides what a failure means.

A worker or node that is lost, and an `infra` answer, are the machine's: the job goes to another worker. What a judge
says of a candidate is final, with one exception: a GPU on which one candidate after the other faults or hangs is
suspect, and the next such answer is checked by another GPU. A job that takes its worker down time and again is given
up as `infra`, which is never scored. Callers wait while all workers are busy, so nothing piles up in between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox.workers import parcel
from sandbox.workers.address import Farm
from sandbox.workers.places import Post, Role
from sandbox.workers.roster import Closed, Member, NoWorker, Roster, Times
from sandbox.workers.station import Setup
from sandbox.workers.transport import Call, Cluster, Lost, StationFailed

ATTEMPTS = 3
DEADLY = 3
"""A job that so many workers did not survive is not tried again."""
SUSPECT = 3
"""Broken candidates in a row on one worker until another is asked as well."""
HARD = ("quarantined", "no-gpu", "canary", "canary-child")
"""Rules of `infra` that say the device itself does not work."""
KEPT_TOKENS = 64
log = logging.getLogger("kernelgen.workers")

Means = Literal["good", "broken", "infra", "cancelled"]
"""`good`: of the candidate, whatever it says; `broken`: it faulted or hung."""


@dataclass(frozen=True)
class Task:
    """`blobs`: what the worker may fetch, by hash; `read` says what an answer means, and the rule if it is `infra`."""

    role: Role
    key: str
    header: bytes
    limit_s: float
    read: Callable[[bytes], tuple[Means, str, str]]
    kind: str = ""
    blobs: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """`data` None: no worker could answer; `why` says what happened to them."""

    data: bytes | None
    why: str = ""
    worker: str = ""


@dataclass
class _Try:
    """One worker's go at a job."""

    member: Member
    data: bytes | None
    means: Means
    why: str
    rule: str = ""


class Pool:
    """Thread-safe. The cluster is closed with it."""

    def __init__(
        self, cluster: Cluster, farm: Farm, setup: Callable[[Post], Setup], times: Times | None = None
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self.roster = Roster(cluster, farm, setup, times or Times())
        self._tokens: dict[str, Any] = {}
        self._deaths: dict[str, int] = {}
        self._guard = threading.Lock()
        self._flying: dict[str, Member] = {}
        self._stop = threading.Event()
        self._closing = threading.Lock()
        self._watch = threading.Thread(target=self._beat, name="workers", daemon=True)

    def start(self) -> None:
        """Hire. Raises Lost."""
        self.roster.tick()
        self._watch.start()

    def settle(self, role: Role, kinds: tuple[str, ...] | None) -> None:
        """Wait for a worker of each kind, or until every one has answered; `kinds` None waits for all of them, and
        () for any one. Raises NoWorker, Closed."""
        roster, since = self.roster, None
        with roster.changed:
            while not roster.closed:
                mine = [m for m in roster.members if m.post.role == role]
                starting = any(m.state == "starting" for m in mine)
                ready = {m.kind for m in mine if m.state == "ready"}
                if ready and (not starting or (kinds is not None and ready >= set(kinds))):
                    return
                # a post that was lost just now is filled again in the same round
                since = None if starting else roster.rounds if since is None else since
                if since is not None and roster.rounds > since + 1:
                    raise NoWorker(roster.describe(role))
                roster.changed.wait(1.0)
        raise Closed("the workers were sent home")

    def kinds(self) -> dict[str, Mapping[str, Any]]:
        """Kinds of device that can be judged on now, with the facts of one of each."""
        with self.roster.changed:
            ready = [
                m for m in self.roster.members if m.state == "ready" and m.post.role == "judge"
            ]
            return {m.kind: m.facts for m in ready}

    def run(self, task: Task) -> Answer:
        """The answer of some worker. Raises Closed; all else is in the answer."""
        tries: list[_Try] = []
        first: _Try | None = None
        while len(tries) < ATTEMPTS + (first is not None):
            if self._deaths.get(task.key, 0) >= DEADLY:
                break
            try:
                member = self.roster.take(task.role, task.kind, {t.member.name for t in tries})
            except NoWorker as error:
                return self._give_up(task.key, tries, str(error))
            one = self._once(member, task)
            tries.append(one)
            if self.roster.closed and one.means != "good":
                raise Closed("the workers were sent home")
            if one.means == "infra":
                continue
            if one.means == "broken" and first is None and self._suspicious(one.member):
                first = one
                continue
            if first is not None:
                one = self._compare(first, one)
            elif one.means == "good":
                self.roster.praise(one.member)
            return Answer(one.data, "", one.member.name)
        if first is not None:  # nobody else could say anything
            return Answer(first.data, "", first.member.name)
        return self._give_up(task.key, tries, "")

    def cancel(self, key: str) -> None:
        """The job of that key ends as `cancelled`, if a judge has it."""
        with self._guard:
            member = self._flying.get(key)
        if member is not None:
            member.worker.call(Call("cancel", parcel.pack({"key": key})))

    def close(self) -> None:
        """Cancel what runs, send the workers home, end the cluster. Bounded; harmless when repeated."""
        if not self._closing.acquire(blocking=False):
            return
        roster = self.roster
        with roster.changed:
            roster.closed = True
            roster.changed.notify_all()
        self._stop.set()
        # On a thread: this may be a signal handler, and what it interrupted may hold a lock that Ray needs.
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        ending.join(2 * roster.times.closing + 10)

    def _end(self) -> None:
        members = [m for m in self.roster.members if m.state != "gone"]
        goodbyes: list[Future[Any]] = [m.worker.call(Call("close")) for m in members]
        wait(goodbyes, self.roster.times.closing)
        for member in members:
            self.roster.lost(member, "the pool was closed")
        if self._watch.ident is not None:
            self._watch.join(self.roster.times.closing)
        self._tokens.clear()
        self._cluster.close()

    def _beat(self) -> None:
        while not self._stop.wait(0.0):
            try:
                self.roster.tick()
            except Lost as error:
                log.error("the cluster is lost: %s", error)
                for member in list(self.roster.members):
                    self.roster.lost(member, f"the cluster is lost: {error}")
            starting = any(m.state == "starting" for m in self.roster.members)
            self._stop.wait(
                min(0.2, self.roster.times.beat) if starting else self.roster.times.beat
            )

    def _once(self, member: Member, task: Task) -> _Try:
        try:
            tokens = {sha: self._token(sha, make) for sha, make in task.blobs.items()}
        except Lost as error:  # the store is full or gone: no worker's doing
            self.roster.free(member)
            return _Try(member, None, "infra", str(error), "store")
        with self._guard:
            self._flying[task.key] = member
        try:
            data = self._ask(member, task, tokens)
            means, rule, why = task.read(data)
        except Lost as error:
            self._deaths[task.key] = self._deaths.get(task.key, 0) + 1
            self.roster.lost(member, str(error))
            return _Try(
                member, None, "infra", f"worker {member.name} was lost: {error}", "worker-lost"
            )
        except StationFailed as error:
            means, rule, why, data = "infra", "worker", str(error), b""
        finally:
            with self._guard:
                self._flying.pop(task.key, None)
            self.roster.free(member)
        if means == "infra" and rule in HARD:
            self.roster.condemn(member, why)
        elif means == "infra":
            self.roster.strike(member, task.key, why)
        member.broken = (
            member.broken + 1 if means == "broken" else 0 if means == "good" else member.broken
        )
        return _Try(member, data or None, means, f"{member.name}: {why}", rule)

    def _ask(self, member: Member, task: Task, tokens: Mapping[str, Any]) -> bytes:
        """Raises Lost, StationFailed."""
        future: Future[bytes] = member.worker.call(Call(task.role, task.header, tokens))
        either: list[Future[Any]] = [future, member.gone]
        done, _ = wait(either, task.limit_s, FIRST_COMPLETED)
        if future in done:
            return future.result()
        raise Lost(member.why or f"no answer within {task.limit_s:.0f} s")

    def _token(self, sha: str, make: Callable[[], bytes]) -> Any:
        """One blob of each hash in the cluster, however many jobs name it; the oldest are let go."""
        with self._guard:
            token = self._tokens.pop(sha, None)
            if token is None:
                token = self._cluster.put(make())
            self._tokens[sha] = token
            while len(self._tokens) > KEPT_TOKENS:
                self._tokens.pop(next(iter(self._tokens)))
            return token

    def _suspicious(self, member: Member) -> bool:
        return member.broken >= SUSPECT and self.roster.other(member)

    def _compare(self, first: _Try, second: _Try) -> _Try:
        """What counts after a second opinion; a GPU that alone saw a failure is left out."""
        if second.means == "good":
            self.roster.condemn(first.member, f"a candidate broke on it alone ({first.why})")
            return second
        first.member.broken = second.member.broken = 0
        return first if second.means == "cancelled" else second

    def _give_up(self, key: str, tries: list[_Try], why: str) -> Answer:
        """No worker's answer counts: the last one's `infra`, if there is one, else the reason."""
        soft = [t for t in tries if t.data is not None and t.rule not in HARD]
        if len({t.member.name for t in soft}) > 1:
            for one in soft:
                self.roster.forgive(one.member, key)
        causes = [t.why for t in tries] + ([why] if why else [])
        last = next((t.data for t in reversed(tries) if t.data is not None), None)
        text = (
            "; ".join(causes) or f"{DEADLY} workers did not survive this job: it is not tried again"
        )
        return Answer(last, text, tries[-1].member.name if tries else "")
