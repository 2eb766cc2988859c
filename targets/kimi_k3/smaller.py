"""Smaller versions of a failing problem, smallest first: one request alone, and as short as may be.

Shapes are the artifact's and stay; other requests become padding, other rows zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from targets.base import Workload
from targets.kimi_k3.disturb import Draft
from targets.kimi_k3.held_out import padding, set_lengths
from targets.reference import Tensors

MOST = 8


def cases(w: Workload, tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    """What is left and the tensors, at most MOST of them. Nothing where there is one request of one length only."""
    paged = "inputs.lengths" in tensors
    requests = w.rows // max(1, w.q) if w.rows >= w.q else w.rows
    requests = tensors["inputs.lengths"].shape[0] if paged else requests
    lengths: list[int | None] = [1, int(w.dims["page"]) + 1, None] if paged else [None]
    count = 0
    for length in lengths:
        for b in range(min(requests, 4)):
            if (length is None and requests == 1) or count == MOST:
                continue
            count += 1
            yield _label(b, length, requests), _one(w, tensors, b, length)


def _label(b: int, length: int | None, requests: int) -> str:
    who = f"request {b} alone" if requests > 1 else "the request"
    return who if length is None else f"{who}, length {length}"


def _one(w: Workload, tensors: Tensors, b: int, length: int | None) -> Tensors:
    d = Draft(w, 0, tensors)
    if length is not None:
        set_lengths(d, lambda at, page, most: length if at == b else most)
    if "inputs.lengths" in d.t or d.has("slots"):
        count = d.t["inputs.lengths" if "inputs.lengths" in d.t else d.names("slots")[0]].shape[0]
        for other in range(count):
            if other != b:
                padding(d, other)
    for name in d.activations():
        x = d.edit(name)
        if x.dim() > 1:
            kept = x[..., b * d.q : (b + 1) * d.q, :].clone()
            x.zero_()
            x[..., b * d.q : (b + 1) * d.q, :] = kept
    return d.t
