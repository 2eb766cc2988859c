"""Judging files by hand: source to artifact to verdict, outside the loop, recorded in runs.db all
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent import observe
from agent import record as writer
from agent.ids import new_run_id, now
from agent.outcome import trust
from agent.runner import Services
from agent.store import RunRow
from agent.store.store import CandidateRow, JudgedRow
from agent.versions import versions
from agent.workspace import Place
from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status, Tier, Verdict
from targets.base import Options, Workload, find


@dataclass(frozen=True)
class Setting:
    """What files are judged against."""

    target: str
    workload: Workload
    device: str
    arch: str
    tier: Tier = Tier.SCREEN
    deadline_s: float = 120.0


@dataclass(frozen=True)
class File:
    """A source and the values chosen among its TUNABLES."""

    name: str
    source: str
    tunables: Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """What came of a file."""

    file: File
    outcome: CompileOutcome
    verdict: Verdict


def read(name: str, target: str, tunables: Mapping[str, Any]) -> File:
    """A path, or `seed` or `-` for the target's seed. Raises OSError."""
    if name in ("seed", "-"):
        return File("seed", find(target).seed_source(), tunables)
    try:
        return File(name, Path(name).read_text(), tunables)
    except UnicodeDecodeError as error:
        raise Malformed(name, f"is no text: {error.reason}") from error


def compile_file(services: Services, s: Setting, file: File) -> CompileOutcome:
    return services.compiler.compile(_job(s, file))


def _job(s: Setting, file: File) -> CompileJob:
    w = s.workload
    return CompileJob(file.source, s.target, w.key, w.dims, w.buffers, s.arch, dict(file.tunables))


def judge_file(services: Services, s: Setting, file: File, incumbent: Path | None) -> Found:
    """Compile and judge; a failure on the way is a verdict."""
    outcome = compile_file(services, s, file)
    if outcome.artifact is None:
        return Found(file, outcome, _uncompiled(s, outcome))
    job = JudgeJob(
        artifact=outcome.artifact, target=s.target, options=options_json(s.workload.options),
        device=s.device, tier=s.tier, incumbent=incumbent, deadline_s=s.deadline_s,
        compile_isolation=outcome.isolation,
    )  # fmt: skip
    verdict = services.judge.judge(job)
    pair = (services.compiler, services.judge)
    return Found(file, outcome, observe.timeline(verdict, _job(s, file), job, pair))


def options_json(options: Options) -> dict[str, Any]:
    return {**asdict(options), "extra": dict(options.extra)}


def only_trusted(artifact: Artifact, target: str | None) -> None:
    """A file that an artifact names as its target would be run: only if the user named it. Raises Malformed."""
    if ".py:" in artifact.target and artifact.target != target:
        named = artifact.target
        raise Malformed(
            "target",
            f"is the file {named}, which would be run: if you trust it, give --target {named}",
        )


def options_of(artifact: Artifact) -> Options:
    """The options an artifact was compiled for. Raises UnknownTarget, UnknownOption, Malformed."""
    key = dict(artifact.workload)
    extra = {k[2:]: v for k, v in key.items() if k.startswith("x_") and v is not None}
    try:
        options = Options(
            str(key["preset"]), int(key["layers"]), int(key["rows"]), int(key["context"]), extra
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Malformed("workload", "has no preset, layers, rows and context") from error
    if find(artifact.target).workload(options).key != key:
        raise Malformed("workload", f"is none of the target {artifact.target} in this version")
    return options


def _uncompiled(s: Setting, outcome: CompileOutcome) -> Verdict:
    return Verdict(
        status=outcome.status or Status.INFRA, target=s.target, artifact="",
        device={"kind": s.device.partition(":")[0]}, tier=s.tier, trust=trust(outcome.isolation),
        isolation=dict(outcome.isolation), date=now(),
        failure=outcome.failure or Failure("compile", "no artifact and no reason"),
        seconds=dict(outcome.seconds),
    )  # fmt: skip


def start_record(place: Place, s: Setting) -> str:
    """A run of kind `evaluate` for files to come; returns its id."""
    run = new_run_id()
    row = RunRow(
        run, s.target, "evaluate", s.device, "files", "", s.workload.key,
        {"options": options_json(s.workload.options), "tier": str(s.tier)}, versions(), now(),
    )  # fmt: skip
    writer.opened(place.db, row)
    return run


def record(place: Place, run: str, seq: int, found: Found) -> None:
    """One judged file as a candidate of the run."""
    workspace = place.workspace
    artifact = None
    if found.outcome.artifact is not None:
        artifact = artifact_store.load(found.outcome.artifact)
        artifact_store.save(artifact, workspace.artifacts)
    sha = artifact.sha256 if artifact else None
    tunables = dict(artifact.tunables) if artifact else dict(found.file.tunables)
    judged = JudgedRow(0, found.verdict, workspace.put_verdict(found.verdict), tunables, sha)
    row = CandidateRow(
        seq=seq, round=0, parent=None, proposer="file", direction=found.file.name, note="",
        predicted_gain=None, source=workspace.put(found.file.source), tunables=tunables,
        declared={k: list(v) for k, v in found.outcome.tunables.items()}, artifact=sha,
        verdict=found.verdict, created=now(), judged=(judged,),
        artifacts=(artifact,) if artifact else (),
    )  # fmt: skip
    writer.by_hand(place.db, run, row)


def finish_record(place: Place, run: str, seconds: float) -> None:
    writer.changed(place.db, run, state="done", elapsed=seconds, updated=now())
