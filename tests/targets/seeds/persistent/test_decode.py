"""The decode step's other ways beside its default, against the reference on the cpu device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.compile_client import CompileClient
from targets.base import Options, find
from targets.kimi_k3.seeds.persistent.unit_plan import DecodeOp, ring_stage
from tests.targets.seeds.harness import Case
from tests.targets.seeds.persistent.test_numbers import built, verify


@pytest.mark.slow
@pytest.mark.parametrize(
    "tunables",
    [
        {"preset": "tiny-tp2", "units": 0, "couples": 1, "bank": 1, "burst": 0},
        {"preset": "tiny-tp2", "stage_bytes": 2560, "in_flight": 2, "hungry": 4, "router_first": 0},
        {"stage_bytes": 2560, "ctas": 8, "twos": 1, "burst": 3, "packed": 1},
        {"stage_bytes": 4096, "ctas": 8},
    ],
    ids=["all warps choose", "stages of two rows", "one stage at a time", "eight CTAs"],
)  # fmt: skip
def test_other_ways(compiler: CompileClient, tunables: dict[str, Any]) -> None:
    """Four layers, of which the last has MLA; stages of two wide rows, and of eight narrow ones."""
    preset = tunables.get("preset", "tiny")
    given = {"ctas": 4, **{k: v for k, v in tunables.items() if k != "preset"}}
    case = Case("decode", preset=preset, layers=3 if preset == "tiny-tp2" else 4, tunables=given)
    verify(built(compiler, case), case)


def op_of(preset: str, layers: int, **given: Any) -> DecodeOp:
    dims = SimpleNamespace(**find("kimi-k3-decode").workload(Options(preset, layers, 1)).dims)
    stage = ring_stage(dims, 132, 14, 28672, given.get("units", False))
    return DecodeOp(dims, 132, 14, stage, 6, 0, kept=True, **given)


def test_two_rows_of_the_bank_are_held_and_more_are_not() -> None:
    assert op_of("tp8", 12, bank=False).bank_held and not op_of("tp8", 12).bank_held
    more = op_of("tp8", 24, bank=False)
    assert more.d.bank_rows > 2 and not more.bank_held and not more.bank_kept


def test_scratch_of_the_choosing_warp_lies_behind_the_latent() -> None:
    op = op_of("tp8", 12, units=True)
    assert op.choice_at >= 2 * op.d.latent and op.pool >= op.choice_at + 128 + 10 * op.d.experts
    assert op.stage >= op.tile.up_bytes and op.tile.stage == op.stage
    assert (op.block, op_of("tp8", 12).block) == (512, 480)


def test_a_stage_that_holds_no_unit_is_refused() -> None:
    dims = SimpleNamespace(**find("kimi-k3-decode").workload(Options("tp8", 12, 1)).dims)
    with pytest.raises(ValueError, match="a unit of experts is 30592 bytes"):
        DecodeOp(dims, 132, 14, 28672, 6, 0, kept=True, units=True)


def test_a_stage_that_holds_no_piece_of_w2_is_refused() -> None:
    """Four CTAs at `tiny` with stages of 4 KB wrote beyond the ring, over its barriers."""
    dims = SimpleNamespace(**find("kimi-k3-decode").workload(Options("tiny", 4, 1)).dims)
    with pytest.raises(ValueError, match="w2 of one expert is 4352 bytes a CTA, a stage 4096"):
        DecodeOp(dims, 4, 14, 4096, 6, 0, kept=True, units=True)
    assert DecodeOp(dims, 8, 14, 4096, 6, 0, kept=True, units=True).down_slots > 0
