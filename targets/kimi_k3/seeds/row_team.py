"""Sums over the CTAs that share a row: one cluster, partial sums go into every CTA's shared memory (st.async).

Each round has an mbarrier of its own that counts the bytes of all CTAs, and is used once in a launch. A CTA that has
waited for the last round has had everything that will ever be sent to it, so no barrier of the cluster is needed at the
end. With one CTA a row the same goes through its own shared memory.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from targets.kimi_k3.seeds.common import lanes_sum, smem


class Team(NamedTuple):
    """number of this CTA in its row; parts f32: what each CTA sent, by round; sums f32 [values, warps]: of this CTA's
    warps; bars: an mbarrier a round."""

    number: Any
    parts: Any
    sums: Any
    bars: Any


@cute.jit
def open_team(rounds: cutlass.Constexpr, ctas: cutlass.Constexpr, warps: cutlass.Constexpr):
    """rounds: how many values each has. Begins a barrier of the cluster, which `meet` ends."""
    tid, _, _ = cute.arch.thread_idx()
    number, _, _ = cute.arch.block_idx()
    team = Team(
        number, smem(Float32, (sum(rounds) * ctas,), (1,)), smem(Float32, (sum(rounds) * warps,), (1,)),
        smem(Int64, (len(rounds),), (1,)).iterator,
    )  # fmt: skip
    if cutlass.const_expr(ctas > 1):
        if tid == 0:
            for r in cutlass.range_constexpr(len(rounds)):
                cute.arch.mbarrier_init(team.bars + r, 1)
            cute.arch.mbarrier_init_fence()
            for r in cutlass.range_constexpr(len(rounds)):
                cute.arch.mbarrier_arrive_and_expect_tx(team.bars + r, 4 * ctas * rounds[r])
        cute.arch.sync_threads()
        cute.arch.cluster_arrive()
    return team


@cute.jit
def meet(ctas: cutlass.Constexpr):
    """All CTAs of the row have their mbarriers; before the first `tell_team`."""
    if cutlass.const_expr(ctas > 1):
        cute.arch.cluster_wait()


@cute.jit
def warp_says(team: Team, place: Int32, x: Float32, warps: cutlass.Constexpr):
    """This warp's share of value number `place` (counted over all rounds)."""
    tid, _, _ = cute.arch.thread_idx()
    x = lanes_sum(x, 32)
    if tid % 32 == 0:
        team.sums[place * warps + tid // 32] = x


@cute.jit
def store_async(target: Int32, bar: Int32, to: Int32, x: Float32):
    """x to the same place of another CTA's shared memory, counted by its mbarrier."""
    cute.arch.inline_ptx(
        """{
        .reg .b32 there, theirs;
        mapa.shared::cluster.u32 there, {$r0}, {$r2};
        mapa.shared::cluster.u32 theirs, {$r1}, {$r2};
        st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], {$r3}, [theirs];
        }""",
        read_only_args=[target, bar, to, x.bitcast(Int32)],
    )


@cute.jit
def tell_team(team: Team, number: cutlass.Constexpr, op: cutlass.Constexpr):
    """After a barrier of the CTA: its sums of round `number` to all CTAs. op = (rounds, ctas, warps)."""
    rounds, ctas, warps = op
    tid, _, _ = cute.arch.thread_idx()
    n, before = rounds[number], sum(rounds[:number])
    for item in cutlass.range(tid, n * ctas, warps * 32, unroll=1):
        value, to = item % n, item // n
        x = Float32(0.0)
        for w in cutlass.range_constexpr(warps):
            x += team.sums[(before + value) * warps + w]
        place = before * ctas + team.number * n + value
        if cutlass.const_expr(ctas > 1):
            target = Int32(team.parts.iterator.toint()) + 4 * place
            store_async(target, Int32((team.bars + number).toint()), to, x)
        else:
            team.parts[before + value] = x


@cute.jit
def await_team(team: Team, number: cutlass.Constexpr, ctas: cutlass.Constexpr):
    """Until all CTAs' sums of that round are here."""
    if cutlass.const_expr(ctas > 1):
        cute.arch.mbarrier_wait(team.bars + number, 0)
    else:
        cute.arch.sync_threads()


@cute.jit
def team_sum(team: Team, number: cutlass.Constexpr, value: Int32, op: cutlass.Constexpr):
    """The sum of a value over all CTAs, in their order."""
    rounds, ctas, _ = op
    n, before = rounds[number], sum(rounds[:number])
    total = Float32(0.0)
    for k in cutlass.range_constexpr(ctas):
        total += team.parts[before * ctas + k * n + value]
    return total
