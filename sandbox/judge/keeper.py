"""Keeps devices usable: judges jobs in children, looks after the GPU when one broke, and quarantines what stays broken.

Policy only; forking is `child`, locking and waiting `lease`. On cuda a fault or a hang is judged once more in a fresh
context, because a broken machine looks the same; a second run that ends otherwise makes the candidate `flaky`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sandbox import judge_wire
from sandbox.devices.base import Device
from sandbox.jobs import JudgeJob
from sandbox.judge import child, lease, liveness, rounds, winner
from sandbox.judge.child import Ended, Watch
from sandbox.judge.confine import LEVELS, UNBOXED
from sandbox.judge.progress import Progress
from sandbox.judge.rounds import Place, Runner
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status, Verdict

PROBE_S = 180.0  # the first may read gigabytes of CUDA libraries from disk
LOCK_S = 600.0
BROKEN = (Status.FAULT, Status.HANG)
NOT_OPENED = ("no-gpu", "cuda", "toolchain", "canary-child")
"""Ends of a first canary that less confinement may mend."""


@dataclass(frozen=True)
class Settings:
    """`visible`: the server's CUDA_VISIBLE_DEVICES; `opener` opens a device in a child. Times in seconds."""

    state: Path
    visible: str | None = None
    lock_s: float = LOCK_S
    probe_s: float = PROBE_S
    opener: Callable[[Place], Device] = rounds.open_device
    tools: winner.Tools = field(default_factory=winner.Tools)


