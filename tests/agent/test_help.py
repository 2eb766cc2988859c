"""Help of every command, and where settings come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.cli import COMMANDS
from tests.agent.test_cli import TARGET, Call, call

__all__ = ["call"]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_examples(call: Call, command: str) -> None:
    done = call(command, "--help")
    assert done.exit_code == 0
    assert "Examples:" in done.stdout and f"kernelgen {command}" in done.stdout


def test_help_says_the_defaults_that_hold_for_each_command(call: Call) -> None:
    for command, rounds in (
        ("optimize", "8; cpu 2; external none"),
        ("resume", "the run's"),
        ("mcp", "none"),
    ):
        said = " ".join(call(command, "--help").stdout.split())
        assert f"Rounds. [default: {rounds}]" in said, command
    refused = call("bench", "--target", TARGET, "--rows", "0", "--device", "cpu")
    assert refused.exit_code == 2 and "--rows" in refused.stderr, refused.output


def test_settings_come_from_flag_environment_and_file_in_that_order(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernelgen.toml").write_text(
        f'target = "{TARGET}"\nk = 2\n[optimize]\nrounds = 1\nproposer = "tuner"\n'
    )
    args = ("optimize", "--device", "cpu", "--dry-run", "--json")
    assert json.loads(call(*args).stdout)["candidates"] == 2
    monkeypatch.setenv("KERNELGEN_OPTIMIZE_ROUNDS", "3")
    assert json.loads(call(*args).stdout)["candidates"] == 6
    assert json.loads(call(*args, "--rounds", "5").stdout)["candidates"] == 10
    (tmp_path / "kernelgen.toml").write_text("k = = 2")
    broken = call(*args)
    assert (broken.exit_code, "kernelgen.toml" in broken.stderr) == (2, True)
