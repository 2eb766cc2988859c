"""README, docs and CI say what is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from agent.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_target_is_the_file() -> None:
    assert (ROOT / "examples/my_target.py").read_text().rstrip() in README


def test_every_command_named_exists_and_every_command_is_named() -> None:
    named = set(re.findall(r"`kernelgen (\w+)", README))
    there = set(main.list_commands(click.Context(main)))
    assert named <= there
    missing = {c for c in there if not re.search(rf"\b{c}\b", README)}
    assert not missing


def test_the_file_map_names_real_paths() -> None:
    block = README.split("## Files", 1)[1].split("```")[1]
    for line in block.strip().splitlines():
        name = line.split()[0]
        if name.endswith("/") and not line.startswith(" "):
            assert (ROOT / name).is_dir(), name


@pytest.mark.parametrize("link", re.findall(r"\]\((docs/[^)]+|examples/[^)]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci/run").read_text()
    pattern = re.search(r"sed -n '(.+?)' README", script)
    assert pattern is not None
    done = subprocess.run(
        ["sed", "-n", pattern[1], "README.md"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip().endswith("pytest -n auto") and len(done.stdout.splitlines()) == 1
