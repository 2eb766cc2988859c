"""How matrices are cut into stages of the ring, and which rows a CTA has.

Plain Python, computed while compiling; the validator of the schedule reads the same objects. No CuTe DSL.
"""

import math
from dataclasses import dataclass

STRIDE = 17
"""Floats between rows of partial sums and between slots of reductions: one per warp, odd against bank conflicts."""

SHARED_MEMORY = 232448
"""Bytes that a CTA can have on sm_90a, sm_100a and sm_103a."""


@dataclass(frozen=True)
class Rows:
    """A bf16 matrix with rows of `k` columns as it passes the ring: `warps` consumers, `stage` bytes a stage.

    A row is shared by `width` warps; a thread has `per` vectors of eight columns; `passes` rows are made at a time.
    `pair`: a stage holds as many rows of one half of the matrix as of the other (gate and up).
    """

    k: int
    warps: int
    stage: int
    pair: bool = False

    @property
    def vecs(self):
        return self.k // 8

    @property
    def width(self):
        return min(self.warps, -(-self.vecs // 32))

    @property
    def per(self):
        return -(-self.vecs // (32 * self.width))

    @property
    def exact(self):
        return self.vecs == 32 * self.width * self.per

    @property
    def passes(self):
        return self.warps // self.width

    @property
    def row_bytes(self):
        return 2 * self.k

    @property
    def chunk(self):
        """Rows (pairs of rows) a stage."""
        most = self.stage // (self.row_bytes * (2 if self.pair else 1))
        if most < 1:
            raise ValueError(f"stages of {self.stage} bytes do not hold a row of {self.row_bytes}")
        even = 1 if self.pair else 2
        return most - most % (even * self.passes) if most > even * self.passes else most


@dataclass(frozen=True)
class TileRows:
    """A bf16 matrix with rows of `k` columns as it passes the ring for up to eight tokens: a stage is a tile of sixteen
    rows times a slice of their columns, packed when weights are loaded so that it is one piece of memory.

    A block is 32 columns of a tile's rows, 64 bytes a row: what a warp reads at once. `width` warps share a slice,
    `per` blocks each. The last tile of a CTA has fewer rows and is as much shorter.
    """

    k: int
    warps: int
    stage: int

    ROWS = 16
    TOKENS = 8

    @property
    def blocks(self):
        if self.k % 32:
            raise ValueError(f"{self.k} columns are no whole blocks of 32")
        return self.k // 32

    @property
    def slices(self):
        """As many warps as can share a slice, then as few slices as fit."""
        found = [
            (-self._width(n), n)
            for n in range(1, self.blocks + 1)
            if self.blocks % n == 0 and self.ROWS * 64 * (self.blocks // n) <= self.stage
        ]
        if not found:
            raise ValueError(f"stages of {self.stage} bytes hold no tile of {self.ROWS} rows")
        return min(found)[1]

    def _width(self, slices):
        piece = self.blocks // slices
        return max(w for w in range(1, self.warps + 1) if piece % w == 0)

    @property
    def piece(self):
        """Blocks of a slice."""
        return self.blocks // self.slices

    @property
    def width(self):
        return self._width(self.slices)

    @property
    def per(self):
        return self.piece // self.width

    @property
    def vectors(self):
        """Vectors of eight columns that a thread has of its token."""
        return self.per * self.slices

    @property
    def piece_bytes(self):
        """Of a row in a stage."""
        return 64 * self.piece

    @property
    def row_bytes(self):
        return 2 * self.k


@dataclass(frozen=True)
class CodeRows:
    """MXFP4 rows of `k` columns: codes and scales are separate matrices, copied in whole 16 bytes: `unit` rows."""

    k: int
    stage: int
    parts: int

    @property
    def code_bytes(self):
        return self.k // 2

    @property
    def scale_bytes(self):
        return self.k // 32

    @property
    def unit(self):
        return 16 // math.gcd(16, self.scale_bytes)

    @property
    def chunk(self):
        """Rows of each of the `parts` matrices a stage."""
        most = self.stage // (self.parts * (self.code_bytes + self.scale_bytes))
        return most - most % self.unit


def share(n, cta, ctas, unit=1):
    """(first, count) of the rows of CTA `cta`, whole units."""
    units = n // unit
    first = units * cta // ctas * unit
    return first, units * (cta + 1) // ctas * unit - first


def most(n, ctas, unit=1):
    """The largest share."""
    return -(-n // unit // ctas) * unit


def one_in_hand(g, op):
    """Whether a stage has just two rows of `hidden` columns, single or a pair."""
    pair = op.rows(g.k, pair=True)
    return g.k == op.wide.k and op.wide.chunk == 2 and pair.chunk == 1
