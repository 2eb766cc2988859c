"""Lessons say predicted against measured, survive in runs.db, and come back before the same idea is tried again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agent import lessons
from agent.fakes import kernel
from agent.feedback import word
from agent.models.base import Request
from agent.models.scripted import ScriptedProposer
from agent.runner import save_settings, task_of
from agent.search import Limits
from agent.types import Direction, Proposal, Situation
from sandbox.verdict import Failure, Status
from targets import base


@dataclass
class Watched(ScriptedProposer):
    """Keeps the situations that it was shown."""

    seen: list[Situation] = field(default_factory=list)

    def propose(self, r: Request) -> Proposal:
        self.seen.append(r.situation)
        return super().propose(r)


@pytest.mark.parametrize(
    "text, found",
    [
        ("deeper ring of stages", ("ring",)),
        ("fewer grid barriers: fuse norm into the GEMV", ("edges", "fusion")),
        ("evict-first hints on weights", ("cache hints",)),
        ("something else entirely", ()),
    ],
)
def test_techniques_are_found_by_their_words(text: str, found: tuple[str, ...]) -> None:
    assert lessons.techniques(text) == found


def test_lessons_of_the_direction_come_first_and_say_so() -> None:
    known = [
        "[tiles] 64 rows (a; H200): 0.9x",
        "[ring, tiles] 14 stages (a; H200): lint, shared-memory",
    ]
    d = Direction("a longer ring", "more stages in flight")
    shown = lessons.for_direction(known, d)
    assert (
        shown[0].startswith("TRIED BEFORE (ring): [ring, tiles] 14 stages") and shown[1] == known[0]
    )


LIMITS = Limits(rounds=1, stop_at=None, patience=None)


def test_a_round_leaves_its_measurements_as_lessons(kit: Any) -> None:
    ended = kit.optimize([kernel(90)], limits=LIMITS)
    shown, said = kit.queries.lessons(ended.run)
    assert said == "round 2: candidate 1 leads"
    assert shown.startswith("scripted 0 (fake, preset=tiny, layers=1, rows=1; fake): 1.11")
    assert "(modelled), predicted 1.010x, the prediction missed" in shown


def test_another_run_sees_them_before_it_proposes(kit: Any) -> None:
    kit.optimize([kernel(90)], limits=LIMITS)
    again = Watched([kernel(80)])
    kit.go(kit.new(limits=LIMITS), again)
    assert any(x.startswith("scripted 0 (fake, ") for x in again.seen[0].lessons)


def test_they_are_found_by_target_device_and_technique(kit: Any) -> None:
    ended = kit.optimize([kernel(90)], limits=LIMITS)
    kit.queries.store.add_lessons(
        ended.run, 7, ["[ring] 20 stages (fake; H200): lint, shared-memory"]
    )
    find = lambda **by: [x["text"] for x in lessons.search(kit.queries, **by)]  # noqa: E731
    assert find(technique="ring") == ["[ring] 20 stages (fake; H200): lint, shared-memory"]
    assert find(technique="ring", device="H200") and not find(technique="ring", target="other")
    assert not find(technique="clusters") and len(find(target="fake")) == 3


def test_failures_come_first_with_their_reason(kit: Any) -> None:
    ended = kit.optimize([kernel(90)], limits=LIMITS)
    history = kit.queries.history(ended.run)
    better = history[1]
    void = {"outcome": None, "timing": None, "correctness": None, "profile": {}}
    failure = Failure("shared-memory", "560000 bytes of shared memory > 232448")
    verdict = replace(better.verdict, status=Status.LINT, failure=failure, **void)
    failed = replace(
        better, seq=2, parent=0, direction="a ring of 20 stages", predicted_gain=1.4, us=None, verdict=verdict,
    )  # fmt: skip
    task = task_of(ended.run, kit.settings(), base.find("fake"))
    made = [x.text() for x in lessons.of_round(task, [better, failed], history)]
    assert made[0].startswith("[ring] a ring of 20 stages (")
    assert "lint, shared-memory, predicted 1.400x. 560000 bytes" in made[0]
    assert len(made) == 2 and "1.11" in made[1]


def test_a_resumed_run_is_told_what_it_was_told_at_first_whatever_became_of_the_others(
    kit: Any,
) -> None:
    """Else its recorded answers would be to other questions, and be paid for again."""
    other = kit.optimize([kernel(90)], limits=LIMITS).run
    run = kit.new(limits=LIMITS)
    first, second = Watched([kernel(80)]), Watched([kernel(80), kernel(70)])
    kit.go(run, first)
    kit.queries.store.set_run(other, updated="2999-01-01T00:00:00Z")  # somebody reviewed it
    kit.queries.store.add_lessons(other, 9, ["said later"])
    settings = kit.settings(limits=Limits(rounds=2, stop_at=None, patience=None))
    save_settings(kit.place, run, settings)
    kit.go(run, second)
    told = [x for x in first.seen[0].lessons if x.startswith("scripted 0 (fake, ")]
    assert told
    assert [x for x in second.seen[-1].lessons if x in told or x == "said later"] == told


def test_a_value_that_changes_nothing_is_a_lesson_and_not_somebody_elses_gain(kit: Any) -> None:
    same = kernel(90)
    ended = kit.optimize(
        [same, same + "# the same work in other words\n"],
        limits=Limits(rounds=2, stop_at=None, patience=None),
    )
    history = kit.queries.history(ended.run)
    assert [t.twin for t in history] == [None, None, 1]
    task = task_of(ended.run, kit.settings(), base.find("fake"))
    made = lessons.lesson(task, history[2], history[1])
    assert (made.effect, made.why, made.worked) == (
        "the same machine work as candidate 1, predicted 1.010x", "", False,
    )  # fmt: skip
    assert word(history[2]) == "the same machine work as candidate 1: not judged again"
