"""Every seed becomes an artifact for every architecture, at full size, with one launch per operation."""

from __future__ import annotations

import pytest

from sandbox import artifact_store
from sandbox.artifact import ARCHS
from sandbox.compile_client import CompileClient
from tests.targets.seeds.harness import PARTS, Case, compile_seed

LAUNCHES = {"gemv": 12, "attn-res": 12, "router": 24, "kda": 36, "mla": 72, "latent-moe": 107}
"""Launches of twelve instances, none of them fused across operations (the first latent MoE has no sum to make)."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_full_size_seeds_compile(compiler: CompileClient, part: str, arch: str) -> None:
    rows = 8 if arch == "sm_100a" else 1
    outcome = compile_seed(compiler, Case(part, rows, "tp8"), arch)
    assert outcome.failure is None and outcome.artifact, outcome.failure
    artifact = artifact_store.load(outcome.artifact)
    assert f".target {arch}" in artifact.step.ptx
    if part in LAUNCHES:
        assert len(artifact.step.launches) == LAUNCHES[part]
    assert ".local" not in artifact.step.ptx


@pytest.mark.slow
@pytest.mark.parametrize("part", ["decode", "latent-moe", "mla"])
def test_sixteen_ranks_compile(compiler: CompileClient, part: str) -> None:
    outcome = compile_seed(compiler, Case(part, 1, "tp16"))
    assert outcome.failure is None and outcome.artifact, outcome.failure


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("decode", 32, "tp16", layers=13, extra={"first": 0}),
        Case(
            "decode", 16, "tp8", layers=5,
            extra={"first": 88, "q": 8, "kv": "fp8", "experts": "nvfp4", "taps": "dspark"},
        ),
    ],
    ids=["the first layers and a block's border", "the last layers, as a verification"],
)  # fmt: skip
def test_both_ends_of_the_model_compile_at_real_sizes(compiler: CompileClient, case: Case) -> None:
    w = case.workload()
    assert (w.dims["attn"], w.dims["ffn"]) in (
        ("KKKM" * 3 + "K", "D" + "E" * 12), ("KKKMM", "EEEEE")
    )  # fmt: skip
    outcome = compile_seed(compiler, case)
    assert outcome.failure is None and outcome.artifact, outcome.failure
    assert ".local" not in artifact_store.load(outcome.artifact).step.ptx
