"""Unusual but lawful values: each function changes a few tensors of a copy, so that rare paths and limits are run.

Those that change weights need the candidate's `prepare` run again. All results stay finite in a correct kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3.generate import cache_rows, generator
from targets.reference import Tensors

COMMON = 128.0
"""Of keys that have a standard deviation of 1: it moves a head's scores by 150, one standard deviation over heads (2 of
a query, times the root of the 64 positional of 192 dimensions)."""
NARROW_COMMON = 64.0
"""The same in units of an E4M3 cache's scale: less, since products of that type are summed in 14 bits on a GPU."""


class Draft:
    """A shallow copy of all tensors; `edit` copies one before it is changed."""

    def __init__(self, w: Workload, seed: int, tensors: Tensors) -> None:
        self.w, self.seed, self.q = w, seed, w.q
        self.t = dict(tensors)

    def names(self, *leaves: str) -> list[str]:
        return [n for n in self.t if n.rsplit(".", 1)[-1] in leaves]

    def activations(self) -> list[str]:
        """x0, x.N, delta, delta.N, partial.N, bank: what enters from outside, not from other ranks."""
        heads = ("inputs.x0", "inputs.x.", "inputs.delta", "inputs.partial", "inputs.bank")
        return [n for n in self.t if n.startswith(heads)]

    def edit(self, name: str) -> Tensor:
        self.t[name] = self.t[name].clone()
        return self.t[name]

    def has(self, leaf: str) -> bool:
        return bool(self.names(leaf))

    def random(self, shape: tuple[int, ...], name: str) -> Tensor:
        return torch.randn(shape, generator=generator(self.seed, f"disturb.{name}", "cpu"))


def _scale(factor: float) -> Callable[[Draft], None]:
    def change(d: Draft) -> None:
        for name in d.activations():
            d.edit(name).mul_(factor)

    return change


def _spike(d: Draft) -> None:
    """One element of each row is 100, elsewhere for every row."""
    for name in d.activations():
        x = d.edit(name)
        at = d.random(tuple(x.shape), name).argmax(-1, keepdim=True).to(x.device)
        x.scatter_(-1, at, 100.0)


def _constant(d: Draft) -> None:
    for name in d.activations():
        x = d.edit(name)
        x.copy_(x[..., :1].expand_as(x).clone())


def _equal_sign(d: Draft) -> None:
    for name in d.activations():
        d.edit(name).abs_()


def _heavy_tails(d: Draft) -> None:
    """Cubes of normals: a few elements carry a row."""
    for name in d.activations():
        d.edit(name).pow_(3)


def _router_ties(d: Draft) -> None:
    """Experts 2j and 2j + 1 have equal router rows and biases: the lower id must come first."""
    for name in d.names("router"):
        router = d.edit(name)
        router[1::2] = router[0::2]
    for name in d.names("router_bias"):
        bias = d.edit(name)
        bias[1::2] = bias[0::2]


def _one_choice(d: Draft) -> None:
    """All rows choose the same experts, the first and the last among them."""
    experts, topk = int(d.w.dims["experts"]), int(d.w.dims["topk"])
    for name in d.names("router_bias"):
        middle = 1 + d.random((experts - 2,), name).argsort()[: topk - 2]
        chosen = torch.cat([torch.tensor([0, experts - 1]), middle])
        d.edit(name)[chosen] += 10.0


def _null_request(d: Draft) -> None:
    """Request 0 is padding: null slots (id 0, or -1), length 0, nothing inserted; the other ranks send it zeros too."""
    for name in d.names("slots"):
        d.edit(name)[0] = -(d.seed % 2)
    for name in d.names("lengths"):
        d.edit(name)[0] = 0
    for name in d.names("slot_mapping"):
        d.edit(name)[: d.q] = -1
    for name in d.names("attn"):
        d.edit(name)[: d.q] = 0


def _null_store(d: Draft) -> None:
    """The last request keeps no state of its last token, unless it starts from that slot."""
    accepted = d.t["inputs.accepted"]
    slots = d.edit("inputs.slots")
    if int(accepted[-1]) == d.q:
        d.edit("inputs.accepted")[-1] = d.q - 1
    slots[-1, -1] = -1


def _accepted(d: Draft) -> None:
    """One token was kept of every other request, all of the others."""
    accepted = d.edit("inputs.accepted")
    for b in range(accepted.shape[0]):
        accepted[b] = 1 if (b + d.seed) % 2 else d.q


def _no_insert(d: Draft) -> None:
    """The last request's last new row is not inserted: attention sees what the cache holds there."""
    for name in d.names("slot_mapping"):
        d.edit(name)[-1] = -1


def _short(d: Draft) -> None:
    """Lengths 1, page - 1, page, page + 1, ... as far as the context allows."""
    page, most = int(d.w.dims["page"]), int(d.w.dims["context"])
    lengths = d.edit("inputs.lengths")
    for m in range(lengths.shape[0]):
        lengths[m] = min(max((1, page - 1, page, page + 1)[(m + d.seed) % 4], d.q), most)
    table = d.t["inputs.block_table"]
    d.t["inputs.slot_mapping"] = cache_rows(table, lengths, (page, d.q))


