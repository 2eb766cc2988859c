"""Folders that people name for output and that hold other things are left as they are, and the error says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.export.subject import ExportRefused
from agent.export.vllm import STATE, may_write
from tests.agent.test_cli import TARGET, Call, call, optimize  # noqa: F401 (a fixture)


def content(folder: Path) -> dict[str, str]:
    return {str(p): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder of somebody's, with names that ours have too."""
    folder = tmp_path / "papers"
    (folder / "deep").mkdir(parents=True)
    for name in ("best.py", "README.md", "0001-mine.patch", "PR.md", "deep/manifest.json"):
        (folder / name).write_text("years of work")
    return folder


def test_a_record_does_not_replace_a_folder(call: Call, papers: Path) -> None:  # noqa: F811
    optimize(call, "--rounds", "1")
    before = content(papers)
    done = call("trajectory", "last", "-o", str(papers))
    assert (done.exit_code, content(papers)) == (1, before)
    assert "left as it is" in done.stderr and len(done.stderr.splitlines()) == 1
    assert call("trajectory", "last", "-o", "new").exit_code == 0
    assert call("trajectory", "last", "-o", "new").exit_code == 0  # its own is replaced


def test_an_authors_folder_does_not_write_over_files(call: Call, papers: Path) -> None:  # noqa: F811
    before = content(papers)
    asked = (
        "optimize",
        "--target",
        TARGET,
        "--device",
        "cpu",
        "--proposer",
        "external",
        "--no-wait",
    )
    done = call(*asked, "--folder", str(papers))
    assert (done.exit_code, content(papers)) == (1, before)
    assert "choose another --folder" in done.stderr.splitlines()[-1]
    assert call(*asked, "--folder", "new").exit_code == 3
    assert call("resume", "last").exit_code == 3  # into the same folder again


def test_patches_do_not_replace_patches(papers: Path, tmp_path: Path) -> None:
    before = content(papers)
    with pytest.raises(ExportRefused, match="choose another -o"):
        may_write(papers)
    assert content(papers) == before
    may_write(tmp_path / "new")
    (papers / STATE).write_text("{}")
    may_write(papers)


def test_a_file_that_is_not_there_is_a_mistake_of_the_command(call: Call, papers: Path) -> None:  # noqa: F811
    for file in ("nowhere.py", str(papers)):
        done = call("evaluate", "--target", TARGET, "--device", "cpu", file)
        assert done.exit_code == 2
        assert f"{file}: " in done.stderr.splitlines()[-1]
