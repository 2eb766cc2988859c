"""The live table and its plain lines: on stderr, without markup from data, without colour where asked."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from agent.budget import Ledger
from agent.fakes import kernel
from agent.render import Screen, spent_words
from agent.search import Limits, Spent
from agent.views import clean, columns


def screen(terminal: bool, **more: Any) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False, **more)
    return Screen(console, "title"), out


def test_plain_lines_when_it_is_no_terminal(kit: Any) -> None:
    shown, out = screen(False)
    kit.reporter = shown
    with shown:
        kit.optimize([kernel(80), kernel(90, "wrong")], limits=Limits(rounds=2, stop_at=None))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(
        "round 0  candidate 0  screen: not_timed  100.00 us a step  50.0% of"
    )
    assert "candidate 1 is the new best: speed-up over the incumbent at least" in out.getvalue()
    assert "ends as wrong" in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_a_table_on_a_terminal_that_stays_at_the_end(kit: Any) -> None:
    shown, out = screen(True, force_interactive=True)
    kit.reporter = shown
    with shown:
        kit.optimize([kernel(80)], limits=Limits(rounds=1, stop_at=None))
    assert "\x1b[?25h" in out.getvalue()
    table = Console(file=io.StringIO(), width=100, record=True)
    table.print(shown.table())
    text = table.export_text()
    assert "1 *" in text and "62.5%" in text and "best: candidate 1, 80.00 us" in text


def test_text_of_candidates_is_never_markup_or_terminal_control() -> None:
    shown, out = screen(False)
    shown.say("[bold]x[/bold] [link=evil]")
    assert out.getvalue() == "[bold]x[/bold] [link=evil]\n"
    assert clean("a\x1b[31mb\r\nc\u202e") == "a\ufffd[31mb\ufffd\nc\ufffd"


def test_what_was_spent_is_shown_with_its_limits() -> None:
    ledger = Ledger(Limits(usd=2.0), Spent(usd=0.5, tokens=1234), clock=lambda: 0.0)
    assert spent_words(ledger) == "spent: 0.0 min, 0 GPU s, 1,234 tokens, 0.50 of 2 $"


@pytest.mark.parametrize(
    ("value", "cell"), [("x" * 99, "x" * 59 + "…"), (1.23456, "1.235"), ("a\nb", "a b")]
)
def test_a_plain_table_has_one_line_a_row(value: Any, cell: str) -> None:
    assert columns([{"k": value}], {"k": "head"}).splitlines() == ["head", cell]
