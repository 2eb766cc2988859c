"""The Triton baseline computes the same step as the reference: every piece, on a stand-in for Triton."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from targets.kimi_k3 import disturb
from targets.kimi_k3.maths import mxfp4
from targets.reference import Tensors
from tests.targets import triton_lite
from tests.targets.kimi import PARTS, rel, run, tensors, workload
from tests.targets.test_kimi_baseline import LIMIT, with_outputs


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    with triton_lite.installed():
        yield


def module(name: str) -> Any:
    """Of the baseline, as it is under the stand-in."""
    return importlib.import_module(f"targets.kimi_k3.baseline.{name}")


def made(w: Any, t: Tensors) -> Any:
    baseline = importlib.import_module("targets.kimi_k3.baseline.mix").MixBaseline()
    baseline.prepare(w, t)
    return baseline


def follow(w: Any, steps: int) -> None:
    """Steps in a row, each against the oracle on what the baseline left."""
    t = tensors(w)
    mine = with_outputs(w, t)
    baseline = made(w, mine)
    for step in range(steps):
        inputs = {k: v for k, v in tensors(w, step=step).items() if k.startswith("inputs.")}
        for name, value in inputs.items():
            mine[name].copy_(value)
        before = {k: v.clone() for k, v in mine.items()}
        baseline.step()
        expected = run(w, before, ids=mine.get("outputs.ids"))
        for name, value in expected.tensors.items():
            if value.is_floating_point():
                assert rel(mine[name], value) < LIMIT, (name, step)
        for tie in expected.ties:
            differ = (mine["outputs.ids"] != expected.tensors["outputs.ids"]).any(-1)
            assert not (differ & ~tie.allowed).any()
        for name, mask in expected.masks.items():
            assert torch.equal(mine[name][~mask], before[name][~mask]), name


@pytest.mark.parametrize("part", [p for p in PARTS if p != "decode"])
@pytest.mark.parametrize("preset, rows", [("tiny", 1), ("tiny-tp2", 2)])
def test_a_piece_agrees_with_the_oracle(part: str, preset: str, rows: int) -> None:
    follow(workload(part, preset, rows=rows, layers=1 if part == "latent-moe" else 2), 1)


@pytest.mark.slow
@pytest.mark.parametrize("preset, rows", [("tiny", 1), ("tiny-tp2", 2)])
def test_a_whole_step_agrees_with_the_oracle(preset: str, rows: int) -> None:
    follow(workload("decode", preset, rows=rows), 2)


def test_a_librarys_products_agree_with_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ("in_proj", "a_proj", "q_b", "o_proj", "latent_up", "gemv")
    tiles = module("tiles")
    monkeypatch.setattr(tiles, "MEASURED", {(p, 16): tiles.BLAS for p in places})
    asked: list[str] = []
    blas = module("blas").BlasProducts
    product = blas._product
    monkeypatch.setattr(
        blas, "_product", lambda self, place, *a: asked.append(place) or product(self, place, *a)
    )
    for part in ("gemv", "mla", "latent-moe"):
        follow(workload(part, "tiny-tp2", rows=2, layers=1), 1)
    assert set(asked) == set(places) - {"in_proj"}


@pytest.mark.parametrize("apart", [False, True], ids=["beside", "apart"])
@pytest.mark.parametrize("early", [False, True], ids=["plain", "early"])
def test_every_way_of_the_experts_agrees_with_the_oracle(
    apart: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = module("tiles")
    monkeypatch.setattr(tiles, "WAYS", {16: (tiles.Way(apart, early),)})
    w = workload("latent-moe", "tiny-tp2", rows=2, layers=1)
    follow(w, 1)
    plan = made(w, with_outputs(w, tensors(w))).plan
    assert len(plan) == (6 if apart else 5)


@pytest.mark.parametrize("preset, rows", [("tiny", 8), ("tiny-tp2", 2)])
def test_pairs_grouped_by_expert_agree_with_the_oracle(
    preset: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = module("tiles")
    monkeypatch.setattr(tiles, "WAYS", {16: (tiles.Way(apart=True, grouped=True),)})
    follow(workload("latent-moe", preset, rows=rows, layers=1), 1)


def test_the_fastest_way_is_taken_and_a_wrong_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    routed, tiles = module("routed").RoutedExperts, module("tiles")
    halves, call = routed._halves, routed.__call__
    given: list[Any] = []
    ways: dict[int, tiles.Way] = {}

    def noted(self: Any, *operands: Any) -> Any:
        given.append((self, operands))
        return call(self, *operands)

    def followed(self: Any, layer: Any, r: Any, how: Any) -> Any:
        launches = halves(self, layer, r, how)
        if how[1] == tiles.TRIED[2]:
            launches.append(lambda: r.z.zero_())  # a way that leaves something else
        ways[id(launches)] = how[1]
        given.append(launches)  # ids of lists that live are their own
        return launches

    monkeypatch.setattr(routed, "__call__", noted)
    monkeypatch.setattr(routed, "_halves", followed)
    w = workload("latent-moe", "tiny-tp2", rows=2, layers=1)
    made(w, with_outputs(w, tensors(w)))
    one, operands = given[0]
    assert one.way == tiles.TRIED[0]  # nothing is measured without a GPU
    us = dict(zip(tiles.TRIED, (30.0, 20.0, 10.0, 25.0), strict=True))
    shelf = one.maker.shelf
    monkeypatch.setattr(one.maker.blas.here, "cold", lambda launches: us[ways[id(launches)]])
    assert one._known(*operands) == tiles.TRIED[1] == one._known(*operands)  # tried once
    assert shelf.notes[tiles.TRIED[1].name] == "used: 20.00 us, ours 30.00 us"
    assert shelf.notes[tiles.TRIED[2].name].startswith("skipped: differs")
    assert shelf.notes[tiles.TRIED[3].name] == "slower: 25.00 us, ours 20.00 us"


def test_the_fastest_right_tile_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    w = workload("latent-moe", "tiny-tp2", rows=2, layers=1)
    make, tiles = made(w, with_outputs(w, tensors(w))).make, module("tiles")
    out, tried = torch.ones(4), tuple(tiles.Tile(n, 16) for n in (16, 32, 64, 128))
    values, us = (1.0, 1.0, 2.0, 1.0), (9.0, 8.0, 1.0, 8.5)

    kept: list[list[Any]] = []  # ids of lists that live are their own
    by_id: dict[int, float] = {}

    def noted(t: Any) -> list[Any]:
        kept.append([lambda: out.fill_(values[tried.index(t)])])
        by_id[id(kept[-1])] = us[tried.index(t)]
        return kept[-1]

    assert make.chosen("place", tried, noted, out) == tried[0]  # nothing is measured without a GPU
    monkeypatch.setattr(make.blas.here, "cold", lambda one: by_id[id(one)])
    names = {f"place {t.bn}": t for t in tried}
    assert make.shelf.fastest(names, noted, (out, make.blas.here.cold)) == tried[1]
    said = [v for k, v in make.shelf.notes.items() if k.startswith("place")]
    assert said[0] == "used: 8.00 us, ours 9.00 us" and said[1].startswith("skipped: differs")
    assert said[2] == "slower: 8.50 us, ours 8.00 us"


def test_who_compiles_ahead_meets_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the launches that only a choice on the device would need."""
    parts, launched, tiled = module("parts"), [], []

    class Noting(parts.Maker):  # type: ignore[misc]
        every_way = True

        def launch(self, kernel: Any, grid: Any, args: Any, t: Any, **constants: Any) -> Any:
            launched.append((kernel.f.__name__, constants))
            tiled.append((kernel.f.__name__, t))
            return lambda: None

    monkeypatch.setattr(parts, "Maker", Noting)
    w = workload("decode", "tiny-tp2", rows=8)
    made(w, with_outputs(w, tensors(w)))
    assert {"rank_kernel", "select_kernel"} <= {name for name, _ in launched}
    tried = module("tiles").ALTERNATIVES
    assert {t for name, t in tiled if name == "grouped_up_kernel"} == set(tried["grouped_up"])
    assert {t for name, t in tiled if name == "grouped_down_kernel"} == set(tried["grouped_down"])
    assert {t for name, t in tiled if name == "front_kernel"} >= set(module("tiles").FRONTS)
    middle = {(c["N"] > 0, c["EARLY"]) for name, c in launched if name == "middle_kernel"}
    assert middle == {(False, False), (False, True), (True, True)}
    also = {"norm_kernel", "ends_kernel", "linear_kernel", "group_kernel", "grouped_down_kernel"}
    assert also <= {name for name, _ in launched}


