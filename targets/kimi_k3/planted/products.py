"""Planted mistakes in the products (gemv), the mix over blocks (AttnRes) and the whole chain of launches (decode)."""

# ruff: noqa: E501  (text of the seeds, as it stands there)

from __future__ import annotations

from targets.base import Options
from targets.kimi_k3.planted.build import FORBIDDEN, RACY, bug
from targets.planted import Planted

_SHARDED = Options("tiny-tp2", 2, 2)


def gemv() -> list[Planted]:
    return [
        bug("gemv", "tail", "last-row-skipped", "the last row of x gets no result",
            ("        if m < mY.shape[0]:\n            acc", "        if m < mY.shape[0] - 1:\n            acc")),
        bug("gemv", "tail", "last-columns-skipped", "the last 32 columns of x are not used",
            ("        if m < end and block < op.blocks:\n", "        if m < end and block < op.blocks - 1:\n")),
        bug("gemv", "tail", "last-warp-dropped", "the last warp's share of K is not added",
            ("            for w in cutlass.range(op.warps, unroll_full=True):",
             "            for w in cutlass.range(op.warps - 1, unroll_full=True):")),
        bug("gemv", "tail", "second-group-of-rows-wrong", "rows from 8 on are those of the first eight",
            ("    m0 = group * 8\n", "    m0 = group * 0\n"), options=Options("tiny", 1, 16)),
        bug("gemv", "barrier", "no-barrier-before-sum", "shares are added before all warps have stored theirs",
            ("    cute.arch.sync_threads()\n    for item in", "    for item in"), expect=RACY),
        bug("gemv", "rounding", "sums-in-bf16", "the warps' shares are added in bf16",
            ("                acc += sC[r, c, w]\n", "                acc = round_bf16(acc + sC[r, c, w])\n")),
        bug("gemv", "gain", "output-one-percent", "every output is 1 % too large",
            ("        mY[m, n] = acc.to(mY.element_type)\n\n", "        mY[m, n] = (1.01 * acc).to(mY.element_type)\n\n")),
        bug("gemv", "gain", "output-one-per-mille", "every output is 0.1 % too large",
            ("        mY[m, n] = acc.to(mY.element_type)\n\n", "        mY[m, n] = (1.001 * acc).to(mY.element_type)\n\n")),
        bug("gemv", "rounding", "output-truncated", "outputs are cut off to bf16 instead of rounded",
            ("        mY[m, n] = acc.to(mY.element_type)\n\n",
             "        mY[m, n] = (acc.bitcast(Uint32) & Uint32(0xFFFF0000)).bitcast(Float32).to(mY.element_type)\n\n")),
        bug("gemv", "rounding", "sum-not-rounded", "x + y enters the product truncated, not rounded",
            ("    return pack_bf16(low(a) + low(b), high(a) + high(b))\n",
             "    s = (low(a) + low(b)).bitcast(Uint32) >> 16\n"
             "    return s | ((high(a) + high(b)).bitcast(Uint32) & Uint32(0xFFFF0000))\n")),
        bug("gemv", "layout", "addend-of-first-row", "row 0 of the result before is added to every row",
            ("                cute.autovec_copy(plus[m, (None, block * 4 + lane % 4)], rPlus[None, u])\n",
             "                cute.autovec_copy(plus[first, (None, block * 4 + lane % 4)], rPlus[None, u])\n")),
        bug("gemv", "memory", "write-beyond-the-end", "one element beyond the result is written",
            ("            finish(acc, up, (m, tile * width + c), mY, ex, op)\n",
             "            finish(acc, up, (m, tile * width + c), mY, ex, op)\n"
             "            if m == mY.shape[0] - 1 and tile * width + c == op.n - 1:\n"
             "                mY[m, op.n] = acc.to(mY.element_type)\n"), expect=FORBIDDEN),
        bug("gemv", "memory", "input-modified", "x is set to zero after use",
            ("            finish(acc, up, (m, tile * width + c), mY, ex, op)\n",
             "            finish(acc, up, (m, tile * width + c), mY, ex, op)\n"
             "            if tile == tiles - 1 and c == width - 1:\n                mX[m, op.k - 1] = BFloat16(0.0)\n"),
            ("    sum_and_store(rC, mY, ex, op)\n\n", "    sum_and_store(rC, mX, mY, ex, op)\n\n"),
            ("def sum_and_store(rC: cute.Tensor, mY", "def sum_and_store(rC: cute.Tensor, mX: cute.Tensor, mY"),
            expect=FORBIDDEN),
        bug("gemv", "memory", "one-nan", "one element of the last row is NaN",
            ("            finish(acc, up, (m, tile * width + c), mY, ex, op)\n",
             "            acc = acc if m + 1 < mY.shape[0] or tile + c > 0 else Float32.inf - Float32.inf\n"
             "            finish(acc, up, (m, tile * width + c), mY, ex, op)\n")),
        bug("gemv", "layout", "weights-of-the-layer-before", "instance i uses the weights of instance i - 1",
            ("mSum, pick(w, i), pick(y, i)", "mSum, pick(w, i - 1), pick(y, i)")),
    ]  # fmt: skip


