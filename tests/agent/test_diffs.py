"""Strict diffs: round trip over random edits, and what must not apply."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import diffs

LINES = st.lists(
    st.sampled_from(["a", "b", "", " c", "-d", "--- e", "+f", "++ g", "@@ h"]), max_size=30
)


@given(LINES, LINES)
@settings(max_examples=300, deadline=None)
def test_a_made_diff_applies(old: list[str], new: list[str]) -> None:
    before, after = ("".join(f"{x}\n" for x in t) for t in (old, new))
    if old == new or not new or not new[-1].strip() or not old or not old[-1].strip():
        return  # a diff that ends in blank lines cannot be told from text after the diff
    assert diffs.apply(before, diffs.make(before, after)) == after


def test_wrong_line_numbers_are_forgiven_when_the_place_is_unique() -> None:
    source = "one\ntwo\nthree\nfour\n"
    assert diffs.apply(source, "@@ -9,2 +9,2 @@\n three\n-four\n+4\n") == "one\ntwo\nthree\n4\n"


@pytest.mark.parametrize(
    "diff, why",
    [
        ("", "no hunk"),
        ("@@ -1,1 +1,1 @@\n-zero\n+0\n", "expects line 1"),
        ("@@ -7,1 +7,1 @@\n-same\n+other\n", "fits at 2 places"),
        (
            "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-same\n+1\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-same\n+1\n",
            "second file",
        ),
        ("@@ -1 +1 @@\nsame\n", "neither"),
    ],
)
def test_what_does_not_fit_is_refused(diff: str, why: str) -> None:
    with pytest.raises(diffs.BadDiff, match=why):
        diffs.apply("same\nmiddle\nsame\n", diff)


def test_no_newline_marker_and_headers_are_skipped() -> None:
    diff = "diff --git a/k b/k\nindex 1..2\n--- a/k\n+++ b/k\n@@ -1 +1 @@\n-same\n\\ No newline at end of file\n+new\n"
    assert diffs.apply("same\n", diff) == "new\n"
