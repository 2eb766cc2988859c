"""Differences from the parent: parts, phases, kernels and machine code, tied to the functions that changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent import difference, trace, waterfall
from agent.difference import Side, hunks
from agent.fakes import kernel
from agent.observe import marks_phases
from agent.search import Limits
from sandbox.judge.waterfall import Span, Step, of_spans

BEFORE = """import cutlass.cute as cute
from kernelgen import timeline


def tile():
    return 64


@cute.jit
def gemv(track):
    timeline.mark(track, "gemv", 0)
    return tile()


@cute.jit
def unused():
    return 1


@cute.kernel
def main_kernel(track):
    gemv(track)


@cute.kernel
def other_kernel():
    return 2
"""


def test_a_hunk_names_its_function_the_kernels_that_reach_it_and_its_phases() -> None:
    (h,) = hunks(BEFORE, BEFORE.replace("return tile()", "x = tile()\n    return x"))
    assert (h.functions, h.kernels, h.phases) == (("gemv",), ("main_kernel",), ("gemv",))
    assert (h.added, h.removed) == (2, 1)
    (deep,) = hunks(BEFORE, BEFORE.replace("return 64", "return 128"))
    assert deep.functions == ("tile",) and deep.kernels == ("main_kernel",)
    (alone,) = hunks(BEFORE, BEFORE.replace("return 1\n", "return 3\n"))
    assert alone.functions == ("unused",) and alone.kernels == ()
    assert hunks(BEFORE, BEFORE) == [] and hunks("def (", BEFORE)[0].kernels


def spans(work: float) -> list[Span]:
    return [
        Span(0, "gemv", "work", 0, 0.0, work), Span(0, "meet", "edge", 0, work, work + 1.0),
        Span(1, "gemv", "work", 0, 0.0, 2.0), Span(1, "meet", "edge", 0, 2.0, work + 1.0),
    ]  # fmt: skip


@pytest.fixture
def pair(kit: Any) -> tuple[Side, Side]:
    ended = kit.optimize([kernel(90)], limits=Limits(rounds=1, stop_at=None, patience=None))
    verdict = kit.queries.history(ended.run)[1].verdict
    sides = []
    for work, us, opcode in ((6.0, 10.0, 24), (4.0, 8.0, 12)):
        profile = {
            "waterfall": of_spans(spans(work), Step(us, 3.0)),
            "kernels": [{"kernel": "main", "calls": 1, "us": us, "share": 1.0}],
            "launches": [{"kernel": "main", "us": us, "smem": 0, "waves": work, "occupancy": 0.5}],
            "sass": {"main": {"opcodes": {"LDG": opcode, "STG": 4}}},
        }
        source = BEFORE if us == 10.0 else BEFORE.replace("return tile()", "return 2 * tile()")
        sides.append(Side(source, replace(verdict, profile=profile)))
    return sides[0], sides[1]


def test_every_number_that_differs_is_said_with_the_place_that_changed(
    pair: tuple[Side, Side],
) -> None:
    told = difference.lines(*pair)
    assert told[0] == "step 10.00 -> 8.00 us (-2.00)"
    assert "phase meet: -1.00 us" in told and "phase gemv: -1.00 us" in told
    assert "kernel main: 10.00 -> 8.00 us, 1 -> 1 launches" in told
    assert "kernel main: waves 6.0 -> 4.0" in told and "SASS of main: LDG 24 -> 12" in told
    assert not any("occupancy" in x or "STG" in x for x in told)
    assert told[-1] == "@@ -11,3 +11,3 @@ in gemv (kernel main_kernel), +1 -1: gemv -1.00 us"


def test_a_parent_without_a_profile_leaves_the_places_alone(pair: tuple[Side, Side]) -> None:
    before, after = pair
    told = difference.lines(Side(before.source, None), after)
    assert told == ["@@ -11,3 +11,3 @@ in gemv (kernel main_kernel), +1 -1"]


def test_the_waterfall_in_words(pair: tuple[Side, Side]) -> None:
    verdict = pair[0].verdict
    assert verdict
    text = "\n".join(waterfall.lines(verdict.profile))
    assert "a step of 10.00 us" in text and "byte floor" in text and "loss 1:" in text
    total = sum(us for _, us, _ in waterfall.parts(verdict.profile["waterfall"]))
    assert total == pytest.approx(10.0, abs=1e-3)
    assert waterfall.lines({}) == []


def test_traces_of_marks_and_of_launches() -> None:
    timeline = {
        "kind": "measured", "overhead": 1.01, "phases": [["gemv", "work"], ["end", "end"]],
        "tracks": [{"track": 3, "role": 0, "block": 3, "sm": 8, "marks": [[0.5, 0, 2], [2.0, 1, 0]]}],
    }  # fmt: skip
    made = trace.chrome({"timeline": timeline, "step_us": 2.0}, "X-1")
    assert made
    (event,) = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert (event["name"], event["ts"], event["dur"], event["tid"]) == ("gemv", 0.5, 1.5, 3)
    assert event["args"] == {"layer": 2, "sm": 8}
    rows = [{"kernel": "a\x1b", "us": 3.0}, {"kernel": "b", "us": 2.0}]
    made = trace.chrome({"launches": rows, "method": "modelled"}, "X-1")
    assert made and [e["ts"] for e in made["traceEvents"] if e["ph"] == "X"] == [0.0, 3.0]
    assert "\x1b" not in str(made) and trace.chrome({}, "X-1") is None


def test_sources_with_marks_are_told_by_their_import() -> None:
    assert marks_phases(BEFORE) and marks_phases("import kernelgen.timeline as t\n")
    assert not marks_phases("# from kernelgen import timeline\nx = 'timeline'\n")
