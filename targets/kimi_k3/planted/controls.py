"""Right but unusual kernels: other tunables, other orders of sums, roundings that the specification leaves open.

A judge that rejects one of them is too strict.
"""

# ruff: noqa: E501  (text of the seeds, as it stands there)

from __future__ import annotations

from targets.base import Options
from targets.kimi_k3.planted.build import good
from targets.planted import Planted

_SHARDED = Options("tiny-tp2", 2, 2)
_LONG = Options("tiny", 1, 1, 640)
_LANES = (
    "    offset = lanes // 2\n    while cutlass.const_expr(offset > 0):\n"
    "        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)\n        offset = offset // 2\n",
    "    offset = 1\n    while cutlass.const_expr(offset < lanes):\n"
    "        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)\n        offset = offset * 2\n",
)
_SHARE = "                acc += sC[r, c, w]\n"


def kernels() -> list[Planted]:
    return [*_gemv(), *_mix(), *_router(), *_kda(), *_mla(), *_moe(), *_whole()]


def _gemv() -> list[Planted]:
    return [
        good("gemv", "as-it-is", "the seed"),
        good("gemv", "four-warps", "another split of K", tunables={"gemv_warps": 4, "gemv_tile": 1, "gemv_unroll": 7}),
        good("gemv", "sixteen-warps", "another split of K", tunables={"gemv_warps": 16, "gemv_unroll": 2}),
        good("gemv", "sum-apart", "the addition is a launch of its own", tunables={"fuse_add": False}),
        good("gemv", "dependent-launches", "launches overlap with those before", tunables={"pdl": True}),
        good("gemv", "warps-in-reverse", "the warps' shares are added last to first",
             (_SHARE, "                acc += sC[r, c, op.warps - 1 - w]\n")),
        good("gemv", "compensated-sum", "Kahan's summation of the shares",
             ("            up = Float32(0.0)\n            for w", "            up = Float32(0.0)\n"
              "            lost = Float32(0.0)\n            for w"),
             (_SHARE, "                term = sC[r, c, w] - lost\n                more = acc + term\n"
              "                lost = (more - acc) - term\n                acc = more\n")),
        good("gemv", "stored-twice", "every result is stored twice",
             ("        mY[m, n] = acc.to(mY.element_type)\n\n",
              "        mY[m, n] = BFloat16(0.0)\n        mY[m, n] = acc.to(mY.element_type)\n\n"),
             options=Options("tiny", 2, 4)),
        good("gemv", "sixteen-rows", "two groups of rows", options=Options("tiny", 1, 16)),
        good("gemv", "atomic-sum", "the warps' shares meet in float atomics, in any order",
             ("    sC = smem(Float32, (8, op.parts * 8, op.warps), (1, 8, op.parts * 64))\n",
              "    sC = smem(Float32, (8, op.parts * 8), (1, 8))\n"
              "    for i in cutlass.range(tid, 64 * op.parts, op.warps * 32, unroll=1):\n        sC[i] = Float32(0.0)\n"
              "    cute.arch.sync_threads()\n"),
             ("            sC[lane // 4, j * 8 + lane % 4 * 2 + i, tid // 32] = rC[i, j]\n",
              "            add_shared(sC, lane // 4 + 8 * (j * 8 + lane % 4 * 2 + i), rC[i, j])\n"),
             ("            for w in cutlass.range(op.warps, unroll_full=True):\n                acc += sC[r, c, w]\n"
              "                if cutlass.const_expr(op.situ):\n                    up += sC[r, width + c, w]\n",
              "            acc = sC[r, c]\n            if cutlass.const_expr(op.situ):\n                up = sC[r, width + c]\n"),
             ("@cute.jit\ndef sum_and_store(", _ADD_SHARED + "@cute.jit\ndef sum_and_store(")),
    ]  # fmt: skip


_ADD_SHARED = '''@cute.jit
def add_shared(sT: cute.Tensor, i: Int32, x: Float32):
    """Atomic sum in shared memory."""
    cute.arch.inline_ptx(
        "red.shared.add.f32 [{$r0}], {$r1};", read_only_args=[Int32(sT.iterator.toint()) + i * 4, x]
    )


'''


