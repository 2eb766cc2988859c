"""Verdicts from another host: requests are files, verdicts come back by `kernelgen record`.

A verdict is accepted for the artifact hash, tier, target and device kind that were asked for. That
the other host really ran it, and against the incumbent named in the request, is taken on trust.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.models.base import Waiting
from agent.workspace import RunFiles, read_json, write_json
from sandbox import strict
from sandbox.jobs import JudgeJob
from sandbox.strict import Malformed
from sandbox.verdict import Verdict, from_json

MAX_VERDICT_BYTES = 32 << 20
MARKED = "timeline"
"""In names: of a build with marks beside its artifact."""


@dataclass(frozen=True)
class FolderJudge:
    """`sandbox.jobs.Judge` that asks by file and waits by raising Waiting."""

    files: RunFiles

    def judge(self, job: JudgeJob) -> Verdict:
        """Raises Waiting until the verdict was recorded."""
        sha = job.artifact.name
        against = job.incumbent.name if job.incumbent else "nothing"
        name = f"{sha}-{job.tier}-{against}.json"
        if job.timeline is not None:  # the same look whatever tier it follows: asked for once
            name = f"{sha}-{MARKED}.json"
        found = read_json(self.files.folder / "imported" / name)
        if found is not None:
            return from_json(found)
        write_json(
            requests(self.files) / name,
            {
                "artifact": str(job.artifact), "sha256": sha, "tier": str(job.tier),
                "target": job.target, "device": job.device, "options": dict(job.options),
                "incumbent": str(job.incumbent) if job.incumbent else None,
                "timeline": str(job.timeline) if job.timeline else None,
                "compile_isolation": dict(job.compile_isolation),
            },
        )  # fmt: skip
        flag = f" --against {job.incumbent}" if job.incumbent else ""
        flag += f" --timeline {job.timeline}" if job.timeline else ""
        flag += f" --target {job.target}" if ".py:" in job.target else ""
        jail = job.compile_isolation.get("tier", "none")
        raise Waiting(
            f"judge it on the other host: kernelgen judge {job.artifact} --tier {job.tier} --device "
            f"{job.device}{flag} --jail {jail} -o DIR; then here: kernelgen record "
            f"{self.files.folder.name} DIR/{verdict_name(sha, str(job.tier), job.timeline is not None)}"
        )

    def close(self) -> None:
        return None


def verdict_name(artifact: str, tier: str, marked: bool) -> str:
    """The file that `kernelgen judge -o` writes: a look at the build with marks does not replace a judgement."""
    return f"{artifact}-{MARKED if marked else tier}.json"


def requests(files: RunFiles) -> Path:
    return files.folder / "requests"


def read_verdict(path: Path) -> Verdict:
    """A verdict.json as hostile input. Raises Malformed, OSError."""
    with path.open("rb") as file:
        read = file.read(MAX_VERDICT_BYTES + 1)
    data = strict.parse(read, path.name, MAX_VERDICT_BYTES)
    try:
        return from_json(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Malformed(path.name, f"is no verdict: {error}") from error


def accept(files: RunFiles, verdict: Verdict) -> bool:
    """Take a verdict that open requests ask for; False if none does. Raises Malformed on a
    mismatch.
    """
    taken = False
    marked = "compare" in verdict.seconds  # only who runs both builds compares them
    which = MARKED if marked else f"{verdict.tier}-*"
    for path in sorted(requests(files).glob(f"{verdict.artifact}-{which}.json")):
        imported = files.folder / "imported" / path.name
        if imported.exists():
            continue
        request: Any = read_json(path)
        kind = request["device"].partition(":")[0]
        pairs = (
            ("target", verdict.target, request["target"]),
            ("device", verdict.device.get("kind"), kind),
        )
        for field, got, wanted in pairs:
            if got != wanted:
                raise Malformed(field, f"is {got}, the run asked for {wanted}")
        write_json(imported, verdict.to_json())
        taken = True
    return taken
