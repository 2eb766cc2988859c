"""AttnRes: add to the running prefix, mix it with the bank of earlier blocks by a softmax over sources, normalise.

One CTA per row keeps all sources (at most nine rows of bf16) in registers, so that each is read once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from targets.kimi_k3.seeds.common import begin, block_sum, high, lanes_sum, low, pick, smem

TUNABLES = {"attn_res_vectors": (1, 2, 4), "pdl": (False, True)}


class Mix(NamedTuple):
    """Tensors of one AttnRes step; bf16, rows M.

    prefix, out_prefix [M, hidden] (may be one); delta [M, hidden]; old [M, rows, hidden], new likewise or None: the
    bank, earlier rows first, `new` is writable; norm, proj, out_norm [hidden]; y [M, hidden].
    """

    prefix: Any
    out_prefix: Any
    delta: Any
    old: Any
    new: Any
    norm: Any
    proj: Any
    out_norm: Any
    y: Any


class MixState(NamedTuple):
    """What varies from launch to launch of one kernel (run-time values).

    sources: bank rows in the mix; row: row of `new` that receives P, -1 = none; add: 1 = P is bf(prefix + delta);
    closing: 1 = the mix is rounded to bf16 before the output norm.
    """

    sources: Int32
    row: Int32
    add: Int32
    closing: Int32


@dataclass(frozen=True)
class MixShape:
    """Compile-time sizes: `threads` x `vectors` x 8 = hidden."""

    threads: int
    vectors: int
    bank: int
    hidden: int
    eps: float
    pdl: bool


@cute.jit
def load_sources(mix: Mix, state: MixState, rV: cute.Tensor, op: cutlass.Constexpr):
    """rV[8, vector, source]: the bank rows, then P (updated, stored and banked). Absent sources are zero."""
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    old = 0 if cutlass.const_expr(mix.old is None) else mix.old.shape[1]
    rDelta = cute.make_rmem_tensor(cute.make_layout((8, op.vectors)), BFloat16)
    for v in cutlass.range_constexpr(op.vectors):
        i = v * op.threads + tid
        cute.autovec_copy(by_eight(mix.prefix)[m, (None, i)], rV[None, v, op.bank])
        if state.add == 1:
            cute.autovec_copy(by_eight(mix.delta)[m, (None, i)], rDelta[None, v])
        for s in cutlass.range_constexpr(op.bank):
            if s < state.sources:
                if cutlass.const_expr(s < old):
                    cute.autovec_copy(by_eight(mix.old)[m, s, (None, i)], rV[None, v, s])
                else:
                    cute.autovec_copy(by_eight(mix.new)[m, s - old, (None, i)], rV[None, v, s])
    for v in cutlass.range_constexpr(op.vectors):
        i = v * op.threads + tid
        rP = rV[None, v, op.bank]
        if state.add == 1:
            total = rP.load().to(Float32) + rDelta[None, v].load().to(Float32)
            rP.store(total.to(BFloat16))
        cute.autovec_copy(rP, by_eight(mix.out_prefix)[m, (None, i)])
        if cutlass.const_expr(mix.new is not None):
            if state.row >= 0:
                cute.autovec_copy(rP, by_eight(mix.new)[m, state.row, (None, i)])


@cute.jit
def by_eight(mT: cute.Tensor):
    """Vectors of eight elements (16 bytes) along the last mode."""
    return cute.logical_divide(mT, (*[None] * (cute.rank(mT) - 1), 8))


@cute.jit
def eight(mV: cute.Tensor, i: Int32):
    """Elements 8 i to 8 i + 7 of a vector, in f32."""
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    cute.autovec_copy(cute.local_tile(mV, (8,), (i,)), rW)
    return rW.load().to(Float32)


@cute.jit
def weigh_sources(
    mix: Mix, state: MixState, rV: cute.Tensor, rP: cute.Tensor, op: cutlass.Constexpr
):
    """rP[source] = softmax of rsqrt(mean(v^2) + eps) * sum(v * norm * proj) over the sources present."""
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid // 32, tid % 32
    warps = op.threads // 32
    sources = op.bank + 1
    sPart = smem(Float32, (2, sources, warps), (1, 2, 2 * sources))
    sScore = smem(Float32, (sources,), (1,))
    rW = cute.make_rmem_tensor(cute.make_layout((8, op.vectors)), Float32)
    for v in cutlass.range_constexpr(op.vectors):
        i = v * op.threads + tid
        rW[None, v].store(eight(mix.norm, i) * eight(mix.proj, i))
    for s in cutlass.range_constexpr(sources):
        square, dot = Float32(0.0), Float32(0.0)
        for v in cutlass.range_constexpr(op.vectors):
            x = rV[None, v, s].load().to(Float32)
            square += (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            dot += (x * rW[None, v].load()).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        square, dot = lanes_sum(square, 32), lanes_sum(dot, 32)
        if lane == 0:
            sPart[0, s, warp] = square
            sPart[1, s, warp] = dot
    cute.arch.sync_threads()
    for s in cutlass.range(warp, sources, warps, unroll=1):
        square, dot = Float32(0.0), Float32(0.0)
        if lane < warps:
            square, dot = sPart[0, s, lane], sPart[1, s, lane]
        square, dot = lanes_sum(square, 32), lanes_sum(dot, 32)
        if lane == 0:
            score = cute.math.rsqrt(square / op.hidden + op.eps) * dot
            sScore[s] = score if s < state.sources or s == op.bank else -Float32.inf
    cute.arch.sync_threads()
    top = sScore[op.bank]
    for s in cutlass.range_constexpr(op.bank):
        top = cute.arch.fmax(top, sScore[s])
    total = Float32(0.0)
    for s in cutlass.range_constexpr(sources):
        rP[s] = cute.math.exp(sScore[s] - top)
        total += rP[s]
    for s in cutlass.range_constexpr(sources):
        rP[s] = rP[s] / total


@cute.jit
def mix_vector(rV: cute.Tensor, rP: cute.Tensor, v: cutlass.Constexpr, op: cutlass.Constexpr):
    """sum_s p_s v_s of eight columns. Unpacks words by hand: were it the conversion used for the scores, the compiler
    would keep all converted values from there to here, in twice the registers."""
    rM = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rWord = cute.recast_tensor(rV, Uint32)
    for e in cutlass.range_constexpr(4):
        x, y = low(rWord[e, v, op.bank]) * rP[op.bank], high(rWord[e, v, op.bank]) * rP[op.bank]
        for s in cutlass.range_constexpr(op.bank):
            x += low(rWord[e, v, s]) * rP[s]
            y += high(rWord[e, v, s]) * rP[s]
        rM[2 * e], rM[2 * e + 1] = x, y
    return rM.load()


@cute.kernel
def attn_res_kernel(mix: Mix, state: MixState, op: cutlass.Constexpr):
    """One row a CTA, grid (M): P <- bf(prefix + delta); y = bf(RMS(sum_s p_s v_s; out_norm)), the mix in f32."""
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    rV = cute.make_rmem_tensor(cute.make_layout((8, op.vectors, op.bank + 1)), BFloat16)
    rV.fill(0.0)
    load_sources(mix, state, rV, op)
    rP = cute.make_rmem_tensor(cute.make_layout((op.bank + 1,)), Float32)
    weigh_sources(mix, state, rV, rP, op)
    rM = cute.make_rmem_tensor(cute.make_layout((8, op.vectors)), Float32)
    square = Float32(0.0)
    for v in cutlass.range_constexpr(op.vectors):
        rM[None, v].store(mix_vector(rV, rP, v, op))
        if state.closing == 1:
            rM[None, v].store(rM[None, v].load().to(BFloat16).to(Float32))
        x = rM[None, v].load()
        square += (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    scale = cute.math.rsqrt(block_sum(square, op.threads // 32) / op.hidden + op.eps)
    rY = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    for v in cutlass.range_constexpr(op.vectors):
        y = rM[None, v].load() * scale * eight(mix.out_norm, v * op.threads + tid)
        rY.store(y.to(BFloat16))
        cute.autovec_copy(rY, by_eight(mix.y)[m, (None, v * op.threads + tid)])


def mix_shape(mix, cfg):
    hidden = mix.y.shape[1]
    bank = sum(t.shape[1] for t in (mix.old, mix.new) if t is not None)
    fits = [v for v in (1, 2, 4, 8) if hidden % (256 * v) == 0 and hidden // (8 * v) <= 1024]
    vectors = max([v for v in fits if v <= cfg.attn_res_vectors] or fits[:1])
    return MixShape(hidden // (8 * vectors), vectors, bank, hidden, cfg.dims.eps, cfg.pdl)


@cute.jit
def attn_res(mix: Mix, state: MixState, cfg: cutlass.Constexpr, stream):
    op = mix_shape(mix, cfg)
    attn_res_kernel(mix, state, op).launch(
        grid=(mix.y.shape[0], 1, 1),
        block=(op.threads, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


@cute.jit
def step(t, cfg, stream):
    """Instance i: P <- bf(P + delta_i), banked in row i while there is one, mixed with the rows before it into y_i."""
    layers = t.weights.layers
    norm, proj, out_norm = (
        [getattr(x, n) for x in layers] for n in ("res_norm", "res_proj", "out_norm")
    )
    rows = cfg.dims.bank_rows
    for i in cutlass.range(len(layers), unroll=1):
        prefix = pick([t.inputs.x0, t.outputs.prefix], Int32(1) if i > 0 else Int32(0))
        mix = Mix(
            prefix, t.outputs.prefix, pick(t.inputs.delta, i), None, t.outputs.bank,
            pick(norm, i), pick(proj, i), pick(out_norm, i), pick(t.outputs.y, i),
        )  # fmt: skip
        sources = i if i < rows else rows
        row = i if i < rows else -1
        attn_res(mix, MixState(Int32(sources), Int32(row), Int32(1), Int32(0)), cfg, stream)
