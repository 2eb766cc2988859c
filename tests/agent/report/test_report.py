"""Reports: what they contain, that they stand alone, and that hostile text stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agent.cli import main
from agent.report.html import html
from agent.report.markdown import MOST_CHARS, fenced, markdown, safe
from agent.report.views import run_view
from agent.review.decide import decide
from tests.agent.report.pages import harmless, read
from tests.agent.review.staged import EVIL, SEED, stage

pytest.importorskip("matplotlib")
Call = Callable[..., Result]


@pytest.fixture
def view(kit: Any) -> Any:
    return run_view(kit.queries, kit.queries.run(stage(kit)))


@pytest.fixture
def call(kit: Any, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(kit.place.db.parent)
    return lambda *args: CliRunner().invoke(main, ["report", *args])


def test_points_carry_times_intervals_dollars_and_minutes(view: Any) -> None:
    points = {p.seq: p for p in view.points}
    assert [points[s].us for s in (0, 1, 2, 3)] == [100, 80, None, 70]
    assert points[1].low == pytest.approx(80 * 1.25 / 1.262)
    assert points[1].high == pytest.approx(80 * 1.25 / 1.24)
    assert (points[0].usd, points[1].usd, points[3].usd) == (0.0, 0.25, 0.75)
    assert points[2].minutes == pytest.approx(2 + 10 / 60)
    assert [d.me.seq for d in view.dossiers] == [3, 1]


def test_the_page_stands_alone_and_hostile_text_stays_text(view: Any) -> None:
    page = html(view)
    found = harmless(page)
    assert "<script" not in page and "<b>bold" not in page and "\x1b" not in page
    assert found.text.count("<script>alert(1)</script>") >= 6
    assert '# <b>bold</b> "quoted" & more' in found.text
    assert found.text.count("Tunables: stages: unset -> 3") == 2
    assert "Tunables against the parent: stages: unset -" in markdown(view)
    named = re.sub(
        r"http://www\.w3\.org/\S+?\"|'sha256-[^']+'", "", page
    )  # a digest may have // in it
    assert not re.search(r"(?:https?:)?//[a-z]", named)


def test_the_policy_allows_the_style_sheet_of_the_page_and_nothing_else(view: Any) -> None:
    page = html(view)
    policy = next(a["content"] for t, a in read(page).elements if a.get("http-equiv"))
    css = re.search(r"<style>(.*?)</style>", page, re.S)
    assert css is not None
    digest = base64.b64encode(hashlib.sha256(css[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ") and f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and "prefers-color-scheme: dark" in css[1]
    assert any(a.get("name") == "viewport" for _, a in read(page).elements)


def test_axes_have_units_and_every_plot_is_there(view: Any) -> None:
    page = html(view)
    for words in (
        "time of a step, us (measured)", "candidate, number", "paid to models, $", "minutes since the start",
        "share of the byte floor reached, %", "ratio of times, 95 % interval",
        "time since the start of the step, us", "time in a step, us", ">round<",
    ):  # fmt: skip
        assert words in page, words
    labels = [a["aria-label"] for t, a in read(page).elements if t == "svg"]
    assert len(labels) == 6 + 2 * 4
    assert "currentColor" in page and "#000000" not in page


def test_the_numbers_of_the_plots_are_in_tables_too(view: Any) -> None:
    text = read(html(view)).text
    for words in ("79.24 to 80.65", "57.1%", "1.1430", "$0.75", "3 (promoted)", "not verified"):
        assert words in text, words


@pytest.mark.slow
def test_two_reports_of_one_record_are_equal(view: Any) -> None:
    assert html(view) == html(view)


def test_a_run_of_only_a_seed_and_one_without_prices_can_be_reported(kit: Any) -> None:
    ended = kit.optimize([])
    view = run_view(kit.queries, kit.queries.run(ended.run))
    page = html(view)
    harmless(page)
    assert "nothing but the seed" in page and "paid to models" not in page
    assert "nothing but the seed" in markdown(view)


def test_a_real_loop_on_fakes_can_be_reported(kit: Any) -> None:
    from agent.fakes import kernel

    ended = kit.optimize([kernel(80), kernel(90, "hang"), kernel(70)], k=1)
    page = html(run_view(kit.queries, kit.queries.run(ended.run)))
    assert "hang" in harmless(page).text and "modelled" in page


def test_markdown_has_the_proof_and_defuses_what_models_wrote(view: Any) -> None:
    text = markdown(view)
    prose = text.split("```")[0] + text.split("```")[2]
    assert "<script" not in prose and "<img" not in prose and "\x1b" not in text
    assert text.count("```") == 2 and "<script>alert" in text.split("```")[1]
    assert "#### What was not verified" in text and "other devices" in text
    assert "| 1.143" in text.replace("\\", "") and "- other devices" in text
    assert text.count("<details>") == text.count("</details>") == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", "a\\|b"), ("@user", "@\u2060user"), ("[x](https://e)", "\\[x\\]\\(https:\u2060//e\\)"),
        ("two\nlines", "two lines"), ("`x`", "\\`x\\`"), ("<b>", "&lt;b&gt;"), ("www.e.org", "www\u2060.e.org"),
    ],
)  # fmt: skip
def test_each_way_out_of_a_cell_is_closed(text: str, shown: str) -> None:
    assert safe(text) == shown


def test_a_fence_is_longer_than_any_in_the_text() -> None:
    assert fenced("a\n````\nb").startswith("`````diff\n")


def test_a_long_diff_is_cut_and_said_so(kit: Any, view: Any) -> None:
    from dataclasses import replace

    best = view.dossiers[0]
    matter = replace(best.me.matter, source=SEED + "".join(f"# line {i}\n" for i in range(9000)))
    long = replace(best, me=replace(best.me, matter=matter))
    text = markdown(replace(view, dossiers=(long,)))
    assert len(text) < MOST_CHARS and re.search(r"its last \d+ lines are left out", text)


def test_the_command_writes_the_file_and_says_where(kit: Any, call: Call) -> None:
    stage(kit)
    done = call("last", "-o", "r.html", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["format"] == "html" and Path("r.html").stat().st_size == data["bytes"]
    assert call("last", "-o", "r.md").stdout == "r.md\n"
    assert Path("r.md").read_text().startswith("## fake")
    assert call("last", "--format", "md").stdout.startswith("## fake")
    assert call("last", "--json").exit_code == 2 and call("none", "-o", "x").exit_code == 2


def test_decisions_are_in_the_report(kit: Any) -> None:
    run = stage(kit)
    decide(kit.place, kit.queries.candidate(f"{run}-3"), "approve", ("well read", f"Ada {EVIL}"))
    view = run_view(kit.queries, kit.queries.run(run))
    page = html(view)
    assert "approved by Ada" in read(page).text and "well read" in page
    assert "<script" not in page
    assert next(p.word for p in view.points if p.seq == 3) == "approve"


def test_without_the_plotting_library_it_is_one_line_and_exit_code_4(
    kit: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(kit)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = call("last", "-o", "r.html")
    assert (done.exit_code, done.stdout) == (4, "")
    assert "kernelgen[report]" in done.stderr and not Path("r.html").exists()
    assert call("last", "--format", "md").exit_code == 0
