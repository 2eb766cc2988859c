"""What is exported has no marks in it, and is the same kernel."""

from __future__ import annotations

import ast

from agent.export.marks import without
from targets.base import find
from tests.sandbox.judge.marked import SOURCE, norm_with_marks


def test_marks_go_and_everything_else_stays() -> None:
    bare = without(SOURCE)
    ast.parse(bare)
    assert "timeline" not in bare and "kernelgen" not in bare
    assert "track = None" in bare and "t.workspace.sync, None, 4).launch(" in bare
    assert [x for x in SOURCE.splitlines() if "timeline" not in x] == [
        x for x in bare.splitlines() if "None" not in x
    ]


def test_a_block_of_marks_alone_stays_a_block() -> None:
    source = "from kernelgen import timeline\n\ndef f(t):\n    if t:\n        timeline.end(t)\n    return 1\n"
    assert "    if t:\n        pass\n    return 1\n" in without(source)


def test_the_example_comes_back_and_sources_without_marks_are_untouched() -> None:
    import pathlib

    file = pathlib.Path(__file__).parents[3] / "examples" / "my_target.py"
    seed = find(f"{file}:RmsNorm").seed_source()
    assert without(seed) == seed
    bare = without(norm_with_marks(seed))
    assert (
        bare.replace(" phases,", "")
        .replace("t.outputs.y, None,", "t.outputs.y,")
        .replace("    track = None\n", "")
        == seed
    )
