"""From optimize to a send-back and on, by commands alone: each could be another day."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import agent.commands.optimize
from agent import fakes
from agent.cli import main
from agent.fakes import kernel
from agent.models.external import offer
from agent.runner import Services
from agent.services import Wanted
from agent.workspace import Workspace

TARGET = f"{Path(__file__).parents[1] / 'fake_target.py'}:Fake"


def call(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NO_COLOR", "1")

    def start(w: Wanted, workspace: Workspace) -> tuple[Services, dict[str, Any]]:
        services = Services(fakes.FakeCompiler(workspace.root), fakes.FakeJudge(), fakes.FakeJudge)
        return services, {"arch": "sm_90a"}

    monkeypatch.setattr(agent.commands.optimize, "start", start)


def test_a_note_reaches_the_author_and_the_answer_is_reviewed_again() -> None:
    offer(Path("box"), kernel(80))
    first = call(
        "optimize", "--target", TARGET, "--device", "cpu", "--proposer", "external", "--folder", "box",
        "--no-wait", "--rounds", "1",
    )  # fmt: skip
    assert first.exit_code == 0, first.output
    back = call("review", "last", "--send-back", "1", "--note", "no spin loops, please")
    assert back.exit_code == 0 and "kernelgen resume" in back.stdout
    waits = call("resume", "last")
    assert waits.exit_code == 3, waits.output
    feedback = next(Path("box").glob("feedback.md")).read_text()
    assert "A reviewer sent back candidate 1: no spin loops, please" in feedback
    offer(Path("box"), kernel(60))
    on = call("resume", "last")
    assert on.exit_code == 0, on.output
    queue = json.loads(call("review", "last", "--json").stdout)["queue"]
    assert [d["seq"] for d in queue] == [2]
    assert call("review", "last", "--approve", "2", "--note", "good").exit_code == 0
    state = json.loads(call("runs", "--json").stdout)["runs"][0]["state"]
    assert (state, call("review", "last").exit_code) == ("done", 1)
