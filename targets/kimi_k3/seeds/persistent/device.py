"""Where a thread of a persistent kernel is, and how it comes at memory: addresses of fields, scratch, whole vectors."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import high, low


class Ctx(NamedTuple):
    """Where a thread is, and the shared memory of its CTA.

    ring: stages of weights (words); full, empty: mbarriers, one each a stage; routed: mbarrier, the ids are known, and
    behind it, for a warp that chooses, one that says that this CTA's logits are posted, one that MLA begins to wait;
    part, red: sums of warps; tab: addresses by layer and field; sync: counters of the edges (global), a line each:
    ALL at 0, ROUTE at 32, the record of a spin that gave up at 64, what the counters were at the launch from 96; mail:
    boxes of what CTAs send each other (global); track, brought: timelines of consumers and producer, None in a normal
    build; list: what the producer brings of each matrix (`bring`), where it has one;
    kept: this thread's columns of the prefix and, where there is room, of the bank (words).
    """

    tid: Any
    warp: Any
    lane: Any
    cta: Any
    ring: Any
    full: Any
    empty: Any
    routed: Any
    part: Any
    red: Any
    tab: Any
    ids: Any
    weights: Any
    own: Any
    pool: Any
    sync: Any
    base: Any
    mail: Any
    track: Any
    brought: Any
    list: Any
    kept: Any


@cute.jit
def consumers(op: cutlass.Constexpr):
    """Barrier of the consumer warps."""
    cute.arch.barrier(barrier_id=1, number_of_threads=op.threads)


@cute.jit
def at(dtype: cutlass.Constexpr, address: Int64, n: cutlass.Constexpr):
    """n elements in global memory at an address that is a multiple of 16."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((n,)))


@cute.jit
def words_at(address: Int64, i: Int32, r: cute.Tensor):
    """r[4 words] = the i-th 16 bytes at an address."""
    pointer = cute.make_ptr(
        Uint32, address + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
    )
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout((4,))), r)


@cute.jit
def within(i: Int32, n: Any):
    """i, or the last of n: a load is waited for at the end of a branch, so loads stand in none."""
    return i if i < n else n - 1


@cute.jit
def view(c: Ctx, dtype: cutlass.Constexpr, offset: cutlass.Constexpr, n: cutlass.Constexpr):
    """n elements of the scratch pool, `offset` bytes in."""
    pointer = cute.recast_ptr(c.pool.iterator + offset // 4, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout((n,)))


@cute.jit
def field(c: Ctx, layer: Int32, f: cutlass.Constexpr, fields: cutlass.Constexpr):
    return c.tab[layer * fields + f]


@cute.jit
def unpack(r: cute.Tensor, x: cute.Tensor):
    """x[8] f32 of r[4] words of bf16."""
    for e in cutlass.range_constexpr(4):
        x[2 * e], x[2 * e + 1] = low(r[e]), high(r[e])


@cute.jit
def ahead(c: Ctx, address: Int64, n: Int32, most_: cutlass.Constexpr, op: cutlass.Constexpr):
    """This thread's f32 of `n` at an address (at most `most_`), on their way before they are wanted."""
    turns = -(-most_ // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((turns,)), Float32)
    r.fill(0.0)
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < n:
            pointer = cute.make_ptr(
                Float32, address + Int64(i) * 4, cute.AddressSpace.gmem, assumed_align=4
            )
            r[k] = cute.make_tensor(pointer, cute.make_layout((1,)))[0]
    return r


@cute.jit
def vector(c: Ctx, v: cutlass.Constexpr, g: cutlass.Constexpr):
    """Which vector of eight columns this thread has as its v-th."""
    return (c.warp % g.width) * 32 + c.lane + v * 32 * g.width
