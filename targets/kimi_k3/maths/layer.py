"""The tensors of one layer, by the last part of their buffer names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from targets.kimi_k3.maths.exchange import Exchange, Loopback


@dataclass(frozen=True)
class Layer:
    """`peers`: real ranks; without them the others' contributions are in `remote`."""

    weights: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    remote: Mapping[str, Tensor]
    peers: Exchange | None = None

    @property
    def exchange(self) -> Exchange:
        return self.peers if self.peers is not None else Loopback(self.remote)


def layer_of(tensors: Mapping[str, Tensor], n: int) -> Layer:
    """Layer (or instance) n of the run."""
    return Layer(
        _under(tensors, f"weights.layers.{n}."),
        _under(tensors, f"states.layers.{n}."),
        _under(tensors, f"inputs.remote.layers.{n}."),
    )


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
