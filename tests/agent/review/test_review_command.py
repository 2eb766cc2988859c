"""`kernelgen review`: the queue, pipes, terminals, JSON, decisions, exit codes, and texts that attack."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import agent.commands.review
from agent.cli import main
from agent.commands.review_screen import page
from agent.review.decide import decisions
from agent.review.dossier import dossier, queue
from agent.review.proof import sections
from tests.agent.review.staged import EVIL, stage

Call = Callable[..., Result]
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@pytest.fixture
def call(kit: Any, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(kit.place.db.parent)
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(agent.commands.review, "whoami", lambda: "Ada <ada@example.org>")
    return lambda *args, **kw: CliRunner().invoke(main, ["review", *args], **kw)


def test_the_queue_holds_what_was_promoted_and_not_decided(kit: Any, call: Call) -> None:
    run = stage(kit)
    assert queue(kit.queries, run) == [3, 1]
    assert call(run, "--approve", "3", "--note", "fine").exit_code == 0
    assert queue(kit.queries, run) == [1]
    assert call(run, "--reject", f"{run}-1", "--note", "old").exit_code == 0
    done = call(run)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "waits for a decision: all that were promoted are decided" in done.stderr
    assert call(run, "--all").exit_code == 0


def test_a_pipe_gets_plain_text_with_git_diffs_and_no_control_characters(
    kit: Any, call: Call
) -> None:
    run = stage(kit)
    out = call(run).stdout
    assert "\x1b" not in out
    assert f"diff --git a/{run}-0.py b/{run}-1.py" in out
    assert (
        f"diff --git a/{run}-1.py b/{run}-3.py" in out
        and f"diff --git a/{run}-0.py b/{run}-3.py" in out
    )
    for title in ("Risks", "Speed-up", "What was checked", "What was not verified", "Resources"):
        assert f"\n{title}\n" in out
    assert "1.2500" in out and "1.2400 to 1.2620" in out
    assert re.search(r"registers +40 +168 +changed", out)
    assert "other devices" in out and "long contexts" in out


def test_the_diffs_in_the_pipe_name_one_parent_when_asked(kit: Any, call: Call) -> None:
    run = stage(kit)
    out = call(f"{run}-3", "--against", "parent").stdout
    assert out.count("diff --git") == 1 and f"a/{run}-1.py" in out
    # No diff of sources shows a changed tunable.
    assert f"Against the parent, candidate {run}-1; tunables stages: unset -> 3\n" in out


def test_side_by_side_and_forced_colour(
    kit: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage(kit)
    wide = call(f"{run}-1", "-y", env={"COLUMNS": "160"}).stdout
    line = next(x for x in wide.splitlines() if "fused(t)" in x)
    assert "first(t)" in line and "\x1b" not in line
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = call(f"{run}-3", env={"COLUMNS": "160"}).stdout
    assert "\x1b[" in coloured
    assert "\x1b[31m$x" not in coloured and "[31m$x_1" in ANSI.sub("", coloured)


@pytest.mark.parametrize(
    ("pager", "less", "escapes", "asked"),
    [
        ("", None, True, "-R"),  # less would print escapes as text unless it is asked not to
        ("", "-FX", False, "-FX"),  # a person's own flags without -R stay
        ("viewer", None, False, ""),  # delta, bat: they colour git's diffs themselves
    ],
)
def test_pages_are_coloured_only_where_the_pager_shows_colours(
    kit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pager: str, less: str | None,
    escapes: bool, asked: str,
) -> None:  # fmt: skip
    run = stage(kit)
    shown = [dossier(kit.queries, kit.queries.run(run), 3)]
    for name in ("less", "viewer"):
        fake = tmp_path / name
        fake.write_text(f'#!/bin/sh\necho "$LESS" > {tmp_path}/asked; cat > {tmp_path}/paged\n')
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in (("PAGER", pager), ("LESS", less), ("NO_COLOR", None)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    _, terminal = os.openpty()
    with open(terminal, "w") as tty, open(os.ttyname(terminal)) as keys:
        monkeypatch.setattr(sys, "stdout", tty)
        monkeypatch.setattr(sys, "stdin", keys)
        page(shown, ("parent",), False, True)
        monkeypatch.undo()
    paged = (tmp_path / "paged").read_text()
    assert ("\x1b[" in paged) is escapes
    assert f"+++ b/{run}-3.py" in ANSI.sub("", paged)
    assert (tmp_path / "asked").read_text().strip() == asked


def test_json_has_the_proof_and_the_diffs(kit: Any, call: Call) -> None:
    run = stage(kit)
    data = json.loads(call(run, "--json").stdout)
    first = data["queue"][0]
    assert (data["schema"], first["candidate"], first["parent"]) == (1, f"{run}-3", f"{run}-1")
    assert first["verdict"]["status"] == "passed"
    assert first["speedups"][0]["ratio"] == {"value": 1.143, "low": 1.133, "high": 1.155}
    assert set(first["diffs"]) == {"parent", "seed"}
    assert EVIL in first["verdict"]["findings"][0]["message"]


def test_a_decision_without_a_terminal(kit: Any, call: Call) -> None:
    run = stage(kit)
    done = call(run, "--approve", "3", "--note", "read it all", "--json")
    data = json.loads(done.stdout)
    assert (data["decision"], data["who"], data["note"]) == (
        "approve",
        "Ada <ada@example.org>",
        "read it all",
    )
    assert data["hashes"]["artifact"] == kit.queries.candidate(f"{run}-3")["artifact"]
    assert [d.kind for d in decisions(kit.queries, run)] == ["approve"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--approve", "2"], "status is wrong"),
        (["--reject", "3"], "needs a note"),
        (["--approve", "3", "--reject", "3"], "one decision"),
        (["--approve", "9"], "no candidate 9"),
        (["--note", "x"], "--note needs"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    kit: Any, call: Call, args: list[str], words: str
) -> None:
    done = call(stage(kit), *args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr and "Traceback" not in done.stderr


def test_no_record_and_no_run(kit: Any, call: Call) -> None:
    assert call("last").exit_code == 2
    stage(kit)
    assert call("nothing").exit_code == 2


def test_a_terminal_asks_and_records(kit: Any, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stage(kit)
    place, queries = kit.place, kit.queries
    shown = [dossier(queries, queries.run(run), seq) for seq in queue(queries, run)]
    answers = iter(["d", "s", "", "s", "no spins", "q"])
    paged: list[list[str]] = []
    monkeypatch.setattr(agent.commands.review.click, "prompt", lambda *a, **k: next(answers))
    monkeypatch.setattr(
        agent.commands.review, "page", lambda d, *a, **k: paged.append([x.me.name for x in d])
    )
    look = agent.commands.review.Look(("parent",), False, False)
    assert agent.commands.review._ask_all(place, shown, look) == 0
    assert paged == [[f"{run}-3"], [f"{run}-3"], [f"{run}-1"]]
    assert [(d.seq, d.kind, d.note) for d in decisions(queries, run)] == [
        (3, "send_back", "no spins")
    ]


def test_a_candidate_whose_artifact_is_lost_is_still_shown(kit: Any, call: Call) -> None:
    import shutil

    run = stage(kit)
    shutil.rmtree(kit.place.workspace.artifacts)
    done = call(run)
    assert done.exit_code == 0 and "not compared" in done.stdout


def test_every_section_of_the_proof_has_something_to_say(kit: Any) -> None:
    run = stage(kit)
    d = dossier(kit.queries, kit.queries.run(run), 3)
    keys = [s.key for s in sections(d)]
    assert keys[:2] == ["risks", "speedups"]
    assert {"kernels", "resources", "checked", "not_verified", "tensors", "lessons"} <= set(keys)
    kernels = next(s for s in sections(d) if s.key == "kernels")
    assert kernels.rows[0][-1] == "-10.00"
