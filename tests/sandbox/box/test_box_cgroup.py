"""Groups: made with their limits where this machine grants them, and gone with their box."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import box
from sandbox.box import cgroup

MB = 1 << 20


@pytest.fixture
def groups() -> cgroup.Groups:
    made = cgroup.make(box.Limits(memory=123 * MB, processes=45))
    if not made.folders:
        pytest.skip("no group can be made here")
    return made


def test_limits_are_what_was_asked_for(groups: cgroup.Groups) -> None:
    text = {path.name: path.read_text().strip() for f in groups.folders for path in f.iterdir() if "max" in path.name
            or path.name == "memory.limit_in_bytes"}  # fmt: skip
    if groups.memory == "cgroup v2":
        assert text["memory.max"] == str(123 * MB) and text["pids.max"] == "45"
    elif groups.memory == "cgroup v1":
        assert text["memory.limit_in_bytes"] == str(123 * MB)
    groups.remove()


def test_removed_groups_leave_no_folder(groups: cgroup.Groups) -> None:
    folders = list(groups.folders)
    groups.remove()
    assert not [folder for folder in folders if folder.exists()]
    assert groups.members() == [] and not groups.out_of_memory()


def test_groups_of_a_killed_process_are_swept(groups: cgroup.Groups) -> None:
    place = groups.folders[0].parent
    stale = place / f"{cgroup.PREFIX}4194304-0"
    stale.mkdir()
    cgroup._sweep.cache_clear()
    cgroup._sweep(place)
    assert not stale.exists()
    assert groups.folders[0].exists()
    groups.remove()


def test_without_any_grant_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_make", lambda folder: None)
    made = cgroup.make(box.Limits())
    assert made.folders == [] and made.memory == "" and made.entries == []


def test_paths_of_a_hierarchy_that_is_mounted_below_its_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container sees its group as the mount's root: the group's path must not be added twice."""
    files = {
        "/proc/self/cgroup": "0::/docker/abc/job\n",
        "/proc/self/mountinfo": f"30 1 0:26 /docker/abc {tmp_path} rw - cgroup2 cgroup rw\n",
    }
    monkeypatch.setattr(cgroup, "_read", lambda path: files.get(str(path), ""))
    assert cgroup._places("") == [tmp_path / "job", tmp_path]