def _mix() -> list[Planted]:
    return [
        good("attn-res", "four-vectors", "another lane mapping", tunables={"attn_res_vectors": 4}),
        good("attn-res", "base-two-softmax", "the softmax in powers of two",
             ("        rP[s] = cute.math.exp(sScore[s] - top)\n",
              "        rP[s] = cute.math.exp2((sScore[s] - top) * 1.4426950408889634)\n")),
        good("attn-res", "root-and-quotient", "one over a square root instead of its reciprocal instruction",
             ("cute.math.rsqrt(square / op.hidden + op.eps) * dot", "dot / cute.math.sqrt(square / op.hidden + op.eps)")),
        good("attn-res", "weights-first", "scale times weight before the value",
             ("        y = rM[None, v].load() * scale * eight(mix.out_norm, v * op.threads + tid)\n",
              "        y = rM[None, v].load() * (eight(mix.out_norm, v * op.threads + tid) * scale)\n")),
        good("attn-res", "normalised-late", "the softmax is normalised after the mix",
             ("        rP[s] = rP[s] / total\n", "        rP[s] = rP[s] * (1.0 / total)\n")),
    ]  # fmt: skip


def _router() -> list[Planted]:
    return [
        good("router", "four-warps", "another division of the experts", tunables={"topk_warps": 4}),
        good("router", "sigmoid-by-tanh", "sg(x) = (1 + tanh(x / 2)) / 2",
             ("    return 1.0 / (1.0 + cute.math.exp(-x))\n", "    return 0.5 + 0.5 * cute.math.tanh(0.5 * x)\n")),
        good("router", "weights-by-product", "weights times the reciprocal of their sum",
             ("(s / total).to(BFloat16)", "(s * (1.0 / total)).to(BFloat16)")),
    ]  # fmt: skip


def _kda() -> list[Planted]:
    return [
        good("kda", "256-threads", "another lane mapping", tunables={"kda_threads": 256, "fuse_add": False}),
        good("kda", "1024-threads", "another lane mapping", tunables={"kda_threads": 1024, "pdl": True}),
        good("kda", "convolution-in-bf16", "the convolution's result crosses in bf16, as stock kernels have it",
             ("        sU[c] = silu(u)\n", "        sU[c] = round_bf16(silu(u))\n")),
        good("kda", "output-in-bf16", "the attention's result is bf16 before its norm, as stock kernels have it",
             ("            sO[row] = o\n", "            sO[row] = round_bf16(o)\n")),
        good("kda", "both-in-bf16", "both of these",
             ("        sU[c] = silu(u)\n", "        sU[c] = round_bf16(silu(u))\n"),
             ("            sO[row] = o\n", "            sO[row] = round_bf16(o)\n")),
        good("kda", "base-two-decay", "the decay as a power of two",
             ("cute.math.exp(-5.0 * gate)", "cute.math.exp2(-7.213475204444817 * gate)")),
        good("kda", "beta-on-the-key", "the write strength is applied to the key",
             ("        s = s + k * (beta * (sU[2 * K + row] - seen))\n",
              "        s = s + (k * beta) * (sU[2 * K + row] - seen)\n")),
        good("kda", "difference-spread", "beta v - beta S k instead of beta (v - S k)",
             ("        s = s + k * (beta * (sU[2 * K + row] - seen))\n",
              "        s = s + k * (beta * sU[2 * K + row] - beta * seen)\n")),
        good("kda", "lanes-in-reverse", "sums over lanes start with the nearest", _LANES),
        good("kda", "gate-in-fp16", "the output gate is held in fp16",
             ("        gate = sigmoid(mY[m, 3 * op.width + h * K + tid].to(Float32))\n",
              "        gate = sigmoid(mY[m, 3 * op.width + h * K + tid].to(Float32)).to(cutlass.Float16).to(Float32)\n")),
        good("kda", "state-read-twice", "the state is read again behind the wait",
             ("    beta = sigmoid(mY[m, 4 * op.width + K + h].to(Float32))\n",
              "    for p in cutlass.range_constexpr(op.passes):\n        for c in cutlass.range_constexpr(4):\n"
              "            row = p * (op.threads // 8) + tid // 8\n"
              "            cute.autovec_copy(gS[row, (None, c * 8 + tid % 8)], rS[None, c, p])\n"
              "    beta = sigmoid(mY[m, 4 * op.width + K + h].to(Float32))\n")),
        good("kda", "sharded", "one of two ranks", options=_SHARDED),
    ]  # fmt: skip


