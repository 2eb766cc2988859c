"""AttnRes with a row on several CTAs of a cluster: what `attn_res` does on one, its sums taken over the row's team."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from targets.kimi_k3.seeds.attn_res import Mix, MixShape, MixState, by_eight, eight, mix_vector
from targets.kimi_k3.seeds.row_team import Team, await_team, meet, team_sum, tell_team, warp_says


@dataclass(frozen=True)
class Receive:
    """Compile-time sizes: of the mix, of the exchange; `spread`: CTAs that share a row."""

    mix: MixShape
    wire: Any
    spread: int

    @property
    def warps(self):
        return self.mix.threads // 32

    @property
    def rounds(self):
        """Values that the row's CTAs sum: of the bank, of P, of the mix."""
        return (2 * self.mix.bank, 2, 1)

    @property
    def scores(self):
        """Places for the bank's scores: they are read in fours."""
        return -(-self.mix.bank // 4) * 4

    @property
    def team(self):
        return (self.rounds, self.spread, self.warps)


@cute.jit
def vector_of(v: cutlass.Constexpr, number: Int32, op: cutlass.Constexpr):
    """Which vector of eight columns of the row this thread has as its v-th; `number` of its CTA in the row."""
    tid, _, _ = cute.arch.thread_idx()
    return (v * op.spread + number) * op.mix.threads + tid


@cute.jit
def load_bank(mix: Mix, state: MixState, rV: cute.Tensor, at: tuple, op: cutlass.Constexpr):
    """rV[8, vector, source] = a row of the bank and, last, of the prefix as it was; at = (row, number); absent sources
    stay zero."""
    m, number = at
    old = 0 if cutlass.const_expr(mix.old is None) else mix.old.shape[1]
    for v in cutlass.range_constexpr(op.mix.vectors):
        i = vector_of(v, number, op)
        cute.autovec_copy(by_eight(mix.prefix)[m, (None, i)], rV[None, v, op.mix.bank])
        for s in cutlass.range_constexpr(op.mix.bank):
            if s < state.sources:
                if cutlass.const_expr(s < old):
                    cute.autovec_copy(by_eight(mix.old)[m, s, (None, i)], rV[None, v, s])
                else:
                    cute.autovec_copy(by_eight(mix.new)[m, s - old, (None, i)], rV[None, v, s])


@cute.jit
def say_source(
    team: Team, place: cutlass.Constexpr, rV: cute.Tensor, rW: cute.Tensor, s: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """This warp's shares of (sum v^2, sum v w) of source s are values `place` and the next."""
    square, dot = Float32(0.0), Float32(0.0)
    for v in cutlass.range_constexpr(op.mix.vectors):
        x = rV[None, v, s].load().to(Float32)
        square += (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        dot += (x * rW[None, v].load()).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    warp_says(team, Int32(place), square, op.warps)
    warp_says(team, Int32(place + 1), dot, op.warps)


@cute.jit
def score_of(square: Float32, dot: Float32, op: cutlass.Constexpr):
    return cute.math.rsqrt(square / op.mix.hidden + op.mix.eps) * dot


@cute.jit
def score_bank(
    state: MixState, rV: cute.Tensor, rW: cute.Tensor, team: Team, sScore: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """Scores of the bank's rows; those that are absent get -inf. Ends with a barrier of the CTA."""
    tid, _, _ = cute.arch.thread_idx()
    for s in cutlass.range_constexpr(op.mix.bank):
        say_source(team, 2 * s, rV, rW, s, op)
    cute.arch.sync_threads()
    meet(op.spread)
    tell_team(team, 0, op.team)
    await_team(team, 0, op.spread)
    for s in cutlass.range(tid, op.scores, op.mix.threads, unroll=1):
        score = -Float32.inf
        if s < state.sources:
            two = tuple(team_sum(team, 0, 2 * s + k, op.team) for k in range(2))
            score = score_of(*two, op)
        sScore[s] = score
    cute.arch.sync_threads()


@cute.jit
def weigh(rV: cute.Tensor, rW: cute.Tensor, team: Team, sScore: cute.Tensor, op: cutlass.Constexpr):
    """rP[source]: the score of P, then the softmax over all sources."""
    bank = op.mix.bank
    say_source(team, 2 * bank, rV, rW, bank, op)
    cute.arch.sync_threads()
    tell_team(team, 1, op.team)
    await_team(team, 1, op.spread)
    mine = score_of(team_sum(team, 1, Int32(0), op.team), team_sum(team, 1, Int32(1), op.team), op)
    top = mine
    for k in cutlass.range_constexpr(bank):
        top = cute.arch.fmax(top, sScore[k])
    rP = cute.make_rmem_tensor(cute.make_layout((bank + 1,)), Float32)
    rP[bank] = cute.math.exp(mine - top)
    total = rP[bank]
    for k in cutlass.range_constexpr(bank):
        rP[k] = cute.math.exp(sScore[k] - top)
        total += rP[k]
    for k in cutlass.range_constexpr(bank + 1):
        rP[k] = rP[k] / total
    return rP


@cute.jit
def finish_mix(
    mix: Mix, rV: cute.Tensor, rP: cute.Tensor, team: Team, at: tuple, op: cutlass.Constexpr
):
    """The mix, its norm: y. at = (row, closing)."""
    shape = op.mix
    m, closing = at
    rM = cute.make_rmem_tensor(cute.make_layout((8, shape.vectors)), Float32)
    square = Float32(0.0)
    for v in cutlass.range_constexpr(shape.vectors):
        rM[None, v].store(mix_vector(rV, rP, v, shape))
        if closing == 1:
            rM[None, v].store(rM[None, v].load().to(BFloat16).to(Float32))
        x = rM[None, v].load()
        square += (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    warp_says(team, Int32(2 * shape.bank + 2), square, op.warps)
    cute.arch.sync_threads()
    tell_team(team, 2, op.team)
    await_team(team, 2, op.spread)
    square = team_sum(team, 2, Int32(0), op.team)
    scale = cute.math.rsqrt(square / shape.hidden + shape.eps)
    rY = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    for v in cutlass.range_constexpr(shape.vectors):
        i = vector_of(v, team.number, op)
        y = rM[None, v].load() * scale * eight(mix.out_norm, i)
        rY.store(y.to(BFloat16))
        cute.autovec_copy(rY, by_eight(mix.y)[m, (None, i)])
