"""The decode step's other ways beside its default, against the reference on the cpu device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.compile_client import CompileClient
from targets.base import Options, find
from targets.kimi_k3.seeds.persistent.stages import STRIDE
from targets.kimi_k3.seeds.persistent.unit_plan import DecodeOp, ring_stage
from tests.targets.seeds.harness import Case
from tests.targets.seeds.persistent.test_numbers import built, races, verify


@pytest.mark.slow
@pytest.mark.parametrize(
    "tunables",
    [
        {"preset": "tiny-tp2", "units": 0, "couples": 1, "bank": 1, "burst": 0},
        {"preset": "tiny-tp2", "stage_bytes": 2560, "in_flight": 2, "hungry": 4, "router_first": 0},
        {"stage_bytes": 2560, "ctas": 8, "twos": 1, "burst": 3, "packed": 1},
        {"stage_bytes": 4096, "ctas": 8},
        {"dots": 0, "hold": 0},
        {"missing": 64, "ctas": 8, "stage_bytes": 2560},
        {"first": 2, "ctas": 8, "stage_bytes": 2560},
        {"preset": "tiny-tp2", "first": 3, "ctas": 8},
    ],
    ids=[
        "all warps choose", "stages of two rows", "one stage at a time", "eight CTAs", "no sums of others",
        "boxes before all hints", "one row of earlier layers", "two rows of earlier layers",
    ],
)  # fmt: skip
def test_other_ways(compiler: CompileClient, tunables: dict[str, Any]) -> None:
    """Four layers, of which the last has MLA; stages of two wide rows, and of eight narrow ones; runs that start with
    the second or fourth layer, two steps in a row."""
    preset, first = tunables.get("preset", "tiny"), tunables.get("first", 0)
    given = {"ctas": 4, **{k: v for k, v in tunables.items() if k not in ("preset", "first")}}
    layers = 4 - first if first else 3 if preset == "tiny-tp2" else 4
    extra, steps = {"first": first} if first else {}, 2 if first else 1
    case = Case("decode", preset=preset, layers=layers, steps=steps, extra=extra, tunables=given)
    verify(built(compiler, case), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "order", "missing"), [("tiny", 1, 4), ("tiny-tp2", 2, 4), ("tiny", 2, 64)]
)
def test_does_not_race(compiler: CompileClient, preset: str, order: int, missing: int) -> None:
    """Who posts sums of columns reads a prefix that other threads keep, and rows of the bank that they wrote. With
    `missing` of 64 one of four CTAs is not waited for."""
    case = Case("decode", preset=preset, layers=4, tunables={"ctas": 4, "missing": missing})
    assert races(built(compiler, case), case, order) == []


def test_sums_of_columns_have_an_entry_for_every_warp_that_makes_some() -> None:
    """Of 7168 columns the last CTA has 55; of an FFN's 896 some have 7, with 48 of those that other ranks make."""
    op = op_of("tp8", 12, bank=False, dots=True)
    assert (op.dot_columns, op.dot_warps, op.dot_entries) == (55, 2, 264)
    at, size, n = op.boxes["dots"]
    assert size * n == 2 * 264 * 32 and op.fresh_at == at + 2 * op.box_bytes(size, n)
    assert op.reductions * STRIDE >= op.plain_reductions * STRIDE + 8 * op.warps + 4 + 55


def test_sums_of_columns_are_for_two_rows_of_the_bank_in_registers() -> None:
    with pytest.raises(ValueError, match="held in registers"):
        op_of("tp8", 24, bank=False, dots=True)


def test_a_stage_is_held_where_a_half_begins_with_two_wide_rows() -> None:
    given = {"bank": False, "couples": 2, "twos": 2, "hold": True}
    assert op_of("tp8", 12, **given).held
    assert not op_of("tp8", 12, **{**given, "twos": 1}).held


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