def test_a_run_that_starts_later_reads_the_earlier_bank_rows() -> None:
    follow(workload("decode", "tiny-tp2", rows=1, layers=2, extra={"first": 2}), 1)


def test_the_end_of_the_model_has_two_mla_layers() -> None:
    follow(workload("decode", "tiny-end", rows=1, layers=2, extra={"first": 3}), 1)


@pytest.mark.parametrize("extra", [{"router": "sharded"}, {"latent_down": "replicated"}])
def test_whoever_has_the_front_of_the_ffn_the_columns_are_joined(extra: dict[str, str]) -> None:
    follow(workload("latent-moe", "tiny-tp2", rows=2, layers=1, extra=extra), 1)


def test_padding_writes_nothing_and_gives_zero_attention() -> None:
    for part in ("kda", "mla"):
        w = workload(part, rows=2, layers=1)
        t = disturb.apply(w, "null_request", 5, tensors(w))
        mine = with_outputs(w, t)
        made(w, mine).step()
        assert mine["outputs.y.0"][0].abs().max() == 0
        for name, mask in run(w, t).masks.items():
            assert torch.equal(mine[name][~mask], t[name][~mask])


def test_a_row_that_is_not_inserted_leaves_the_cache_alone() -> None:
    w = workload("mla", rows=2, layers=1)
    t = disturb.apply(w, "no_insert", 5, tensors(w))
    mine = with_outputs(w, t)
    made(w, mine).step()
    assert rel(mine["outputs.y.0"], run(w, t).tensors["outputs.y.0"]) < LIMIT
    changed = (mine["states.layers.0.kv"] != t["states.layers.0.kv"]).any(-1)
    assert int(changed.sum()) == 1


