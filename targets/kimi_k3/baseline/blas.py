"""Products of the mix through cuBLASLt, with launches of ours around them where a place needs more than a product.

`tiles` says where it is taken, and where it is tried when a plan is made. On a CPU tensor the product is torch's, for
tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from targets.kimi_k3.baseline import cublaslt, libraries, tiles
from targets.kimi_k3.baseline.kernels import products, rows
from targets.kimi_k3.baseline.tiles import Tile, Way, cdiv, power
from targets.kimi_k3.sizes import EPS

if TYPE_CHECKING:
    from targets.kimi_k3.baseline.launcher import Ends, Launcher

Launch = Callable[[], None]
BLOCK = 1024


@dataclass
class Here:
    """What the plans of a process share on a device: a clock, tuned algorithms, and what trials have decided."""

    cold: Callable[..., float] = field(default_factory=libraries.Cold)
    tuned: cublaslt.Tuned | None = None
    taken: dict[Hashable, bool] = field(default_factory=dict)
    ways: dict[Hashable, Way] = field(default_factory=dict)
    tiles: dict[Hashable, Tile] = field(default_factory=dict)


@functools.cache
def here(device: torch.device) -> Here:
    return Here()


class BlasProducts:
    """`Launcher.linear` by cuBLASLt: call it with a place, (x, W, y) and the ends of the product."""

    def __init__(self, maker: Launcher) -> None:
        self.maker = maker
        self.here = here(maker.device)
        self._taken: dict[str, bool] = {}

    @property
    def places(self) -> tuple[str, ...]:
        """Where it was tried and is taken."""
        return tuple(place for place, yes in self._taken.items() if yes)

    def taken(self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends) -> bool:
        """Whether cuBLASLt does `place`: tried once on operands of the same form, with several rows on a GPU."""
        make = self.maker
        if place not in tiles.BLAS_TRIED or make.mp == 1:
            return False
        if make.every_way:
            self(place, operands, ends)
        if not operands[0].is_cuda:
            return False
        if place not in self._taken:
            known = self.here.taken
            key = (place, *operands[1].shape, make.m, ends.mode)
            if key not in known:
                known[key] = self._faster(place, operands, ends)
            self._taken[place] = known[key]
        return self._taken[place]

    def _faster(self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends) -> bool:
        x, w, y = operands
        given = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (x, y)
        )
        x, y = given
        x.normal_()
        if ends.send is not None:
            ends = replace(ends, send=torch.empty_like(ends.send))
        try:
            theirs = [self(place, (x, w, y), ends)]
        except Exception as error:  # foreign code: whatever it raises, ours is used
            self.maker.shelf.notes[f"cuBLASLt, {place}"] = (
                f"skipped: {type(error).__name__}: {str(error)[:120]}"
            )
            return False
        ours = [self.maker.triton_linear(place, (x, w, y), ends)]
        trial = libraries.Trial(
            f"cuBLASLt in place of ours, {place}", ours, theirs, y, least=tiles.BLAS_LEAST
        )
        return self.maker.shelf.better(trial, self.here.cold) is theirs

    def __call__(self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends) -> Launch:
        x, w, y = operands
        n, k = w.shape
        chain: list[Launch] = []
        if ends.norm is not None:
            x = self._normed(place, x, ends.norm, chain)
        plain = ends.mode == "plain" and ends.tail is None
        raw = y if plain else self.maker.buffer(f"{place}_raw", self.maker.m, n)
        chain.append(self._product(place, (x[:, :k], w, raw)))
        if not plain:
            chain.append(self._ends(raw, y, ends))

        def run() -> None:
            for launch in chain:
                launch()

        return run

    def _normed(self, place: str, x: Tensor, norm: Tensor, chain: list[Launch]) -> Tensor:
        k, make = norm.shape[0], self.maker
        out = make.buffer(f"{place}_normed", make.m, k)
        args = (x, x.stride(0), norm, out, EPS)
        chain.append(
            make.launch(rows.norm_kernel, (make.m,), args, Tile(1, 1), W=k, BLOCK=power(k))
        )
        return out

    def _ends(self, raw: Tensor, y: Tensor, ends: Ends) -> Launch:
        n, columns = raw.shape[1], 0 if ends.tail is None else ends.tail.shape[1]
        given = (raw if g is None else g for g in (ends.remote, ends.send, ends.addend, ends.tail))
        return self.maker.launch(
            products.ends_kernel, (cdiv(n, BLOCK) + cdiv(columns, BLOCK), self.maker.m),
            (raw, y, y.stride(0), *given), Tile(1, 1), N=n, BLOCK=BLOCK, MODE=ends.mode, OWN=ends.own, TAIL=columns,
        )  # fmt: skip

    def _product(self, place: str, operands: tuple[Tensor, Tensor, Tensor]) -> Launch:
        x, w, y = operands
        if not x.is_cuda:

            def run() -> None:
                y.copy_(x.float() @ w.float().T)

            return run
        try:
            if self.here.tuned is None:
                self.here.tuned = cublaslt.Tuned(x.device, self.here.cold)
            launch, said = self.here.tuned.launch(operands)
        except (cublaslt.Missing, OSError) as error:

            def launch() -> None:
                torch.mm(x, w.T, out=y)

            said = f"skipped: {error}; torch.mm"
        self.maker.shelf.notes[f"cuBLASLt, {place}"] = said
        return launch
