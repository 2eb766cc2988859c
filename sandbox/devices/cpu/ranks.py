"""Several ranks on the cpu device: launches of different ranks at once, each rank's own in order, one memory each.

A rank runs as far as it goes before the next has its turn, in an order that follows the seed, so that a rank may be a
whole step ahead of another. Where no rank can go on, that is a deadlock, told rank by rank. Accesses of different ranks
are not checked for races: their order shows in results alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sandbox.devices.base import Faulted
from sandbox.devices.cpu.execute import Running
from sandbox.devices.cpu.record import Memory
from sandbox.verdict import Failure, Status

if TYPE_CHECKING:
    from sandbox.devices.cpu.program import CpuBound, CpuProgram


class Held(AbstractContextManager[None]):
    """While it is entered, steps are queued; on leaving they run together."""

    def __init__(self) -> None:
        self.active = False
        self.queue: list[CpuBound] = []

    def __enter__(self) -> None:
        self.active, self.queue = True, []

    def __exit__(self, *error: object) -> None:
        self.active, queue = False, self.queue
        self.queue = []
        if error[0] is None and queue:
            queue[0].program.crew.together(queue)


@dataclass
class _Rank:
    """One rank's way through the queued steps: (step, number of the launch in its plan)."""

    number: int
    memory: Memory
    todo: Iterator[tuple[CpuBound, int]]
    step: CpuBound | None = None
    index: int = 0
    running: Running | None = None
    over: bool = False
    explained: Failure | None = field(default=None)


class Crew:
    """Runs the steps of one program on all its ranks. `skip` leaves ranks out, as if they had stalled before."""

    def __init__(self, program: CpuProgram, held: Held) -> None:
        self._program, self._held = program, held
        self._memories = [Memory() for _ in range(program.artifact.ranks)]
        self.skip: frozenset[int] = frozenset()

    def launch(self, bound: CpuBound) -> None:
        if self._held.active:
            self._held.queue.append(bound)
        else:
            self.together([bound])

    def together(self, steps: list[CpuBound]) -> None:
        """Raises Faulted; a deadlock names every rank that waits."""
        with self._program.lock:
            for step in steps:
                step.begin()
            ranks = [
                _Rank(r, memory, _launches(steps, r))
                for r, memory in enumerate(self._memories)
                if r not in self.skip
            ]
            random.Random(self._program.policy.seed).shuffle(ranks)
            while not all(rank.over for rank in ranks):
                self._round(ranks)

    def _round(self, ranks: list[_Rank]) -> None:
        moved = False
        for rank in ranks:
            while not rank.over and self._advance(rank):
                moved = True
        waiting = [rank for rank in ranks if not rank.over]
        if waiting and not moved and all([self._stuck(rank) for rank in waiting]):
            raise Faulted(Status.HANG, self._deadlock(ranks))

    def _advance(self, rank: _Rank) -> bool:
        """Whether the rank went on: within its launch, or to the next."""
        try:
            if rank.running is None:
                following = next(rank.todo, None)
                if following is None:
                    rank.over = True
                    return False
                rank.step, rank.index = following
                work = rank.step.work(rank.index)
                rank.running = Running(work, self._program.policy, rank.memory)
            moved = rank.running.advance()
        except Faulted as end:
            raise Faulted(end.status, _of(rank, end.failure)) from end
        if rank.running.ended:
            assert rank.step is not None
            rank.step.done(rank.index, *rank.running.results())
            rank.running = None
            moved = True
        return moved

    def _stuck(self, rank: _Rank) -> bool:
        assert rank.running is not None
        try:
            found = rank.running.stuck()
        except Faulted as end:
            raise Faulted(end.status, _of(rank, end.failure)) from end
        rank.explained = rank.running.explanation if found else None
        return found

    def _deadlock(self, ranks: list[_Rank]) -> Failure:
        waiting = sorted((r for r in ranks if not r.over), key=lambda r: r.number)
        ended = sorted([r.number for r in ranks if r.over] + list(self.skip))
        told = "; ".join(f"rank {r.number}: {r.explained.message}" for r in waiting if r.explained)
        gone = f" (rank {', '.join(map(str, ended))} launches nothing more)" if ended else ""
        first = waiting[0].explained
        where = {
            **(first.where if first else {}), "rank": waiting[0].number,
            "waiting": [r.number for r in waiting], "ended": ended,
        }  # fmt: skip
        number = "rank" if len(waiting) == 1 else "ranks"
        names = " and ".join(str(r.number) for r in waiting)
        return Failure("deadlock", f"{number} {names} cannot go on{gone}: {told}"[:4000], where)


def _launches(steps: list[CpuBound], rank: int) -> Iterator[tuple[CpuBound, int]]:
    for step in steps:
        for i, item in enumerate(step.plan.launches):
            if item.rank == rank:
                yield step, i


def _of(rank: _Rank, failure: Failure) -> Failure:
    message = f"rank {rank.number}: {failure.message}"
    return Failure(failure.rule, message, {**failure.where, "rank": rank.number})
