"""Builds the verdict: status, evidence, identity of device and code, times spent. It decides no status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from sandbox.devices.base import DeviceFacts
from sandbox.jobs import JudgeJob
from sandbox.verdict import (
    Correctness,
    Failure,
    KernelResources,
    Outcome,
    Status,
    Tier,
    Timing,
    Trust,
    Verdict,
)

WEAK_TIERS = ("none", "weak", "unjailed")


@dataclass
class Draft:
    """What is known so far of a judgement; `passed` or `ended` makes the verdict."""

    job: JudgeJob
    progress: Callable[[str], None]
    device: Mapping[str, Any] = field(default_factory=dict)
    artifact: str = ""
    resources: tuple[KernelResources, ...] = ()
    findings: list[Failure] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_verified: list[str] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what happens now and keep how long it took."""
        self.progress(name)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begin, 6)

    def ended(
        self, status: Status, failure: Failure, correctness: Correctness | None = None
    ) -> Verdict:
        shown = correctness if status in (Status.WRONG, Status.FLAKY) else None
        return Verdict(status=status, failure=failure, correctness=shown, **self._common())

    def passed(self, outcome: Outcome, correctness: Correctness, timing: Timing | None) -> Verdict:
        return Verdict(
            status=Status.PASSED,
            outcome=outcome,
            correctness=correctness,
            timing=timing,
            **self._common(),
        )

    def _common(self) -> dict[str, Any]:
        return {
            "target": self.job.target, "artifact": self.artifact, "device": dict(self.device), "tier": self.job.tier,
            "trust": trust_of(self.job), "isolation": dict(self.job.compile_isolation),
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(),
            "resources": self.resources, "findings": tuple(self.findings), "checked": tuple(self.checked),
            "not_verified": tuple(self.not_verified), "seconds": dict(self.seconds), "profile": dict(self.profile),
        }  # fmt: skip


def trust_of(job: JudgeJob) -> Trust:
    """`audited` needs the promotion tier, which the server runs in a fresh process; a weak or unknown jail is not
    mended by a good judge."""
    tier = str(job.compile_isolation.get("tier", "none"))
    if tier in WEAK_TIERS:
        return Trust.UNJAILED
    return Trust.AUDITED if job.tier is Tier.PROMOTE else Trust.JUDGED


def device_of(facts: DeviceFacts) -> dict[str, Any]:
    return {**asdict(facts), "slug": facts.slug}


@cache
def commit() -> str:
    """The commit of this checkout, read once and without running git; empty for an installed package."""
    git = Path(__file__).resolve().parents[2] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:40]
        ref = head.removeprefix("ref: ")
        loose = git / ref
        if loose.is_file():
            return loose.read_text().strip()[:40]
        for line in (git / "packed-refs").read_text().splitlines():
            if line.endswith(f" {ref}"):
                return line[:40]
    except OSError:
        return ""
    return ""
