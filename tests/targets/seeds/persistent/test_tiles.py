"""Packed tiles of sixteen rows in the ring: every column has one thread, every row one place."""

from __future__ import annotations

import pytest

from targets.kimi_k3.seeds.persistent.plan import Tiles, share

SIZES = (32, 96, 256, 512, 1536, 3584, 7168, 768, 704)


def columns(g: Tiles) -> list[int]:
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
    g = Tiles(k, warps, stage)
    assert sorted(columns(g)) == list(range(k // 8))
    assert g.ROWS * g.piece_bytes <= stage and g.piece_bytes % 16 == 0
    assert g.width <= warps and g.slices * g.piece_bytes == g.row_bytes


@pytest.mark.parametrize(("rows", "ctas"), [(6284, 132), (7168, 132), (656, 12), (33, 4)])
def test_a_row_finds_the_cta_that_has_it(rows: int, ctas: int) -> None:
    """As `tensor.pack_kernel` looks for it."""
    for row in range(rows):
        cta = ((row + 1) * ctas - 1) // rows
        first, count = share(rows, cta, ctas)
        assert first <= row < first + count


def test_the_widths_of_the_model_fill_the_ring() -> None:
    g = Tiles(7168, 14, 28672)
    assert (g.width, g.per, g.slices, g.ROWS * g.piece_bytes) == (14, 2, 8, 28672)
    g = Tiles(1536, 14, 28672)
    assert (g.width, g.per, g.slices) == (12, 2, 2)


def test_columns_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        _ = Tiles(1000, 14, 28672).width
    with pytest.raises(ValueError, match="hold no tile"):
        _ = Tiles(7168, 14, 512).slices
