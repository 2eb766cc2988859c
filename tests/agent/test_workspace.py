"""Folders that are written whole: what a kill leaves behind does not stay, and nobody else's folder is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.workspace import Place, check_writable, replace_folder
from tests.agent import crashing


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_what_a_kill_left_of_a_folder_is_gone_after_the_next_attempt(tmp_path: Path) -> None:
    final = tmp_path / "run-1"
    for at in (tmp_path / ".new-run-1", final):  # died while it wrote the second version
        at.mkdir()
        (at / "kernel.py").write_text("half")
    replace_folder(final, {"kernel.py": b"whole"}, {}, "kernel.py")
    assert [p.name for p in tmp_path.iterdir()] == ["run-1"]
    assert (final / "kernel.py").read_text() == "whole"


@pytest.mark.parametrize("there", ["papers", "file", "link"])
def test_a_folder_of_somebody_else_is_never_replaced(tmp_path: Path, there: str) -> None:
    final, home = tmp_path / "final", tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    if there == "papers":
        home.rename(final)
    elif there == "link":
        final.symlink_to(home)
    else:
        final.write_text("years of work")
    before = content(tmp_path)
    with pytest.raises(FileExistsError, match="left as it is"):
        replace_folder(final, {"record.json": b"{}"}, {}, "record.json")
    assert content(tmp_path) == before


def test_a_kill_anywhere_leaves_the_old_folder_or_the_new_one_whole(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "deep").write_text("deep")
    versions = [{"mark": f"{n}", "more": f"{n}" * 9, "tree/deep": "deep"} for n in (1, 2)]

    def write(folder: Path, n: int) -> None:
        files = {k: v.encode() for k, v in versions[n].items() if "/" not in k}
        replace_folder(folder / "final", files, {"tree": tree}, "mark")

    def second(folder: Path) -> None:
        write(folder, 1)

    first = tmp_path / "count"
    write(first, 0)
    for n in range(len(crashing.changes(second, first))):
        folder = tmp_path / f"killed-{n}"
        write(folder, 0)
        assert crashing.die_at(n, second, folder)
        there = [content(p) for p in (folder / "final", folder / ".old-final") if p.exists()]
        assert any(x in versions for x in there), n
        second(folder)
        assert content(folder / "final") == versions[1], n
        assert [p.name for p in folder.iterdir()] == ["final"], n


def test_a_place_that_takes_no_files_is_named_before_a_run_begins(tmp_path: Path) -> None:
    check_writable(Place(tmp_path / "runs.db", tmp_path / "out"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/out'$"):
        check_writable(Place(tmp_path / "runs.db", tmp_path / "file" / "out"))
