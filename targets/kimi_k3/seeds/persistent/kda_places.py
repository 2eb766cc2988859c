"""Which thread of a CTA has what of KDA for several tokens, and where in shared memory it lies."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from targets.kimi_k3.seeds.persistent.device import Ctx, view
from targets.kimi_k3.seeds.persistent.kda_seat import Seat
from targets.kimi_k3.seeds.persistent.kda_sizes import HEAD, channels_of, state_stages
from targets.kimi_k3.seeds.persistent.tensor import TOKENS


class Spot(NamedTuple):
    """token; row of this CTA's part, 0 if it has none here; whether it has; its quad of rows, -1 without; its row in
    the stage.
    """

    token: Any
    row: Any
    there: Any
    quad: Any
    inner: Any


def projected(d):
    """Rows of in_proj that mean something."""
    return 4 * d.kda_dim + d.f_rank + d.kda_heads


def turns_of(op):
    """Turns of threads over the channels of all tokens."""
    return -(-op.d.rows * channels_of(op) // op.threads)


def quads_of(op):
    """Quads of state rows a token."""
    return -(-op.state_rows // 4)


def squares(op):
    """Parts of a head's sum of squares: one of each quad of rows of each CTA that has some of them."""
    return op.slices * quads_of(op)


@cute.jit
def convolved(c: Ctx, op: cutlass.Constexpr):
    """f32 [token, q 128 | k 128 | v of this CTA]."""
    return view(c, Float32, 4 * TOKENS, op.d.rows * channels_of(op))


@cute.jit
def decays(c: Ctx, op: cutlass.Constexpr):
    """f32 [token, 128]."""
    return view(c, Float32, 4 * TOKENS + 4 * TOKENS * channels_of(op), TOKENS * HEAD)


@cute.jit
def mine(c: Ctx, k: cutlass.Constexpr, s: Seat, op: cutlass.Constexpr):
    """(token, channel of this CTA, whether there is such a one) of this thread's k-th; clamped, so that what it loads
    needs no branch: loads in branches wait for each other.
    """
    channels = channels_of(op)
    i = c.tid + k * op.threads
    token, own = i // channels, i % channels
    there = token < op.d.rows and own < 2 * HEAD + s.count
    token = token if there else Int32(0)
    own = own if there else Int32(0)
    return token, own, there


@cute.jit
def place_of(c: Ctx, turn: cutlass.Constexpr, s: Seat, op: cutlass.Constexpr):
    """(token, row of this CTA's part, whether there is such a one, its quad, its row in the stage) of eight lanes in
    a turn of warps over all stages. Clamped, so that what it loads needs no branch.
    """
    rows, cuts, tokens, _ = state_stages(op)
    quads = -(-rows // 4)
    each = -(-tokens * quads // op.warps)
    stage, unit = turn // each, c.warp + turn % each * op.warps
    first, above = stage // cuts * tokens, stage % cuts * rows
    token, quad = first + unit // quads, unit % quads + above // 4
    inner = unit % quads * 4 + c.lane // 8
    row = above + inner
    known = unit < tokens * quads and token < op.d.rows
    there = known and inner < rows and row < s.count
    return Spot(
        token if known else Int32(first),
        row if there else Int32(0),
        there,
        quad if known and quad < quads_of(op) else Int32(-1),
        unit // quads * rows + inner if there else Int32(0),
    )


@cute.jit
def row_token(c: Ctx, op: cutlass.Constexpr):
    """The token of this lane's column of B, the last one for columns that are none."""
    token = c.lane // 4
    return token if token < op.d.rows else Int32(op.d.rows - 1)


@cute.jit
def owned(c: Ctx, k: cutlass.Constexpr, widest: cutlass.Constexpr, op: cutlass.Constexpr):
    """(token, row) of the k-th sum of this thread among [tokens, widest]."""
    i = c.tid + k * op.threads
    return i // widest, i % widest
