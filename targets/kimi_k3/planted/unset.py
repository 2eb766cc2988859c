"""Planted kernels that read registers which nothing has written: wrong whatever a GPU happens to hold there.

On a GPU some of them come out right by luck, where what ran before left finite numbers; those are judged on cpu only.
"""

# ruff: noqa: E501  (text of the seeds, as it stands there)

from __future__ import annotations

from targets.base import Options
from targets.kimi_k3.planted.build import bug, good
from targets.planted import Planted

_ENDS = frozenset({"wrong", "flaky", "fault", "hang"})
"""How a result of chance may end."""
_LUCK = ("cpu",)
_ROWS = (
    "                    a, b = i // 2, g.chunk + i // 2\n"
    "                else:\n"
    "                    b = i + 1 if i + 1 < n else i\n"
    "                load_row(c, slot * (op.stage // 16) + a * g.vecs, rA, g)\n"
    "                load_row(c, slot * (op.stage // 16) + b * g.vecs, rB, g)\n"
)


def kernels() -> list[Planted]:
    return [
        bug("gemv", "unset", "sum-not-started", "the product's sums begin with what their registers held",
            ("    rC.fill(0.0)\n    load_weights(", "    load_weights("), expect=_ENDS),
        bug("oproj-allreduce", "unset", "addend-past-the-end", "past the last block of k an addend that was not loaded is added",
            ("    if cutlass.const_expr(plus is not None and not op.exact):\n        rPlus.fill(0)", "    if cutlass.const_expr(False):\n        rPlus.fill(0)"),
            options=Options("tiny-tp2", 3, 2), expect=_ENDS, devices=_LUCK, tunables={"ahead": False}),
        bug("attn-res", "unset", "absent-sources", "sources that are not there yet enter with weight zero and any value",
            ("    rV.fill(0.0)\n", ""), expect=_ENDS, devices=_LUCK),
        bug("mla", "unset", "tokens-past-the-end", "cache rows past the last token enter with weight zero and any value",
            ("    rK.fill(0)\n", ""), expect=_ENDS, devices=_LUCK),
        bug("latent-moe", "unset", "expert-sums-not-started", "an expert's first product begins with what its registers held",
            ("    rC.fill(0.0)\n    rCode", "    rCode"), expect=_ENDS),
        bug("persistent", "unset", "row-sums-not-started", "rows of a matrix begin their sum with what the registers held",
            (_ROWS + "                rC.fill(0.0)\n", _ROWS), expect=_ENDS),
        good("mla", "heads-past-the-end-unset", "queries of heads that do not exist hold anything, and nobody reads their results",
             ("        rQ.fill(0)\n        if block", "        if block")),
    ]  # fmt: skip
