"""Where a tensor is wrong, in one sentence for people and models: tensor, layer, row or head, first bad element.

It explains a failure that `sandbox.judge.checks` has found; it decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sandbox.judge.bands import Errors, Oracle

_LAYER = re.compile(r"(?:\.layers)?\.(\d+)(?:\.|$)")
_SAID = {
    "rel_l2": "relative L2 error", "max_abs": "largest error", "norm_ratio": "error of the norm",
    "cell_rel_l2": "relative L2 error of the worst row", "cell_norm_ratio": "error of the norm of the worst row",
    "gain": "error along the expected values", "cell_gain": "error along the expected values of the worst row",
}  # fmt: skip


@dataclass(frozen=True)
class Where:
    """The circumstances of a comparison. `axes`: names of the tensor's dimensions where the reference gives them."""

    seed: int
    step: int
    phase: str = "trajectory"
    axes: Mapping[str, tuple[str, ...]] | None = None

    def text(self) -> str:
        return f"{self.phase}, seed {self.seed}, step {self.step}"

    def names(self, tensor: str) -> tuple[str, ...]:
        axes = self.axes or {}
        words = [w for w in tensor.partition("@")[0].split(".") if not w.isdigit()]
        return axes.get(tensor) or axes.get(words[-1]) or ()


def layer_of(tensor: str) -> int | None:
    found = _LAYER.search(tensor)
    return int(found[1]) if found else None


def spell(index: Sequence[int], names: Sequence[str]) -> str:
    """`row 3, head 1`; dimensions without a name are `[i, j]`."""
    if len(names) >= len(index) > 0:
        return ", ".join(f"{n} {i}" for n, i in zip(names, index, strict=False))
    return f"index {list(index)}"


def outside(
    tensor: str, o: Oracle, got: torch.Tensor, found: tuple[Errors, Errors], where: Where
) -> tuple[str, dict[str, Any]]:
    """Sentence and facts for a tensor beyond its bounds. `found`: (errors, bounds)."""
    errors, bounds = found
    view = o.view(got)
    apart = (view - o.values).abs()
    apart = torch.where(torch.isfinite(view), apart, torch.full_like(apart, float("inf")))
    share = apart.square().sum(1).sqrt() / o.scale.clamp(min=1e-300)
    row = int(torch.nan_to_num(share, nan=float("inf"), posinf=1e300).argmax())
    limit = max(bounds.max_abs, 1e-300)
    at = int(apart[row].argmax())
    wrong_rows = int((share > bounds.cell_rel_l2).sum())
    gate = errors.failed(bounds)[0]
    facts: dict[str, Any] = {
        "tensor": tensor, "layer": layer_of(tensor), "seed": where.seed, "step": where.step, "phase": where.phase,
        "cell": list(o.cell(row)), "cells_wrong": wrong_rows, "cells": int(view.shape[0]), "element": at,
        "got": _plain(float(view[row, at])), "expected": float(o.values[row, at]), "gate": gate,
        "elements_beyond": int((apart > limit).sum()),
    }  # fmt: skip
    cell = o.cell(row)
    place = f" at {spell(cell, where.names(tensor))}" if cell else ""
    sentence = (
        f"{tensor}{place}: {_SAID[gate]} {getattr(errors, gate):.3g}, allowed {getattr(bounds, gate):.3g}; "
        f"element {at} is {float(view[row, at]):.6g} instead of {float(o.values[row, at]):.6g}; "
        f"{wrong_rows} of {view.shape[0]} rows are wrong ({where.text()})"
    )
    return sentence, facts


def unfinite(tensor: str, bad: torch.Tensor, where: Where) -> tuple[str, dict[str, Any]]:
    """`bad`: True where a specified element is NaN or infinite."""
    first = first_index(bad)
    sentence = (
        f"{tensor}: {int(bad.sum())} of {bad.numel()} elements are NaN or infinite (or were not written), first at "
        f"{spell(first, where.names(tensor))} ({where.text()})"
    )
    return sentence, _facts(tensor, first, where)


def touched(tensor: str, bad: torch.Tensor, where: Where) -> tuple[str, dict[str, Any]]:
    """`bad`: True where an element changed that must stay."""
    first = first_index(bad)
    sentence = (
        f"{tensor}: {int(bad.sum())} elements changed that this step must leave alone, first at "
        f"{spell(first, where.names(tensor))} ({where.text()})"
    )
    return sentence, _facts(tensor, first, where)


def unequal(
    tensor: str, got: torch.Tensor, expected: torch.Tensor, where: Where
) -> tuple[str, dict[str, Any]]:
    """Integers or copied data that differ."""
    bad = got != expected
    first = first_index(bad)
    at = tuple(first)
    sentence = (
        f"{tensor}: {int(bad.sum())} of {bad.numel()} elements differ, first at {spell(first, where.names(tensor))}: "
        f"{got[at].item()} instead of {expected[at].item()} ({where.text()})"
    )
    return sentence, _facts(tensor, first, where)


def first_index(bad: torch.Tensor) -> list[int]:
    """Index of the first True, in memory order; there is one."""
    flat = int(bad.reshape(-1).to(torch.uint8).argmax())
    out = []
    for extent in reversed(bad.shape):
        out.append(flat % extent)
        flat //= extent
    return out[::-1]


def _facts(tensor: str, first: list[int], where: Where) -> dict[str, Any]:
    return {
        "tensor": tensor, "layer": layer_of(tensor), "seed": where.seed, "step": where.step,
        "phase": where.phase, "first": first,
    }  # fmt: skip


def _plain(x: float) -> float | str:
    return x if x == x and abs(x) != float("inf") else str(x)
