"""The seeds for many tokens: whole bundles, the list of pairs, sizes, and steps against the reference on the cpu
device."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sandbox.compile_client import CompileClient
from sandbox.devices.cpu.device import CpuDevice
from targets.kimi_k3 import sizes
from targets.kimi_k3.reference import IDS
from targets.kimi_k3.seeds import persistent
from targets.kimi_k3.seeds.grouped.pairs import NUMBERS, TOGETHER, Grouping
from targets.kimi_k3.seeds.grouped.product import REGISTERS, product_shapes, registers
from tests.targets.seeds.harness import Case, check, results, steps
from tests.targets.seeds.persistent.test_numbers import built
from tests.targets.seeds.persistent.test_source import defined, imported, missing

PARTS = ("decode-grouped", "latent-moe-grouped")


@pytest.mark.parametrize("part", PARTS)
def test_a_bundle_is_whole_and_has_every_name_once(part: str) -> None:
    tree = ast.parse(persistent.source(part))
    names = defined(tree)
    assert missing(tree) == set()
    assert sorted(names) == sorted(set(names)) and not set(names) & imported(tree)
    assert {"TUNABLES", "workspace", "step", "group_kernel", "product_kernel"} <= set(names)
    assert not {"gemv_kernel", "expert_up_kernel", "expert_down_kernel"} & set(names)
    modules = {n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert not any(m.startswith(("targets", "agent", "sandbox")) for m in modules)


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
@pytest.mark.parametrize(("topk", "experts"), [(16, 896), (4, 32), (4, 4)])
def test_the_list_has_room_for_every_routing(rows: int, topk: int, experts: int) -> None:
    op = Grouping(rows, topk, experts, 256)
    even = [op.pairs // experts + (e < op.pairs % experts) for e in range(experts)]
    # seven pairs more than full entries cost most
    spread = [min(1, op.pairs - e) for e in range(min(experts, op.pairs))]
    spread[0] += op.pairs - sum(spread)
    same = [rows] * topk
    assert all(sum(-(-n // TOGETHER) for n in x) <= op.entries for x in (even, spread, same))
    assert 1 <= op.usual <= op.entries


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize(
    ("n", "k", "situ"),
    [(6288, 7168, False), (448, 7168, False), (768, 7168, True), (7168, 768, False), (16, 64, False)],
)  # fmt: skip
def test_a_product_fits_registers_and_is_covered(rows: int, n: int, k: int, situ: bool) -> None:
    cfg = SimpleNamespace(
        sms=132, product_tile=4, product_splits=4, product_warps=8, product_ring=4, pdl=False
    )
    op = product_shapes([(n, 2 if situ else 1)], k, rows, cfg)[0]
    assert registers(op.parts, op.tokens, op.ring) <= REGISTERS
    assert op.alone == (op.tokens * 8 >= rows) and op.warps * 32 <= k
    if (rows, n) == (64, 6288):
        assert (op.tile, op.tokens) == (3, 8)


def listed(ids: Tensor, experts: int) -> list[list[int]]:
    """[expert, pairs, numbers ...] of one layer's routing i32 [M, topk]."""
    found = []
    for e in range(experts):
        pairs = torch.nonzero(ids.flatten() == e).flatten().tolist()
        cut = [pairs[i : i + TOGETHER] for i in range(0, len(pairs), TOGETHER)]
        found += [[e, len(x), *x] for x in cut]
    return found


def entries(table: Tensor) -> list[list[int]]:
    rows = table.tolist()
    end = next(i for i, row in enumerate(rows) if row[0] < 0)
    assert all(row[0] == -1 for row in rows[end:])
    return [[*row[:2], *row[NUMBERS : NUMBERS + row[1]]] for row in rows[:end]]


def verify(compiler: CompileClient, case: Case, part: str) -> Mapping[str, Tensor]:
    got: Mapping[str, Tensor] = {}
    for step in steps(built(compiler, case, part), case):
        check(step)
        got = step.got
    return got


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "rows", "extra", "tunables"),
    [
        ("tiny", 16, {}, {}),
        ("tiny", 64, {}, {"up_tile": 1, "up_ring": 1, "down_ring": 1, "product_ring": 1}),
        ("tiny-tp2", 32, {"experts": "nvfp4"}, {"up_warps": 2, "down_warps": 2, "pdl": True}),
        ("tiny-tp2", 2, {}, {"product_warps": 4, "product_tile": 3, "product_splits": 1}),
        ("tiny", 1, {}, {"down_turns": 1}),
    ],
)
def test_the_latent_moe(
    compiler: CompileClient,
    preset: str,
    rows: int,
    extra: dict[str, str],
    tunables: dict[str, int],
) -> None:
    """Experts of one to more than eight pairs; the last layer's list is the routing's, in order."""
    case = Case("latent-moe", rows, preset, layers=2, extra=extra, tunables=tunables)
    got = verify(compiler, case, "latent-moe-grouped")
    assert entries(got["workspace.pair_list"]) == listed(got[IDS][-1], 32)


@pytest.mark.slow
def test_rings_that_go_round_and_a_part_of_one(
    compiler: CompileClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps for four warps of two each, two and a half steps of w2 in two turns, tiles beyond the last row."""
    tiny = sizes.PRESETS["tiny"]
    long = replace(tiny, sizes=replace(tiny.sizes, latent=1280, expert_dim=320, hidden=1536))
    monkeypatch.setitem(sizes.PRESETS, "long", long)
    case = Case("latent-moe", 16, "long", layers=1, tunables={"product_tile": 3})
    artifact = built(compiler, case, "latent-moe-grouped")
    for step in steps(artifact, case):
        check(step)


@pytest.mark.slow
def test_the_latent_moe_has_no_race_and_the_same_bits_in_any_order(compiler: CompileClient) -> None:
    case = Case("latent-moe", 16, layers=1)
    artifact = built(compiler, case, "latent-moe-grouped")
    usual, _ = results(artifact, case, CpuDevice())
    got, findings = results(artifact, case, CpuDevice(seed=1, mode="exact"))
    assert not findings
    for name, value in usual.items():
        assert torch.equal(got[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("decode", 16, layers=2),
        Case("decode", 16, "tiny-tp2", layers=3, extra={"first": 3}),
        Case("decode", 8, layers=5, extra={"q": 4, "kv": "fp8", "taps": "dspark"}),
    ],
    ids=["dense", "both kinds of attention", "several tokens a request"],
)
def test_the_whole_step(compiler: CompileClient, case: Case) -> None:
    verify(compiler, case, "decode-grouped")


@pytest.mark.slow
def test_real_sizes_compile_without_spills_to_local_memory(compiler: CompileClient) -> None:
    artifact = built(compiler, Case("decode", 64, "tp8", layers=4), "decode-grouped")
    assert ".local" not in artifact.step.ptx
