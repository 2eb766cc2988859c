"""What the mathematics asks of other ranks. `Loopback` is one rank alone: the others' contributions are inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from targets.kimi_k3.maths.precision import bf


class Exchange(Protocol):
    """The collectives of one layer, named as their buffers are (`targets.kimi_k3.buffers`). Partials are BF16 values in
    the working dtype."""

    def all_reduce(self, name: str, partial: Tensor) -> Tensor:
        """The sum over the ranks, in rank order, rounded once to BF16; on one rank the partial itself."""
        ...

    def all_gather(self, name: str, own: Tensor) -> Tensor:
        """The columns of all ranks in rank order."""
        ...

    def reduce_scatter(
        self, name: str, partial: Tensor, width: int
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's `width` columns of the sum, rounded once, and what was sent to others (None on one rank)."""
        ...


@dataclass(frozen=True)
class Loopback:
    """Rank 0 alone. Reductions read the FP32 sum of the other ranks' partials, gathers their columns. A name that is
    not in `remote` has nobody to exchange with."""

    remote: Mapping[str, Tensor]

    def all_reduce(self, name: str, partial: Tensor) -> Tensor:
        return bf(partial + self.remote[name].to(partial.dtype)) if name in self.remote else partial

    def all_gather(self, name: str, own: Tensor) -> Tensor:
        found = self.remote.get(name)
        return own if found is None else torch.cat([own, found.to(own.dtype)], -1)

    def reduce_scatter(
        self, name: str, partial: Tensor, width: int
    ) -> tuple[Tensor, Tensor | None]:
        send = partial[:, width:] if width < partial.shape[-1] else None
        return self.all_reduce(name, partial[:, :width]), send
