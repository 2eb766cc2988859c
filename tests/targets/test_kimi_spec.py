"""Buffers, options and byte floors of the Kimi K3 targets, without allocating anything."""

from __future__ import annotations

import pytest

from sandbox.artifact import GROUPS, Buffer
from sandbox.dtypes import ITEM_BYTES
from targets.base import Options, UnknownOption, Workload, find, names
from targets.kimi_k3.floors import expected_distinct
from targets.kimi_k3.options import PAIRED
from targets.kimi_k3.spec import KimiTarget
from tests.targets.kimi import PARTS, workload

KDA, MLA = 12, 15
VARIANTS = {
    "stock": {"latent_down": "replicated"},
    "LD": {},
    "LD+R": {"router": "sharded"},
}
FLOORS_MB = {
    ("tp8", KDA): {
        "stock": (253.0, 289.0, 359.3, 492.7, 733.7, 1662), "LD": (208.0, 244.1, 314.3, 447.8, 688.7, 1617),
        "LD+R": (196.8, 232.8, 303.1, 436.5, 677.5, 1606),
    },
    ("tp8", MLA): {
        "stock": (223.3, 257.8, 324.9, 452.0, 680.4, 1533), "LD": (178.4, 212.8, 279.9, 407.1, 635.5, 1488),
        "LD+R": (167.1, 201.6, 268.7, 395.8, 624.3, 1477),
    },
    ("tp16", KDA): {
        "stock": (159.6, 177.7, 212.8, 279.5, 400, 864), "LD": (111.5, 129.5, 164.6, 231.3, 352, 816),
        "LD+R": (99.4, 117.4, 152.6, 219.3, 340, 804),
    },
    ("tp16", MLA): {
        "stock": (158.9, 176.1, 209.7, 273.3, 388, 814), "LD": (110.7, 128.0, 161.5, 225.1, 339, 766),
        "LD+R": (98.7, 115.9, 149.5, 213.1, 327, 754),
    },
}  # fmt: skip


def buffer(w: Workload, name: str) -> Buffer:
    return next(b for b in w.buffers if b.name == name)


def test_the_targets_are_registered() -> None:
    assert "glm-5.3-flash-kda" in names()
    everything = sorted((*PARTS, *PAIRED))
    assert [n for n in names() if n.startswith("kimi-k3-")] == [f"kimi-k3-{p}" for p in everything]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("preset", ["tiny", "tiny-tp2", "tp8", "tp16"])
def test_buffers_are_well_formed(part: str, preset: str) -> None:
    w = workload(part, preset, rows=8)
    assert len({b.name for b in w.buffers}) == len(w.buffers)
    for b in w.buffers:
        assert b.group in GROUPS and b.group not in ("workspace", "constants")
        assert b.dtype in ITEM_BYTES and all(x > 0 for x in b.shape)
        assert all(x < 2**31 for x in b.shape) and b.nbytes < 2**31
    assert {b.group for b in w.buffers} >= {"inputs", "weights", "outputs"}
    assert w.floor.bytes > 0 and w.floor.flops > 0 or part == "attn-res"


@pytest.mark.parametrize("where", FLOORS_MB)
@pytest.mark.parametrize("variant", VARIANTS)
def test_floor_of_one_layer_matches_the_published_table(
    where: tuple[str, int], variant: str
) -> None:
    """The table leaves out the KV cache, the conv taps and the exchange buffers; all else agrees to 0.2 MB or 0.1 %."""
    preset, layer = where
    expected = FLOORS_MB[where][variant]
    for rows, megabytes in zip((1, 2, 4, 8, 16, 64), expected, strict=True):
        extra = {"first": layer, **VARIANTS[variant]}
        w = workload("decode", preset, rows=rows, layers=1, context=1, extra=extra)
        taps = (
            2
            * rows
            * sum(
                b.nbytes // b.shape[0]
                for b in w.buffers
                if b.name.endswith(".conv") and "states" in b.name
            )
        )
        cache = rows * 2 * 576 if layer == MLA else 0
        exchange = sum(
            b.nbytes for b in w.buffers if b.name.startswith(("inputs.remote", "outputs.send"))
        )
        got = (w.floor.bytes - taps - cache - exchange) / 1e6
        assert got == pytest.approx(
            megabytes, rel=1e-3, abs=0.7 if megabytes == int(megabytes) else 0.2
        )


def test_kv_cache_and_state_bytes() -> None:
    def floor(context: int, rows: int = 1) -> int:
        return workload("mla", "tp8", rows=rows, layers=1, context=context).floor.read_bytes

    assert floor(8192) - floor(1) == pytest.approx(9.44e6, rel=1e-3)
    kda = workload("kda", "tp8", layers=1).floor
    assert kda.write_bytes == pytest.approx(1.573e6 / 2 + 3 * 4608 * 2, rel=1e-3)


