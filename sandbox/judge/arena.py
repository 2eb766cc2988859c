"""Device memory of a judgement: every buffer between two guard zones, at a random multiple of its alignment.

Guards hold random bytes and are compared after launches; a read across the border yields garbage, a write is found. The
arena does not stop a kernel from roaming further: `sandbox.judge.digest` watches what lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from sandbox.artifact import Buffer
from sandbox.judge.dtypes import TORCH

PAGE = 4096
MIN_ALIGN = 16


@dataclass(frozen=True)
class Place:
    """Where and how buffers are laid out. `guard` is bytes on each side; `choose(n)` draws from 0..n-1."""

    device: str
    guard: int
    choose: Callable[[int], int]
    seed: int


@dataclass(frozen=True)
class Slot:
    raw: torch.Tensor
    start: int
    tensor: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class Broken:
    """A guard zone that was written: bytes from the buffer's edge, negative before its start."""

    buffer: str
    offset: int


class Arena(Mapping[str, torch.Tensor]):
    """name -> tensor. `together`: all in one allocation, so that one copy restores them all (`raw`)."""

    def __init__(
        self, buffers: Iterable[tuple[str, Buffer]], place: Place, together: bool = False
    ) -> None:
        self.place = place
        generator = torch.Generator().manual_seed(place.seed)
        noise = torch.randint(0, 256, (place.guard,), dtype=torch.uint8, generator=generator)
        self._pattern = noise.to(place.device)
        named = tuple(buffers)
        self._slots = self._one(named) if together else self._many(named)
        for slot in self._slots.values():
            self._guards(slot)[0].copy_(self._pattern)
            self._guards(slot)[1].copy_(self._pattern)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._slots[name].tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, name: str) -> Slot:
        """Where a buffer lies in its allocation."""
        return self._slots[name]

    @property
    def raw(self) -> torch.Tensor:
        """The single allocation of an arena made with `together`, guards included; empty without buffers."""
        raws = {id(s.raw): s.raw for s in self._slots.values()}
        if not raws:
            return torch.empty(0, dtype=torch.uint8, device=self.place.device)
        (raw,) = raws.values()
        return raw

    def broken(self) -> tuple[Broken, ...]:
        """Guard zones that no longer hold their bytes; one wait for all."""
        if not self._slots:
            return ()
        zones = [z for slot in self._slots.values() for z in self._guards(slot)]
        bad: list[int] = []
        for first in range(0, len(zones), 512):
            part = torch.stack(zones[first : first + 512])
            bad += [first + i for i in (part != self._pattern).any(1).nonzero().flatten().tolist()]
        names = list(self._slots)
        return tuple(self._describe(names[i // 2], i % 2, zones[i]) for i in bad)

    def _describe(self, name: str, side: int, zone: torch.Tensor) -> Broken:
        at = (zone != self._pattern).nonzero().flatten()
        offset = int(at[-1]) - self.place.guard if side == 0 else int(at[0])
        return Broken(name, offset)

    def _guards(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        g = self.place.guard
        return slot.raw[slot.start - g : slot.start], slot.raw[slot.end : slot.end + g]

    def _shift(self, b: Buffer) -> int:
        align = max(b.align, MIN_ALIGN)
        return align * self.place.choose(max(1, PAGE // align))

    def _many(self, named: tuple[tuple[str, Buffer], ...]) -> dict[str, Slot]:
        out = {}
        for name, b in named:
            total = b.nbytes + 2 * self.place.guard + 2 * PAGE
            raw = torch.empty(total, dtype=torch.uint8, device=self.place.device)
            out[name] = self._slot(raw, self.place.guard, b)
        return out

    def _one(self, named: tuple[tuple[str, Buffer], ...]) -> dict[str, Slot]:
        total = sum(b.nbytes + 2 * self.place.guard + 2 * PAGE for _, b in named)
        raw = torch.zeros(max(total, 1), dtype=torch.uint8, device=self.place.device)
        out: dict[str, Slot] = {}
        at = 0
        for name, b in named:
            out[name] = self._slot(raw, at + self.place.guard, b)
            at = out[name].end + self.place.guard
        return out

    def _slot(self, raw: torch.Tensor, at: int, b: Buffer) -> Slot:
        """The buffer at the first page boundary of memory from `raw[at]` on, plus a random shift."""
        start = at + (-(raw.data_ptr() + at)) % PAGE + self._shift(b)
        tensor = raw[start : start + b.nbytes].view(TORCH[b.dtype]).reshape(b.shape)
        return Slot(raw, start, tensor)
