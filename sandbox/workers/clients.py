"""`Compiler` and `Judge` (`sandbox.jobs`) on a pool of workers: what the loop uses instead of local processes.

Equal jobs of one scope are done once: those under way are shared, those done are found on disk. An answer is checked
before it counts: artifacts against their hash, verdicts against their artifact. Nothing raises for what a worker does.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox import artifact_store, compile_wire, judge_wire
from sandbox.artifact import Artifact
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status, Verdict
from sandbox.workers import keys, parcel
from sandbox.workers.pool import Answer, Means, Pool, Task
from sandbox.workers.results import Results
from sandbox.workers.roster import Closed
from sandbox.workers.station import verdict_of
from sandbox.workers.transport import Lost

COMPILE_LIMIT = 10.0
"""Times a compile's deadline: the box alone may take three of them, and a busy node waits for slots."""
JUDGE_SLACK_S = 1800.0
"""Over twice a job's deadline; the judge's own client gives up after 1500."""
NOT_KEPT = ("deadline", "memory", "crash")


@dataclass
class Flights:
    """Jobs under way in this process, by key: whoever comes second gets the first one's result."""

    flying: dict[str, Future[Any]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def share(self, key: str, work: Callable[[], Any]) -> tuple[Any, bool]:
        """The result, and whether it had been given to somebody before."""
        with self.guard:
            future = self.flying.get(key)
            mine = future is None
            if future is None:
                future = self.flying[key] = Future()
        if not mine:
            return future.result(), True
        try:
            result = work()
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self.guard:
                del self.flying[key]
        with self.guard:
            before = key in self.given
            self.given.add(key)
        return result, before


@dataclass(frozen=True)
class Desk:
    """What the clients of one pool share. `jail`: what the workers were told about confinement, part of every key.

    `artifacts`: where artifacts that workers made are put down; `scope` is the run.
    """

    pool: Pool
    results: Results
    artifacts: Path
    scope: str
    jail: Mapping[str, Any]
    flights: Flights = field(default_factory=Flights)


class PoolCompiler:
    """Implements `sandbox.jobs.Compiler`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def compile(self, job: CompileJob) -> CompileOutcome:
        key = keys.compile_key(job, self._desk.jail)
        try:
            outcome: CompileOutcome = self._desk.flights.share(key, lambda: self._found(key, job))[
                0
            ]
            return outcome
        except Closed as error:
            return _failed(Status.CANCELLED, "closed", str(error))
        except OSError as error:
            why = f"results cannot be written: {error.strerror or error}"
            return _failed(Status.INFRA, "store", why)

    def close(self) -> None:
        """The pool is the judge's to close: it is the same."""

    def _found(self, key: str, job: CompileJob) -> CompileOutcome:
        kept = self._desk.results.get(key)
        outcome = self._kept(kept) if kept else None
        if outcome is not None:
            return dataclasses.replace(outcome, cached=True, seconds={"total": 0.0})
        blocks = compile_wire.job_blocks(job)
        body = {"key": key, "job": parcel.json_of(blocks["job"])}
        header = parcel.pack(body, {"source": blocks["source"]})
        limit = COMPILE_LIMIT * float(self._desk.jail["deadline_s"]) + 300
        answer = self._desk.pool.run(Task("compile", key, header, limit, self._read))
        if answer.data is None:
            return _failed(Status.INFRA, "worker-lost", answer.why)
        outcome = self._outcome(answer.data)
        if (outcome.artifact or (outcome.status and outcome.status.cacheable)) and not (
            outcome.failure and outcome.failure.rule in NOT_KEPT
        ):
            name = outcome.artifact.name if outcome.artifact else None
            said = compile_wire.outcome_json(dataclasses.replace(outcome, artifact=None))
            self._desk.results.put(
                key, {"outcome": said, "artifact": name, "worker": answer.worker}
            )
        return outcome

    def _kept(self, kept: Mapping[str, Any]) -> CompileOutcome | None:
        try:
            outcome = compile_wire.outcome_from_json(kept["outcome"])
            if kept["artifact"] is None:
                return outcome
            folder = parcel.held(self._desk.artifacts, kept["artifact"])
        except (KeyError, TypeError, ValueError):
            return None
        return None if folder is None else dataclasses.replace(outcome, artifact=folder)

    def _read(self, data: bytes) -> tuple[Means, str, str]:
        try:
            body, blocks = parcel.unpack(data)
            outcome = compile_wire.outcome_from_json(body["outcome"])
            if "sha256" in body:
                parcel.artifact_of(blocks, body["sha256"])
        except (Malformed, KeyError, TypeError, ValueError) as error:
            return "infra", "garbled", f"the worker's answer is malformed: {error}"[:300]
        return _means(outcome.status, outcome.failure)

    def _outcome(self, data: bytes) -> CompileOutcome:
        """Raises OSError."""
        body, blocks = parcel.unpack(data)
        outcome = compile_wire.outcome_from_json(body["outcome"])
        if "sha256" not in body:
            return outcome
        artifact = parcel.artifact_of(blocks, body["sha256"])
        folder = artifact_store.save(artifact, self._desk.artifacts)
        return dataclasses.replace(outcome, artifact=folder, sha256=artifact.sha256)


class PoolJudge:
    """Implements `sandbox.jobs.Judge` on workers of one kind of device. `fresh`: by a server that has judged nothing.

    `owner`: closing it closes the pool.
    """

    def __init__(self, desk: Desk, kind: str, fresh: bool = False, owner: bool = True) -> None:
        self._desk, self.kind, self._fresh, self._owner = desk, kind, fresh, owner
        self._mine: set[str] = set()

    def judge(self, job: JudgeJob) -> Verdict:
        try:
            artifacts = {
                "artifact": artifact_store.load(job.artifact),
                "incumbent": artifact_store.load(job.incumbent) if job.incumbent else None,
                "timeline": artifact_store.load(job.timeline) if job.timeline else None,
            }
            return self._judge(dataclasses.replace(job, device=self._device(job)), artifacts)
        except Closed as error:
            return _verdict(job, Status.CANCELLED, "closed", str(error))
        except (Malformed, OSError, Lost) as error:
            return _verdict(job, Status.INFRA, "workers", str(error))

    def cancel(self) -> None:
        """What this judge has under way ends as `cancelled`."""
        for key in list(self._mine):
            self._desk.pool.cancel(key)

    def close(self) -> None:
        if self._owner:
            self._desk.pool.close()

    def _device(self, job: JudgeJob) -> str:
        """A worker sees the GPUs that it holds and no others, so they count from 0."""
        return job.device.partition(":")[0]

    def _judge(self, job: JudgeJob, artifacts: Mapping[str, Artifact | None]) -> Verdict:
        shas = {role: a.sha256 if a else None for role, a in artifacts.items()}
        look = {
            "scope": self._desk.scope, "kind": self.kind, "fresh": self._fresh, **self._desk.jail,
        }  # fmt: skip
        key = keys.judge_key(job, shas, look)
        self._mine.add(key)
        try:
            verdict: Verdict
            verdict, before = self._desk.flights.share(
                key,
                lambda: self._found(key, job, {a.sha256: a for a in artifacts.values() if a}, shas),
            )
        finally:
            self._mine.discard(key)
        if before:  # the seconds on the device were counted when it was given the first time
            verdict = dataclasses.replace(verdict, seconds={**verdict.seconds, "held": 0.0})
        return verdict

    def _found(
        self,
        key: str,
        job: JudgeJob,
        contents: Mapping[str, Artifact],
        shas: Mapping[str, str | None],
    ) -> Verdict:
        kept = self._desk.results.get(key)
        if kept is not None:
            try:
                return judge_wire.verdict_from_json(kept.get("verdict"))
            except Malformed:
                pass  # written by another version: judged again
        sha = str(shas["artifact"])
        body = {
            "key": key, "job": judge_wire.finite(judge_wire.job_to_json(job)), "artifacts": dict(shas),
            "fresh": self._fresh, "target_hash": keys.target_hash(job.target),
        }  # fmt: skip

        def read(data: bytes) -> tuple[Means, str, str]:
            verdict = verdict_of(data, job, sha)
            return _means(verdict.status, verdict.failure)

        def packer(artifact: Artifact) -> Callable[[], bytes]:
            return lambda: parcel.pack_artifact(artifact)

        task = Task(
            "judge", key, parcel.pack(body), 2 * job.deadline_s + JUDGE_SLACK_S, read, self.kind,
            {sha: packer(artifact) for sha, artifact in contents.items()},
        )  # fmt: skip
        answer = self._desk.pool.run(task)
        verdict = self._verdict(answer, job, sha)
        if verdict.status.cacheable:
            self._desk.results.put(key, {"verdict": verdict.to_json(), "worker": answer.worker})
        return verdict

    def _verdict(self, answer: Answer, job: JudgeJob, sha: str) -> Verdict:
        if answer.data is None:
            return _verdict(job, Status.INFRA, "worker-lost", answer.why)
        return verdict_of(answer.data, job, sha)


def _means(status: Status | None, failure: Failure | None) -> tuple[Means, str, str]:
    rule, why = (failure.rule, failure.message[:300]) if failure else ("", str(status))
    if status is Status.INFRA:
        return "infra", rule, why
    if status is Status.CANCELLED:
        return "cancelled", rule, why
    return ("broken" if status in (Status.FAULT, Status.HANG) else "good"), rule, why


def _failed(status: Status, rule: str, why: str) -> CompileOutcome:
    return CompileOutcome(None, status=status, failure=Failure(rule, why[:500]))


def _verdict(job: JudgeJob, status: Status, rule: str, why: str) -> Verdict:
    return judge_wire.without_judging(job, status, Failure(rule, why[:500]))
