"""What the pieces of the one-launch chain (`oproj_stack`) share: sizes, where a thread is, a row's registers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

BANK = 8
"""The most rows of the bank: a lane in four has the score of one."""
FIELDS = ("o_proj", "res_norm", "res_proj", "out_norm", "x", "y")
O_PROJ = 0
NORM = 1
PROJ = 2
OUT = 3
X = 4
Y = 5


@dataclass(frozen=True)
class Stack:
    """Compile-time sizes. A CTA has `per` groups of eight columns of the product; `split` of `warps` warps share k.

    eager: all warps look for the mix as soon as they have nothing else to do, else once its square is known: less to
    read, a trip to L2 later."""

    layers: int
    rows: int
    hidden: int
    k: int
    ctas: int
    per: int
    warps: int
    split: int
    bank: int
    eps: float
    eager: bool
    paired: bool
    spin: int

    @property
    def width(self):
        return 8 * self.per

    @property
    def turns(self):
        """Pairs of columns a lane has of its row."""
        return -(-4 * self.per // 32)

    @property
    def blocks(self):
        """Blocks of 32 of k that a warp has."""
        return self.k // 32 // self.split

    @property
    def pitch(self):
        """Bytes of a row of weights in shared memory: 64 more than it has, so that rows lie in other banks."""
        return 2 * self.k + 64

    @property
    def share(self):
        """Warps that bring the columns of a row of x."""
        return self.warps // self.rows

    @property
    def units(self):
        """Four columns each that a thread brings of x."""
        return -(-self.k // (128 * self.share))

    @property
    def shared(self):
        """Bytes of shared memory of a CTA: weights, x, the warps' sums, and small things."""
        return (
            self.width * self.pitch
            + self.rows * (2 * self.k + 16 + 4 * self.split * self.width)
            + 2048
        )

    @property
    def ctas4(self):
        return -(-self.ctas // 4) * 4


class Ctx(NamedTuple):
    """Where a thread is: `first` group of its CTA and how many (`count`), the row of its warp, that warp's part of the
    row's x; shared memory; mailboxes and boxes by address; number of the step."""

    lane: Any
    warp: Any
    first: Any
    count: Any
    row: Any
    part: Any
    table: Any
    full: Any
    empty: Any
    weights: Any
    x: Any
    sums: Any
    scale: Any
    own: Any
    peer: Any
    scores: Any
    squares: Any
    mixed: Any
    flag: Any


class Row(NamedTuple):
    """What the first warps keep of a row, each lane of its columns: prefix [turns], bank [turns, bank] (words), mix
    [2, turns]; square [1] of the bank's row lane // 4 over all columns; weight [2, turns] = norm x proj."""

    prefix: Any
    bank: Any
    mix: Any
    square: Any
    weight: Any


class Ahead(NamedTuple):
    """Loaded long before it is wanted: x and its norm [2 words, units]; norm, proj, own columns' norm [turns]."""

    x: Any
    scale: Any
    norm: Any
    proj: Any
    out: Any


@cute.jit
def consumers(op: cutlass.Constexpr):
    """Barrier of all warps but the producer."""
    cute.arch.barrier(barrier_id=1, number_of_threads=op.warps * 32)


@cute.jit
def words_at(address: Int64, i: Int32, r: cute.Tensor, n: cutlass.Constexpr):
    """r[n words] = the i-th of their kind at an address."""
    pointer = cute.make_ptr(
        Uint32, address + Int64(i) * (4 * n), cute.AddressSpace.gmem, assumed_align=4 * n
    )
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout((n,))), r)


@cute.jit
def word_into(address: Int64, i: Int32, word: Uint32):
    pointer = cute.make_ptr(Uint32, address + Int64(i) * 4, cute.AddressSpace.gmem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout((1,)))[0] = word


@cute.jit
def pair_of(c: Ctx, t: cutlass.Constexpr):
    """(pair of columns in the CTA, in the row, whether there is one): this lane's t-th."""
    j = t * 32 + c.lane
    return j, c.first * 4 + j, j < c.count * 4
