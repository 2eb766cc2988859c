"""Who works for us: hires workers for the posts of a cluster, hears their hearts, and lets go of what is broken.

Policy and bookkeeping only; jobs are `sandbox.workers.pool`'s. A worker whose GPU is bad stays at its post without
work, so that the cluster does not hand the same GPU to the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sandbox.strict import Malformed
from sandbox.workers import keys, parcel
from sandbox.workers.address import Farm
from sandbox.workers.places import Node, Post, Role, posts
from sandbox.workers.station import Setup
from sandbox.workers.transport import Call, Cluster, Lost, StationFailed, Worker

State = Literal["starting", "ready", "bad", "gone"]
log = logging.getLogger("kernelgen.workers")


@dataclass(frozen=True)
class Times:
    """Seconds. `silent`: a worker not heard for so long is lost; `hello`: its first answer, which may measure a GPU;
    `patience`: a job waits so long for a worker while none is in sight."""

    beat: float = 2.0
    silent: float = 60.0
    hello: float = 420.0
    patience: float = 60.0
    closing: float = 8.0


STRIKES = 3
"""Jobs in a row that failed on a worker, and not for the candidate, until it is left out."""
HEARTS_PER_S = 100
"""Heartbeats asked for at most: a thousand workers are heard every ten seconds."""
REHIRES = 4
"""Workers that may be lost at one post."""


@dataclass
class Member:
    """A worker and what is known of it. Changed under the roster's lock only."""

    name: str
    post: Post
    worker: Worker
    state: State = "starting"
    why: str = ""
    kind: str = ""
    pid: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    busy: int = 0
    done: int = 0
    strikes: set[str] = field(default_factory=set)
    broken: int = 0
    heard: float = 0.0
    asked: float = 0.0
    hello: Future[bytes] | None = None
    beat: Future[bytes] | None = None
    gone: Future[None] = field(default_factory=Future)


class NoWorker(Exception):
    """Nobody can do this; the message says what became of the workers."""


class Closed(Exception):
    """The pool has been closed."""


