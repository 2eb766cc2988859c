"""Words between CTAs of one GPU that say themselves which step they are of: the lowest bit of an f32 is the step's.

A place is written once in every step, so it holds this step's word or the last one's, and one bit tells them apart;
nothing is cleared, nothing fenced. The bit is no part of the value, or an odd step would leave other results than an
even one: who takes a word takes it off (`value_of`), which costs 2^-24 of a value. The first step's number is odd and
memory begins with zeros. Not for what other GPUs read, and not for places that a step may leave out.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import lanes_sum

BIT = 1
"""Of a word, the step's."""
REST = 0xFFFFFFFF ^ BIT


@cute.jit
def marked(x: Float32, flag: Uint32):
    """x with the bit of step number `flag`."""
    return (x.bitcast(Uint32) & Uint32(REST)) | (flag & Uint32(1)) * Uint32(BIT)


@cute.jit
def value_of(word: Uint32):
    """What a marked word says, the same in every step."""
    return (word & Uint32(REST)).bitcast(Float32)


@cute.jit
def post_word(address: Int64, word: Uint32):
    cute.arch.inline_ptx(
        "st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[address, word]
    )


@cute.jit
def post_pair(address: Int64, a: Uint32, b: Uint32):
    cute.arch.inline_ptx(
        "st.relaxed.gpu.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, a, b]
    )


@cute.jit
def peek_four(address: Int64, r: cute.Tensor):
    """r[4] = the words there, new or not."""
    found = cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
    for e in cutlass.range_constexpr(4):
        r[e] = found[e]


@cute.jit
def stale(r: cute.Tensor, flag: Uint32, many: Int32):
    """Whether one of the first `many` of four words is still the last step's."""
    wrong = Uint32(0)
    for e in cutlass.range_constexpr(4):
        wrong = wrong | ((r[e] ^ (flag * Uint32(BIT))) if many > e else Uint32(0))
    return (wrong & Uint32(BIT)) != Uint32(0)


@cute.jit
def await_four(address: Int64, r: cute.Tensor, flag: Uint32, many: Int32, spin: cutlass.Constexpr):
    """After `peek_four`: again until the first `many` words are of this step; `spin` turns at most, 0: for ever."""
    if cutlass.const_expr(spin == 0):
        while stale(r, flag, many):
            peek_four(address, r)
    else:
        turns = Int32(0)
        while stale(r, flag, many) and turns < spin:
            peek_four(address, r)
            turns += 1


@cute.jit
def peek_row(start: Int64, r: cute.Tensor, n: cutlass.Constexpr):
    """r[4, sweeps] = this lane's of n words at `start`."""
    lane = cute.arch.lane_idx()
    for j in cutlass.range_constexpr(-(-n // 128)):
        r[None, j].fill(0)
        i = j * 32 + lane
        if 4 * i < n:
            peek_four(start + Int64(i) * 16, r[None, j])


@cute.jit
def row_share(start: Int64, r: cute.Tensor, flag: Uint32, n: cutlass.Constexpr, spin: cutlass.Constexpr):  # fmt: skip
    """After `peek_row`: this lane's share of the sum of those n words, once all are of this step."""
    lane = cute.arch.lane_idx()
    total = Float32(0.0)
    for j in cutlass.range_constexpr(-(-n // 128)):
        i = j * 32 + lane
        if 4 * i < n:
            many = Int32(n) - 4 * i
            await_four(start + Int64(i) * 16, r[None, j], flag, many, spin)
            for e in cutlass.range_constexpr(4):
                x = value_of(r[e, j])
                total += x if many > e else Float32(0.0)
    return total


@cute.jit
def row_sum(start: Int64, flag: Uint32, n: cutlass.Constexpr, spin: cutlass.Constexpr):
    """The sum of n words at `start`, in every lane."""
    r = cute.make_rmem_tensor(cute.make_layout((4, -(-n // 128))), Uint32)
    peek_row(start, r, n)
    return lanes_sum(row_share(start, r, flag, n, spin), 32)


@cute.jit
def fold_eight(r: cute.Tensor):
    """r[8] in every lane -> the sum over the warp of r[lane // 4]: nine shuffles instead of forty."""
    lane = cute.arch.lane_idx()
    for level in cutlass.range_constexpr(3):
        n, offset = 4 >> level, 16 >> level
        upper = (lane & offset) != 0
        for i in cutlass.range_constexpr(n):
            keep, give = (r[i + n], r[i]) if upper else (r[i], r[i + n])
            r[i] = keep + cute.arch.shuffle_sync_bfly(give, offset=offset)
    return lanes_sum(r[0], 4)


@cute.jit
def sum_two(x: Float32, y: Float32):
    """Sums of x and of y over the warp, in every lane."""
    lane = cute.arch.lane_idx()
    upper = lane >= 16
    total = (y if upper else x) + cute.arch.shuffle_sync_bfly(x if upper else y, offset=16)
    total = lanes_sum(total, 16)
    return cute.arch.shuffle_sync(total, 0), cute.arch.shuffle_sync(total, 16)
