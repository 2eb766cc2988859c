"""Starting and resuming a run: builds what the nodes need, drives the graph, closes the record.

Knows nothing of the command line and prints nothing; it reports to a Reporter. The services it starts
are given to it, so that tests pass fakes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent import record, search
from agent.budget import Ledger, spent_before
from agent.config import RunSettings, settings_from_json
from agent.graph import Drain, Stopped, engine
from agent.heartbeat import beating, elapsed_of
from agent.ids import new_run_id, now
from agent.models.base import Model, Proposer
from agent.models.calls import Clerk
from agent.state import Deps, Reporter
from agent.store import Queries, RunRow, Store
from agent.types import Task
from agent.workspace import Missing, Place, read_json, write_json
from sandbox.jobs import Compiler, Judge
from targets.base import Target, find


@dataclass(frozen=True)
class Services:
    """The sandbox's side. `fresh_judge` starts another judge process; `gpu` is held while judging; `width` says how
    many jobs are worth asking for at once, `kind` on which kind of device workers judge ('' for this machine)."""

    compiler: Compiler
    judge: Judge
    fresh_judge: Callable[[], Judge]
    gpu: AbstractContextManager[Any] = field(default_factory=threading.Lock)
    width: int = 1
    kind: str = ""
    note: str = ""

    def close(self) -> None:
        self.compiler.close()
        self.judge.close()


@dataclass(frozen=True)
class Party:
    """Who proposes, and with which model if any."""

    proposer: Proposer
    model: Model | None = None


@dataclass
class Session:
    """One process's turn at a run. `stop()` asks it to end at the next quiet point; callable from a signal handler."""

    place: Place
    reporter: Reporter
    drain: Drain = field(default_factory=Drain)
    stopping: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        self.stopping.set()
        self.drain.request()

    def sleep(self, seconds: float) -> bool:
        """True when asked to stop meanwhile."""
        return self.stopping.wait(seconds)


@dataclass(frozen=True)
class Ended:
    """How the session ended. `how`: end, review, waiting, drained; `stop`: a reason of `agent.search` or ''."""

    run: str
    how: str
    stop: str
    incumbent: int
    waiting: tuple[str, ...] = ()

    @property
    def improved(self) -> bool:
        return self.incumbent > 0


def task_of(run: str, settings: RunSettings, target: Target) -> Task:
    """Raises UnknownOption."""
    w = target.workload(settings.options)
    return Task(
        run=run, target=settings.target, summary=target.summary, workload=w.key, dims=w.dims,
        buffers=w.buffers, floor=w.floor, device=settings.device, arch=settings.arch,
        tier=str(settings.tier), brief=getattr(target, "brief", ""),
    )  # fmt: skip


def create(
    place: Place, settings: RunSettings, versions: dict[str, str], run: str | None = None
) -> str:
    """Write a new run down and return its id. Raises UnknownTarget, UnknownOption, Corrupt, OSError."""
    run = run or new_run_id()
    target = find(settings.target)
    task = task_of(run, settings, target)
    source = settings.start and Path(settings.start).read_text()
    files = place.workspace.run(run)
    started = now()
    write_json(
        files.settings,
        {
            "settings": settings.to_json(), "started": started, "versions": versions,
            "seed": place.workspace.put(source or target.seed_source()),
        },
    )  # fmt: skip
    record.opened(
        place.db,
        RunRow(
            run, settings.target, "optimize", settings.device, settings.proposer, settings.model,
            task.workload, settings.to_json(), versions, started,
        ),
    )  # fmt: skip
    return run


def load_settings(place: Place, run: str) -> RunSettings:
    """Raises Missing for a run whose folder is gone."""
    written = read_json(place.workspace.run(run).settings)
    if written is None:
        raise Missing(f"the folder of run {run} is missing from {place.workspace.root}")
    return settings_from_json(written["settings"])


def save_settings(place: Place, run: str, settings: RunSettings) -> None:
    """Limits and waiting may change when a run is resumed; what is optimised may not."""
    files = place.workspace.run(run)
    write_json(files.settings, {**read_json(files.settings), "settings": settings.to_json()})
    record.changed(place.db, run, settings=settings.to_json())


def make_ledger(place: Place, run: str, settings: RunSettings) -> Ledger:
    """What earlier sessions spent counts."""
    row = Queries(Store(place.db), place.workspace).run(run)
    files = place.workspace.run(run)
    before = spent_before(files, max(row["elapsed"], elapsed_of(files.clock)))
    return Ledger(settings.limits, before)


@dataclass(frozen=True)
class Run:
    """An existing run with everything to go on."""

    id: str
    settings: RunSettings
    session: Session
    services: Services
    party: Party
    ledger: Ledger


def deps_of(r: Run) -> Deps:
    place = r.session.place
    store, workspace = Store(place.db), place.workspace
    files = workspace.run(r.id)
    clerk = None
    if r.party.model is not None:
        clerk = Clerk(r.party.model, workspace, files, r.ledger, r.session.sleep, now)
        clerk.sweep()
    return Deps(
        settings=r.settings, task=task_of(r.id, r.settings, find(r.settings.target)),
        seed_source=workspace.text(read_json(files.settings)["seed"]), proposer=r.party.proposer,
        compiler=r.services.compiler, judge=r.services.judge,
        fresh_judge=r.services.fresh_judge, store=store, workspace=workspace, files=files,
        ledger=r.ledger, reporter=r.session.reporter, now=now, out=place.out, clerk=clerk,
        stopping=r.session.stopping, gpu=r.services.gpu,
    )  # fmt: skip


def advance(r: Run) -> Ended:
    """Run until the graph ends, waits or is drained; the record is up to date afterwards."""
    deps = deps_of(r)
    record.changed(r.session.place.db, r.id, state="running", stop=None, updated=now())
    try:
        with beating(r.ledger, deps.files.clock), engine(r.session.place.db, r.id, r.settings) as e:
            e.settle()
            if e.at_rest():
                e.reopen()
            stopped = e.advance(deps, r.session.drain)
    except BaseException as error:
        with suppress(Exception):  # a full disk or a lost record: what came first is what is said
            close(deps, None, f"{type(error).__name__}: {error}"[:500])
        raise
    close(deps, stopped)
    state: Any = stopped.state
    return Ended(
        r.id, stopped.how, state.get("stop", ""), state.get("incumbent", 0), stopped.waiting
    )


def close(deps: Deps, stopped: Stopped | None, why: str = "") -> None:
    """The run's row after a session; None: it ended by an exception, `why`, and can be resumed."""
    state: Any = stopped.state if stopped else {}
    how = stopped.how if stopped else "failed"
    if deps.clerk is not None:
        deps.clerk.sweep(give_up=how == "end")
    stop = state.get("stop", "")
    words = {"drained": "interrupted", "end": "spent" if stop in search.SPENT else "done"}
    record.closed(
        deps, state.get("round", 0), state=words.get(how, how), stop=stop or None,
        message="; ".join(stopped.waiting if stopped else (why,)) or None,
        elapsed=deps.ledger.elapsed, updated=now(),
    )  # fmt: skip


def with_limits(settings: RunSettings, **changes: Any) -> RunSettings:
    """Settings with the given limits replaced; None leaves one as it is."""
    known = {k: v for k, v in changes.items() if v is not None}
    return replace(settings, limits=replace(settings.limits, **known))
