"""Tiles of the Triton kernels by place in the layer. Plain data and arithmetic.

The rules are what a first tuning on an H200 left for one row; for several rows they are reasoned.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """`bn` rows of W by `bk` columns at a time; Triton's warps and pipeline stages."""

    bn: int
    bk: int
    warps: int = 4
    stages: int = 3
    kind: str = "triton"


BLAS = Tile(0, 0, kind="cublaslt")
"""Not a tile: the product through cuBLASLt, with launches of ours before and after it where a place needs them."""


BLAS_TRIED = (
    "in_proj",
    "a_proj",
    "q_b",
    "o_proj",
    "shared_down",
    "latent_up",
    "dense_down",
    "gemv",
)
"""Where a plan for several rows tries cuBLASLt when it is made; it is taken where it needs less than `BLAS_LEAST`."""
BLAS_LEAST = 0.95
"""Of our own product's time, alone and with a cold L2: in the step ours also starts before the launch before has ended.
"""


MEASURED: dict[tuple[str, int], Tile] = {("o_proj", 1): Tile(8, 512)}
"""(place, padded rows) -> what was faster in the whole step than the rule's."""


@dataclass(frozen=True)
class Style:
    """How launches overlap. `fetch`: bytes of weights that a short launch asks into L2 for the next one, 0 for none;
    `open`: it lets the next one start before it waits.

    On an H200 at tp8, M = 1, a step took 378.6 us without fetching and 418.6 with 16 MB; `open` made no difference.
    """

    fetch: int = 0
    open: bool = True


STYLES: dict[int, Style] = {}
"""Padded rows -> what was fastest in the whole step, where it is not the default."""


def style(mp: int) -> Style:
    return STYLES.get(mp, Style())


@dataclass(frozen=True)
class Way:
    """How the experts' first half runs. `apart`: in a launch of its own, not in one with the shared expert's second
    half, whose tensor cores want shared memory with several rows. `early`: a tile is loaded while one is multiplied.
    `grouped`: both halves by expert instead of by pair (`grouped.py`), always apart."""

    apart: bool = False
    early: bool = True
    grouped: bool = False

    @property
    def name(self) -> str:
        if self.grouped:
            return "pairs grouped by expert"
        beside = "apart from" if self.apart else "beside"
        return f"experts {beside} the shared one, {'early' if self.early else 'plain'} loads"


WAYS: dict[int, tuple[Way, ...]] = {1: (Way(),)}
"""Padded rows -> ways to choose from, where that is settled. One row was measured in the whole step."""
TRIED = (
    Way(apart=True, early=False),
    Way(apart=True),
    Way(),
    Way(apart=True, early=False, grouped=True),
)
"""For several rows the device decides when a plan is made; the first where nothing can be measured. On an H200, M = 64
took 4961 us a step with the first, 4991 with the second and 5469 with the third."""


def ways(mp: int) -> tuple[Way, ...]:
    return WAYS.get(mp, TRIED)


FIXED = {
    "attn_res": Tile(1, 1, 16),
    "select": Tile(1, 1, 4),
    "rank": Tile(32, 128, 4),
    "kda": Tile(1, 1, 4),
    "query": Tile(1, 64, 4),
    "attention": Tile(1, 1, 4, 2),
    "join": Tile(32, 16, 8),
    "up": Tile(8, 64, 4),
    "down": Tile(4, 16, 4),
    "group": Tile(1, 1, 16),
    "combine": Tile(256, 1, 4),
}
ALTERNATIVES = {
    "grouped_up": (
        Tile(64, 32, 4),
        Tile(32, 64, 2),
        Tile(64, 32, 4, 4),
        Tile(128, 32, 8),
    ),
    "grouped_down": (
        Tile(64, 512, 2),
        Tile(64, 256, 2, 4),
        Tile(128, 512, 4),
    ),
}
"""Tiles that a plan for several rows tries when it is made. For `grouped_down` a program has `bk` rows of w2, `bn` at a
time, with all of their columns."""


def tried(place: str, mp: int) -> tuple[Tile, ...]:
    """More than one where a device has to choose."""
    return (MEASURED[place, mp],) if (place, mp) in MEASURED else ALTERNATIVES[place]


PAIRS = 8
"""Pairs of one expert that are multiplied at a time: with 16 of 896 experts for each of 64 rows it has two on average.
"""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def fixed(place: str, mp: int) -> Tile:
    return MEASURED.get((place, mp), FIXED[place])


def product(place: str, shape: tuple[int, int], mp: int) -> Tile:
    """For W of that shape [n, k] and rows padded to `mp`.

    One row: a program's first tile is all of its k where that is short, so that it arrives while the program waits.
    """
    if (place, mp) in MEASURED:
        return MEASURED[place, mp]
    n, k = shape
    if mp == 1:
        if place == "front":
            return Tile(4, 512, 8)
        bk = power(k) if k <= 1024 else 1024
        return Tile(4, bk)
    bk = min(256 if mp <= 32 else 128, power(k))
    return Tile(32 if n > 2048 else 16, bk)


FRONTS = (Tile(16, 256), Tile(16, 256, 8, 4), Tile(32, 128, 4, 5))
"""More of them for `front`, with several rows: by rule it has fewer programs than an H200 has SMs."""


def fronts(shape: tuple[int, int], mp: int) -> tuple[Tile, ...]:
    """As `tried`, for `front`: the rule's tile first."""
    ruled = product("front", shape, mp)
    settled = mp == 1 or ("front", mp) in MEASURED
    return (ruled,) if settled else (ruled, *(t for t in FRONTS if t != ruled))