def _stale_cache(d: Draft) -> None:
    """Cache rows that no request sees hold large values."""
    seen = torch.zeros(int(d.w.dims["pages"]) * int(d.w.dims["page"]), dtype=torch.bool)
    table, lengths = d.t["inputs.block_table"].cpu().long(), d.t["inputs.lengths"].cpu()
    page = int(d.w.dims["page"])
    for m in range(lengths.shape[0]):
        t = torch.arange(int(lengths[m]))
        seen[table[m][t // page] * page + t % page] = True
    for name in d.names("kv"):
        kv = d.edit(name)
        narrow = kv.element_size() == 1
        huge = torch.tensor(448.0 if narrow else 1000.0, device=kv.device).to(kv.dtype)
        bits = torch.uint8 if narrow else torch.int16  # torch fills no E4M3 through a mask
        kv.view(-1, kv.shape[-1]).view(bits)[~seen.to(kv.device)] = huge.view(bits)


def _shared_keys(d: Draft) -> None:
    """The positional keys of a request's cache rows have a large part in common, and no row without it is inserted: all
    scores of a head are the same hundred or two away from 0, where exp() overflows or vanishes, and weights stay as
    they were. It is not in the latents, so values stay in scale."""
    table, latent = d.t["inputs.block_table"].long(), int(d.w.dims["kv_lora"])
    for name in d.names("kv"):
        kv = d.edit(name)
        narrow = kv.element_size() == 1
        bits = kv.view(torch.uint8 if narrow else torch.int16)
        signs = d.random((table.shape[0], kv.shape[-1] - latent), name).sign().to(kv.device)
        for pages, common in zip(
            table.to(kv.device), (NARROW_COMMON if narrow else COMMON) * signs, strict=True
        ):
            keys = bits[pages, :, latent:].view(kv.dtype).float() + common
            bits[pages, :, latent:] = keys.to(kv.dtype).view(bits.dtype)
    d.edit("inputs.slot_mapping").fill_(-1)


def _saturated(d: Draft) -> None:
    """Queries of one layer six times as large: its softmax picks a few tokens. In a chain of such layers every rounding
    would be blown up by each, until right kernels differ by a sixth."""
    names = d.names("q_b")
    d.edit(names[d.seed % len(names)]).mul_(6)


def _decay(d: Draft) -> None:
    """Half of the key channels forget at the bound, the others keep everything."""
    for name in d.names("dt_bias"):
        bias = d.edit(name)
        bias[0::2] += 30.0
        bias[1::2] -= 30.0


def _beta(d: Draft) -> None:
    """Write strengths of one layer at 0 and 1: their logits are forty times as large, and with them every rounding of
    what comes into that layer. With all layers like that, right results were beyond the band in one case of 16."""
    wide, rank = int(d.w.dims["kda_dim"]), int(d.w.dims["f_rank"])
    first = 3 * wide if d.w.dims["gate_rank"] else 4 * wide + rank
    names = d.names("in_proj")
    d.edit(names[d.seed % len(names)])[first : first + int(d.w.dims["kda_heads"])].mul_(40)


def _faint(d: Draft) -> None:
    """Queries and keys so small that the epsilon of their L2 norm counts."""
    wide = 2 * int(d.w.dims["kda_dim"])
    for name in d.names("in_proj"):
        d.edit(name)[:wide].mul_(2.0**-10)
    for name in d.names("conv"):
        if name.startswith("states."):
            d.edit(name)[..., :wide].mul_(2.0**-10)


_ALL: dict[str, tuple[str, Callable[[Draft], None]]] = {
    "large": ("", _scale(30.0)), "small": ("", _scale(0.01)), "spike": ("", _spike), "constant": ("", _constant),
    "equal_sign": ("", _equal_sign), "heavy_tails": ("", _heavy_tails),
    "router_ties": ("router", _router_ties), "one_choice": ("router", _one_choice),
    "null_request": ("slots lengths", _null_request), "no_insert": ("lengths", _no_insert),
    "short": ("lengths", _short), "stale_cache": ("lengths", _stale_cache), "saturated": ("lengths", _saturated),
    "shared_keys": ("kv", _shared_keys),
    "null_store": ("accepted", _null_store), "accepted": ("accepted", _accepted),
    "decay": ("slots", _decay), "beta": ("slots", _beta), "faint": ("slots", _faint),
}  # fmt: skip


def names(w: Workload) -> tuple[str, ...]:
    """Those that say something about this workload."""
    leaves = {b.name.rsplit(".", 1)[-1] for b in w.buffers}
    return tuple(n for n, (needs, _) in _ALL.items() if not needs or leaves & set(needs.split()))


def apply(w: Workload, name: str, seed: int, tensors: Tensors) -> Tensors:
    draft = Draft(w, seed, tensors)
    _ALL[name][1](draft)
    return draft.t
