"""Artifacts of several ranks: what they may name, and that those of one GPU are written as ever."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from sandbox import canary
from sandbox.artifact import Artifact, LaunchPlan, canonical, from_manifest, on_rank, rank_of
from sandbox.strict import Malformed
from tests.sandbox.devices import pair


def again(a: Artifact, **changes: Any) -> Artifact:
    blobs = {hashlib.sha256(a.step.ptx.encode()).hexdigest(): a.step.ptx.encode()}
    return from_manifest({**json.loads(canonical(a.manifest())), **changes}, blobs)


def test_two_ranks_survive_the_manifest() -> None:
    a = pair.artifact()
    assert again(a) == a and a.ranks == 2
    assert [x.rank for x in a.step.launches] == [0, 1]
    assert a.step.of(1).launches == a.step.launches[1:]
    assert (rank_of("outputs.y@1"), rank_of("outputs.y"), on_rank("x", 0)) == (1, 0, "x")


def test_one_gpu_is_written_as_ever() -> None:
    """The address of an artifact that is older than ranks."""
    made = canary.artifact("sm_90a", 1024)
    assert "rank" not in canonical(made.manifest()) and made.ranks == 1
    launches = made.manifest()["step"]["launches"]
    fields = {
        "kernel",
        "grid",
        "block",
        "smem",
        "cluster",
        "cooperative",
        "pdl",
        "params",
        "param_offsets",
    }
    assert set(launches[0]) == fields | {"relocations"}


@pytest.mark.parametrize("buffer", ["inputs.x@1", "outputs.y@1"])
def test_of_other_ranks_only_mailboxes_are_in_reach(buffer: str) -> None:
    with pytest.raises(Malformed, match="only persistent workspace"):
        again(pair.reaching(buffer))


def test_scratch_of_a_step_is_no_mailbox() -> None:
    a = pair.artifact()
    buffers = tuple(
        replace(b, lifetime="step") if b.name == "workspace.mail@1" else b for b in a.buffers
    )
    with pytest.raises(Malformed, match="only persistent workspace"):
        again(replace(a, buffers=buffers))


def test_every_rank_launches_something() -> None:
    a = pair.artifact()
    with pytest.raises(Malformed, match="each of the 2 ranks"):
        again(replace(a, step=LaunchPlan(a.step.ptx, a.step.launches[:1])))


@pytest.mark.parametrize("rank", [0, 8, -1, True, "1"])
def test_ranks_are_small_numbers_and_rank_0_is_not_spelled(rank: object) -> None:
    a = pair.artifact()
    step = json.loads(canonical(a.manifest()["step"]))
    step["launches"][1]["rank"] = rank
    with pytest.raises(Malformed, match="rank"):
        again(a, step=step)


@pytest.mark.parametrize(
    "name", ["outputs.y@0", "outputs.y@8", "outputs.y@", "outputs.y@1@1", "outputs.y@01"]
)
def test_odd_marks_are_no_names(name: str) -> None:
    a = pair.artifact()
    with pytest.raises(Malformed):
        again(replace(a, buffers=(replace(a.buffers[0], name=name), *a.buffers[1:])))
