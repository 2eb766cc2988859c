"""The persistent kernel's schedule on the host: it ends, covers every row once, and broken ones are caught."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from targets.base import Options, find
from targets.kimi_k3.seeds.persistent.plan import Op, refuse_others
from targets.kimi_k3.seeds.persistent.schedule import lists, simulate, validate
from targets.kimi_k3.seeds.persistent.unit_plan import DecodeOp, ring_stage

SMEM = 232448


def op_of(preset: str, layers: int, ctas: int, stages: int = 7, stage: int = 28672) -> Op:
    dims = find("kimi-k3-decode").workload(Options(preset, layers, 1)).dims
    return Op(SimpleNamespace(**dims), ctas, 14, stage, stages, 0)


def units_of(preset: str, layers: int, ctas: int, **ways: bool) -> DecodeOp:
    dims = SimpleNamespace(**find("kimi-k3-decode").workload(Options(preset, layers, 1)).dims)
    stage = ring_stage(dims, ctas, 14, 28672, True)
    return DecodeOp(dims, ctas, 14, stage, 5, 0, kept=True, units=True, **ways)


WORKLOADS = [("tiny", 6, 16), ("tiny-tp2", 6, 4), ("tp8", 4, 132), ("tp16", 4, 132)]


@pytest.mark.parametrize("way", ["shared_first", "router_first", ""])
@pytest.mark.parametrize(("preset", "layers", "ctas"), WORKLOADS)
def test_ends_with_a_warp_that_chooses(preset: str, layers: int, ctas: int, way: str) -> None:
    assert validate(units_of(preset, layers, ctas, **({way: True} if way else {})), 90) == ""


@pytest.mark.parametrize(("preset", "layers", "ctas"), WORKLOADS)
@pytest.mark.parametrize("length", [0, 1, 90])
def test_ends(preset: str, layers: int, ctas: int, length: int) -> None:
    assert validate(op_of(preset, layers, ctas), length) == ""


def test_ends_with_pages_for_every_cta_twice_over() -> None:
    assert validate(op_of("tp8", 4, 132), 64 * 300 + 5) == ""


def test_a_ring_shorter_than_a_page_stands_still() -> None:
    """A page's stages are held together: three of them do not fit in two."""
    op = op_of("tp8", 4, 132, stages=2)
    assert "the producer stands at" in validate(op, 8192)


@pytest.mark.parametrize("preset", ["tiny", "tp8"])
def test_every_row_has_one_cta(preset: str) -> None:
    op = op_of(preset, 4, 132 if preset == "tp8" else 16)
    d = op.d
    rows: dict[str, list[int]] = {}
    for cta in range(op.ctas):
        for event in lists(op, cta, 0).produce:
            if event[0] == "stage" and event[1][0] != "w2":
                name, layer, first, n = event[1]
                rows.setdefault(f"{name}.{layer}", []).extend(range(first, first + n))
    wanted = {
        "o_proj": d.hidden, "front": d.router_rows + d.latent_rows, "shared_down": d.hidden,
        "w13": d.topk * d.expert_dim,
        "latent_up": d.hidden_local, "shared_gate_up": d.shared_dim,
        "in_proj": 4 * d.kda_dim + d.f_rank + d.kda_heads, "a_proj": d.a_proj_rows, "dense_down": d.hidden,
        "dense_gate_up": d.dense_dim, "q_b": d.mla_heads * (d.qk_nope + d.qk_rope), "w_uv": d.mla_heads * d.v_dim,
    }  # fmt: skip
    for name, found in rows.items():
        assert sorted(found) == list(range(wanted[name.split(".")[0]])), name


@pytest.mark.parametrize(
    ("part", "event"),
    [("consume", ("arrive", "all")), ("consume", ("arrive", "route")), ("consume", ("post", "latent", 2)),
     ("consume", ("post", "q", 3)),
     ("consume", ("post", "lat", 3)), ("consume", ("post", "hs", 2)), ("produce", None)],
)  # fmt: skip
def test_a_lost_event_is_found(part: str, event: tuple[str, ...] | None) -> None:
    op = op_of("tiny", 4, 16)
    programs = [lists(op, cta, 90) for cta in range(op.ctas)]
    broken = getattr(programs[3], part)
    broken.remove(event) if event else broken.pop(5)
    assert simulate(op, programs) != ""


@pytest.mark.parametrize(
    ("part", "event"),
    [("choose", ("wait", "route", 2)), ("consume", ("arrive", "route")), ("consume", ("post", "q", 3))],
)  # fmt: skip
def test_a_lost_choice_is_found(part: str, event: tuple[str, ...]) -> None:
    op = units_of("tiny", 4, 16)
    programs = [lists(op, cta, 90) for cta in range(op.ctas)]
    getattr(programs[3], part).remove(event)
    assert simulate(op, programs) != ""


@pytest.mark.parametrize("preset", ["tiny", "tp8", "tp16"])
def test_units_are_whole_rows_of_every_chosen_expert(preset: str) -> None:
    op = units_of(preset, 4, 16 if preset == "tiny" else 132)
    found: list[int] = []
    for cta in range(op.ctas):
        for event in lists(op, cta, 0).produce:
            if event[0] == "stage" and event[1][:2] == ("w13", 2):
                assert event[2] <= op.stage and event[1][3] <= 8
                found.extend(range(event[1][2], event[1][2] + event[1][3]))
    assert sorted(found) == list(range(op.d.topk * op.d.expert_dim))


def test_stages_in_another_order_are_found() -> None:
    op = op_of("tiny", 2, 16)
    programs = [lists(op, cta, 90) for cta in range(op.ctas)]
    made = programs[1].produce
    made[0], made[1] = made[1], made[0]
    assert "CTA 1: takes" in simulate(op, programs)


def test_bytes_are_even_over_ctas() -> None:
    """The fullest CTA has at most four per cent more than the mean; routed experts included."""
    op = op_of("tp8", 4, 132)
    loads = [
        sum(e[2] for e in lists(op, cta, 8193).produce if e[0] == "stage") for cta in range(op.ctas)
    ]
    assert max(loads) / (sum(loads) / len(loads)) < 1.04


def test_pool_and_ring_fit() -> None:
    op = op_of("tp8", 12, 132)
    fixed = op.stages * op.stage + op.part_rows * 17 * 4 + op.pool
    assert fixed < SMEM
    op = units_of("tp8", 12, 132)
    fixed = op.stages * op.stage + op.part_rows * 17 * 4 + op.pool + 4 * op.kept_words
    assert fixed < SMEM and op.choice_at >= 2 * op.d.latent


def test_more_heads_than_a_cta_attends_with_or_than_there_are_ctas_are_refused() -> None:
    """A rank of two has 48: their statistics went over what lies behind them in shared memory."""
    two = SimpleNamespace(**find("kimi-k3-decode").workload(Options("tp2", 4, 1)).dims)
    with pytest.raises(ValueError, match="up to 16 heads of MLA, not 48"):
        refuse_others(two)
    refuse_others(SimpleNamespace(**find("kimi-k3-decode").workload(Options("tp2", 3, 1)).dims))
    refuse_others(SimpleNamespace(**find("kimi-k3-decode").workload(Options("tp8", 4, 1)).dims))
    with pytest.raises(ValueError, match="each of 48 heads"):
        op_of("tp2", 3, 32)
