"""The cache of outcomes: what is kept, what is a miss, and what makes another key."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sandbox.artifact import Buffer
from sandbox.compile.cache import OutcomeCache
from sandbox.compile.key import cache_key
from sandbox.jobs import CompileJob, CompileOutcome
from sandbox.verdict import Failure, Status

JOB = CompileJob("src", "demo", {"rows": 1}, {"rows": 1}, (Buffer("inputs.x", "f32", (4,)),))
FAILED = CompileOutcome(
    None, status=Status.COMPILE_ERROR, failure=Failure("TYPE_UNSTABLE_JOIN", "m", {"line": 3}),
    tunables={"a": (1, True, "x")}, isolation={"tier": "strict"}, findings=(Failure("pow", "slow"),),
)  # fmt: skip


def test_an_outcome_comes_back_equal_and_marked(tmp_path: Path) -> None:
    cache = OutcomeCache(tmp_path)
    cache.put("k", FAILED)
    assert cache.get("k") == dataclasses.replace(FAILED, cached=True)
    assert cache.get("other") is None


def test_a_missing_artifact_or_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    cache = OutcomeCache(tmp_path)
    folder = tmp_path / "artifacts" / ("0" * 64)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    cache.put("k", CompileOutcome(folder, "0" * 64))
    found = cache.get("k")
    assert found and found.artifact == folder
    (folder / "manifest.json").unlink()
    assert cache.get("k") is None
    cache.put("k", FAILED)
    file = tmp_path / "outcomes" / "k.json"
    file.write_bytes(file.read_bytes()[:-9])
    assert cache.get("k") is None


@pytest.mark.parametrize(
    ("status", "rule"),
    [
        (Status.INFRA, "box"),
        (Status.CANCELLED, "server"),
        (Status.COMPILE_ERROR, "deadline"),
        (Status.COMPILE_ERROR, "memory"),
    ],
)
def test_what_a_busy_machine_can_cause_is_not_kept(
    tmp_path: Path, status: Status, rule: str
) -> None:
    cache = OutcomeCache(tmp_path)
    cache.put("k", CompileOutcome(None, status=status, failure=Failure(rule, "m")))
    assert cache.get("k") is None


@pytest.mark.parametrize(
    "change",
    [
        {"source": "src "}, {"tunables": {"a": 1}}, {"arch": "sm_100a"}, {"sms": 114}, {"dims": {"rows": 2}},
        {"workload": {"rows": 2}}, {"target": "other"}, {"buffers": (Buffer("inputs.x", "f32", (4,), 256),)},
    ],
)  # fmt: skip
def test_whatever_shapes_the_artifact_is_in_the_key(change: dict[str, object]) -> None:
    assert cache_key(dataclasses.replace(JOB, **change), "strict") != cache_key(JOB, "strict")  # type: ignore[arg-type]


def test_the_isolation_is_in_the_key_and_equal_jobs_share_one() -> None:
    assert cache_key(JOB, "none") != cache_key(JOB, "strict")
    assert cache_key(dataclasses.replace(JOB), "strict") == cache_key(JOB, "strict")
    assert cache_key(dataclasses.replace(JOB, sms=132), "strict") == cache_key(JOB, "strict")
