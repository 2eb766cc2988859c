"""Diffs: git's own reader applies the unified ones; side by side loses no line."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from agent.review.sides import bare_lines, counts, side_by_side, unified
from tests.agent.review.staged import ATTACK, BETTER, SEED

PAIRS = [
    (SEED, BETTER), (SEED, ATTACK), ("a\nb", "a\nb\n"), ("", "new\n"), ("gone\n", ""),
    ("\n".join(f"line {i}" for i in range(60)), "\n".join(f"line {i}" if i != 30 else "x" for i in range(60))),
    ("a\x0cb\u2028c\r\n", "a\x0cb\u2028d\r\n"), ("-- a\n+++ b/x\n", "--- a/x\n++ b\n"),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_git_applies_the_unified_diff(pair: tuple[str, str], tmp_path: Path) -> None:
    old, new = pair
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "k.py").write_bytes(old.encode())
    diff = unified(("k.py", old), ("k.py", new))
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], cwd=tmp_path, input=diff.encode(),
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode() + diff
    assert (tmp_path / "k.py").read_bytes() == new.encode()


@pytest.mark.parametrize("pair", PAIRS)
def test_side_by_side_shows_every_changed_line_once(pair: tuple[str, str]) -> None:
    old, new = pair
    rows = side_by_side(old, new, context=2)
    skipped = sum(r.count for r in rows)
    left = [r.left for r in rows if r.left is not None]
    right = [r.right for r in rows if r.right is not None]
    if bare_lines(old) == bare_lines(new):
        assert rows == []
        return
    assert len(left) + skipped == len(bare_lines(old))
    assert len(right) + skipped == len(bare_lines(new))
    for r in rows:
        if r.left_no is not None:
            assert bare_lines(old)[r.left_no - 1] == r.left
        if r.right_no is not None:
            assert bare_lines(new)[r.right_no - 1] == r.right
        assert (r.kind == "same") == (r.left is not None and r.left == r.right)


def test_a_source_of_blank_lines_does_not_keep_the_reviewer_waiting() -> None:
    blank = "\n" * 6000
    began = time.perf_counter()
    rows = side_by_side(blank + "a" + blank, blank + "b")
    assert rows and time.perf_counter() - began < 15


def test_equal_texts_have_no_diff_and_counts_ignore_headers() -> None:
    assert unified(("a", "x\n"), ("b", "x\n")) == ""
    diff = unified(("k.py", "a\nb\n"), ("k.py", "a\nc\nd\n"))
    assert diff.startswith("diff --git a/k.py b/k.py\n--- a/k.py\n+++ b/k.py\n@@ ")
    assert counts(diff) == (2, 1)
