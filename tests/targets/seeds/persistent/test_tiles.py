"""The tile kernel: its plan covers every column once and fits a GPU; its numbers on the cpu device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sandbox import artifact_store
from sandbox.compile_client import CompileClient
from sandbox.jobs import CompileJob
from targets.kimi_k3.seeds import persistent
from targets.kimi_k3.seeds.persistent.schedule import simulate
from targets.kimi_k3.seeds.persistent.tile_plan import (
    SHARED_MEMORY,
    Tile,
    TileOp,
    refuse_others_tiles,
)
from targets.kimi_k3.seeds.persistent.tile_schedule import tile_lists, validate_tiles
from tests.targets.seeds.harness import Case
from tests.targets.seeds.persistent.test_numbers import verify

PART = "latent-moe-tiles"


def full(rows: int, **other: object) -> SimpleNamespace:
    sizes = dict(
        rows=rows, hidden=7168, hidden_local=896, latent=3584, latent_rows=448, router_rows=896, experts=896, topk=16,
        expert_dim=384, shared_dim=768, layers=12, ranks=8, experts_format="mxfp4",
    )  # fmt: skip
    return SimpleNamespace(**{**sizes, **other})


@pytest.mark.parametrize("k, height", [(7168, 8), (7168, 16), (768, 16), (3584, 8), (512, 8), (256, 16), (192, 8)])
def test_every_column_of_a_tile_belongs_to_one_warp(k: int, height: int) -> None:
    g = Tile(k, 14, height)
    seen = [
        (s * g.wide * g.active * 2 + (j // 2 * g.active * 2 + warp * 2 + j % 2)) * 32
        for s in range(g.slices) for j in range(2 * g.wide) for warp in range(g.active)
    ]  # fmt: skip
    assert sorted(seen) == list(range(0, k, 32))
    assert g.slices * g.piece == 2 * k and g.piece % 16 == 0


def test_tiles_of_both_heights_take_the_same_registers_of_x() -> None:
    """Register 2 (s wide + half) + i holds columns that both heights multiply by it."""
    eight, sixteen = Tile(7168, 14, 8), Tile(7168, 14, 16)
    assert (eight.spans, eight.wide, sixteen.wide) == (sixteen.spans, 2, 1)

    def column(g: Tile, register: int, warp: int) -> int:
        s, j = divmod(register, 2 * g.wide)
        return (s * g.wide * g.active * 2 + j // 2 * g.active * 2 + warp * 2 + j % 2) * 32

    assert all(column(eight, r, w) == column(sixteen, r, w) for r in range(16) for w in range(14))


@pytest.mark.parametrize("rows", range(1, 9))
def test_it_fits_an_sm_with_a_ring_deep_enough_for_an_edge(rows: int) -> None:
    op = TileOp(full(rows), 132, 14, 0, 0)
    assert op.stages >= 5 and op.stages * op.stage < SHARED_MEMORY
    assert op.emptied % 16 == 0 and all(start % 128 == 0 for start, _, _ in op.boxes.values())
    assert op.down_slots * op.down_piece <= op.stage and op.up_bytes <= op.stage


@pytest.mark.parametrize("rows, wanted, stages", [(1, 16, 0), (1, 16, 2), (8, 16, 0), (8, 128, 0), (8, 103, 2)])
def test_it_ends_and_brings_every_byte_once(rows: int, wanted: int, stages: int) -> None:
    op = TileOp(full(rows, layers=3), 132, 14, stages, 0)
    assert validate_tiles(op, wanted) == ""
    brought: dict[str, int] = {}
    for cta in range(op.ctas):
        for event in tile_lists(op, cta, wanted).produce:
            if event[0] == "stage":
                brought[event[1][0]] = brought.get(event[1][0], 0) + event[2]
    d = op.d
    assert {name: size // 3 for name, size in brought.items()} == {
        "router": 2 * 896 * d.hidden, "front": 2 * (448 + 2 * 768) * d.hidden, "shared_down": 2 * d.hidden * 768,
        "w13": wanted * 2 * d.expert_dim * (d.latent // 2 + d.latent // 32),
        "w2": wanted * d.latent * (d.expert_dim // 2 + d.expert_dim // 32), "latent_up": 2 * 896 * d.latent,
    }  # fmt: skip


def test_a_routing_that_is_never_published_is_found() -> None:
    op = TileOp(full(1, layers=1), 4, 14, 0, 0)
    programs = [tile_lists(op, cta, 16) for cta in range(4)]
    programs[2].consume.remove(("route",))
    assert "the producer stands at ('routed', 0)" in simulate(op, programs)


def test_others_are_refused() -> None:
    for d in (full(9), full(1, experts_format="nvfp4"), full(1, latent=3600)):
        with pytest.raises(ValueError, match="the tile kernel"):
            refuse_others_tiles(d)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset, rows, extra",
    [("tiny-tp2", 1, {}), ("tiny-tp2", 3, {"router": "sharded"}), ("tiny", 8, {})],
)
def test_steps_in_a_row(compiler: CompileClient, preset: str, rows: int, extra: dict[str, str]) -> None:
    """One token's boxes change sets from step to step; several tokens share experts."""
    tunables = {"ctas": 4, "spin_limit": 200000}
    case = Case("latent-moe", rows, preset, layers=2, steps=2, extra=extra, tunables=tunables)
    w = case.workload()
    job = CompileJob(persistent.source(PART), case.target, w.key, w.dims, w.buffers, "sm_90a", case.tunables)
    outcome = compiler.compile(job)
    assert outcome.failure is None and outcome.artifact, outcome.failure
    verify(artifact_store.load(outcome.artifact), case)