def _mla() -> list[Planted]:
    return [
        good("mla", "four-warps", "smaller tiles, norm and sum as launches of their own",
             tunables={"mla_warps": 4, "fuse_norm": False, "fuse_add": False}),
        good("mla", "several-tiles", "several tiles a split", options=_LONG, tunables={"kv_splits": 16, "mla_warps": 4}),
        good("mla", "weights-in-bf16", "softmax weights are bf16 before the sum, as tensor cores take them",
             ("            sP[token, h, 1] = (p - hi.to(Float32)).to(BFloat16)\n",
              "            sP[token, h, 1] = BFloat16(0.0)\n")),
        good("mla", "weights-summed-in-bf16", "and their sum is that of the rounded ones",
             ("            sP[token, h, 1] = (p - hi.to(Float32)).to(BFloat16)\n",
              "            sP[token, h, 1] = BFloat16(0.0)\n"),
             ("            total += p\n            hi", "            total += p.to(BFloat16).to(Float32)\n            hi")),
        good("mla", "base-two-softmax", "the softmax in powers of two",
             ("            p = cute.math.exp(sS[h, token] - top) if token",
              "            p = cute.math.exp2((sS[h, token] - top) * 1.4426950408889634) if token")),
        good("mla", "splits-in-reverse", "splits are joined last to first",
             ("            cute.autovec_copy(gSum[m, s, h, (None, vector)], rX)\n        rSum.store(rSum.load() + rX.load() * "
              "sWeight[s])\n".replace("            cute", "        cute"),
              "        r = op.splits - 1 - s\n        cute.autovec_copy(gSum[m, r, h, (None, vector)], rX)\n"
              "        rSum.store(rSum.load() + rX.load() * sWeight[r])\n")),
        good("mla", "gate-in-fp16", "the output gate is held in fp16",
             ("            y = round_bf16(dot) * gate\n",
              "            y = round_bf16(dot) * gate.to(cutlass.Float16).to(Float32)\n")),
    ]  # fmt: skip


def _moe() -> list[Planted]:
    return [
        good("latent-moe", "other-warps", "another division of the experts' rows",
             tunables={"expert_up_warps": 8, "expert_down_warps": 8, "expert_unroll": 2}),
        good("latent-moe", "norm-apart-in-place", "the latent norm as a launch of its own, over its input",
             ("rmsnorm_kernel(mX, ex.norm, space.normed, (mW", "rmsnorm_kernel(mX, ex.norm, mX, (mW"),
             ("        gemv(space.normed, mW, mY, ex._replace(norm=None), cfg, stream)\n",
              "        gemv(mX, mW, mY, ex._replace(norm=None), cfg, stream)\n"), tunables={"fuse_norm": False}),
        good("latent-moe", "experts-in-reverse", "the weighted sum runs last to first",
             ("            total += mWeights[m, slot].to(Float32) * sF[tid, slot]\n",
              "            back = op.topk - 1 - slot\n            total += mWeights[m, back].to(Float32) * sF[tid, back]\n")),
        good("latent-moe", "squares-in-bf16", "squares of the latent norm are bf16, as stock kernels have it",
             ("                square += low(x) * low(x) + high(x) * high(x)\n            square = lanes",
              "                square += round_bf16(low(x) * low(x)) + round_bf16(high(x) * high(x))\n"
              "            square = lanes")),
        good("latent-moe", "sharded", "one of two ranks", options=_SHARDED),
    ]  # fmt: skip


def _whole() -> list[Planted]:
    return [
        good("decode", "dependent-launches", "launches overlap with those before", tunables={"pdl": True, "gemv_tile": 1}),
        good("decode", "roundings-of-stock-kernels", "convolution and attention cross in bf16",
             ("        sU[c] = silu(u)\n", "        sU[c] = round_bf16(silu(u))\n"),
             ("            sO[row] = o\n", "            sO[row] = round_bf16(o)\n")),
        good("persistent", "as-it-is", "one launch, four CTAs"),
        good("persistent", "eight-ctas", "other shares, shorter ring",
             tunables={"ctas": 8, "ring_stages": 5, "stage_bytes": 14336}),
        good("persistent", "lanes-in-reverse", "sums over lanes start with the nearest", _LANES),
        good("persistent", "sharded", "one of two ranks", options=Options("tiny-tp2", 4, 1)),
    ]  # fmt: skip
