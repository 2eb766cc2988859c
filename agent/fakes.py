"""Stand-ins for the sandbox's services and for a target: deterministic, instant, without device or
compiler.

For tests of the loop. A fake kernel is text whose comments say what it costs and how it fails:
`# fake: us=100 mode=passed` and, per tunable, `# cost: threads 128=0.9 512=1.2` (factor on `us`;
values not named cost 1). Verdicts carry `modelled` times and the device name `fake`; nothing is
run.
"""

from __future__ import annotations

import ast
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox import artifact_store
from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.verdict import (
    Correctness,
    Failure,
    Outcome,
    Ratio,
    Status,
    TensorCheck,
    Tier,
    Timing,
    Trust,
    Verdict,
    WorkloadTiming,
)
from targets.base import Floor, Options, UnknownOption, Workload

SEED = '''"""The seed: plain and right."""
# fake: us=100 mode=passed
# cost: threads 128=0.95 512=1.2
# cost: stages 3=0.9
TUNABLES = {"threads": (256, 128, 512), "stages": (2, 3)}
'''
BUFFERS = (Buffer("inputs.x", "f32", (1024,)), Buffer("outputs.y", "f32", (1024,)))
FLOOR_US = 50.0
COMPILE_FAILURES = (Status.REJECTED, Status.COMPILE_ERROR, Status.PLAN_ERROR, Status.LINT)


@dataclass(frozen=True)
class FakeTarget:
    name: str = "fake"
    summary: str = "Doubles a vector, in the imagination."
    presets: tuple[str, ...] = ("tiny", "big")
    reference: str = "nowhere:Nothing"
    seed: str = SEED

    def seed_source(self) -> str:
        return self.seed

    def workload(self, options: Options) -> Workload:
        if options.preset not in self.presets:
            raise UnknownOption(f"no preset {options.preset!r}; there are tiny, big")
        return Workload(
            target=self.name, options=options, layers=options.layers or 1, rows=options.rows,
            context=options.context or 0, q=1, ranks=1, dims={"n": 1024}, buffers=BUFFERS,
            floor=Floor(4096, 4096),
        )  # fmt: skip


def kernel(us: float, mode: str = "passed", extra: str = "") -> str:
    """Source of a fake kernel."""
    return f'"""A kernel of {us} us. Predicted gain: 1.1"""\n# fake: us={us} mode={mode}\n{extra}'


@dataclass
class FakeCompiler:
    """`delay` seconds a job; `seen` counts jobs by source hash."""

    root: Path
    delay: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)

    def compile(self, job: CompileJob) -> CompileOutcome:
        time.sleep(self.delay)
        digest = hashlib.sha256(job.source.encode()).hexdigest()
        self.seen[digest] = self.seen.get(digest, 0) + 1
        us, mode = _said(job.source)
        if mode in COMPILE_FAILURES:
            failure = Failure("fake", f"this kernel says that it ends as {mode}")
            return CompileOutcome(None, status=Status(mode), failure=failure)
        declared = _declared(job.source)
        chosen = {n: job.tunables.get(n, values[0]) for n, values in declared.items()}
        unknown = set(job.tunables) - set(declared)
        if unknown:
            failure = Failure("tunables", f"{sorted(unknown)} are not declared")
            return CompileOutcome(None, status=Status.REJECTED, failure=failure)
        for name, value in chosen.items():
            us *= _factor(job.source, name, value)
        artifact = Artifact(
            target=job.target, workload=dict(job.workload), arch=job.arch, buffers=job.buffers,
            step=LaunchPlan(f"// fake us={us:.6f} mode={mode}\n", (_LAUNCH,)), tunables=chosen,
            source_sha256=digest, toolchain={"fake": "1"},
        )  # fmt: skip
        folder = artifact_store.save(artifact, self.root)
        return CompileOutcome(
            folder, artifact.sha256, tunables=declared, isolation={"tier": "strict"},
            seconds={"compile": 0.0},
        )  # fmt: skip

    def close(self) -> None:
        return None


