"""How the mix launches: grids, tiles and scratch of one shape on one device, products with what goes before and after.

It knows no layer (`parts`), and launches nothing itself: every method returns closures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from targets.kimi_k3.baseline import libraries, tiles
from targets.kimi_k3.baseline.blas import BlasProducts
from targets.kimi_k3.baseline.kernels import products
from targets.kimi_k3.baseline.tiles import Tile, cdiv, power
from targets.kimi_k3.buffers import Shape
from targets.kimi_k3.sizes import EPS

Launch = Callable[[], None]

PDL = True
"""Join launches by programmatic dependent launch, where the device has it."""


@dataclass(frozen=True)
class Ends:
    """What a product does besides y = x W^T (see `linear_kernel`)."""

    mode: str = "plain"
    remote: Tensor | None = None
    send: Tensor | None = None
    addend: Tensor | None = None
    tail: Tensor | None = None
    norm: Tensor | None = None
    own: int = 0


PLAIN = Ends()


def _normed(norm: libraries.Norm, x: Tensor, weight: Tensor, out: Tensor) -> Launch:
    def launch() -> None:
        norm(x.contiguous(), weight, out)

    return launch


@dataclass(frozen=True)
class Ahead:
    """What a launch's spare programs ask for: every `stride`-th 4 KB piece of `weights`, `chunks` in all."""

    weights: Tensor
    chunks: int
    stride: int

    def programs(self, t: Tile) -> int:
        return cdiv(self.chunks, 32 * t.warps)

    def constants(self, t: Tile) -> dict[str, int]:
        return {"CHUNKS": self.chunks, "STRIDE": self.stride, "LANES": 32 * t.warps}


class Launcher:
    """Launches for one shape. `pdl`: programmatic dependent launch, on GPUs that have it."""

    every_way = False
    """Make the launches of all ways there are, also those that are not chosen: for who compiles ahead."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device, self.m = shape, device, shape.rows
        self.pdl = PDL and device.type == "cuda"
        self.sms = 132
        if device.type == "cuda":
            self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.mp = 1 if self.m == 1 else max(16, power(self.m))
        self.style = tiles.style(self.mp)
        self._made: dict[str, Tensor] = {}
        self._decided: dict[str, str] = {}
        self.shelf = libraries.Shelf(libraries.graph_us)
        self.blas = BlasProducts(self)

    def fixed(self, place: str) -> Tile:
        return tiles.fixed(place, self.mp)

    def ahead(self, weights: Tensor | None, like: Tensor) -> Ahead:
        """A style's worth of `weights` for the launch before; nothing where launches do not overlap."""
        fetch = self.style.fetch
        if weights is None or not self.pdl or not fetch:
            return Ahead(like, 0, 1)
        size = weights.numel() * weights.element_size()
        stride = max(1, round(size / fetch))
        return Ahead(weights, size // (4096 * stride), stride)

    def chosen(
        self, place: str, tried: tuple[Tile, ...], made: Callable[[Tile], list[Launch]], out: Tensor
    ) -> Tile:
        """With which of the tiles `made` makes `out` in the least time: tried once, on a GPU; elsewhere the first."""
        if self.every_way:
            for t in tried[1:]:
                made(t)
        if len(tried) == 1 or not out.is_cuda:
            return tried[0]
        key, known = (place, self.m, self.shape.sizes), self.blas.here.tiles
        if key not in known:
            names = {
                f"{place}, {t.bn} x {t.bk}, {t.warps} warps, {t.stages} stages": t for t in tried
            }
            known[key] = self.shelf.fastest(names, made, (out, self.blas.here.cold))
        return known[key]

    def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Scratch that launches share; one of each name."""
        if name not in self._made:
            self._made[name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._made[name]

    def wide(self) -> Tensor:
        return torch.empty(
            (self.m, self.shape.sizes.hidden), dtype=torch.bfloat16, device=self.device
        )

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], t: Tile, **constants: Any
    ) -> Launch:
        """`kernel` on `grid`; tensors, then compile-time constants by name."""
        options: dict[str, Any] = {"num_warps": t.warps, "num_stages": t.stages}
        if self.pdl:
            options["launch_pdl"] = True
        bound = kernel[grid]
        known = {**constants, "PDL": self.pdl, **options}

        def run() -> None:
            bound(*args, **known)

        return run

    def linear(
        self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends = PLAIN
    ) -> Launch:
        """y = x W^T; operands = (x, W, y). `place` chooses the tile, or cuBLASLt."""
        w = operands[1]
        chosen = tiles.product(place, (w.shape[0], w.shape[1]), self.mp).kind == "cublaslt"
        if chosen or self.blas.taken(place, operands, ends):
            return self.blas(place, operands, ends)
        return self.triton_linear(place, operands, ends)

    def triton_linear(
        self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends
    ) -> Launch:
        x, w, y = operands
        n, k = w.shape
        t = tiles.product(place, (n, k), self.mp)
        columns = 0 if ends.tail is None else ends.tail.shape[1]
        grid = (cdiv(n, t.bn) + self.m * cdiv(columns, 1024),)
        given = [ends.norm, ends.remote, ends.send, ends.addend, ends.tail]
        norm, remote, send, addend, tail = (x if g is None else g for g in given)
        args = (
            x, x.stride(0), norm, EPS, w, y, y.stride(0), remote, send, addend, tail,
        )  # fmt: skip
        return self.launch(
            products.linear_kernel, grid, args, t, M=self.m, MP=self.mp, N=n, K=k, BN=t.bn, BK=t.bk,
            NORM=ends.norm is not None, MODE=ends.mode, OWN=ends.own, TAIL=columns,
        )  # fmt: skip

    def normed_linear(
        self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends
    ) -> list[Launch]:
        """`linear` with a norm of its input: fused, or a library's norm first where that is faster."""
        x, w, y = operands
        chosen = [self.linear(place, operands, ends)]
        if ends.norm is None or not x.is_cuda:
            return chosen
        fused, wide = chosen, x[:, : w.shape[1]]
        known = self._decided.get(place)
        if known is None:
            x.normal_()
        for name, norm in self.shelf.norms().items():
            if known is not None and known != name:
                continue
            out = self.buffer(f"{place}_normed", self.m, w.shape[1])
            theirs = [
                _normed(norm, wide, ends.norm, out),
                self.linear(place, (out, w, y), replace(ends, norm=None)),
            ]
            trial = libraries.Trial(f"{name}, norm of {place}", chosen, theirs, y)
            if known or self.shelf.better(trial) is theirs:
                chosen, self._decided[place] = theirs, name
        if chosen is fused:
            self._decided.setdefault(place, "")
        return chosen

    def reduced(
        self, place: str, operands: tuple[Tensor, Tensor, Tensor], remote: Tensor | None
    ) -> Launch:
        """y = bf(bf(x W^T) + remote)."""
        ends = PLAIN if remote is None else Ends("remote", remote=remote)
        return self.linear(place, operands, ends)