class Roster:
    """Thread-safe. `setup` makes the worker's orders from a post; `tick` is called by a thread of the pool."""

    def __init__(
        self, cluster: Cluster, farm: Farm, setup: Callable[[Post], Setup], times: Times
    ) -> None:
        self._cluster, self._farm, self._setup, self.times = cluster, farm, setup, times
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self.members: list[Member] = []
        self._nodes: dict[str, int] = {}
        self._lost_at: dict[tuple[str, str, int], int] = {}
        self._listened = time.monotonic()
        self.rounds = 0

    # Jobs

    def take(self, role: Role, kind: str, avoid: set[str]) -> Member:
        """A worker with a free slot, the caller's until `free`. Waits while others may come. Raises Closed, NoWorker.

        Those in `avoid` are taken only when nobody else is there.
        """
        last = time.monotonic()
        with self.changed:
            while True:
                if self.closed:
                    raise Closed("the workers were sent home")
                hopeful = [m for m in self.members if m.post.role == role and self._hope(m, kind)]
                others = [m for m in hopeful if m.name not in avoid]
                ready = [
                    m for m in others or hopeful if m.state == "ready" and m.busy < m.post.slots
                ]
                if ready:
                    found = min(ready, key=lambda m: m.busy / m.post.slots)
                    found.busy += 1
                    return found
                if hopeful:
                    last = time.monotonic()
                elif time.monotonic() - last > self.times.patience:
                    raise NoWorker(self.describe(role))
                self.changed.wait(1.0)

    def _hope(self, m: Member, kind: str) -> bool:
        return m.state == "starting" or (m.state == "ready" and (not kind or m.kind == kind))

    def other(self, member: Member) -> bool:
        """Whether a second opinion can be had: another ready worker of the same kind."""
        with self.changed:
            return any(
                m is not member and m.state == "ready" and m.kind == member.kind and m.post.role == member.post.role
                for m in self.members
            )  # fmt: skip

    def free(self, member: Member) -> None:
        with self.changed:
            member.busy = max(0, member.busy - 1)
            member.done += 1
            self.changed.notify_all()

    def praise(self, member: Member) -> None:
        with self.changed:
            member.strikes.clear()

    def strike(self, member: Member, job: str, why: str) -> None:
        """A failure that was not the candidate's; on too many jobs in a row and the worker is left out."""
        with self.changed:
            member.strikes.add(job)
            if len(member.strikes) >= STRIKES:
                self.condemn(member, f"{STRIKES} jobs in a row failed on it, the last: {why}")

    def forgive(self, member: Member, job: str) -> None:
        """The job failed everywhere: it was not this worker."""
        with self.changed:
            member.strikes.discard(job)

    def condemn(self, member: Member, why: str) -> None:
        """Quarantine: it keeps its post and gets no more work."""
        with self.changed:
            if member.state in ("starting", "ready"):
                member.state, member.why = "bad", why
                log.warning("worker %s is left out: %s", member.name, why)
            self.changed.notify_all()

    def lost(self, member: Member, why: str) -> None:
        """It is gone; whoever waits for it is told, and its post may be filled again."""
        with self.changed:
            if member.state == "gone":
                return
            member.state, member.why = "gone", why
            post = member.post
            at = (post.node, post.role, post.number)
            self._lost_at[at] = self._lost_at.get(at, 0) + 1
            if not self.closed:
                log.warning("worker %s is lost: %s", member.name, why)
            if not member.gone.done():
                member.gone.set_result(None)
            self.changed.notify_all()
        member.worker.kill()

    # Watching

    def tick(self) -> None:
        """Fill posts, take in first answers, hear hearts. Raises Lost when the cluster is gone."""
        self._excuse()
        self._reconcile(self._cluster.nodes())
        for member in list(self.members):
            if member.state == "starting":
                self._greet(member)
            if member.state in ("ready", "bad"):
                self._listen(member)
        self.rounds += 1

    def _excuse(self) -> None:
        """While this process was stopped, or had no turn on a processor, nobody listened: that was no silence."""
        now = time.monotonic()
        away = now - self._listened
        self._listened = now
        if away > max(self.times.silent / 4, 2 * self.times.beat):
            for member in self.members:
                member.heard += away

    def _reconcile(self, nodes: list[Node]) -> None:
        alive = {n.id for n in nodes}
        for member in self.members:
            if member.state != "gone" and member.post.node not in alive:
                self.lost(member, f"its node {member.post.host} left the cluster")
        for node in nodes:
            self._nodes.setdefault(node.id, len(self._nodes))
        known = sorted(nodes, key=lambda n: self._nodes[n.id])
        example = self._setup(Post("judge", "", "", 0))
        filled = {m.post for m in self.members if m.state != "gone"}
        for post in posts(known, self._farm, example.device, example.arch):
            lost = self._lost_at.get((post.node, post.role, post.number), 0)
            if post not in filled and lost < REHIRES and not self.closed:
                self._hire(post, lost)

    def _hire(self, post: Post, lost: int) -> None:
        name = post.name + (f"#{lost + 1}" if lost else "")
        setup = replace(self._setup(post), role=post.role, number=post.number, slots=post.slots)
        member = Member(
            name, post, self._cluster.hire(post, setup.to_text()), heard=time.monotonic()
        )
        member.hello = member.worker.call(Call("hello"))
        member.hello.add_done_callback(lambda _: self._wake())
        with self.changed:
            self.members.append(member)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _greet(self, member: Member) -> None:
        hello = member.hello
        assert hello is not None
        if not hello.done():
            if time.monotonic() - member.heard > self.times.hello:
                self.lost(member, f"no answer within {self.times.hello:g} s of its start")
            return None
        try:
            said, _ = parcel.unpack(hello.result())
            probe = dict(said["probe"])
        except Lost as error:
            return self.lost(member, str(error))
        except (StationFailed, Malformed, KeyError, TypeError, ValueError) as error:
            return self.condemn(member, f"its first answer: {error}")
        odd = keys.differing(said.get("versions", {})) if self._farm.address else ""
        if odd:
            return self.condemn(member, f"it runs other versions: {odd}")
        if not probe.get("ok"):
            return self.condemn(member, str(probe.get("message", "it does not work"))[:500])
        with self.changed:
            member.facts = probe.get("facts", {}) if member.post.role == "judge" else probe
            member.kind = kind_of(member.facts) if member.post.role == "judge" else ""
            member.pid = int(said.get("pid", 0))
            member.state, member.heard = "ready", time.monotonic()
            self.changed.notify_all()
        return None

    def _listen(self, member: Member) -> None:
        now = time.monotonic()
        beat = member.beat
        if beat is not None and beat.done():
            try:
                beat.result()
                member.heard = now
            except (Lost, StationFailed) as error:
                return self.lost(member, str(error))
            beat = member.beat = None
        if beat is None and now - member.asked >= len(self.members) / HEARTS_PER_S:
            member.asked = now
            member.beat = member.worker.call(Call("beat"))
        if now - member.heard > self.times.silent:
            self.lost(member, f"not heard for {now - member.heard:.0f} s")
        return None

    # People

    def describe(self, role: Role | None = None) -> str:
        """What became of the workers, in a line."""
        with self.changed:
            mine = [m for m in self.members if role in (None, m.post.role)]
            out = [f"{m.name} {m.state}: {m.why}" for m in mine if m.why]
            count = sum(m.state == "ready" for m in mine)
        what = f"{role} workers" if role else "workers"
        return f"{count} of {len(mine)} {what} are ready" + (
            f" ({'; '.join(out[-6:])})" if out else ""
        )


def kind_of(facts: Mapping[str, Any]) -> str:
    """A short name for a kind of device, such as `h200` or `cpu`: what results may be compared within."""
    words = str(facts.get("name", "")).lower().replace("nvidia", "").split()
    return "-".join(words) or str(facts.get("kind", ""))