def test_every_code_and_a_tie_are_exact() -> None:
    common = importlib.import_module("targets.kimi_k3.baseline.kernels.common")
    word = torch.tensor([0x76543210, 0xFEDCBA98 - (1 << 32)], dtype=torch.int32)
    values = torch.stack([common.decode(word, i) for i in range(8)], -1).double() * 2.0**126
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values[0].tolist() == positive and values[1].tolist() == [-v for v in positive]


def test_codes_for_tensor_cores_are_exact_and_lie_where_their_operands_do() -> None:
    grouped = module("kernels.grouped")
    words = torch.randint(-(1 << 31), 1 << 31, (8, 32), generator=torch.manual_seed(1)).int()
    scales = torch.tensor([[62, 90, 119, 126, 127, 128, 140, 188]] * 8, dtype=torch.uint8)
    codes = words.view(torch.uint8)
    expected = mxfp4.dequantise(codes, scales, torch.float64)
    found = torch.full_like(expected, torch.nan)
    for plane, values in enumerate(grouped.planes(words, scales)):
        word, nibble = grouped.column(torch.full((32,), plane), torch.arange(32))
        found[:, 8 * word + nibble] = values.double() * 2.0**60
    assert torch.equal(found, expected)
    at = grouped.place_of(torch.arange(256), 32)
    word, nibble = grouped.column(at // 32, at % 32)
    assert torch.equal(8 * word + nibble, torch.arange(256))


def test_experts_selected_by_row_are_those_that_counting_selects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker = module("parts").Maker
    monkeypatch.setattr(maker, "_ranked", lambda self, *a: self._select(*a, raw=True))
    follow(workload("latent-moe", "tiny-tp2", rows=2, layers=1), 1)


def test_pairs_of_an_expert_are_together_and_a_crowd_is_cut() -> None:
    """Eleven of twelve rows want expert 3; four have a second one, 0."""
    grouped = module("kernels.grouped")
    wanted = [[3, 0]] * 4 + [[3, 5]] * 3 + [[3, 7]] * 4 + [[6, 7]]
    ids = torch.tensor(wanted, dtype=torch.int32)
    m, experts = len(wanted), 8
    tasks, count, members = (
        torch.full(n, 99, dtype=torch.int32) for n in ((1 + 2 * m,), (experts,), (experts, m))
    )
    latent, values = torch.ones(m, 32) * 2.0**100, torch.zeros(m, 32, dtype=torch.bfloat16)
    grouped.group_kernel[(1 + m,)](
        ids, latent, tasks, count, members, values,
        M=m, TOPK=2, PP=32, EXPERTS=experts, EP=8, K=32, KP=32, N=8, PDL=False,
    )  # fmt: skip
    found: dict[int, list[int]] = {}
    for first in tasks[1 : 1 + int(tasks[0])].tolist():
        expert, at = divmod(first, m)
        most = min(8, int(count[expert]) - at)
        assert at % 8 == 0 and most > 0
        found.setdefault(expert, []).extend(members[expert, at : at + most].tolist())
    flat = ids.flatten().tolist()
    assert {e: sorted(p) for e, p in found.items()} == {
        e: [i for i, x in enumerate(flat) if x == e] for e in set(flat)
    }
    assert int(tasks[0]) == 6 and (values == 2.0**60).all()


def test_a_layer_has_about_a_dozen_launches() -> None:
    w = workload("decode", "tiny-tp2", rows=1)
    baseline = made(w, with_outputs(w, tensors(w)))
    assert len(baseline.plan) <= 14 * w.layers
