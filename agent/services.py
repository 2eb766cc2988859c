"""Starts the sandbox's services and says beforehand whether this machine can do what was asked.

The clients start processes; nothing of the compiler, the judge, torch or CUDA is imported here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agent.ids import new_run_id
from agent.models.base import Unavailable
from agent.runner import Services
from agent.workspace import Workspace
from sandbox.compile_client import CompileClient, CompileSettings, NoIsolation
from sandbox.jobs import Judge, JudgeJob
from sandbox.judge_client import ClientOptions, JudgeClient, JudgeFailed, state_folder
from sandbox.verdict import Verdict
from sandbox.workers import farm

T = TypeVar("T")
R = TypeVar("R")
DEFAULT_ARCH = "sm_90a"
WIDEST = 256
"""Files given to workers at once; the pool lets those wait for which there is no worker."""


@dataclass(frozen=True)
class Wanted:
    """What to start. `sandbox` '' means the strongest isolation that works; `arch` '' that of the
    device. `workers` as `--workers` says it; of these, `kinds` of device, and `scope`, the run.
    """

    device: str
    arch: str = ""
    sandbox: str = ""
    trust_this_code: bool = False
    parallel: int = 1
    deadline_s: float = 120.0
    workers: str = ""
    kinds: tuple[str, ...] = ()
    scope: str = ""


def judge_state() -> Path:
    """Locks and device facts are the machine's, not the project's."""
    return state_folder()


def new_judge() -> JudgeClient:
    return JudgeClient(ClientOptions(judge_state()))


def new_compiler(w: Wanted, workspace: Workspace) -> CompileClient:
    cores = os.cpu_count() or 1
    return CompileClient(
        CompileSettings(
            store=workspace.root, tier=w.sandbox or None, trust_this_code=w.trust_this_code,
            arch=w.arch or DEFAULT_ARCH, idle=max(1, min(w.parallel + 1, cores)),
            jobs=max(1, min(w.parallel, cores)), deadline_s=w.deadline_s,
        )
    )  # fmt: skip


def device_facts(judge: JudgeClient, device: str) -> Mapping[str, Any]:
    """What the judge sees of the device, after a canary ran on it. Raises Unavailable."""
    try:
        found = judge.probe(device)
    except JudgeFailed as error:
        raise Unavailable(f"device {device}: {error}") from error
    if not found.get("ok"):
        raise Unavailable(f"device {device}: {found.get('message', 'it does not work')}")
    facts: Mapping[str, Any] = found["facts"]
    return facts


Started = tuple[Services, Mapping[str, Any]]


def start(w: Wanted, workspace: Workspace) -> Started:
    """Running services, and the device's facts. Raises Unavailable; nothing is left running
    then.
    """
    return next(iter(start_each(w, workspace).values()))


def start_each(w: Wanted, workspace: Workspace) -> dict[str, Started]:
    """Services by kind of device: on this machine the one asked for, on workers all of `w.kinds`.

    Here it is decided, once, who works; nobody else knows. Those on workers share a pool, which the
    first `close` closes. Raises Unavailable.
    """
    wanted = farm.parse(w.workers)
    return {w.device: _local(w, workspace)} if wanted is None else _hired(wanted, w, workspace)


def _hired(wanted: farm.Farm, w: Wanted, workspace: Workspace) -> dict[str, Started]:
    orders = farm.Orders(
        w.device, workspace.root, w.scope or new_run_id(), w.arch, w.kinds, w.sandbox or None,
        w.trust_this_code, w.deadline_s,
    )  # fmt: skip
    try:
        crew = farm.hire(wanted, orders)
    except farm.Unusable as error:
        raise Unavailable(f"workers {w.workers}: {error}") from error
    return {kind: (_services_of(crew, kind), facts) for kind, facts in crew.kinds.items()}


def roll(w: Wanted, workspace: Workspace) -> list[dict[str, Any]]:
    """The workers that `w.workers` names, after they have answered. Raises Unavailable."""
    wanted = farm.parse(w.workers)
    assert wanted is not None
    orders = farm.Orders(w.device, workspace.root, new_run_id(), w.arch, every_kind=True)
    try:
        crew = farm.hire(wanted, orders)
    except farm.Unusable as error:
        raise Unavailable(f"workers {w.workers}: {error}") from error
    with closing(crew):
        return crew.roll()


def _services_of(crew: farm.Crew, kind: str) -> Services:
    """The pool gives every job a GPU of its own, so jobs need not take turns here."""

    def fresh() -> Judge:
        return crew.fresh_judge(kind)

    return Services(
        crew.compiler(), crew.judge(kind), fresh, nullcontext(), WIDEST, kind, crew.describe()
    )


def _local(w: Wanted, workspace: Workspace) -> Started:
    judge = new_judge()
    compiler = None
    try:
        facts = device_facts(judge, w.device)
        compiler = new_compiler(w, workspace)
        try:
            compiler.start()
        except NoIsolation as error:
            raise Unavailable(f"no compile jail: {error}") from error
    except BaseException:
        judge.close()
        if compiler is not None:
            compiler.close()
        raise
    return Services(compiler, judge, new_judge), facts


JudgeAll = Callable[[Sequence[JudgeJob]], Iterator[tuple[JudgeJob, Verdict]]]


@contextmanager
def judging(w: Wanted) -> Iterator[JudgeAll]:
    """Judges alone: a function that judges jobs, in their order, on every kind of device. Raises Unavailable."""
    if farm.parse(w.workers) is None:
        with new_judge() as service:
            device_facts(service, w.device)
            yield lambda jobs: ((job, service.judge(job)) for job in jobs)
        return
    with tempfile.TemporaryDirectory(prefix="kernelgen-") as folder, ExitStack() as stack:
        judges = []
        for services, _ in start_each(w, Workspace(Path(folder))).values():
            stack.callback(services.close)
            judges.append(services.judge)
        yield lambda jobs: in_order([(j, job) for job in jobs for j in judges], _one, WIDEST)


def _one(item: tuple[Judge, JudgeJob]) -> tuple[JudgeJob, Verdict]:
    return item[1], item[0].judge(item[1])


def in_order(todo: Sequence[T], work: Callable[[T], R], width: int) -> Iterator[R]:
    """Results in the order of `todo`, up to `width` at a time. One at a time stays on this thread, so that Ctrl-C
    reaches what is running."""
    if min(width, len(todo)) <= 1:
        yield from map(work, todo)
        return
    pool = ThreadPoolExecutor(min(width, len(todo)))
    try:
        for future in [pool.submit(work, item) for item in todo]:
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class NoJudge:
    """Where only compiling was asked for."""

    def judge(self, job: JudgeJob) -> Verdict:
        raise Unavailable("no judge was started")

    def close(self) -> None:
        return None


def start_compiler(w: Wanted, workspace: Workspace, judge: Judge | None = None) -> Services:
    """The compiler alone, or with verdicts that come from elsewhere. Raises Unavailable."""
    compiler = new_compiler(w, workspace)
    try:
        compiler.start()
    except NoIsolation as error:
        compiler.close()
        raise Unavailable(f"no compile jail: {error}") from error
    judging = judge or NoJudge()
    return Services(compiler, judging, lambda: judging)
