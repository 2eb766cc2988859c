"""Jobs and outcomes as JSON between the agent's side and the compile server, both trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox.artifact import Buffer, buffer_dict
from sandbox.jobs import CompileJob, CompileOutcome
from sandbox.verdict import Failure, Status


def job_blocks(job: CompileJob) -> dict[str, bytes]:
    """A job as frame blocks: the source apart, since it may hold anything."""
    fields = {
        "target": job.target,
        "workload": dict(job.workload),
        "dims": dict(job.dims),
        "buffers": [buffer_dict(b) for b in job.buffers],
        "arch": job.arch,
        "tunables": dict(job.tunables),
        "filename": job.filename,
        "sms": job.sms,
    }
    return {
        "job": json.dumps(fields).encode(),
        "source": job.source.encode("utf-8", "surrogatepass"),
    }


def job_from_blocks(blocks: Mapping[str, bytes]) -> CompileJob:
    """Inverse of `job_blocks`."""
    fields = json.loads(blocks["job"])
    buffers = tuple(Buffer(**{**b, "shape": tuple(b["shape"])}) for b in fields.pop("buffers"))
    source = blocks["source"].decode("utf-8", "surrogatepass")
    return CompileJob(source=source, buffers=buffers, **fields)


def outcome_json(outcome: CompileOutcome) -> dict[str, Any]:
    return {
        "artifact": str(outcome.artifact) if outcome.artifact else None,
        "sha256": outcome.sha256,
        "status": outcome.status,
        "failure": _failure_json(outcome.failure) if outcome.failure else None,
        "findings": [_failure_json(f) for f in outcome.findings],
        "tunables": {k: list(v) for k, v in outcome.tunables.items()},
        "isolation": dict(outcome.isolation),
        "cached": outcome.cached,
        "seconds": dict(outcome.seconds),
    }


def outcome_from_json(data: Mapping[str, Any]) -> CompileOutcome:
    """Inverse of `outcome_json`. Raises KeyError, TypeError or ValueError for anything else."""
    return CompileOutcome(
        artifact=Path(data["artifact"]) if data["artifact"] else None,
        sha256=str(data["sha256"]),
        status=Status(data["status"]) if data["status"] else None,
        failure=Failure(**data["failure"]) if data["failure"] else None,
        findings=tuple(Failure(**f) for f in data["findings"]),
        tunables={k: tuple(v) for k, v in data["tunables"].items()},
        isolation=dict(data["isolation"]),
        cached=bool(data["cached"]),
        seconds=dict(data["seconds"]),
    )


def _failure_json(failure: Failure) -> dict[str, Any]:
    return {"rule": failure.rule, "message": failure.message, "where": dict(failure.where)}
