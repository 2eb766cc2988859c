"""A pool on threads for tests: real stations with services that do as they are told. No process, no device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent import fakes
from sandbox import artifact_store
from sandbox.artifact import Artifact, LaunchPlan
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.judge_wire import without_judging
from sandbox.verdict import Failure, Status, Verdict
from sandbox.workers import farm, roster
from sandbox.workers.fake_cluster import FakeCluster, FakeWorker
from sandbox.workers.places import Node, Post
from sandbox.workers.station import Setup, Station, Tools

REAL_HIRE = farm.hire
# A worker's thread may have to wait for a processor for seconds; only tests of silence and patience are in a hurry.
QUICK = roster.Times(beat=0.02, silent=60.0, hello=60.0, patience=30.0, closing=30.0)


@dataclass
class ToldJudge:
    """A judge that says what `script` has for it, else what the fake kernel says of itself; `seen` holds hashes."""

    post: Post
    facts: Mapping[str, Any]
    script: Callable[[ToldJudge, JudgeJob], Verdict | None]
    gauge: Gauge
    seen: list[str] = field(default_factory=list)
    closes: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def probe(self, device: str) -> Mapping[str, Any]:
        if not self.facts:
            return {"ok": False, "rule": "canary", "message": "the canary failed"}
        return {"ok": True, "facts": dict(self.facts)}

    def judge(self, job: JudgeJob) -> Verdict:
        with self.gauge.one():
            self.seen.append(job.artifact.name)
            return self.script(self, job) or fakes.FakeJudge().judge(job)

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.closes += 1


@dataclass
class ToldCompiler(fakes.FakeCompiler):
    def start(self) -> dict[str, Any]:
        return {"tier": "strict"}

    def compile(self, job: CompileJob) -> CompileOutcome:
        return super().compile(job)


@dataclass
class Gauge:
    """How many are inside at once, at most."""

    now: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def one(self) -> Gauge:
        return self

    def __enter__(self) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.now -= 1


def facts(name: str, arch: str = "sm_90a") -> dict[str, Any]:
    return {"kind": "cuda", "name": f"NVIDIA {name}", "arch": arch}


def gpus(*counts: int) -> list[Node]:
    return [Node(f"node{i}-{'0' * 8}", f"10.0.0.{i}", 16, n) for i, n in enumerate(counts)]


class Shop:
    """A cluster with its stations. `kind_of` names a node's device; `script` as for `ToldJudge`."""

    def __init__(self, folder: Path, nodes: list[Node], times: roster.Times = QUICK) -> None:
        self.folder, self.times = folder, times
        self.cluster = FakeCluster(nodes, self.station)
        self.kinds: dict[str, dict[str, Any]] = {}
        self.script: Callable[[ToldJudge, JudgeJob], Verdict | None] = lambda judge, job: None
        self.judges: list[ToldJudge] = []
        self.compilers: list[ToldCompiler] = []
        self.gauge = Gauge()

    def station(self, post: Post, setup: str) -> Station:
        root = self.folder / post.node
        if post.role == "compile":
            self.compilers.append(ToldCompiler(root / "jail"))
            return Station(Setup.of(setup), Tools(root, compiler=self.compilers[-1]))
        found = self.kinds.get(post.node, facts("H200"))
        self.judges.append(ToldJudge(post, found, lambda j, job: self.script(j, job), self.gauge))
        return Station(Setup.of(setup), Tools(root, self.judges[-1]))

    def open(self, scope: str = "run", **orders: Any) -> farm.Crew:
        return self.hire(farm.Farm(), farm.Orders("cuda", self.folder / "driver", scope, **orders))

    def hire(self, wanted: farm.Farm, orders: farm.Orders) -> farm.Crew:
        """In the place of `farm.hire`."""
        return REAL_HIRE(wanted, orders, self.cluster, self.times)

    def worker(self, judge: ToldJudge) -> FakeWorker:
        """The worker around a judge."""
        return next(w for w in self.cluster.hired if getattr(w.station, "_judge", None) is judge)

    def judged(self) -> list[str]:
        return [sha for judge in self.judges for sha in judge.seen]


def artifact(folder: Path, n: int = 0, mode: str = "passed") -> Path:
    """A fake kernel's artifact; `n` tells them apart."""
    found = Artifact(
        target="fake", workload={"preset": "tiny"}, arch="sm_90a", buffers=fakes.BUFFERS,
        step=LaunchPlan(f"// fake us={50 + n:.6f} mode={mode}\n", (fakes._LAUNCH,)), source_sha256="0" * 64,
    )  # fmt: skip
    return artifact_store.save(found, folder)


def job(path: Path, incumbent: Path | None = None, **more: Any) -> JudgeJob:
    options = {"preset": "tiny", "layers": 1, "rows": 1, "context": 0, "extra": {}}
    given = {"compile_isolation": {"tier": "strict"}, "deadline_s": 5.0} | more
    return JudgeJob(path, "fake", options, "cuda", incumbent=incumbent, **given)


def infra(at: JudgeJob, rule: str) -> Verdict:
    return without_judging(at, Status.INFRA, Failure(rule, f"told to end as {rule}"))


def fault(at: JudgeJob) -> Verdict:
    return without_judging(at, Status.FAULT, Failure("illegal-address", "told to fault"))


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
