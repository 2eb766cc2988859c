"""The decode step for several tokens: against the reference on the cpu device, its schedule, its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from sandbox.compile_client import CompileClient
from targets.base import Options, Workload, find
from targets.kimi_k3.seeds import persistent
from targets.kimi_k3.seeds.persistent.many_plan import ManyOp, many_shape
from targets.kimi_k3.seeds.persistent.many_schedule import many_lists, pages_of, validate_many
from targets.kimi_k3.seeds.persistent.schedule import simulate
from targets.kimi_k3.seeds.persistent.stages import SHARED_MEMORY
from tests.targets.seeds.harness import Case
from tests.targets.seeds.persistent.test_numbers import built, races, verify


@dataclass(frozen=True)
class Within(Case):
    """A case whose requests see up to so many tokens."""

    context: int | None = None

    def workload(self) -> Workload:
        options = Options(self.preset, self.layers, self.rows, self.context, extra=self.extra)
        return find(self.target).workload(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "rows", "layers", "first", "context", "tunables"),
    [
        ("tiny", 2, 4, 1, None, {"ctas": 4}),
        ("tiny-tp2", 8, 5, 0, None, {"ctas": 8}),
        ("tiny", 8, 3, 2, 9, {"ctas": 12, "ring_stages": 2, "in_flight": 0}),
        ("tiny-tp2", 4, 2, 3, 40, {"ctas": 16}),
        ("tiny-tp2", 4, 2, 3, 300, {"ctas": 4, "ring_stages": 3, "packed": 0}),
    ],
    ids=["two", "eight", "one page each", "fewer pages than CTAs", "long"],
)
def test_two_steps_in_a_row(
    compiler: CompileClient,
    preset: str,
    rows: int,
    layers: int,
    first: int,
    context: int | None,
    tunables: dict[str, int],
) -> None:
    """Layers KKKMKM, the first with a dense FFN: both kinds of attention, blocks that open, rows of the bank old and
    new. The pages of all requests are dealt as one row, so a CTA may have none, one request's or several requests'.
    """
    case = Within(
        "decode", rows, preset, layers, steps=2, extra={"first": first}, tunables=tunables, context=context
    )  # fmt: skip
    artifact = built(compiler, case, "decode-rows")
    cfg = SimpleNamespace(**{n: artifact.tunables[n] for n in artifact.tunables}, sms=132)
    op = many_shape(SimpleNamespace(**case.workload().dims), cfg)
    assert artifact.step.launches[0].smem == op.used
    verify(artifact, case)


@pytest.mark.slow
def test_boxes_and_what_they_do_not_order_do_not_race(compiler: CompileClient) -> None:
    """KDA, then MLA: taps move, pages and rows of the cache are written, lists of experts change hands."""
    case = Case("decode", 2, layers=2, extra={"first": 2}, tunables={"ctas": 4})
    artifact = built(compiler, case, "decode-rows")
    assert races(artifact, case, 1) == [] and races(artifact, case, 2) == []


def shaped(preset: str, rows: int, layers: int, ctas: int, **given: int) -> ManyOp:
    dims = find("kimi-k3-decode").workload(Options(preset, layers, rows)).dims
    cfg = {
        "consumer_warps": 14,
        "ctas": ctas,
        "ring_stages": 0,
        "in_flight": 2,
        "jitter": 0,
        "sms": 132,
    }
    return many_shape(SimpleNamespace(**dims), SimpleNamespace(**{**cfg, "spin_limit": 0, **given}))


SHAPES = [("tiny", 8, 5, 8), ("tiny-tp2", 2, 5, 4), ("tp8", 8, 4, 132), ("tp8", 2, 4, 132)]


@pytest.mark.parametrize(("preset", "rows", "layers", "ctas"), SHAPES)
@pytest.mark.parametrize("length", [0, 5, 700])
def test_ends(preset: str, rows: int, layers: int, ctas: int, length: int) -> None:
    op = shaped(preset, rows, layers, ctas)
    lengths = [max(0, length - 30 * m) for m in range(rows)]
    assert validate_many(op, lengths, op.tiles_op.touched) == ""
    assert validate_many(op, lengths, op.d.topk) == ""


@pytest.mark.parametrize(
    "event",
    [("arrive", "all"), ("arrive", "route"), ("route",), ("post", "q", 3), ("post", "lat", 3)],
)
def test_a_lost_event_is_found(event: tuple[str, ...]) -> None:
    op = shaped("tiny", 8, 5, 8)
    programs = [many_lists(op, cta, [90] * 8, 7) for cta in range(op.ctas)]
    programs[3].consume.remove(event)
    assert simulate(op, programs) != ""


@pytest.mark.parametrize(
    "lengths",
    [[64] * 8, [900, 810, 886, 830, 838, 790, 869, 815], [0, 5000, 0, 1, 64, 65, 0, 9000], [1] * 8],
)
def test_pieces_of_sums_are_nobodys_twice(lengths: list[int]) -> None:
    """Piece CTA + request; a request's lie together, as those who join them take for granted."""
    op = shaped("tp8", 8, 4, 132)
    found: dict[int, set[int]] = {}
    for cta in range(op.ctas):
        for m, _ in pages_of(op, cta, lengths):
            found.setdefault(m, set()).add(cta + m)
    every = [x for s in found.values() for x in s]
    assert len(every) == len(set(every)) and max(every) < op.pieces
    assert all(s == set(range(min(s), max(s) + 1)) for s in found.values())


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_shared_memory_holds_a_ring_that_a_page_fits(rows: int) -> None:
    op = shaped("tp8", rows, 12, 132)
    assert op.used <= SHARED_MEMORY and op.stages >= max(4, op.cache_stages)
    assert op.tiles_op.stage == op.stage and op.tiles_op.stages == op.stages


def test_what_it_does_not_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="two to eight rows"):
        shaped("tiny", 1, 3, 8)
    with pytest.raises(ValueError, match="each of 8 tokens has a CTA"):
        shaped("tiny", 8, 3, 4)
    with pytest.raises(ValueError, match="132 CTAs are more than w2 has units"):
        shaped("tiny", 8, 3, 132)
    with pytest.raises(ValueError, match="takes 3 stages of 2"):
        shaped("tp8", 8, 4, 132, ring_stages=2)


def test_two_functions_of_one_name_get_two_in_the_bundle() -> None:
    """`weigh` of the caches' values and `weigh` of the experts."""
    text = persistent.source("decode-rows")
    assert text.count("def weigh(") == text.count("def weigh_values(") == 1
    assert "weigh_values(c, it, sP" in text and "weigh(c, expert, rC" in text
