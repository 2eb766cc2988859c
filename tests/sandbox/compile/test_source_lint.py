"""Refusals before any worker starts, and advice that refuses nothing."""

from __future__ import annotations

import pytest

from sandbox.compile.source_lint import MAX_SOURCE_BYTES, lint

STEP = "def step(t, cfg, stream):\n    pass\n"


@pytest.mark.parametrize(
    ("source", "rule", "line"),
    [
        ("x = 1\n", "no-step", None),
        ("def step(t):\n    pass\n", "signature", 1),
        (STEP + "def broken(:\n", "syntax", 3),
        (STEP + "\0", "syntax", None),
        ("x = " + "(" * 5000 + ")" * 5000, "syntax", 1),
        (STEP + "#" * MAX_SOURCE_BYTES, "size", None),
        (STEP + "x = '\ud800'\n", "syntax", None),
    ],
)
def test_what_can_never_compile_is_refused(source: str, rule: str, line: int | None) -> None:
    refusal = lint(source).refusal
    assert refusal and refusal.rule == rule and refusal.where.get("line") == line


@pytest.mark.parametrize(
    "source",
    [
        STEP,
        "step = make()\n",
        "from seeds import step\n",
        "def step(t, cfg, stream, extra=1):\n    pass\n",
    ],
)
def test_every_form_of_step_is_accepted(source: str) -> None:
    assert lint(source).refusal is None


def test_advice_names_rule_and_line() -> None:
    source = (
        "@cute.kernel\n"
        "def k(x):\n"
        "    y = pow(x, 2)\n"
        "    z = x & 0xFFFF0000\n"
        "@cute.jit\n"
        "def step(t, cfg, stream):\n"
        "    k(t.x).launch(grid=(1, 1, 1), block=(32, 1, 1), cooperative=True, smem=4)\n"
        "    k(t.x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)\n"
    )
    advice = {(f.rule, f.where["line"]) for f in lint(source).advice}
    assert advice == {
        ("pow", 3),
        ("wide-literal", 4),
        ("stream", 7),
        ("smem", 7),
        ("min-blocks", 7),
    }
