"""Tiles of sixteen rows in the ring: every column has one thread, and lanes that read together meet all banks."""

from __future__ import annotations

import pytest

from targets.kimi_k3.seeds.persistent.plan import Tiles

SIZES = (32, 96, 256, 512, 1536, 3584, 7168, 768, 704)


def columns(g: Tiles) -> list[int]:
    """As `tensor.column` and `tensor.further` deal vectors of eight columns to warps and lanes."""
    found = []
    for warp in range(g.width):
        for q in range(4):
            for v in range(g.vectors):
                found.append(warp * 4 * g.per + q + (v // g.per * g.piece + v % g.per) * 4)
    return found


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize(("warps", "stage"), [(14, 29696), (14, 15360), (7, 29696), (8, 28672)])
def test_every_vector_of_a_row_has_one_thread_and_a_slice_fits(
    k: int, warps: int, stage: int
) -> None:
    g = Tiles(k, warps, stage)
    assert sorted(columns(g)) == list(range(k // 8))
    assert g.ROWS * g.pitch <= stage and g.piece_bytes <= g.pitch
    assert g.piece_bytes % 16 == 0 and g.pitch % 16 == 0
    assert g.width <= warps and g.slices * g.piece_bytes == g.row_bytes


@pytest.mark.parametrize("k", SIZES)
def test_eight_lanes_read_from_all_banks(k: int) -> None:
    """A quarter of a warp reads 16 bytes a lane at once: four lanes of a row, four of the next."""
    g = Tiles(k, 14, 29696)
    banks = [
        (row * g.pitch + 16 * q + 4 * word) // 4 % 32
        for row in (0, 1)
        for q in range(4)
        for word in range(4)
    ]
    assert sorted(banks) == list(range(32))


def test_the_widths_of_the_model_use_the_ring_well() -> None:
    """At tp8 nine tenths of a stage are weights."""
    for k in (7168, 3584):
        g = Tiles(k, 14, 29696)
        assert (g.width, g.ROWS * g.piece_bytes > 0.9 * 29696) == (14, True)


def test_columns_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        _ = Tiles(1000, 14, 29696).width
    with pytest.raises(ValueError, match="hold no tile"):
        _ = Tiles(7168, 14, 512).slices
