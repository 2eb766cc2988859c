"""What agent and judge server say to each other: frames of JSON over pipes, jobs and verdicts in JSON form.

A frame is four bytes of length (big-endian) and that many bytes of JSON. Shared by `sandbox.judge_client` and
`sandbox.judge.server`, so it imports neither, and no torch. Both ends are ours; what came near a candidate is parsed
strictly all the same.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sandbox import strict
from sandbox.jobs import JudgeJob
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status, Tier, Trust, Verdict, from_json

MAX_FRAME = 32 << 20
MAX_DEADLINE_S = 86_400
_CHUNK = 1 << 16
_WEAK_TIERS = (None, "none", "weak")


def pack(body: Mapping[str, Any]) -> bytes:
    """One frame. Non-finite numbers become the largest finite one of their sign. Raises Malformed over the cap."""
    data = json.dumps(finite(body), separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_FRAME:
        raise Malformed("frame", f"has {len(data)} bytes, more than {MAX_FRAME}")
    return struct.pack(">I", len(data)) + data


def finite(value: Any) -> Any:
    """`value` with infinities, and NaN as the worst of them, made finite: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return -sys.float_info.max if value < 0 else sys.float_info.max
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def write(fd: int, body: Mapping[str, Any]) -> None:
    """Write a whole frame. Raises OSError, BrokenPipeError when nobody reads."""
    data = memoryview(pack(body))
    while data:
        data = data[os.write(fd, data) :]


class Frames:
    """Frames from a descriptor. `pump` reads once what is there; `next` gives a frame or None. Raises Malformed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._data = bytearray()

    def pump(self) -> None:
        """One read, which blocks if nothing is there. At the end of the stream `closed` becomes true."""
        chunk = os.read(self.fd, _CHUNK)
        self._data += chunk
        self.closed = not chunk

    def next(self) -> dict[str, Any] | None:
        if len(self._data) < 4:
            return None
        (size,) = struct.unpack_from(">I", self._data)
        if size > MAX_FRAME:
            raise Malformed("frame", f"declares {size} bytes, more than {MAX_FRAME}")
        if len(self._data) < 4 + size:
            return None
        body = strict.parse(bytes(self._data[4 : 4 + size]), "frame", MAX_FRAME)
        del self._data[: 4 + size]
        if not isinstance(body, dict):
            raise Malformed("frame", "is no object")
        return body


def job_to_json(job: JudgeJob) -> dict[str, Any]:
    """Paths become absolute: the server works elsewhere."""
    d = asdict(job)
    d["artifact"] = str(job.artifact.resolve())
    d["incumbent"] = str(job.incumbent.resolve()) if job.incumbent else None
    d["timeline"] = str(job.timeline.resolve()) if job.timeline else None
    return d


def job_from_json(value: object) -> JudgeJob:
    """Inverse of `job_to_json`. Raises Malformed."""
    d = strict.keys(value, "job", set(JudgeJob.__dataclass_fields__))
    try:
        return JudgeJob(
            artifact=Path(d["artifact"]),
            target=strict.text(d["target"], "job.target", 4096),
            options=dict(d["options"]),
            device=strict.text(d["device"], "job.device", 64),
            tier=Tier(d["tier"]),
            incumbent=None if d["incumbent"] is None else Path(d["incumbent"]),
            baselines=tuple(map(str, d["baselines"])),
            seed=None if d["seed"] is None else strict.integer(d["seed"], "job.seed", 0, 2**63 - 1),
            deadline_s=_seconds(d["deadline_s"]),
            compile_isolation=dict(d["compile_isolation"]),
            timeline=None if d["timeline"] is None else Path(d["timeline"]),
            steps=strict.integer(d["steps"], "job.steps", 0, 1_000_000),
        )
    except (TypeError, ValueError) as error:
        raise (
            error if isinstance(error, Malformed) else Malformed("job", str(error)[:200])
        ) from error


def _seconds(value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= MAX_DEADLINE_S
    ):
        raise Malformed("job.deadline_s", f"is not between 0 and {MAX_DEADLINE_S} seconds")
    return float(value)


def verdict_from_json(value: object) -> Verdict:
    """Raises Malformed for what is no verdict of this version."""
    if not isinstance(value, dict):
        raise Malformed("verdict", "is no object")
    try:
        return from_json(value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Malformed("verdict", f"{type(error).__name__}: {str(error)[:200]}") from error


def trust_of(compile_isolation: Mapping[str, Any]) -> Trust:
    """`judged`, or `unjailed` where the source was not compiled in a jail worth the name."""
    return Trust.UNJAILED if compile_isolation.get("tier") in _WEAK_TIERS else Trust.JUDGED


def without_judging(
    job: JudgeJob, status: Status, failure: Failure, seconds: Mapping[str, float] | None = None
) -> Verdict:
    """A verdict for a job that ended before the judge could write one: infra, cancelled, fault, hang, refusals."""
    return Verdict(
        status=status,
        target=job.target,
        artifact=job.artifact.name,
        device={"kind": job.device.split(":", 1)[0]},
        tier=job.tier,
        trust=trust_of(job.compile_isolation),
        isolation=dict(job.compile_isolation),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        failure=failure,
        seconds=dict(seconds or {}),
    )


def describe_isolation(isolation: Mapping[str, Any]) -> str:
    """How a judging process was confined, in one line for people."""
    tier = isolation.get("tier", "none")
    if tier == "landlock":
        text = f"Landlock ABI {isolation.get('landlock_abi')} and seccomp: no network, own /tmp, files as granted"
    elif tier == "seccomp":
        text = "seccomp alone: no network; files as this user may read and write them"
    else:
        text = "NOT confined"
    missing = isolation.get("missing") or ()
    return f"{text} ({'; '.join(map(str, missing))})" if missing else text
