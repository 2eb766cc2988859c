"""New contents for timed buffers without drawing them anew: random signs, in place, for a whole allocation at once.

Only for float tensors whose values have both signs, so that a scale or a rate stays positive. Integers stay: they are
slots, pages and lengths that belong together.
"""

from __future__ import annotations

import torch

from sandbox.judge.arena import Arena

Masks = tuple[torch.Tensor, ...]
"""Over each of an arena's `raws`."""
MIXED = 0.2
"""Least share of each sign that makes a tensor's signs free."""
PIECE = 1 << 28
"""Elements at a time: caches of ten gigabytes have no room for a second of them."""


def free_signs(arena: Arena, prefixes: int) -> Masks | None:
    """Masks over `arena.raws` of the sign bits that may flip; None if there are none.

    Names are `<i>/<buffer>` for i below `prefixes`; what holds for the first holds for all.
    """
    mixed = {n.split("/", 1)[1] for n in arena if n.startswith("0/") and _mixed(arena[n])}
    if not mixed:
        return None
    masks = {id(raw): torch.zeros_like(raw) for raw in arena.raws}
    for i in range(prefixes):
        for name in mixed:
            slot = arena.slot(f"{i}/{name}")
            size = slot.tensor.element_size()
            # the sign is the highest bit, little-endian: of the last byte
            masks[id(slot.raw)][slot.start : slot.end].view(-1, size)[:, -1] = 0x80
    return tuple(masks[id(raw)] for raw in arena.raws)


def _mixed(t: torch.Tensor) -> bool:
    if not t.dtype.is_floating_point or not t.numel():
        return False
    negative = positive = 0
    for part in torch.split(t.reshape(-1), PIECE):
        values = part.float()
        negative += int((values < 0).sum())
        positive += int((values > 0).sum())
    return min(negative, positive) >= MIXED * t.numel()


def flip(arena: Arena, masks: Masks, seed: int) -> None:
    """Flip a random half of the free signs. Guard zones are outside the masks."""
    for raw, mask in zip(arena.raws, masks, strict=True):
        generator = torch.Generator(device=mask.device).manual_seed(seed & (2**62 - 1))
        for part, free in zip(torch.split(raw, PIECE), torch.split(mask, PIECE), strict=True):
            noise = torch.empty_like(free).random_(0, 256, generator=generator)
            part.bitwise_xor_(noise.bitwise_and_(free))
