"""Search policy: promotion, parents, convergence and budgets, by their edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent import search
from agent.export.provenance import against
from agent.search import Limits, Progress, Spent, Standing
from sandbox.verdict import (
    Correctness,
    Failure,
    Outcome,
    Ratio,
    Status,
    Tier,
    Timing,
    Trust,
    Verdict,
    WorkloadTiming,
)

ROW = WorkloadTiming(
    "t", "tiny", 1, 1, 1, 0, 1, 1, 100.0, 100.0, 1.0, 100, 0.5, 0.4, Ratio(1.1, 1.08, 1.12)
)
GOOD = Verdict(
    Status.PASSED, "t", "a" * 64, {"kind": "cuda", "name": "H"}, Tier.PROMOTE, Trust.AUDITED, {}, "",
    outcome=Outcome.BETTER, correctness=Correctness(1, 1, 1, (), (), ()),
    timing=Timing("measured", (ROW,)),
)  # fmt: skip
BASE = replace(GOOD, tier=Tier.SCREEN, trust=Trust.JUDGED, outcome=Outcome.NOT_TIMED)


def timed(us: float, low: float = 1.0) -> Verdict:
    row = replace(ROW, us=us, speedup_incumbent=Ratio(low + 0.01, low, low + 0.02))
    return replace(GOOD, timing=Timing("measured", (row,)))


def test_reports_name_the_fastest_baseline_and_both_rates() -> None:
    """The torch graph is never called a baseline, and what was not timed is not named."""
    row = replace(
        ROW, speedup_graph=Ratio(9.0, 8.9, 9.1), speedup_best=Ratio(1.2, 1.1, 1.3), best_baseline="mix",
        fraction_of_floor_measured=0.5, fraction_of_floor_spec=0.4688,
    )  # fmt: skip
    said = dict(search.ratios(row))
    assert (
        said["the fastest baseline timed with it, mix"].value == 1.2
        and said["the torch graph"].value == 9.0
    )
    assert (
        search.shares(row)
        == "50.0% of the byte floor at the measured rate, 46.9% at the specified one"
    )
    weak = replace(row, speedup_best=None, best_baseline="")
    assert not any("baseline" in what for what, _ in search.ratios(weak))
    modelled = replace(row, fraction_of_floor_measured=None)
    assert search.shares(modelled) == "46.9% of the byte floor at the specified rate"
    assert search.shares(replace(modelled, fraction_of_floor_spec=None)) == ""


def test_an_export_is_compared_with_the_strongest_that_was_timed() -> None:
    row = replace(
        ROW, speedup_graph=Ratio(9.0, 8.9, 9.1), speedup_incumbent=Ratio(1.5, 1.4, 1.6),
        speedup_best=Ratio(1.2, 1.1, 1.3), best_baseline="mix",
    )  # fmt: skip
    ratio, name = against(row)
    assert (
        ratio is not None and ratio.value == 1.2 and name.startswith("`mix`, the fastest baseline")
    )
    ratio, name = against(replace(row, speedup_best=None))
    assert ratio is not None and ratio.value == 1.5 and "incumbent" in name
    ratio, name = against(replace(row, speedup_best=None, speedup_incumbent=None))
    assert ratio is not None and ratio.value == 9.0 and "no stronger one was timed" in name


def test_only_a_confirmed_better_verdict_is_promoted() -> None:
    assert search.promotable(BASE, GOOD, Tier.PROMOTE)[0]
    assert not search.promotable(BASE, replace(GOOD, outcome=Outcome.SLOW), Tier.PROMOTE)[0]
    assert not search.promotable(BASE, replace(GOOD, tier=Tier.FULL), Tier.PROMOTE)[0]
    assert search.promotable(BASE, replace(GOOD, tier=Tier.FULL), Tier.FULL)[0]


@pytest.mark.parametrize("low", [1.0, 0.99, float("nan")])
def test_an_interval_that_is_not_clear_of_one_is_never_promoted(low: float) -> None:
    assert not search.promotable(BASE, timed(90, low), Tier.PROMOTE)[0]


def test_unjailed_and_other_devices_are_not_ranked_with_the_incumbent() -> None:
    assert not search.promotable(BASE, replace(GOOD, trust=Trust.UNJAILED), Tier.PROMOTE)[0]
    cpu = replace(GOOD, device={"kind": "cpu", "name": "cpu"})
    assert "another device" in search.promotable(BASE, cpu, Tier.PROMOTE)[1]


def test_the_winner_has_the_largest_lower_bound_and_the_smallest_number_on_a_tie() -> None:
    assert search.winner([(1, timed(1, 1.02)), (2, timed(1, 1.05)), (3, timed(1, 1.05))], {}) == 2
    assert search.winner([], {}) is None


def test_of_those_that_cannot_be_told_apart_the_shortest_wins() -> None:
    """Intervals are [low, low + 0.02] here."""
    found = [(1, timed(1, 1.02)), (2, timed(1, 1.05)), (3, timed(1, 1.06))]
    assert search.winner(found, {1: 10, 2: 90, 3: 90}) == 3
    assert search.winner(found, {1: 10, 2: 80, 3: 90}) == 2
    assert search.winner(found, {1: 10, 2: 90, 3: 80}) == 3
    assert search.code_lines("a = 1\n\n    # why\n  b = 2  # and\n") == 2


def test_every_third_place_goes_to_the_best_other_lineage() -> None:
    standings = [
        Standing(0, None, timed(100)), Standing(1, 0, timed(80)), Standing(2, 0, timed(90)),
        Standing(3, 0, timed(85)),
    ]  # fmt: skip
    assert search.parents(standings, 1, 6) == (1, 1, 3, 1, 1, 2)
    assert search.parents(standings[:2], 1, 4) == (1, 1, 1, 1)


def test_a_budget_counts_what_is_in_flight() -> None:
    limits = Limits(usd=1.0, tokens=100)
    assert search.exceeds(limits, Spent(usd=0.5), Spent(usd=0.5)) is None
    assert search.exceeds(limits, Spent(usd=0.6), Spent(usd=0.5)) == "usd"
    assert search.exceeds(limits, Spent(tokens=90), Spent(tokens=11)) == "tokens"
    assert search.over(Limits(minutes=1.0), Spent(minutes=1.0)) == "minutes"


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        (Progress(1, 3, 0, 0.5), None),
        (Progress(1, 3, 0, 0.9), "floor"),
        (Progress(8, 3, 0, 0.5), "rounds"),
        (Progress(1, 9, 0, 0.5), "candidates"),
        (Progress(3, 3, 3, 0.5), "plateau"),
        (Progress(1, 3, 0, 0.5, infra_in_a_row=3), "infra"),
        (Progress(1, 3, 0, None), None),
    ],
)
def test_a_run_stops_for_one_of_the_reasons(progress: Progress, reason: str | None) -> None:
    assert search.stop_reason(Limits(candidates=9), progress, Spent()) == reason


def test_of_a_candidates_versions_the_better_one_ranks_first() -> None:
    slow = replace(timed(1, 0.9), outcome=Outcome.SLOW)
    failed = Verdict(
        Status.WRONG, "t", "", {}, Tier.SCREEN, Trust.JUDGED, {}, "", failure=Failure("r", "m")
    )
    ranks = [search.rank(v) for v in (failed, slow, timed(5, 1.1), timed(5, 1.2))]
    assert ranks == sorted(ranks) and len(set(ranks)) == 4
