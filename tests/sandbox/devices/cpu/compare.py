"""Whether the GPU and the cpu device left the same bytes, and by how much values differ where they may.

Bit for bit unless the PTX has an approximate function or a floating-point mma: then within `BOUNDS`. Quiet NaNs of any
payload are one value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Relative errors of the PTX manual (sin, cos: absolute). Two implementations may lie on either side of the true value,
# so twice the bound is allowed between them. Sums inside an mma are truncated by the hardware, in f32 with three extra
# bits or fewer, in an order of its own: the bound is of the largest value of the result.
BOUNDS = {
    "ex2.approx": 2.0**-22, "lg2.approx": 2.0**-21, "rcp.approx": 2.0**-23, "rsqrt.approx": 2.0**-22.4,
    "sqrt.approx": 2.0**-22.4, "div.approx": 2.0**-22, "div.full": 2.0**-22, "sin.approx": 2.0**-20.5,
    "cos.approx": 2.0**-20.5, "tanh.approx": 2.0**-10.9, "mma": 2.0**-12,
}  # fmt: skip
ABSOLUTE = ("sin.approx", "cos.approx", "lg2.approx", "mma")
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
_MMA = re.compile(r"\bmma\.sync\.[a-z0-9_.]*\.(f16|f32|f64)\b")


@dataclass(frozen=True)
class Row:
    """One comparison. `error`: largest relative error (absolute where the bound is), of `bound`."""

    what: str
    elements: int
    different: int
    error: float
    bound: float
    rule: str

    @property
    def good(self) -> bool:
        return self.different == 0 or self.error <= self.bound


def rules_of(text: str) -> list[str]:
    """Which bounds a text of PTX calls for."""
    found = [r for r in BOUNDS if r != "mma" and re.search(rf"\b{re.escape(r)}\b", text)]
    return found + (["mma"] if _MMA.search(text) else [])


def compare(what: str, here: torch.Tensor, there: torch.Tensor, rules: Sequence[str]) -> Row:
    """Bytes of one buffer of one dtype, under the loosest of the rules."""
    a, b = here.reshape(-1), there.reshape(-1)
    unequal = a.view(torch.uint8).view(a.numel(), -1) != b.view(torch.uint8).view(a.numel(), -1)
    bad = unequal.any(1)
    if a.dtype.is_floating_point:
        bad &= ~(a.isnan() & b.isnan())
    count = int(bad.sum())
    rule = max(rules, key=lambda r: BOUNDS[r], default="")
    bound = 2 * BOUNDS[rule] if rule else 0.0
    if count == 0 or not a.dtype.is_floating_point:
        return Row(
            what, a.numel(), count, 0.0 if count == 0 else float("inf"), bound, rule or "exact"
        )
    x, y = a[bad].double(), b[bad].double()
    gap = (x - y).abs()
    if rule == "mma":
        gap = gap / a.double().nan_to_num(0, 0, 0).abs().max()
    elif rule not in ABSOLUTE or rule == "lg2.approx":
        # lg2: relative outside, absolute inside (0.5, 2): the smaller of the two counts
        relative = gap / torch.maximum(x.abs(), y.abs())
        gap = torch.minimum(gap, relative) if rule == "lg2.approx" else relative
    return Row(
        what, a.numel(), count, float(gap.nan_to_num(float("inf")).max()), bound, rule or "exact"
    )


def split_labels(labels: Sequence[str], here: torch.Tensor, there: torch.Tensor) -> list[Row]:
    """A table of instructions: equal parts of 64-bit words, one instruction each; 32-bit floats where it says so."""
    rows = []
    for label, a, b in zip(labels, here.chunk(len(labels)), there.chunk(len(labels)), strict=True):
        if re.search(r"\.f32 *%ro|\.f32 .*%ro", label) and "%rdo" not in label:
            a, b = (t.view(torch.int32)[::2].contiguous().view(torch.float32) for t in (a, b))
        rows.append(compare(label.strip(), a, b, rules_of(label)))
    return rows
