"""Launches of the routed experts with pairs grouped by expert (`kernels.grouped`): group, first half, second half, sum.

Which way of the experts a plan takes is decided in `routed`; which tiles this one has, `Launcher.chosen`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from targets.kimi_k3.baseline import tiles
from targets.kimi_k3.baseline.kernels import grouped
from targets.kimi_k3.baseline.tiles import PAIRS, Tile, power
from targets.kimi_k3.maths.layer import Layer

if TYPE_CHECKING:
    from targets.kimi_k3.baseline.launcher import Launcher
    from targets.kimi_k3.baseline.routed import Routed

Launch = Callable[[], None]
LEAST = 16
"""Words of a step: what tensor cores multiply at a time."""


class GroupedExperts:
    """Launches of a `Launcher`, in the order of its methods; scratch is shared by all layers."""

    def __init__(self, maker: Launcher) -> None:
        self.maker = maker

    def __call__(
        self, layer: Layer, r: Routed, drawn: Callable[[], Routed]
    ) -> tuple[list[Launch], list[Launch]]:
        """Up to the first half's values, and from there on. Tiles are tried on `drawn` operands."""
        make = self.maker

        def up(t: Tile) -> list[Launch]:
            return [self._group(drawn()), self._up(layer, t)]

        first = make.chosen("grouped_up", tiles.tried("grouped_up", make.mp), up, self._hidden())

        def down(t: Tile) -> list[Launch]:
            return [*up(first), self._down(layer, t)]

        second = make.chosen(
            "grouped_down", tiles.tried("grouped_down", make.mp), down, self._outputs()
        )
        return (
            [self._group(r), self._up(layer, first)],
            [self._down(layer, second), self._combine(layer, r)],
        )

    def _table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tasks, how many pairs each expert has, and which."""
        make, s = self.maker, self.maker.shape.sizes
        sizes = {"tasks": (1 + make.m * s.topk,), "count": (s.experts,), "members": (s.experts, make.m)}  # fmt: skip
        made = [make.buffer(f"expert_{k}", *n, dtype=torch.int32) for k, n in sizes.items()]
        return made[0], made[1], made[2]

    def _values(self) -> Tensor:
        return self.maker.buffer("expert_values", self.maker.m, self.maker.shape.sizes.latent)

    def _hidden(self) -> Tensor:
        s = self.maker.shape.sizes
        return self.maker.buffer("expert_lifted", self.maker.m * s.topk, s.expert_dim)

    def _outputs(self) -> Tensor:
        s = self.maker.shape.sizes
        return self.maker.buffer("expert_outputs", self.maker.m * s.topk, s.latent)

    def _group(self, r: Routed) -> Launch:
        make, s = self.maker, self.maker.shape.sizes
        return make.launch(
            grouped.group_kernel, (1 + make.m,), (r.ids, r.latent, *self._table(), self._values()), make.fixed("group"),
            M=make.m, TOPK=s.topk, PP=power(make.m * s.topk), EXPERTS=s.experts, EP=power(s.experts), K=s.latent,
            KP=power(s.latent), N=PAIRS,
        )  # fmt: skip

    def _up(self, layer: Layer, t: Tile) -> Launch:
        make, s, w = self.maker, self.maker.shape.sizes, layer.weights
        bn = min(t.bn, s.expert_dim & -s.expert_dim)
        bw = max(LEAST, min(t.bk, power(s.latent // 8)))
        args = (
            self._values(), *self._table(), w["w1"].view(torch.int32), w["w1_scale"], w["w3"].view(torch.int32),
            w["w3_scale"], self._hidden(),
        )  # fmt: skip
        return make.launch(
            grouped.grouped_up_kernel, (make.m * s.topk * s.expert_dim // bn,), args, t, M=make.m, TOPK=s.topk,
            ROWS=s.expert_dim, K=s.latent, BN=bn, BW=bw, N=PAIRS,
        )  # fmt: skip

    def _down(self, layer: Layer, t: Tile) -> Launch:
        make, s, w = self.maker, self.maker.shape.sizes, layer.weights
        br = min(t.bk, s.latent & -s.latent)
        args = (
            self._hidden(), *self._table(), w["w2"].view(torch.int32), w["w2_scale"], self._outputs(),
        )  # fmt: skip
        return make.launch(
            grouped.grouped_down_kernel, (make.m * s.topk * s.latent // br,), args, t, M=make.m, ROWS=s.latent,
            K=s.expert_dim, BR=br, BN=min(t.bn, br), BW=LEAST, N=PAIRS,
        )  # fmt: skip

    def _combine(self, layer: Layer, r: Routed) -> Launch:
        make, s, t = self.maker, self.maker.shape.sizes, self.maker.fixed("combine")
        remote = layer.remote.get("moe")
        bn = min(t.bn, s.latent & -s.latent)
        args = (self._outputs(), r.scores, r.z if remote is None else remote, r.z)
        return make.launch(
            grouped.combine_kernel, (s.latent // bn, make.m), args, t, TOPK=s.topk, ROWS=s.latent, BN=bn,
            REMOTE=remote is not None,
        )  # fmt: skip
