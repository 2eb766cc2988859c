"""What is shown inside a box, bubblewrap's arguments, and the folders outside: the parts that need no box to check."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sandbox.box import bwrap, paths, scratch
from sandbox.box.bwrap import Box, arguments
from tests.sandbox.box.specs import spec


def after(words: list[str], option: str) -> list[list[str]]:
    """The two words behind each occurrence of an option."""
    return [words[i + 1 : i + 3] for i, word in enumerate(words) if word == option]


def box_of(variant: str) -> list[str]:
    return arguments(
        Box(Path("/usr/bin/bwrap"), variant, 5), spec("echo"), [Path("/home/me/venv/lib")]
    )


def test_a_venv_in_a_project_shows_its_parts_and_not_the_project(tmp_path: Path) -> None:
    base, project = tmp_path / "base", tmp_path / "project"
    for folder in (base / "bin", base / "lib", project / "venv" / "bin", project / "venv" / "lib"):
        folder.mkdir(parents=True)
    (base / "bin" / "python3").write_text("")
    (project / "secret.txt").write_text("x")
    (project / "venv" / "pyvenv.cfg").write_text(f"home = {base / 'bin'}\n")
    (project / "venv" / "bin" / "python").symlink_to(base / "bin" / "python3")
    shown = paths.needed(project / "venv" / "bin" / "python", ())
    assert set(shown) == {
        project / "venv" / "bin", project / "venv" / "lib", project / "venv" / "pyvenv.cfg", base / "bin", base / "lib",
    }  # fmt: skip
    assert paths.parents(shown)[0] == Path("/tmp") or str(tmp_path).startswith(
        str(paths.parents(shown)[0])
    )
    assert all(
        p in shown[0].parents or p in base.joinpath("bin").parents for p in paths.parents(shown)
    )


def test_links_between_interpreters_are_followed_by_each_name(tmp_path: Path) -> None:
    real, alias = tmp_path / "cpython-3.11.7", tmp_path / "cpython-3.11"
    (real / "bin").mkdir(parents=True)
    (real / "lib").mkdir()
    (real / "bin" / "python3.11").write_text("")
    alias.symlink_to(real)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(alias / "bin" / "python3.11")
    shown = paths.needed(venv / "bin" / "python", ())
    assert {alias / "lib", real / "lib"} <= set(shown)


def test_the_running_interpreter_is_found() -> None:
    shown = paths.needed(Path(sys.executable), ())
    visible = [*shown, *paths.MOUNTED]
    for needed in (os.__file__, sys.executable, os.path.realpath(sys.executable)):
        assert any(Path(needed).is_relative_to(path) for path in visible), needed
    assert Path.home() not in shown and Path("/") not in shown


@pytest.mark.parametrize("variant", ["A", "B"])
def test_bwrap_unshares_everything_and_sizes_every_tmpfs(variant: str) -> None:
    words = box_of(variant)
    for option in ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--die-with-parent",
                   "--new-session", "--clearenv", "--seccomp"):  # fmt: skip
        assert option in words
    mounts = [i for i, word in enumerate(words) if word == "--tmpfs"]
    assert [words[i + 1] for i in mounts] == ["/tmp", "/box", "/dev/shm"]
    assert all(words[i - 2] == "--size" and int(words[i - 1]) > 0 for i in mounts)
    # bwrap's own root is a tmpfs without a size: it must end up read-only, and after all that is mounted on it
    assert words.index("--remount-ro") > max(mounts)
    assert ["/", "--chdir"] in after(words, "--remount-ro")
    assert "--bind" not in words and "--dev-bind" not in words


def test_variants_differ_in_the_user_namespace_and_in_capabilities() -> None:
    a, b = box_of("A"), box_of("B")
    assert {"--unshare-user", "--disable-userns"} <= set(a) and "--cap-add" not in a
    assert "--unshare-user" not in b
    assert [x[0] for x in after(b, "--cap-add")] == ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"]
    assert b.index("--cap-drop") < b.index("--cap-add")


def test_folders_above_a_bind_are_made_open_before_it() -> None:
    words = box_of("B")
    assert words.index("/home/me") < words.index("/home/me/venv/lib")
    assert words[words.index("/home/me") - 3 : words.index("/home/me")] == [
        "--perms",
        "0755",
        "--dir",
    ]


def test_a_configured_bwrap_is_the_only_candidate(tmp_path: Path) -> None:
    assert bwrap.candidates(tmp_path / "bwrap") == [tmp_path / "bwrap"]
    assert bwrap.version(tmp_path / "bwrap") == ""


def test_wiping_a_hostile_folder_leaves_what_its_links_point_to(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder.mkdir()
    (folder / "link").symlink_to(outside / "kept")
    (folder / "links").symlink_to(outside)
    os.link(outside / "kept", folder / "hard")
    os.mkfifo(folder / "fifo")
    (folder / "closed" / "below").mkdir(parents=True)
    (folder / "closed" / "below" / "file").write_text("x")
    os.chmod(folder / "closed", 0)
    scratch.wipe(str(folder))
    assert not folder.exists()
    assert (outside / "kept").read_text() == "kept"


def test_wiping_goes_deeper_than_recursion_or_a_path(tmp_path: Path) -> None:
    folder, here = tmp_path / "scratch", os.getcwd()
    folder.mkdir()
    os.chdir(folder)
    for _ in range(1300):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    scratch.wipe(str(folder))
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed_and_the_rest_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = Path(scratch.make(os.getuid()))
    (left / "below").mkdir()
    dead = left.rename(left.with_name(left.name.replace(f"-{os.getpid()}-", "-4194304-")))
    live, other = Path(scratch.make(os.getuid())), tmp_path / "kernelgen-box-1-4194304-x"
    other.mkdir()
    scratch._sweep.cache_clear()
    scratch._sweep()
    assert not dead.exists()
    assert live.is_dir() and other.is_dir()


def test_measuring_counts_and_stops_at_its_limits(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 8192)
    (tmp_path / "b").mkdir()
    for index in range(20):
        (tmp_path / "b" / str(index)).touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    size, entries = scratch.measure(str(tmp_path), 1 << 30, 1000)
    assert size >= 8192 and entries == 23
    assert scratch.measure(str(tmp_path), 1 << 30, 5)[1] == 6
    assert scratch.measure(str(tmp_path), 100, 1000)[0] > 100