@dataclass
class Keeper:
    """Judges one job at a time. `proven`, `quarantined` and `levels` (of confinement, once a GPU has been proven) are
    by GPU and live as long as the server."""

    settings: Settings
    runner: Runner
    watch: Watch | None = None
    proven: set[str] = field(default_factory=set)
    quarantined: dict[str, str] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    start: Callable[..., Ended] = child.run
    forgotten: Callable[[int, str], bool] = lease.forgotten

    def judge(self, job: JudgeJob) -> Verdict:
        """Always a verdict; whatever goes wrong on our side is `infra`."""
        begin = time.monotonic()
        try:
            if job.device == "cpu":
                verdict, _ = self._once(job, self._place("cpu", None))
            else:
                verdict = self._on_gpu(job)
        except (ValueError, OSError, lease.Busy) as error:
            verdict = _infra(job, "device", str(error)[:300])
        except lease.Interrupted:
            verdict = judge_wire.without_judging(
                job, Status.CANCELLED, Failure("cancelled", "cancelled")
            )
        return replace(verdict, seconds={**verdict.seconds, "server": time.monotonic() - begin})

    def probe(self, device: str) -> Mapping[str, Any]:
        """Facts, canary and isolation of a device, from a child; `ok` false with a message if it does not work."""
        try:
            if device == "cpu":
                return self._probe(self._place("cpu", None))
            gpu = lease.token(device, self.settings.visible)
            with lease.hold(self.settings.state, gpu, self.settings.lock_s):
                return self._probe(self._place("cuda", gpu))
        except (ValueError, OSError, lease.Busy) as error:
            return {"ok": False, "rule": "device", "message": str(error)[:300]}

    def _on_gpu(self, job: JudgeJob) -> Verdict:
        gpu = lease.tokens(job.device, self.settings.visible, rounds.gpus_of(job))
        place = self._place("cuda", gpu)
        unwanted = self.watch.ready if self.watch else lambda: False
        with lease.hold(self.settings.state, gpu, self.settings.lock_s, unwanted) as waited:
            begin = time.monotonic()
            trouble = self._unusable(place)
            if trouble:
                return _infra(job, *trouble)
            verdict, ended = self._once(job, place)
            if not ended.reaped or (verdict.status is Status.CANCELLED and ended.in_flight):
                self.proven.discard(gpu)  # the next job begins with a canary
            if verdict.status in BROKEN or verdict.status is Status.INFRA:
                verdict = self._after_trouble(job, place, verdict, ended)
            if winner.wants(job, verdict):
                verdict = self._with_tools(job, place, verdict)
            if winner.counts(job, verdict):
                verdict = self._with_counters(job, place, verdict)
            seconds = {"lock": waited, "held": time.monotonic() - begin}
            return replace(verdict, seconds={**verdict.seconds, **seconds})

    def _after_trouble(self, job: JudgeJob, place: Place, first: Verdict, ended: Ended) -> Verdict:
        """The GPU is proven again; a fault or hang gets its second run."""
        trouble = self._recover(place, ended)
        if trouble:
            message = (
                f"{trouble[1]} (after: {first.failure.message if first.failure else first.status})"
            )
            return _infra(job, trouble[0], message)
        if first.status is Status.INFRA:
            return self._without_baseline(job, place, first)
        second, ended = self._once(job, place)
        if second.status in BROKEN:
            trouble = self._recover(place, ended)
            return _infra(job, *trouble) if trouble else second
        if second.status in (Status.INFRA, Status.CANCELLED):
            self.proven.discard(str(place.gpu))
            return second
        assert first.failure is not None  # a broken run is never `passed`
        message = f"one of two runs ended as {first.status}: {first.failure.message}"
        where = {**first.failure.where, "second": str(second.status)}
        failure = Failure(f"sometimes-{first.status}", message, where)
        return replace(
            second,
            status=Status.FLAKY,
            outcome=None,
            timing=None,
            failure=failure,
            correctness=None,
        )

    def _without_baseline(self, job: JudgeJob, place: Place, first: Verdict) -> Verdict:
        """Where a baseline broke the GPU or memory did not do for all, the job once more without; what happened stays
        among the findings."""
        failure = first.failure
        fewer = _fewer(job, failure) if failure else None
        if failure is None or fewer is None:
            return first
        second, ended = self._once(fewer, place)
        if second.status in BROKEN or second.status is Status.INFRA:
            self._recover(place, ended)
        unsure = f"speed-up over a baseline: {failure.message[:200]}"
        return replace(
            second,
            findings=(*second.findings, failure),
            not_verified=(*second.not_verified, unsure),
        )

    def _once(self, job: JudgeJob, place: Place) -> tuple[Verdict, Ended]:
        def work(progress: Progress) -> Mapping[str, Any]:
            return rounds.judge(job, at, self.runner, progress)

        with self._scratch() as folder:
            at = replace(place, scratch=folder, level=self.levels.get(str(place.gpu), 0))
            ended = self.start(work, job.deadline_s, self.watch)
        return self._verdict(job, ended), ended

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A folder for one child's temporary files. It goes with the child, whatever it left there."""
        above = self.settings.state / "scratch"
        above.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="judge-", dir=above)).resolve()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _with_tools(self, job: JudgeJob, place: Place, verdict: Verdict) -> Verdict:
        """compute-sanitizer for a winner, while the GPU is still ours. The next job begins with a canary."""
        begin = time.monotonic()
        with self._scratch() as folder:
            at = replace(place, scratch=folder, level=self.levels.get(str(place.gpu), 0))
            verdict = winner.check(self.start, at, job, verdict, self.settings.tools)
        if "sanitizer" in verdict.profile:
            self.proven.discard(str(place.gpu))
        seconds = {"sanitizer": time.monotonic() - begin}
        return replace(verdict, seconds={**verdict.seconds, **seconds})

    def _with_counters(self, job: JudgeJob, place: Place, verdict: Verdict) -> Verdict:
        begin = time.monotonic()
        with self._scratch() as folder:
            at = replace(place, scratch=folder, level=self.levels.get(str(place.gpu), 0))
            verdict = winner.count(self.start, at, job, verdict, self.settings.tools)
        seconds = {"counters": time.monotonic() - begin}
        return replace(verdict, seconds={**verdict.seconds, **seconds})

    def _verdict(self, job: JudgeJob, ended: Ended) -> Verdict:
        if ended.cause == "result" and ended.result is not None:
            try:
                return judge_wire.verdict_from_json(ended.result.get("verdict"))
            except Malformed as error:
                return _infra(job, "garbled", f"the judge's verdict is malformed: {error}")
        status, failure = explain(ended, job.deadline_s)
        verdict = judge_wire.without_judging(job, status, failure, {"child": ended.seconds})
        return replace(
            verdict, isolation={**verdict.isolation, "judge": dict(ended.isolation or UNBOXED)}
        )

    def _unusable(self, place: Place) -> tuple[str, str] | None:
        """Why the GPU cannot be used now: quarantined, or its first canary fails."""
        gpu = str(place.gpu)
        if gpu in self.quarantined:
            return "quarantined", self.quarantined[gpu]
        return None if gpu in self.proven else self._prove(place)

    def _recover(self, place: Place, ended: Ended) -> tuple[str, str] | None:
        self.proven.discard(str(place.gpu))
        gone = ended.reaped and self.forgotten(ended.pid, str(place.gpu))
        trouble = self._prove(place)
        if trouble or gone:
            return trouble
        message = f"process {ended.pid} still holds GPU {place.gpu} after it was killed"
        self.quarantined[str(place.gpu)] = message
        return "quarantined", message

    def _prove(self, place: Place) -> tuple[str, str] | None:
        """Two chances for the canary, then quarantine. A GPU that was never there is no reason for one; one that is
        gone is: it may come back in a state that nobody knows."""
        gpu, found = str(place.gpu), {}
        was_there = gpu in self.levels
        for _ in range(2):
            found = dict(self._probe(place))
            if found.get("ok"):
                self.proven.add(gpu)
                return None
            if found.get("rule") == "no-gpu" and not was_there:
                return "no-gpu", str(found.get("message"))
        gone = found.get("rule") == "no-gpu"
        what = "it worked and is lost" if gone else "the canary failed twice"
        message = f"GPU {gpu} is quarantined: {what} ({found.get('message')})"
        self.quarantined[gpu] = message
        return "quarantined", message

    def _probe(self, place: Place) -> Mapping[str, Any]:
        """A canary under the confinement of this GPU. Before the first that works, a GPU that cannot even be opened is
        tried under less of it; after that never."""
        gpu = str(place.gpu)
        known = self.levels.get(gpu)
        if known is not None or place.gpu is None:
            return self._canary(replace(place, level=known or 0))
        first: Mapping[str, Any] = {}
        for level in range(len(LEVELS)):
            found = self._canary(replace(place, level=level))
            first = first or found
            if found.get("ok"):
                self.levels[gpu] = level
                return found
            if found.get("rule") not in NOT_OPENED:
                return found
        return first

    def _canary(self, place: Place) -> Mapping[str, Any]:
        with self._scratch() as folder:
            at = replace(place, scratch=folder)
            ended = self.start(
                lambda progress: rounds.probe(at, progress), self.settings.probe_s, None
            )
        if ended.cause == "result" and ended.result is not None:
            return ended.result
        return {
            "ok": False,
            "rule": "canary-child",
            "message": explain(ended, self.settings.probe_s)[1].message,
        }

    def _place(self, kind: str, gpu: str | None) -> Place:
        return Place(kind, gpu, self.settings.state, os.getpid(), self.settings.opener)


