"""One compile job, start to end, on the trusted side: lint, cache, worker, claim, artifact store.

Candidate code runs in none of this; the worker's frame is read by `sandbox.compile.claims`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from typing import Any

from sandbox import artifact_store, box, strict
from sandbox.artifact import ARCHS, MAX_BUFFERS
from sandbox.compile import claims, digest, relocate, source_lint
from sandbox.compile.cache import OutcomeCache
from sandbox.compile.key import ToolchainMissing, cache_key, sms, toolchain
from sandbox.compile.pool import Pool
from sandbox.jobs import CompileJob, CompileOutcome
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status

SEND_DEADLINE_S = 20.0
WALL = 3.0  # a busy machine may take this many times the processor time that a source may use


@dataclass
class _Run:
    """What is known of a job under way."""

    job: CompileJob
    isolation: dict[str, Any]
    findings: tuple[Failure, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def failed(self, status: Status, failure: Failure) -> CompileOutcome:
        return CompileOutcome(
            None, status=status, failure=failure, findings=self.findings,
            isolation=self.isolation, seconds=self.seconds,
        )  # fmt: skip


class Service:
    """Compiles jobs with a pool of boxed workers. Thread-safe; every failure is an outcome."""

    def __init__(
        self, pool: Pool, cache: OutcomeCache, choice: box.Choice, deadline_s: float = 60.0
    ) -> None:
        self._pool, self._cache, self._choice = pool, cache, choice
        self._deadline_s = deadline_s
        self._working: set[box.Boxed] = set()

    def close(self) -> None:
        """Kill the workers in use; their jobs end as `infra`, if anyone still listens."""
        self._pool.close()
        for worker in list(self._working):
            worker.kill()

    def compile(self, job: CompileJob) -> CompileOutcome:
        """Compile or look up. Never raises for what a source or a worker does."""
        start = time.monotonic()
        run = _Run(job, self._choice.isolation.to_json())
        try:
            key = cache_key(job, str(self._choice.isolation.tier))
            found = self._cache.get(key)
            outcome = dataclasses.replace(found, seconds={}) if found else self._compile(run)
            if not found:
                self._cache.put(key, outcome)
        except ToolchainMissing as error:
            outcome = run.failed(Status.INFRA, Failure("toolchain", str(error)))
        except OSError as error:
            outcome = run.failed(
                Status.INFRA,
                Failure("store", f"the artifact store cannot be written: {error.strerror}"),
            )
        seconds = {**outcome.seconds, "total": round(time.monotonic() - start, 4)}
        return dataclasses.replace(outcome, seconds=seconds)

    def _compile(self, run: _Run) -> CompileOutcome:
        refusal = _refuse_job(run.job)
        if refusal:
            return run.failed(Status.REJECTED, refusal)
        lint = source_lint.lint(run.job.source, run.job.filename)
        run.findings = lint.advice
        if lint.refusal:
            return run.failed(Status.REJECTED, lint.refusal)
        start = time.monotonic()
        worker = self._start(run)
        run.seconds["worker"] = round(time.monotonic() - start, 4)
        if isinstance(worker, box.Broken):
            return run.failed(Status.INFRA, Failure("box", worker.detail))
        self._working.add(worker)
        try:
            run.isolation = worker.isolation.to_json()
            answer = worker.read(claims.CAPS, WALL * self._deadline_s)
            output = worker.output(8000) if isinstance(answer, box.Broken) else ""
        finally:
            worker.kill()
            self._working.discard(worker)
            self._pool.refill(run.job.arch)
        run.seconds["answer"] = round(time.monotonic() - start - run.seconds["worker"], 4)
        if isinstance(answer, box.Broken):
            verdict = digest.broken(run.job, answer, self._deadline_s, output)
            return run.failed(verdict.status, verdict.failure)
        return self._settle(run, answer)

    def _start(self, run: _Run) -> box.Boxed | box.Broken:
        """A worker that has the job. One that died while it waited is not the candidate's fault: try others."""
        body, blocks = _request(run.job, self._deadline_s)
        broken: box.Broken | None = None
        for _ in range(3):
            worker = self._pool.take(run.job.arch)
            if isinstance(worker, box.Broken):
                return worker
            broken = worker.send(body, blocks, SEND_DEADLINE_S)
            if broken is None:
                return worker
            worker.kill()
        return broken or box.Broken("box", "no worker")

    def _settle(self, run: _Run, frame: box.Frame) -> CompileOutcome:
        try:
            run.seconds |= _seconds(frame.body.get("seconds"))
            if frame.body.get("ok") is not True:
                fields = strict.keys(frame.body, "result", {"ok", "error", "seconds"})
                verdict = digest.report(run.job, fields["error"])
                return run.failed(verdict.status, verdict.failure)
            claim = claims.read(run.job, frame.body, frame.blocks, toolchain())
        except Malformed as error:
            verdict = digest.malformed(error)
            return run.failed(verdict.status, verdict.failure)
        except claims.PlanError as error:
            return run.failed(
                Status.PLAN_ERROR,
                Failure(error.rule, digest.clean(str(error))[: digest.MAX_MESSAGE]),
            )
        folder = artifact_store.save(claim.artifact, self._cache.artifacts)
        return CompileOutcome(
            folder, claim.artifact.sha256, findings=run.findings, tunables=claim.tunables,
            isolation=run.isolation, seconds=run.seconds,
        )  # fmt: skip


def _refuse_job(job: CompileJob) -> Failure | None:
    """What is wrong with the job itself; our callers', not the candidate's, but cheap to say clearly."""
    if job.arch not in ARCHS:
        return Failure("arch", f"the architecture {job.arch} is none of {', '.join(ARCHS)}")
    if len(job.buffers) > MAX_BUFFERS:
        return Failure(
            "buffers", f"the target declares {len(job.buffers)} buffers, more than {MAX_BUFFERS}"
        )
    return None


def _request(job: CompileJob, deadline_s: float) -> tuple[dict[str, Any], dict[str, bytes]]:
    body = {
        "dims": dict(job.dims), "arch": job.arch, "sms": sms(job), "tunables": dict(job.tunables),
        "sentinels": [list(s) for s in relocate.SENTINELS], "cpu_s": deadline_s,
        "wall_s": WALL * deadline_s,
    }  # fmt: skip
    buffers = [[b.name, b.dtype, list(b.shape), b.align] for b in job.buffers]
    return body, {
        "source": job.source.encode("utf-8", "replace"),
        "buffers": json.dumps(buffers).encode(),
    }


def _seconds(value: object) -> dict[str, float]:
    """The worker's own phases: for people only, and only plain ones."""
    out: dict[str, float] = {}
    for name, number in strict.scalars(value, "seconds").items():
        if isinstance(number, float) and 0 <= number < 1e6 and len(out) < 8:
            out[f"worker_{name}"[:40]] = number
    return out
