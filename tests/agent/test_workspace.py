"""Folders of winners: what a kill leaves behind does not stay."""

from __future__ import annotations

from pathlib import Path

from agent.workspace import replace_folder


def test_what_a_kill_left_of_a_folder_is_gone_after_the_next_attempt(tmp_path: Path) -> None:
    final = tmp_path / "run-1"
    for at in (tmp_path / ".new-run-1", final):  # died while it wrote the second version
        at.mkdir()
        (at / "kernel.py").write_text("half")
    replace_folder(final, {"kernel.py": b"whole"}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["run-1"]
    assert (final / "kernel.py").read_text() == "whole"