def attn_res() -> list[Planted]:
    return [
        bug("attn-res", "epsilon", "score-epsilon-times-ten", "1e-4 in the scores of the sources",
            ("square / op.hidden + op.eps) * dot", "square / op.hidden + 10.0 * op.eps) * dot")),
        bug("attn-res", "epsilon", "output-epsilon-times-ten", "1e-4 in the output norm",
            ("op.threads // 32) / op.hidden + op.eps)", "op.threads // 32) / op.hidden + 10.0 * op.eps)")),
        bug("attn-res", "state", "bank-row-one-late", "the bank gets the prefix from before the addition",
            ("                cute.autovec_copy(rP, by_eight(mix.new)[m, state.row, (None, i)])\n",
             "                cute.autovec_copy(rDelta[None, v], by_eight(mix.new)[m, state.row, (None, i)])\n")),
        bug("attn-res", "state", "prefix-not-stored", "the running prefix is not updated after the first instance",
            ("        cute.autovec_copy(rP, by_eight(mix.out_prefix)[m, (None, i)])\n",
             "        if state.sources == 0:\n            cute.autovec_copy(rP, by_eight(mix.out_prefix)[m, (None, i)])\n")),
        bug("attn-res", "context", "last-source-missed", "the newest bank row is not in the mix",
            ("        sources = i if i < rows else rows\n", "        sources = i - 1 if i < rows else rows - 1\n"),
            options=Options("tiny", 3, 2)),
        bug("attn-res", "order", "norm-in-the-mix", "sources are mixed after their norm's weight",
            ("            x += low(rWord[e, v, s]) * rP[s]\n", "            x += low(rWord[e, v, s]) * rP[s] * rP[s]\n")),
        bug("attn-res", "barrier", "no-barrier-before-scores", "statistics are read before all warps wrote theirs",
            ("            sPart[1, s, warp] = dot\n    cute.arch.sync_threads()\n", "            sPart[1, s, warp] = dot\n"),
            expect=RACY),
        bug("attn-res", "rounding", "prefix-truncated", "the prefix is cut off to bf16 instead of rounded",
            ("            rP.store(total.to(BFloat16))\n",
             "            for e in cutlass.range_constexpr(8):\n"
             "                rP[e] = (total[e].bitcast(Uint32) & Uint32(0xFFFF0000)).bitcast(Float32).to(BFloat16)\n")),
        bug("attn-res", "rounding", "mix-rounded", "the mix is rounded to bf16 before its norm",
            ("        if state.closing == 1:\n", "        if state.closing == 0:\n")),
    ]  # fmt: skip


def decode() -> list[Planted]:
    return [
        bug("decode", "state", "prefix-not-restarted", "a new block keeps the old prefix",
            ("    restart = second and opens\n", "    restart = second and opens and n < 0\n")),
        bug("decode", "layout", "norm-of-the-other-half", "the output norm is that of the next half layer",
            ("pick(proj, half), pick(out_norm, half), target",
             "pick(proj, half), pick(out_norm, half + 1 if half < 2 * d.layers else half), target")),
        bug("decode", "order", "bank-row-of-the-attention", "a block's row is written after its attention",
            ("if opens and not second else Int32(-1)\n", "if opens and second else Int32(-1)\n")),
        bug("decode", "layout", "ids-of-the-next-layer", "routed ids of one layer are written to another",
            ("            ids = t.outputs.ids[which, None, None]\n",
             "            ids = t.outputs.ids[which * 0, None, None]\n")),
        bug("decode", "rounding", "closing-mix-not-rounded", "the last mix keeps f32 where bf16 is specified",
            ("Int32(1) if closing else Int32(0))\n    tensors", "Int32(0))\n    tensors"), band=True),
        bug("decode", "tail", "closing-sources-missed", "the closing mix sees one bank row less",
            ("    sources = (layer + d.block - 1) // d.block + (Int32(1) if restart else Int32(0))\n",
             "    sources = (layer + d.block - 1) // d.block + (Int32(1) if restart else Int32(0))\n"
             "    sources = sources - 1 if closing else sources\n")),
    ]  # fmt: skip


def sharded() -> list[Planted]:
    """What shows only where ranks exchange results."""
    return [
        bug("kda", "rounding", "partial-not-rounded", "other ranks' sums are added before this rank's rounding",
            ("    elif cutlass.const_expr(ex.remote is not None):\n        mY[m, n] = (round_bf16(acc) + ex.remote[m, n])",
             "    elif cutlass.const_expr(ex.remote is not None):\n        mY[m, n] = (acc + ex.remote[m, n])"),
            options=_SHARDED, band=True),
        bug("kda", "layout", "remote-of-first-row", "row 0 of the other ranks' sums is added to every row",
            ("    elif cutlass.const_expr(ex.remote is not None):\n        mY[m, n] = (round_bf16(acc) + ex.remote[m, n])",
             "    elif cutlass.const_expr(ex.remote is not None):\n        mY[m, n] = (round_bf16(acc) + ex.remote[0, n])"),
            options=_SHARDED),
        bug("latent-moe", "layout", "gathered-columns-missed", "the other ranks' columns of the result are not copied",
            ("                    mY[group * 8 + r, op.n + i] = ex.tail[group * 8 + r, i]\n",
             "                    mY[group * 8 + r, op.n + i] = BFloat16(0.0)\n"), options=_SHARDED),
    ]  # fmt: skip
