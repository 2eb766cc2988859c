"""A cluster of threads in this process, for tests of the pool: its stations are whatever `station` makes.

Nodes and workers can be taken away, silenced and slowed. It carries no data between machines and isolates nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox.workers.places import Node, Post
from sandbox.workers.transport import Call, Fetch, Lost, StationFailed


class Answers(Protocol):
    def handle(self, method: str, header: bytes, fetch: Fetch) -> bytes: ...


@dataclass
class FakeWorker:
    """`silent`: calls are taken and never answered."""

    post: Post
    station: Answers
    dead: bool = False
    silent: bool = False
    waiting: list[Future[bytes]] = field(default_factory=list)

    def call(self, call: Call) -> Future[bytes]:
        out: Future[bytes] = Future()
        if self.dead:
            out.set_exception(Lost("it was killed"))
            return out
        self.waiting.append(out)
        if not self.silent:
            threading.Thread(target=self._answer, args=(call, out), daemon=True).start()
        return out

    def kill(self) -> None:
        self.dead = True
        for future in self.waiting:
            if not future.done():
                future.set_exception(Lost("it was killed"))

    def _answer(self, call: Call, out: Future[bytes]) -> None:
        blobs: Mapping[str, Any] = call.blobs
        try:
            data = self.station.handle(call.method, call.header, lambda sha: bytes(blobs[sha]))
        except Exception as error:
            if not out.done():
                out.set_exception(StationFailed(f"{type(error).__name__}: {error}"))
            return
        if not out.done():
            out.set_result(data)


@dataclass
class FakeCluster:
    """`hired` keeps every worker; `put_bytes` the sizes of all blobs that were put."""

    there: list[Node]
    station: Callable[[Post, str], Answers]
    hired: list[FakeWorker] = field(default_factory=list)
    put_bytes: list[int] = field(default_factory=list)
    closed: bool = False

    def nodes(self) -> list[Node]:
        return list(self.there)

    def hire(self, post: Post, setup: str) -> FakeWorker:
        worker = FakeWorker(post, self.station(post, setup))
        self.hired.append(worker)
        return worker

    def put(self, data: bytes) -> Any:
        self.put_bytes.append(len(data))
        return data

    def close(self) -> None:
        self.closed = True

    def lose(self, node: str) -> None:
        """The node goes, and its workers with it."""
        self.there = [n for n in self.there if n.id != node]
        for worker in self.hired:
            if worker.post.node == node:
                worker.kill()
