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
    """Where and how buffers are laid out. `guard` is bytes on each side; `choose(n)` draws from 0..n-1. `devices`: of
    each rank, where there are several."""

    device: str
    guard: int
    choose: Callable[[int], int]
    seed: int
    devices: tuple[str, ...] = ()

    def of(self, b: Buffer) -> str:
        return self.devices[b.rank] if self.devices else self.device


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
    """name -> tensor. `together`: all of a rank in one allocation, so that one copy restores them all (`raws`)."""

    def __init__(
        self, buffers: Iterable[tuple[str, Buffer]], place: Place, together: bool = False
    ) -> None:
        self.place = place
        generator = torch.Generator().manual_seed(place.seed)
        noise = torch.randint(0, 256, (place.guard,), dtype=torch.uint8, generator=generator)
        self._patterns = {on: noise.to(on) for on in (place.devices or (place.device,))}
        named = tuple(buffers)
        self._slots = self._one(named) if together else self._many(named)
        for slot in self._slots.values():
            self._guards(slot)[0].copy_(self._pattern(slot))
            self._guards(slot)[1].copy_(self._pattern(slot))

    def _pattern(self, slot: Slot) -> torch.Tensor:
        """The guard bytes, where that slot lies."""
        found = self._patterns.get(str(slot.raw.device))
        return next(iter(self._patterns.values())) if found is None else found

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
    def raws(self) -> tuple[torch.Tensor, ...]:
        """The allocations of an arena made with `together`, one for each rank, guards included."""
        return tuple({id(s.raw): s.raw for s in self._slots.values()}.values())

    def broken(self) -> tuple[Broken, ...]:
        """Guard zones that no longer hold their bytes; one wait for all of a device."""
        zones = [(n, side) for n in self._slots for side in (0, 1)]
        by_device: dict[torch.device, list[tuple[str, int]]] = {}
        for n, side in zones:
            by_device.setdefault(self._slots[n].raw.device, []).append((n, side))
        bad: set[tuple[str, int]] = set()
        for mine in by_device.values():
            for first in range(0, len(mine), 512):
                some = mine[first : first + 512]
                part = torch.stack([self._zone(z) for z in some])
                odd = (part != self._pattern(self._slots[some[0][0]])).any(1)
                bad.update(some[i] for i in odd.nonzero().flatten().tolist())
        return tuple(self._describe(n, side) for n, side in zones if (n, side) in bad)

    def _zone(self, at: tuple[str, int]) -> torch.Tensor:
        return self._guards(self._slots[at[0]])[at[1]]

    def _describe(self, name: str, side: int) -> Broken:
        zone = self._zone((name, side))
        at = (zone != self._pattern(self._slots[name])).nonzero().flatten()
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
            raw = torch.empty(total, dtype=torch.uint8, device=self.place.of(b))
            out[name] = self._slot(raw, self.place.guard, b)
        return out

    def _one(self, named: tuple[tuple[str, Buffer], ...]) -> dict[str, Slot]:
        out: dict[str, Slot] = {}
        for rank in sorted({b.rank for _, b in named}):
            mine = [(n, b) for n, b in named if b.rank == rank]
            total = sum(b.nbytes + 2 * self.place.guard + 2 * PAGE for _, b in mine)
            raw = torch.zeros(total, dtype=torch.uint8, device=self.place.of(mine[0][1]))
            at = 0
            for name, b in mine:
                out[name] = self._slot(raw, at + self.place.guard, b)
                at = out[name].end + self.place.guard
        return {n: out[n] for n, _ in named}

    def _slot(self, raw: torch.Tensor, at: int, b: Buffer) -> Slot:
        """The buffer at the first page boundary of memory from `raw[at]` on, plus a random shift."""
        start = at + (-(raw.data_ptr() + at)) % PAGE + self._shift(b)
        tensor = raw[start : start + b.nbytes].view(TORCH[b.dtype]).reshape(b.shape)
        return Slot(raw, start, tensor)
