"""Prompts within their budgets, and strict readers of answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import prompts
from agent import diffs
from agent.book import Book, folded, stated_gain
from agent.models.base import BadFormat
from agent.models.pricing import CHARS_PER_TOKEN
from agent.types import Direction, Situation, Task, Tried
from sandbox.artifact import Buffer
from sandbox.verdict import Correctness, Failure, Outcome, Status, Tier, Trust, Verdict
from targets.base import Floor

SOURCE = (
    "import cutlass\n\n\ndef step(t, cfg, stream):\n    a = 1\n    b = 2\n    c = 3\n    return a\n"
)


def verdict(status: Status, **more: object) -> Verdict:
    passed = status is Status.PASSED
    base: dict[str, object] = {
        "status": status, "target": "toy", "artifact": "0" * 64, "device": {"name": "cpu"}, "tier": Tier.SCREEN,
        "trust": Trust.JUDGED, "isolation": {}, "date": "2026-11-29",
        "outcome": Outcome.NOT_TIMED if passed else None,
        "failure": None if passed else Failure("rule-x", "it broke | badly\nin two lines", {"line": 5}),
        "correctness": Correctness(3, 2, 3, (), (), ()) if passed else None,
    }  # fmt: skip
    return Verdict(**{**base, **more})  # type: ignore[arg-type]


def tried(seq: int, status: Status = Status.PASSED, **more: object) -> Tried:
    base = Tried(
        seq=seq, round=1, parent=0 if seq else None, direction=f"direction {seq}", note="", predicted_gain=1.1,
        source="0" * 64, tunables={}, verdict=verdict(status),
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def situation(n: int = 3) -> Situation:
    buffers = (
        Buffer("inputs.x", "bf16", (1, 512)),
        Buffer("weights.layers.0.w", "bf16", (512, 512)),
        Buffer("weights.layers.1.w", "bf16", (512, 512)),
        Buffer("outputs.y", "bf16", (1, 512)),
    )
    task = Task(
        "run",
        "toy",
        "a toy",
        {"rows": 1},
        {"hidden": 512},
        buffers,
        Floor(1000, 10),
        "cpu",
        "sm_90a",
        brief="y = W x",
    )
    history = tuple(tried(i) for i in range(n))
    return Situation(task, 1, 2, history[0], SOURCE, history)


def test_texts_keep_their_budgets() -> None:
    for name, most in prompts.BUDGET_TOKENS.items():
        assert len(prompts.text(name)) / CHARS_PER_TOKEN <= most, name


def test_the_stable_part_comes_first_and_is_the_same_for_every_role() -> None:
    book, s = Book(), situation()
    made = [
        book.plan(s), book.propose(s, Direction("d"), SOURCE), book.reflect(s),
        book.repair(s, SOURCE, verdict(Status.COMPILE_ERROR)),
    ]  # fmt: skip
    assert len({p.stable for p in made}) == 1
    assert "t.weights.layers[*].w: bf16 [512, 512] for 0, 1" in made[0].stable
    assert "y = W x" in made[0].stable
    assert all(SOURCE in p.body for p in made[:2])


def test_a_long_history_is_shortened_but_no_source_is_cut() -> None:
    s = situation(6000)
    promoted = replace(s.history[3], promoted=True)
    s = replace(s, history=(*s.history[:3], promoted, *s.history[4:]))
    prompt = Book().plan(s)
    assert (len(prompt.stable) + len(prompt.body)) / CHARS_PER_TOKEN <= 60_000
    assert "| 5999 |" in prompt.body and "| 3 |" in prompt.body and "| 4 |" not in prompt.body
    assert SOURCE in prompt.body


def test_every_prompt_stays_within_its_budget_whatever_the_run_has_gathered() -> None:
    """60,000 tokens at 3.2 characters, sources aside: measured where everything grows at once."""
    big = Failure("rule-x", "m" * 200_000, {"line": 5, "hint": "h" * 50_000})
    failed = verdict(Status.COMPILE_ERROR, failure=big, findings=(big,) * 40)
    kernels = [{"kernel": "k" * 60, "calls": 9, "us": 1.0, "share": 0.1}] * 5000
    loud = tried(
        1, verdict=verdict(Status.PASSED, profile={"kernels": kernels}, findings=(big,) * 99)
    )
    history = (loud, *(tried(i, Status.FAULT, direction="d" * 900) for i in range(2, 4000)))
    s = replace(situation(), history=history, incumbent=loud, lessons=("l" * 600,) * 3000)
    book, stated = Book(), 60_000
    last = replace(s, lessons=(*s.lessons, "the newest lesson"))
    for prompt in (
        book.plan(last), book.propose(last, Direction("d", parent=1), SOURCE), book.reflect(last),
        book.repair(last, SOURCE, failed),
    ):  # fmt: skip
        characters = len(prompt.stable) + len(prompt.body)
        assert characters / CHARS_PER_TOKEN <= stated, prompt.role
        if prompt.role in ("plan", "propose"):
            assert "the newest lesson" in prompt.body, prompt.role
        if prompt.role != "reflect":
            assert SOURCE in prompt.body, prompt.role


def test_a_long_source_costs_neither_history_nor_lessons() -> None:
    """A kernel of 140 KB alone is 45,000 tokens: what was tried and learned is still shown."""
    source = "\n".join(f"value_{i} = {i}" for i in range(9000))
    s = situation(20)
    s = replace(s, incumbent_source=source, lessons=("the ring was no gain",), changes=("c" * 300,))
    for prompt in (Book().plan(s), Book().propose(s, Direction("d"), source)):
        assert source in prompt.body and "the ring was no gain" in prompt.body
    assert "| 3 |" in Book().plan(s).body and "c" * 300 in Book().plan(s).body
    crowded = replace(situation(), changes=("c" * 300,) * 3000)
    prompt = Book().plan(crowded)
    assert (len(prompt.stable) + len(prompt.body)) / CHARS_PER_TOKEN <= 60_000


def test_a_direction_has_mechanism_and_risk_and_none_comes_twice() -> None:
    one = {"title": "Ring", "mechanism": "bytes stay on their way", "risk": "edges queue",
           "predicted_gain": 1.1, "parent": 2}  # fmt: skip
    again = {**one, "title": "ring", "mechanism": "Bytes  stay on their way"}
    other = {"title": "tiles", "detail": "as answers had it before", "parent": 2}
    got = Book().read_plan(json.dumps({"directions": [one, again, other]}), 2)
    assert [d.title for d in got] == ["Ring", "tiles"]
    assert got[0].detail == "bytes stay on their way\nRisk: edges queue"
    assert (got[0].parent, got[0].predicted_gain, got[1].detail) == (
        2,
        1.1,
        "as answers had it before",
    )


def test_a_failure_stays_in_its_table_cell() -> None:
    s = situation()
    s = replace(s, history=(*s.history, tried(9, Status.FAULT)))
    (row,) = [x for x in Book().plan(s).body.splitlines() if x.startswith("| 9 |")]
    assert "it broke / badly in two lines" in row


def test_repair_quotes_the_line() -> None:
    assert "`a = 1`" in Book().repair(situation(), SOURCE, verdict(Status.COMPILE_ERROR)).body


def test_jinja_in_a_source_is_data() -> None:
    body = Book().propose(situation(), Direction("{{ s.k }}"), "x = '{{ 7 * 7 }}'\n").body
    assert "{{ 7 * 7 }}" in body and "{{ s.k }}" in body and "49" not in body


def test_a_whole_file_is_read() -> None:
    got = Book().read_proposal("Predicted gain: 1.07\n\n```python\nx = 1\n```\n", SOURCE)
    assert (got.source, got.predicted_gain) == ("x = 1\n", 1.07)


def test_a_diff_is_applied_strictly() -> None:
    new = SOURCE.replace("b = 2", "b = 20")
    got = Book().read_proposal(f"```diff\n{diffs.make(SOURCE, new)}```", SOURCE)
    assert got.source == new
    with pytest.raises(BadFormat, match="expects line"):
        Book().read_proposal(
            f"```diff\n{diffs.make(SOURCE, new)}```", SOURCE.replace("b = 2", "b = 3")
        )


@pytest.mark.parametrize(
    "text",
    [
        "no block",
        "```python\nx\n```\n```python\ny\n```",
        "```python\n\n```",
        "```diff\nnothing\n```",
    ],
)
def test_unclear_proposals_are_sent_back(text: str) -> None:
    with pytest.raises(BadFormat):
        Book().read_proposal(text, SOURCE)


@pytest.mark.parametrize(
    "text, gain",
    [
        ("Predicted gain: 1.05", 1.05),
        ("**Predicted gain:** 5%", 1.05),
        ("gain 2", None),
        ("Predicted gain: 0", None),
    ],
)
def test_stated_gain(text: str, gain: float | None) -> None:
    assert stated_gain(text) == (pytest.approx(gain) if gain else None)


def test_plans_are_read_with_and_without_a_fence() -> None:
    text = '{"directions": [{"title": "a", "predicted_gain": 1.2, "parent": 3}, {"title": "b"}, {"title": "c"}]}'
    for answer in (text, f"Here:\n```json\n{text}\n```"):
        got = Book().read_plan(answer, 2)
        assert [(d.title, d.predicted_gain, d.parent) for d in got] == [
            ("a", 1.2, 3),
            ("b", None, 0),
        ]


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"directions": []}', '{"directions": [{"title": 1}]}', "[" * 100_000]
)
def test_broken_plans_are_sent_back(text: str) -> None:
    with pytest.raises(BadFormat):
        Book().read_plan(text, 2)


def test_lessons_are_read() -> None:
    assert Book().read_lessons('{"lessons": [" one ", ""]}') == ("one",)


def test_folding_leaves_unlike_lines_alone() -> None:
    lines = ["t.w[0].a: f32 [1]", "t.w[0].b: f32 [2]", "t.w[2].a: f32 [1]", "t.w[1].a: f32 [7]"]
    assert folded(lines) == ["t.w[*].a: f32 [1] for 0, 2", "t.w[0].b: f32 [2]", "t.w[1].a: f32 [7]"]


def test_the_profile_names_the_costliest_kernel() -> None:
    kernels = [{"kernel": "gemv", "calls": 12, "us": 250.5, "share": 0.5}]
    s = situation()
    s = replace(
        s,
        incumbent=replace(
            s.incumbent, verdict=verdict(Status.PASSED, profile={"kernels": kernels})
        ),
    )
    assert "gemv: 12 launches, 250.5 us, 50% of the step" in Book().plan(s).body