def test_expected_distinct_experts() -> None:
    assert [round(expected_distinct(896, 16, m), 1) for m in (1, 2, 4, 8, 16)] == [
        16,
        31.7,
        62.3,
        120.3,
        224.4,
    ]


def test_a_router_alone_reads_no_experts_whatever_it_chose() -> None:
    target = find("kimi-k3-router")
    w = target.workload(Options(preset="tiny", rows=2))
    ids = [[list(range(16))] * 2] * w.layers
    assert target.floor_for(w, ids).bytes == w.floor.bytes  # type: ignore[attr-defined]


def test_floor_for_counts_the_experts_really_routed() -> None:
    target = find("kimi-k3-latent-moe")
    assert isinstance(target, KimiTarget)
    w = target.workload(Options(preset="tp8", rows=2, layers=2))
    same = [[list(range(16))] * 2] * 2
    apart = [[list(range(16)), list(range(16, 32))]] * 2
    one = target.floor_for(w, same).bytes
    assert target.floor_for(w, apart).bytes - one == 2 * 16 * 2_193_408
    assert one < w.floor.bytes < target.floor_for(w, apart).bytes


def test_shapes_of_one_rank_at_tp8() -> None:
    w = workload("decode", "tp8", rows=4)
    expected = {
        "inputs.x0": (4, 7168), "inputs.bank": (4, 1, 7168), "outputs.bank": (4, 1, 7168),
        "weights.layers.0.in_proj": (6288, 7168), "weights.layers.3.a_proj": (3648, 7168),
        "weights.layers.3.q_b": (2304, 1536), "weights.layers.0.w1": (896, 384, 1792),
        "weights.layers.0.w2_scale": (896, 3584, 12), "weights.layers.0.latent_down": (448, 7168),
        "weights.layers.0.latent_up": (896, 3584), "weights.layers.0.shared_down": (7168, 768),
        "inputs.remote.layers.0.latent": (4, 3136), "outputs.send.layers.0.shared": (4, 6272),
        "states.layers.0.S": (10, 12, 128, 128), "outputs.ids": (4, 4, 16),
    }  # fmt: skip
    assert {name: buffer(w, name).shape for name in expected} == expected
    assert (w.dims["attn"], w.dims["ffn"], w.ranks) == ("KKKM", "EEEE", 8)


def test_layer_kinds_follow_the_model() -> None:
    whole = workload("decode", "tp8", layers=93, extra={"first": 0})
    kinds = str(whole.dims["attn"])
    assert [i for i, k in enumerate(kinds) if k == "M"] == [*range(3, 92, 4), 92]
    assert whole.dims["ffn"] == "D" + "E" * 92
    assert buffer(whole, "outputs.bank").shape[1] == 8


def test_twelve_layers_hold_about_26_gigabytes() -> None:
    w = workload("decode", "tp8", layers=12)
    held = sum(b.nbytes for b in w.buffers if b.group == "weights")
    assert held == pytest.approx(26e9, rel=0.05)


@pytest.mark.parametrize(
    "part, options",
    [
        ("decode", Options(preset="huge")),
        ("decode", Options(preset="tiny", rows=3)),
        ("decode", Options(preset="tiny", layers=7)),
        ("decode", Options(preset="tiny", layers=-1)),
        ("decode", Options(preset="tp8", layers=4, extra={"first": 90})),
        ("decode", Options(preset="tp8", extra={"first": "top"})),
        ("decode", Options(preset="tp8", extra={"latent_down": "both"})),
        ("decode", Options(preset="tp8", context=-5)),
        ("gemv", Options(preset="tiny", extra={"first": 1})),
        ("kda", Options(preset="tiny", layers=1000)),
    ],
)
def test_options_that_do_not_exist_are_refused(part: str, options: Options) -> None:
    with pytest.raises(UnknownOption):
        find(f"kimi-k3-{part}").workload(options)


@pytest.mark.parametrize("part", PARTS)
def test_the_brief_names_every_weight_and_state(part: str) -> None:
    """A prompt that leaves a buffer unexplained cannot be followed."""
    target = find(f"kimi-k3-{part}")
    assert isinstance(target, KimiTarget)
    text = target.brief
    for b in workload(part, "tiny-tp2").buffers:
        leaf = b.name.rstrip(".0123456789").rsplit(".", 1)[-1]
        stem = leaf.removesuffix("_scale") if leaf.startswith("w") else leaf
        assert stem in text, b.name
