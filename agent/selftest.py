"""`kernelgen judge --self-test`: compiles planted kernels in the jail and judges each as a winner would be.

A mistake goes up the tiers until one of them catches it; a right kernel must pass the first and the last. Scoring is
in `agent.scores`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Queue

from agent.config import deadline
from agent.offline import options_json
from agent.scores import Effect, Fate, Row, caught, effect_of
from sandbox.jobs import CompileJob, CompileOutcome, Compiler, Judge, JudgeJob
from sandbox.verdict import Status, Tier, Verdict
from targets.base import find
from targets.planted import EditFailed, Planted

BASE_S = 20.0
"""Deadline of a screen on a GPU: tiny kernels, and some of them hang on purpose."""
PATIENT_BASE_S = 3 * BASE_S
"""What deadlines are multiples of there for what is not expected to hang, since it passed a screen, is right, or wrong
by a rounding: judges that share the GPU make it wait."""
UNUSABLE = {Status.INFRA, Status.CANCELLED, Status.UNSUPPORTED}
BUG_TIERS = (Tier.SCREEN, Tier.FULL, Tier.PROMOTE)
GOOD_TIERS = (Tier.SCREEN, Tier.PROMOTE)
LONG = ("persistent", "decode")
"""Parts whose kernels take longest to compile and to run."""


@dataclass(frozen=True)
class Bench:
    """Where planted kernels are judged. `judges` take turns; several on a GPU share it."""

    compiler: Compiler
    judges: Sequence[Judge]
    device: str
    arch: str
    jobs: int = 1

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]


def chosen(catalogue: Sequence[Planted], only: Sequence[str], device: str) -> list[Planted]:
    """Those for this kind of device whose class, kind, part or name is in `only`; all without it. Raises ValueError."""
    kind = device.partition(":")[0]
    found = [p for p in catalogue if kind in p.devices]
    if not only:
        return found
    for word in only:
        if not any(word in _words(p) for p in catalogue):
            groups = ", ".join(sorted({p.group for p in catalogue}))
            raise ValueError(f"{word!r} is no planted kernel, class or part; classes are {groups}")
    return [p for p in found if _words(p) & set(only)]


def shard(todo: Sequence[Planted], part: str) -> list[Planted]:
    """`2/4`: the second of four parts that together are all, each with something of every seed. Raises ValueError."""
    first, _, parts = part.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise ValueError(f"{part!r} is no part such as 2/4")
    return list(todo[int(first) - 1 :: int(parts)])


def _words(p: Planted) -> set[str]:
    return {p.group, p.kind, p.name, p.name.partition("/")[0], p.name.partition("/")[2]}


def resized(p: Planted, preset: str) -> Planted:
    """The same edit on another preset; what stands for the exchange between ranks keeps its own."""
    if preset == "tiny" or p.options.preset != "tiny":
        return p
    tunables = {k: v for k, v in p.tunables.items() if k != "ctas"}
    return replace(p, options=replace(p.options, preset=preset, context=None), tunables=tunables)


def run(
    bench: Bench,
    todo: Sequence[Planted],
    heard: Callable[[Row], None],
    in_time: Callable[[], bool] = lambda: True,
) -> list[Row]:
    """A row for each, in their order; begun are those first that take longest. `heard` gets each as it is known, from
    several threads one at a time. None is begun once `in_time` says no: it has no row."""
    judges: Queue[Judge] = Queue()
    for judge in bench.judges:
        judges.put(judge)
    telling = threading.Lock()

    def one(p: Planted) -> Row | None:
        if not in_time():
            return None
        row = _Trial(bench, judges, p).row()
        with telling:
            heard(row)
        return row

    with ThreadPoolExecutor(max(1, bench.jobs)) as pool:
        begun = {
            i: pool.submit(one, todo[i])
            for i in sorted(range(len(todo)), key=lambda i: _haste(todo[i]))
        }
        rows = [begun[i].result() for i in range(len(todo))]
    return [row for row in rows if row is not None]


def _haste(p: Planted) -> int:
    """What goes through all tiers and what has long kernels comes first, so that nobody waits for it at the end."""
    long = p.name.partition("/")[0] in LONG
    return -2 * (p.kind == "good" or p.band) - long


def prepare(bench: Bench, todo: Sequence[Planted], workers: int) -> None:
    """Compile every kernel now, and the seeds that those in band are compared with; the compiler keeps them."""
    work = [(p, p.source) for p in todo if p.band]
    for p in todo:
        with suppress(EditFailed):  # its own row will say so
            work.append((p, p.text()))
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for outcome in pool.map(lambda x: bench.compiler.compile(_job(bench, *x)), work):
            del outcome


def _job(bench: Bench, p: Planted, source: str) -> CompileJob:
    w = find(p.target).workload(p.options)
    return CompileJob(source, p.target, w.key, w.dims, w.buffers, bench.arch, dict(p.tunables))


class _Trial:
    """The way of one planted kernel through compiler and judge."""

    def __init__(self, bench: Bench, judges: Queue[Judge], planted: Planted) -> None:
        self.bench, self.judges, self.p = bench, judges, planted
        self.seed = secrets.randbits(62)
        self.seconds: dict[str, float] = {}

    def row(self) -> Row:
        try:
            source = self.p.text()
        except EditFailed as error:
            return self._ended("broken", "", ("edit", str(error)))
        outcome = self._compiled(source)
        if outcome.artifact is None:
            failure = outcome.failure
            why = (failure.rule, failure.message) if failure else ("compile", "no artifact")
            fate: Fate = "caught" if str(outcome.status) in self.p.expect else "broken"
            return self._ended(fate, "compile", why, str(outcome.status))
        verdict = None
        for tier in GOOD_TIERS if self.p.kind == "good" else BUG_TIERS:
            verdict = self._judged(outcome, tier)
            fate_now = self._fate(verdict)
            if fate_now is not None:
                return self._of(verdict, fate_now)
        assert verdict is not None
        if self.p.kind == "good":
            return self._of(verdict, "accepted")
        seed = self._compiled(self.p.source)
        if seed.artifact is not None and seed.artifact.name == outcome.artifact.name:
            return self._ended(
                "broken", "", ("edit", "it changes no instruction at these sizes and tunables")
            )
        effect = self._effect(seed, verdict)
        return self._of(verdict, "in band" if effect.share > 0 else "missed", effect)

    def _fate(self, v: Verdict) -> Fate | None:
        """What this verdict settles; None to go on."""
        if v.status in UNUSABLE:
            return "broken"
        if self.p.kind == "good":
            return None if v.status is Status.PASSED else "rejected"
        if caught(self.p, v):
            return "caught"
        return None if v.status is Status.PASSED else "missed"

    def _compiled(self, source: str) -> CompileOutcome:
        with self._clock("compile"):
            return self.bench.compiler.compile(_job(self.bench, self.p, source))

    def _judged(self, outcome: CompileOutcome, tier: Tier) -> Verdict:
        """Without baselines: they cost most of the time at the higher tiers, and no verdict here rests on them."""
        assert outcome.artifact is not None
        w = find(self.p.target).workload(self.p.options)
        patient = tier is not Tier.SCREEN or self.p.kind == "good" or self.p.band
        on_gpu = PATIENT_BASE_S if patient else BASE_S
        asked = None if self.bench.kind == "cpu" else on_gpu
        job = JudgeJob(
            artifact=outcome.artifact, target=self.p.target, options=options_json(w.options), device=self.bench.device,
            tier=tier, seed=self.seed, deadline_s=deadline(tier, asked, self.bench.device),
            compile_isolation=outcome.isolation, baselines=(),
        )  # fmt: skip
        judge = self.judges.get()
        try:
            with self._clock(str(tier)):
                return judge.judge(job)
        finally:
            self.judges.put(judge)

    def _effect(self, seed: CompileOutcome, edited: Verdict) -> Effect:
        """Against the seed as it is, from the same secret."""
        if seed.artifact is None:
            return Effect(0.0)
        return effect_of(edited, self._judged(seed, edited.tier))

    def _of(self, v: Verdict, fate: Fate, effect: Effect | None = None) -> Row:
        failure = v.failure
        if failure is None and self.p.finding:
            failure = next((f for f in v.findings if f.rule == self.p.finding), None)
        why = (failure.rule, failure.message) if failure else ("", "")
        return replace(self._ended(fate, str(v.tier), why, str(v.status), effect), commit=v.commit)

    def _ended(
        self,
        fate: Fate,
        tier: str,
        why: tuple[str, str],
        status: str = "",
        effect: Effect | None = None,
    ) -> Row:
        return Row(self.p, fate, status, tier, *why, dict(self.seconds), effect)

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin


def spent(rows: Sequence[Row]) -> Mapping[str, float]:
    """Seconds by phase, summed over kernels (phases of several kernels overlap)."""
    total: dict[str, float] = {}
    for row in rows:
        for name, seconds in row.seconds.items():
            total[name] = round(total.get(name, 0.0) + seconds, 2)
    return total
