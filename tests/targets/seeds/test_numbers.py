"""Seeds against the reference on the cpu device: states carried over steps, odd inputs, every structural choice."""

from __future__ import annotations

import pytest
import torch

from sandbox.compile_client import CompileClient
from sandbox.devices.cpu.device import CpuDevice
from tests.targets.seeds.harness import Case, built, check, results, steps


def verify(compiler: CompileClient, case: Case) -> None:
    count = 0
    for step in steps(built(compiler, case), case):
        check(step)
        count += 1
    assert count == case.steps


@pytest.mark.parametrize("part", ["gemv", "attn-res", "router"])
@pytest.mark.parametrize("rows", [1, 8])
def test_small_seeds(compiler: CompileClient, part: str, rows: int) -> None:
    verify(compiler, Case(part, rows, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kda", "mla", "latent-moe", "decode"])
@pytest.mark.parametrize("rows", [1, 8])
def test_layers_and_the_whole_step(compiler: CompileClient, part: str, rows: int) -> None:
    verify(compiler, Case(part, rows, steps=3 if rows == 1 else 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("decode", 2, "tiny-tp2"),
        Case("decode", 1, layers=2),
        Case("decode", 1, layers=3, extra={"first": 3}),
        Case("decode", 1, "tiny-end", layers=3, extra={"first": 2}),
        Case("latent-moe", 2, "tiny-tp2", extra={"router": "sharded"}),
        Case("latent-moe", 1, "tiny-tp2", extra={"latent_down": "replicated"}),
        Case("gemv", 16),
        Case("decode", 32, layers=2),
        Case("mla", 32, layers=1),
    ],
    ids=lambda c: f"{c.part}-{c.preset}-{c.rows}-{dict(c.extra)}",
)
def test_other_ranks_slices_and_more_rows(compiler: CompileClient, case: Case) -> None:
    verify(compiler, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("kda", 8, layers=1, extra={"q": 4}, steps=2),
        Case("kda", 8, layers=1, extra={"q": 8}, disturb="null_store", tunables={"pdl": True}),
        Case("kda", 8, layers=1, extra={"q": 4}, disturb="null_request"),
        Case("kda", 2, layers=2, steps=2, family="glm-5.3-flash"),
        Case("mla", 8, layers=1, extra={"q": 4}, disturb="short"),
        Case("mla", 8, layers=1, extra={"q": 4, "kv": "fp8"}, disturb="null_request"),
        Case("mla", 2, layers=1, extra={"kv": "fp8"}, steps=2),
        Case("decode", 4, layers=5, extra={"q": 2, "kv": "fp8", "taps": "dspark"}),
        Case("latent-moe", 2, layers=1, extra={"experts": "nvfp4"}),
    ],
    ids=lambda c: f"{c.family}-{c.part}-{c.rows}-{dict(c.extra)}-{c.disturb}",
)
def test_variants_of_the_targets(compiler: CompileClient, case: Case) -> None:
    verify(compiler, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "tunables"),
    [
        ("gemv", {"gemv_warps": 4, "gemv_tile": 4, "gemv_unroll": 2, "fuse_add": False}),
        ("gemv", {"gemv_warps": 16, "gemv_tile": 1, "gemv_unroll": 7, "pdl": True}),
        ("attn-res", {"attn_res_vectors": 2, "pdl": True}),
        ("router", {"topk_warps": 4}),
        ("router", {"topk_warps": 16}),
        ("kda", {"kda_threads": 256, "fuse_add": False}),
        ("kda", {"kda_threads": 1024, "pdl": True}),
        ("mla", {"kv_splits": 16, "mla_warps": 4, "fuse_norm": False}),
        ("mla", {"kv_splits": 128, "fuse_add": False, "pdl": True}),
        ("latent-moe", {"expert_up_warps": 2, "expert_down_warps": 8, "expert_unroll": 2}),
        ("latent-moe", {"expert_up_warps": 8, "expert_down_warps": 2, "fuse_norm": False}),
    ],
    ids=str,
)
def test_structural_choices(
    compiler: CompileClient, part: str, tunables: dict[str, object]
) -> None:
    verify(compiler, Case(part, 2, tunables=tunables))


@pytest.mark.parametrize("disturb", ["large", "spike", "router_ties"])
def test_the_router_on_odd_inputs(compiler: CompileClient, disturb: str) -> None:
    verify(compiler, Case("router", 8, disturb=disturb))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "disturb"),
    [
        ("kda", "null_request"),
        ("kda", "decay"),
        ("kda", "beta"),
        ("mla", "null_request"),
        ("mla", "no_insert"),
        ("mla", "short"),
        ("mla", "stale_cache"),
        ("mla", "saturated"),
        ("mla", "shared_keys"),
    ],
)
def test_odd_requests(compiler: CompileClient, part: str, disturb: str) -> None:
    verify(compiler, Case(part, 8, disturb=disturb))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gemv", "attn-res", "router", "kda", "mla", "latent-moe"])
def test_no_race_and_the_same_bits_in_any_order(compiler: CompileClient, part: str) -> None:
    case = Case(part, 2)
    artifact = built(compiler, case)
    usual, _ = results(artifact, case, CpuDevice())
    for seed in (1, 2):
        got, findings = results(artifact, case, CpuDevice(seed=seed, mode="exact"))
        assert not findings
        for name, value in usual.items():
            assert torch.equal(got[name].view(torch.uint8), value.view(torch.uint8)), name
