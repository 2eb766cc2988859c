"""Cases that no proposer is told of: the judge runs them at promotion and says pass or fail and the kind of fault.

Written as `disturb` is, over the same `Draft`. All are lawful: a correct kernel stays inside its noise band.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from targets.base import Workload
from targets.kimi_k3.disturb import Draft
from targets.kimi_k3.generate import cache_rows
from targets.reference import Tensors

SUBNORMAL = 2.0**-130
HOT_ROW = 30.0
SWAYED = 10.0


def set_lengths(d: Draft, wanted: Callable[[int, int, int], int]) -> None:
    """lengths[b] = wanted(b, page, most), held between the tokens of a step and the context."""
    page, most = int(d.w.dims["page"]), int(d.w.dims["context"])
    lengths = d.edit("inputs.lengths")
    for b in range(lengths.shape[0]):
        lengths[b] = min(max(wanted(b, page, most), d.q), most)
    table = d.t["inputs.block_table"]
    d.t["inputs.slot_mapping"] = cache_rows(table, lengths, (page, d.q))


def _length_one(d: Draft) -> None:
    set_lengths(d, lambda b, page, most: 1)


def _page_edges(d: Draft) -> None:
    """One before, at and one behind some page's end, another page for each request."""

    def at(b: int, page: int, most: int) -> int:
        pages = max(1, most // page)
        return page * (1 + (d.seed + 7 * b) % pages) + (b + d.seed) % 3 - 1

    set_lengths(d, at)


def _ragged(d: Draft) -> None:
    """Any length, and every third request is padding."""
    drawn = d.random((d.t["inputs.lengths"].shape[0],), "ragged").abs()
    set_lengths(d, lambda b, page, most: 1 + int(float(drawn[b]) * most) % most)
    for b in range(1 + d.seed % 2, drawn.shape[0], 3):
        padding(d, b)


def padding(d: Draft, b: int) -> None:
    """Request b has null slots (any id from 0 downwards), no length, nothing to insert, and zeros from the others."""
    tokens = slice(b * d.q, (b + 1) * d.q)
    for name in d.names("slots"):
        d.edit(name)[b] = -((b + d.seed) % 3)
    for name in d.names("lengths"):
        d.edit(name)[b] = 0
    for name in d.names("slot_mapping"):
        d.edit(name)[tokens] = -1
    for name in d.names("attn"):
        d.edit(name)[tokens] = 0


def _hot_page(d: Draft) -> None:
    """All requests begin with one page, as after a shared prompt. No step writes there."""
    page, lengths = int(d.w.dims["page"]), d.t["inputs.lengths"]
    if int(lengths.min()) <= page + d.q:
        return
    d.edit("inputs.block_table")[:, 0] = d.t["inputs.block_table"][0, 0].clone()


def _hot_row(d: Draft) -> None:
    """One old cache row of each request is thirty times as large: it takes the softmax of half of the heads."""
    page = int(d.w.dims["page"])
    table, lengths = d.t["inputs.block_table"].cpu().long(), d.t["inputs.lengths"].cpu()
    where = d.random((lengths.shape[0],), "hot row").abs()
    for name in d.names("kv"):
        kv = d.edit(name)
        rows = kv.view(-1, kv.shape[-1])
        for b in range(lengths.shape[0]):
            old = int(lengths[b]) - d.q
            if old < 1:
                continue
            at = int(float(where[b]) * old) % old
            row = int(table[b][at // page]) * page + at % page
            rows[row] = (rows[row].float() * HOT_ROW).to(rows.dtype)


def _near_ties(d: Draft) -> None:
    """Experts 2j and 2j + 1 differ by one rounding step of one weight: either may be chosen, but no third."""
    for name in d.names("router"):
        router = d.edit(name)
        router[1::2] = router[0::2]
        column = d.seed % router.shape[1]
        router[1::2, column] *= 1 + 2.0**-7
    for name in d.names("router_bias"):
        bias = d.edit(name)
        bias[1::2] = bias[0::2]


def _one_expert(d: Draft) -> None:
    """One expert is every token's first choice; it is twice as large as usual where its scales are powers of two."""
    expert = d.seed % int(d.w.dims["experts"])
    for name in d.names("router_bias"):
        d.edit(name)[expert] += SWAYED
    for name in d.names("w1_scale"):
        if d.t[name].dtype == torch.uint8:
            d.edit(name)[expert] += 1


def _equal_rows(d: Draft) -> None:
    """Tokens in pairs with the same activations, so that their experts repeat."""
    for name in d.activations():
        x = d.edit(name)
        m = x.shape[-2] // 2
        if x.dim() > 1 and m:
            x[..., 1 : 2 * m : 2, :] = x[..., 0 : 2 * m : 2, :].clone()


def _subnormal(d: Draft) -> None:
    """Every other activation, and a quarter of the recurrent state, is below the smallest normal number."""
    for name in d.activations():
        d.edit(name)[..., 1::2] *= SUBNORMAL
    for name in d.names("S"):
        d.edit(name)[..., ::4] *= SUBNORMAL


def _zero_row(d: Draft) -> None:
    """Nothing at all comes in for one token."""
    for name in d.activations():
        x = d.edit(name)
        if x.dim() > 1:
            x[..., d.seed % x.shape[-2], :] = 0


def _row_scales(d: Draft) -> None:
    """Each token at a scale of its own, from 1/64 to 64."""
    for name in d.activations():
        x = d.edit(name)
        for m in range(x.shape[-2] if x.dim() > 1 else 0):
            x[..., m, :] *= 2.0 ** ((5 * m + d.seed) % 13 - 6)


def _one_channel(d: Draft) -> None:
    """One output channel of each matrix of bf16 is eight times as large."""
    for name in [n for n in d.t if n.startswith("weights.")]:
        w = d.t[name]
        if w.dtype == torch.bfloat16 and w.dim() == 2 and not name.endswith("router"):
            d.edit(name)[d.seed % w.shape[0]] *= 8.0


_ALL: dict[str, tuple[str, Callable[[Draft], None]]] = {
    "length_one": ("lengths", _length_one), "page_edges": ("lengths", _page_edges), "ragged": ("lengths", _ragged),
    "hot_page": ("block_table", _hot_page), "hot_row": ("kv", _hot_row), "near_ties": ("router", _near_ties),
    "one_expert": ("router_bias", _one_expert), "equal_rows": ("", _equal_rows), "subnormal": ("", _subnormal),
    "zero_row": ("", _zero_row), "row_scales": ("", _row_scales), "one_channel": ("", _one_channel),
}  # fmt: skip


def names(w: Workload) -> tuple[str, ...]:
    """Those that say something about this workload, prefixed so that they never meet a public name."""
    leaves = {b.name.rsplit(".", 1)[-1] for b in w.buffers}
    return tuple(f"held-out.{n}" for n, (needs, _) in _ALL.items() if not needs or needs in leaves)


def apply(w: Workload, name: str, seed: int, tensors: Tensors) -> Tensors:
    draft = Draft(w, seed, tensors)
    _ALL[name.removeprefix("held-out.")][1](draft)
    return draft.t
