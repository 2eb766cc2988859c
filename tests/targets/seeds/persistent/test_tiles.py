"""Packed tiles of sixteen rows in the ring: every column has one thread; states and taps have their places."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from targets.base import Options, find
from targets.kimi_k3.seeds.persistent.kda_sizes import pitch_of, state_stages, window
from targets.kimi_k3.seeds.persistent.plan import Op
from targets.kimi_k3.seeds.persistent.stages import TileRows

SIZES = (32, 96, 256, 512, 1536, 3584, 7168, 768, 704)


def columns(g: TileRows) -> list[int]:
    """As `tensor.column` and `tensor.further` deal vectors of eight columns to warps and lanes."""
    found = []
    for warp in range(g.width):
        for q in range(4):
            for v in range(g.vectors):
                step = (v // g.per * g.piece + v % g.per) * 4
                found.append(warp * 4 * g.per + q + step)
    return found


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize(("warps", "stage"), [(14, 28672), (14, 14336), (7, 28672), (8, 24576)])
def test_every_vector_of_a_row_has_one_thread_and_a_slice_fits(
    k: int, warps: int, stage: int
) -> None:
    g = TileRows(k, warps, stage)
    assert sorted(columns(g)) == list(range(k // 8))
    assert g.ROWS * g.piece_bytes <= stage and g.piece_bytes % 16 == 0
    assert g.width <= warps and g.slices * g.piece_bytes == g.row_bytes


def test_the_widths_of_the_model_fill_the_ring() -> None:
    g = TileRows(7168, 14, 28672)
    assert (g.width, g.per, g.slices, g.ROWS * g.piece_bytes) == (14, 2, 8, 28672)
    g = TileRows(1536, 14, 28672)
    assert (g.width, g.per, g.slices) == (12, 2, 2)


def test_columns_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        _ = TileRows(1000, 14, 28672).width
    with pytest.raises(ValueError, match="hold no tile"):
        _ = TileRows(7168, 14, 512).slices


def dims(part: str, preset: str, rows: int) -> SimpleNamespace:
    return SimpleNamespace(**find(f"kimi-k3-{part}").workload(Options(preset, None, rows)).dims)


@pytest.mark.parametrize(
    ("preset", "rows", "ctas"),
    [("tp8", 8, 132), ("tp8", 2, 132), ("tiny-tp2", 8, 4), ("tiny", 4, 12)],
)
def test_states_and_taps_fit_and_every_row_has_a_place(preset: str, rows: int, ctas: int) -> None:
    """As `kda_bring` cuts states into stages; what is copied of v covers a CTA's channels within its head."""
    op = Op(
        dims("kda", preset, rows), ctas, 14, 14336 if preset == "tiny-tp2" else 28672, 6, 0, True
    )
    many, cuts, tokens, stages = state_stages(op)
    assert tokens * many * 512 <= op.stage and (cuts == 1 or many % 4 == 0)
    places = [
        (n // cuts * tokens + t, n % cuts * many + r)
        for n in range(stages) for t in range(tokens) for r in range(many)
    ]  # fmt: skip
    wanted = [(t, r) for t in range(rows) for r in range(op.state_rows)]
    assert set(wanted) <= set(places) and len(set(places)) == len(places)
    for part in range(op.slices):
        first, count = (
            128 * part // op.slices,
            128 * (part + 1) // op.slices - 128 * part // op.slices,
        )
        base = min(first // 8 * 8, 128 - window(op))
        assert 0 <= base <= first and first + count <= base + window(op) <= 128 and base % 8 == 0
    assert 2 * pitch_of(op) % 16 == 0
