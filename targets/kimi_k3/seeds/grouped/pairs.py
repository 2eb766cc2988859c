"""(token, slot) pairs grouped by expert, and the latent laid out as the experts' products want it.

A list entry is an expert with up to eight of its pairs, the columns of one tensor-core product. Entries are in order of
experts, pairs in order of their numbers (token x topk + slot), whatever order threads run in.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from targets.kimi_k3.seeds.common import smem
from targets.kimi_k3.seeds.latent_moe_codes import pair_up

TOGETHER = 8
"""Pairs of an entry at most."""
WORDS = 16
"""i32 words of an entry: expert (-1: no entry), pairs, six unused, numbers of the pairs."""
NUMBERS = 8


@dataclass(frozen=True)
class Grouping:
    """Compile-time sizes: tokens, slots of a token, experts, threads of a CTA."""

    rows: int
    topk: int
    experts: int
    threads: int

    @property
    def pairs(self):
        return self.rows * self.topk

    @property
    def entries(self):
        """The longest list: as many experts as can be, and full entries of the pairs that are left."""
        most = min(self.pairs, self.experts)
        return most + (self.pairs - most) // TOGETHER

    @property
    def usual(self):
        """Entries of even routing: for so many there are CTAs, which have the further ones as well."""
        even = self.experts * (1 - (1 - 1 / self.experts) ** self.pairs)
        return min(self.entries, int(even) + 1)

    @property
    def each(self):
        """Experts of a thread."""
        return -(-self.experts // self.threads)

    @property
    def words(self):
        """Words of a set of tokens."""
        return -(-self.rows // 32)


@cute.jit
def tokens_of(sSeen: cute.Tensor, e: Int32, op: cutlass.Constexpr):
    """How many tokens chose expert e."""
    n = Int32(0)
    for i in cutlass.range_constexpr(op.words):
        n += Int32(cute.arch.popc(sSeen[i, e]))
    return n


@cute.jit
def rank_of(sSeen: cute.Tensor, e: Int32, m: Int32, op: cutlass.Constexpr):
    """How many tokens before m chose expert e."""
    rank = Int32(0)
    for i in cutlass.range_constexpr(op.words):
        before = m - 32 * i
        mask = (Uint32(1) << Uint32(before % 32)) - Uint32(1)
        mask = Uint32(0) if before < 0 else Uint32(0xFFFFFFFF) if before >= 32 else mask
        rank += Int32(cute.arch.popc(sSeen[i, e] & mask))
    return rank


@cute.jit
def scan(own: Int32, warps: cutlass.Constexpr):
    """(sum of `own` over the threads before this one, over all threads) of a CTA."""
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid // 32, tid % 32
    sSum = smem(Int32, (warps,), (1,))
    upto = own
    for i in cutlass.range_constexpr(5):
        # clamp 0: lanes below the offset have no lane to take from
        other = cute.arch.shuffle_sync_up(upto, offset=1 << i, mask_and_clamp=0)
        upto += other if lane >= 1 << i else Int32(0)
    if lane == 31:
        sSum[warp] = upto
    cute.arch.sync_threads()
    before, total = upto - own, Int32(0)
    for w in cutlass.range_constexpr(warps):
        before += sSum[w] if w < warp else Int32(0)
        total += sSum[w]
    return before, total


@cute.jit
def collect(mIds: cute.Tensor, sSeen: cute.Tensor, op: cutlass.Constexpr):
    """sSeen u32 [words, experts]: the set of tokens that chose an expert. Ends with a barrier."""
    tid, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(tid, op.experts, op.threads, unroll=1):
        for k in cutlass.range_constexpr(op.words):
            sSeen[k, i] = Uint32(0)
    cute.arch.sync_threads()
    for p in cutlass.range(tid, op.pairs, op.threads, unroll=1):
        m = p // op.topk
        at = sSeen.iterator + mIds[m, p % op.topk] * op.words + m // 32
        cute.arch.red(
            at, Uint32(1) << Uint32(m % 32), op="or", dtype="b32", sem="relaxed", scope="cta"
        )
    cute.arch.sync_threads()


@cute.jit
def list_pairs(mIds: cute.Tensor, mList: cute.Tensor, op: cutlass.Constexpr):
    """One CTA: all of mList i32 [entries + usual, WORDS] that is read; behind the last entry there is none."""
    tid, _, _ = cute.arch.thread_idx()
    sSeen = smem(Uint32, (op.words, op.experts), (1, op.words))
    sFirst = smem(Int32, (op.experts,), (1,))
    collect(mIds, sSeen, op)
    own = Int32(0)
    for j in cutlass.range_constexpr(op.each):
        e = tid * op.each + j
        if e < op.experts:
            own += (tokens_of(sSeen, e, op) + TOGETHER - 1) // TOGETHER
    at, total = scan(own, op.threads // 32)
    for j in cutlass.range_constexpr(op.each):
        e = tid * op.each + j
        if e < op.experts:
            n = tokens_of(sSeen, e, op)
            sFirst[e] = at
            for first in cutlass.range(0, n, TOGETHER, unroll=1):
                mList[at, 0] = e
                mList[at, 1] = n - first if n - first < TOGETHER else Int32(TOGETHER)
                at += 1
    # lanes have parted in the loop over an expert's tokens
    cute.arch.sync_warp()
    cute.arch.sync_threads()
    for i in cutlass.range(total + tid, op.entries + op.usual, op.threads, unroll=1):
        mList[i, 0] = Int32(-1)
    for p in cutlass.range(tid, op.pairs, op.threads, unroll=1):
        e = mIds[p // op.topk, p % op.topk]
        rank = rank_of(sSeen, e, p // op.topk, op)
        mList[sFirst[e] + rank // TOGETHER, NUMBERS + rank % TOGETHER] = p


@cute.jit
def lay_out(mL: cute.Tensor, mRemote: Any, mX: cute.Tensor, m: Int32, op: cutlass.Constexpr):
    """mX[m] = the latent of row m, own columns, then the gathered ones; eights in the order of `expand`."""
    tid, _, _ = cute.arch.thread_idx()
    gL = cute.logical_divide(cute.recast_tensor(mL, Uint32), (None, 4))
    gX = cute.logical_divide(cute.recast_tensor(mX, Uint32), (None, 4))
    own = mL.shape[1] // 8
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(tid, mX.shape[1] // 8, op.threads, unroll=1):
        if cutlass.const_expr(mRemote is None):
            cute.autovec_copy(gL[m, (None, i)], rX)
        elif i < own:
            cute.autovec_copy(gL[m, (None, i)], rX)
        else:
            gRemote = cute.logical_divide(cute.recast_tensor(mRemote, Uint32), (None, 4))
            cute.autovec_copy(gRemote[m, (None, i - own)], rX)
        pair_up(rX)
        cute.autovec_copy(rX, gX[m, (None, i)])


@cute.jit
def group(
    mIds: cute.Tensor, latent: tuple, mList: cute.Tensor, mX: cute.Tensor, op: cutlass.Constexpr
):
    """The work of 1 + M CTAs: the first makes mList i32 [entries + usual, WORDS] of mIds i32 [M, topk], the others a
    row of mX bf16 [M, latent] each. latent = (bf16 [M, own], bf16 [M, latent - own] or None).
    """
    cta, _, _ = cute.arch.block_idx()
    if cta == 0:
        list_pairs(mIds, mList, op)
    else:
        lay_out(*latent, mX, cta - 1, op)
