"""Keyed checksums of device memory, computed on the device: was a buffer touched?

Sum over 64-bit words of word x secret random word, modulo 2^64. The key is drawn anew from its seed for each pass and
wiped after it, so that a kernel cannot balance its traces. Not a cryptographic hash.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_KEY_WORDS = 1 << 23


def checksums(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, int]:
    """name -> checksum; equal tensors under equal seeds have equal checksums. One wait for all of a device."""
    found: dict[str, int] = {}
    for device in dict.fromkeys(t.device for t in tensors.values()):
        mine = {n: t for n, t in tensors.items() if t.device == device}
        found |= _on_device(mine, seed, device)
    return {n: found[n] for n in tensors}


def _on_device(
    tensors: Mapping[str, torch.Tensor], seed: int, device: torch.device
) -> dict[str, int]:
    most = max(t.numel() * t.element_size() for t in tensors.values())
    key = _key(min(_KEY_WORDS, most // 8 + 1), seed, device)
    sums = torch.stack([_one(t, key) for t in tensors.values()]).tolist()
    key.zero_()
    return dict(zip(tensors, sums, strict=True))


def _key(words: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed & (2**62 - 1))
    key = torch.empty(words, dtype=torch.int64, device=device)
    return key.random_(generator=generator).bitwise_or_(1)


def _one(t: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    raw = t.reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    if whole:
        words = raw[: whole * 8].view(torch.int64)
        step = key.numel()
        for i, start in enumerate(range(0, whole, step)):
            chunk = words[start : start + step]
            # the odd factor makes the key differ from chunk to chunk
            total = total + (chunk * key[: chunk.numel()]).sum() * (2 * i + 1)
    tail = raw[whole * 8 :].to(torch.int64)
    if tail.numel():
        total = total + (tail * key[0]).sum() + tail.sum() * 0x9E3779B97F4A7C1
    return total