def explain(ended: Ended, deadline_s: float) -> tuple[Status, Failure]:
    """Status and failure for a child that brought no result: whether its kernels were running decides."""
    where = {
        "phase": ended.phase,
        "launches": ended.launches,
        "in_flight": ended.in_flight,
    }
    at = f"in phase {where['phase']} after {ended.launches} launches"
    if ended.cause == "cancelled":
        return Status.CANCELLED, Failure("cancelled", f"cancelled {at}", where)
    if ended.cause == "deadline":
        if ended.in_flight:
            message = f"kernels ran when {deadline_s:g} s were over, {at}"
            before, after = ended.kernel
            readings = iter((before, after))
            failure = Failure("deadline", message, where)
            return Status.HANG, liveness.explain(failure, lambda: next(readings), lambda s: None)
        return Status.INFRA, Failure("deadline", f"not done after {deadline_s:g} s, {at}", where)
    if ended.cause == "garbled":
        return Status.INFRA, Failure("garbled", f"the judging process sent no frame, {at}", where)
    last = ended.log.splitlines()[-1][:300] if ended.log else "it said nothing"
    if ended.signal is not None:
        message = f"the judging process died of signal {ended.signal} {at}: {last}"
        status = Status.FAULT if ended.in_flight else Status.INFRA
        return status, Failure("crash", message, {**where, "signal": ended.signal})
    return Status.INFRA, Failure(
        "judge-error", f"the judge failed {at}: {last}", {**where, "log": ended.log}
    )


def _fewer(job: JudgeJob, failure: Failure) -> JudgeJob | None:
    """The job with the baselines that it may do with; None where they are not to blame."""
    if failure.rule == "baseline-fault":
        return replace(job, baselines=(*job.baselines, f"-{failure.where.get('baseline')}"))
    if failure.rule == "memory" and job.baselines:
        return replace(job, baselines=())
    return None


def _infra(job: JudgeJob, rule: str, message: str) -> Verdict:
    return judge_wire.without_judging(job, Status.INFRA, Failure(rule, message))