@dataclass
class FakeJudge:
    """Times are what the artifact says. `full_penalty`: factor on a candidate at higher tiers, for
    flukes.
    """

    delay: float = 0.0
    full_penalty: float = 1.0
    broken: bool = False
    calls: list[tuple[str, Tier]] = field(default_factory=list)
    closed: bool = False

    def judge(self, job: JudgeJob) -> Verdict:
        time.sleep(self.delay)
        artifact = artifact_store.load(job.artifact)
        self.calls.append((artifact.sha256, job.tier))
        us, mode = _said(artifact.step.ptx)
        if self.broken:
            return _verdict(job, artifact, us, Status.INFRA, None)
        if job.tier is not Tier.SCREEN:
            us *= self.full_penalty
        base = None
        if job.incumbent is not None:
            base = _said(artifact_store.load(job.incumbent).step.ptx)[0]
        return _verdict(job, artifact, us, mode, base)

    def close(self) -> None:
        self.closed = True


_LAUNCH = Launch(
    "k", (1, 1, 1), (32, 1, 1), bytes(16), (0, 8), (Relocation(0, "inputs.x"), Relocation(8, "outputs.y"))
)  # fmt: skip


def _said(text: str) -> tuple[float, str]:
    found = re.search(r"fake:? us=([0-9.]+) mode=(\w+)", text)
    return (float(found.group(1)), found.group(2)) if found else (100.0, "passed")


def _declared(source: str) -> dict[str, tuple[Any, ...]]:
    found = re.search(r"^TUNABLES = (\{.*\})$", source, re.MULTILINE)
    return {k: tuple(v) for k, v in ast.literal_eval(found.group(1)).items()} if found else {}


def _factor(source: str, name: str, value: object) -> float:
    found = re.search(rf"^# cost: {re.escape(name)} (.*)$", source, re.MULTILINE)
    pairs = dict(p.split("=") for p in found.group(1).split()) if found else {}
    return float(pairs.get(str(value), 1.0))


def _verdict(
    job: JudgeJob, artifact: Artifact, us: float, mode: str, base: float | None
) -> Verdict:
    trust = Trust.AUDITED if job.tier is Tier.PROMOTE else Trust.JUDGED
    common: dict[str, Any] = {
        "target": job.target, "artifact": artifact.sha256,
        "device": {"kind": job.device, "name": "fake"}, "tier": job.tier, "trust": trust,
        "isolation": dict(job.compile_isolation), "date": "2026-01-01T00:00:00Z",
        "seconds": {"held": 0.25},
    }  # fmt: skip
    if mode != "passed":
        failure = Failure("fake", f"this kernel says that it ends as {mode}", {"tensor": "y"})
        return Verdict(status=Status(mode), failure=failure, **common)
    ratio = None if base is None else Ratio(base / us, base / us * 0.998, base / us * 1.002)
    outcome = Outcome.NOT_TIMED
    if ratio is not None:
        outcome = Outcome.BETTER if ratio.low > 1.005 else Outcome.SLOW
    return Verdict(
        status=Status.PASSED, outcome=outcome, correctness=_CORRECT, checked=("outputs.y",),
        not_verified=("everything: this judge is a fake",),
        timing=Timing("modelled", (_row(job, artifact, us, ratio),)), **common,
    )  # fmt: skip


_CORRECT = Correctness(
    1, 1, 1, (TensorCheck("outputs.y", 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, True),), ("outputs.y",), ()
)  # fmt: skip


def _row(job: JudgeJob, artifact: Artifact, us: float, ratio: Ratio | None) -> WorkloadTiming:
    options: Mapping[str, Any] = job.options
    return WorkloadTiming(
        target=job.target, preset=options["preset"], layers=options["layers"] or 1,
        m=options["rows"], q=1, context=options["context"] or 0, ranks=1,
        launches=len(artifact.step.launches), us=us, us_per_layer=us, gb_per_s=8192 / us / 1000,
        floor_bytes=8192, fraction_of_floor_measured=FLOOR_US / us,
        fraction_of_floor_spec=FLOOR_US / us, speedup_incumbent=ratio,
    )  # fmt: skip
