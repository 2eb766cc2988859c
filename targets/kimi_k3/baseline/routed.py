"""The routed experts of the mix by pair or by expert, and the shared expert's second half beside or apart from them.

Which way is faster depends on the rows and is measured when a plan is made, on a GPU, unless `tiles.WAYS` settles it.
What came of a trial is among the notes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from targets.kimi_k3.baseline import tiles
from targets.kimi_k3.baseline.grouped import GroupedExperts
from targets.kimi_k3.baseline.kernels import experts
from targets.kimi_k3.baseline.tiles import Way, cdiv
from targets.kimi_k3.maths.layer import Layer

if TYPE_CHECKING:
    from targets.kimi_k3.baseline.launcher import Ends, Launcher

Launch = Callable[[], None]
SHIFT = 2.0**100
"""As `kernels.common.SHIFT`: how the experts' operands are scaled."""


@dataclass(frozen=True)
class Routed:
    """Operands of the routed experts: latent f32 in planes, ids, scores; z is what they add up to."""

    latent: Tensor
    ids: Tensor
    scores: Tensor
    z: Tensor


@dataclass(frozen=True)
class Shared:
    """The shared expert's second half y = W x, x its hidden values."""

    x: Tensor
    w: Tensor
    y: Tensor
    ends: Ends


class RoutedExperts:
    """Launches of a `Launcher`: call it with a layer and both kinds of operands."""

    def __init__(self, maker: Launcher) -> None:
        self.maker = maker
        self.by_expert = GroupedExperts(maker)
        self.way: Way | None = None
        self._drawn: Routed | None = None

    def __call__(self, layer: Layer, r: Routed, shared: Shared) -> list[Launch]:
        """Both halves of the experts and the shared one's second."""
        ways = tiles.ways(self.maker.mp)
        if self.maker.every_way:
            for way in ways:
                self._halves(layer, r, (shared, way))
        if self.way is None:
            measured = r.z.is_cuda and len(ways) > 1
            self.way = self._known(layer, r, shared) if measured else ways[0]
        return self._halves(layer, r, (shared, self.way))

    def _known(self, layer: Layer, r: Routed, shared: Shared) -> Way:
        known = self.maker.blas.here.ways
        key = (self.maker.m, self.maker.shape.sizes)
        if key not in known:
            known[key] = self._fastest(layer, r, shared)
        return known[key]

    def _fastest(self, layer: Layer, r: Routed, shared: Shared) -> Way:
        """By time, on drawn operands."""
        make, drawn = self.maker, self._draw(r)
        shared.x.normal_()

        def halves(way: Way) -> list[Launch]:
            return self._halves(layer, drawn, (shared, way))

        ways = {way.name: way for way in tiles.ways(make.mp)}
        return make.shelf.fastest(ways, halves, (r.z, make.blas.here.cold))

    def _draw(self, r: Routed) -> Routed:
        """Operands for trials: ids of a step are not there yet. The same each time."""
        if self._drawn is None:
            make = self.maker
            ids = torch.rand(make.m, make.shape.sizes.experts, device=make.device)
            ids = ids.topk(r.ids.shape[1]).indices.to(r.ids.dtype)
            r.latent.normal_().mul_(SHIFT)
            r.scores.uniform_()
            self._drawn = replace(r, ids=ids)
        return self._drawn

    def _halves(self, layer: Layer, r: Routed, how: tuple[Shared, Way]) -> list[Launch]:
        shared, way = how
        if way.grouped:
            first, last = self.by_expert(layer, r, lambda: self._draw(r))
        else:
            first, last = [self._middle(layer, r, how)], [self._down(layer, r)]
        if way.apart:
            operands = (shared.x, shared.w, shared.y)
            first.append(self.maker.linear("shared_down", operands, shared.ends))
        return [*first, *last]

    def _hidden(self) -> Tensor:
        s, m = self.maker.shape.sizes, self.maker.m
        return self.maker.buffer("expert_hidden", m, s.topk, s.expert_dim, dtype=torch.float32)

    def _middle(self, layer: Layer, r: Routed, how: tuple[Shared, Way]) -> Launch:
        """The experts' first half, and the shared expert's second unless it is apart: neither waits for the other."""
        make, w = self.maker, layer.weights
        s, m, (shared, way) = make.shape.sizes, make.m, how
        up = make.fixed("up")
        n, k = shared.w.shape
        # one number of warps for both halves: the product's tile keeps its shape
        t = tiles.product("shared_down", (n, k), make.mp)
        bw = min(up.bk, s.latent // 8 & -(s.latent // 8))
        ends = shared.ends
        remote, send = (shared.y if e is None else e for e in (ends.remote, ends.send))
        args = (
            r.latent, r.ids, w["w1"].view(torch.int32), w["w1_scale"], w["w3"].view(torch.int32), w["w3_scale"],
            self._hidden(), shared.x, shared.w, shared.y, remote, send,
        )  # fmt: skip
        beside = 0 if way.apart else n
        grid = (m * s.topk * s.expert_dim // up.bn + cdiv(beside, t.bn),)
        return make.launch(
            experts.middle_kernel, grid, args, up, M=m, MP=make.mp, TOPK=s.topk, ROWS=s.expert_dim, K=s.latent,
            BN=up.bn, BW=bw, EARLY=way.early, N=beside, SHARED=k, BR=t.bn, BK=t.bk, MODE=ends.mode, OWN=ends.own,
        )  # fmt: skip

    def _down(self, layer: Layer, r: Routed) -> Launch:
        make, w = self.maker, layer.weights
        s, m = make.shape.sizes, make.m
        t, ahead = make.fixed("down"), make.ahead(w["latent_up"], r.z)
        remote = layer.remote.get("moe")
        bw = min(t.bk, s.expert_dim // 8 & -(s.expert_dim // 8))
        args = (
            self._hidden(), r.ids, r.scores, w["w2"].view(torch.int32), w["w2_scale"],
            r.z if remote is None else remote, r.z, ahead.weights,
        )  # fmt: skip
        blocks = s.latent // t.bn
        return make.launch(
            experts.down_kernel, (blocks + ahead.programs(t), m), args, t, **ahead.constants(t), TOPK=s.topk,
            ROWS=s.latent, K=s.expert_dim, BN=t.bn, BW=bw, REMOTE=remote is not None, BLOCKS=blocks,
        )  # fmt: skip
