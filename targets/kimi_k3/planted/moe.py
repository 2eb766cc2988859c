"""Planted mistakes in routing and in the MXFP4 experts."""

# ruff: noqa: E501  (text of the seeds, as it stands there)

from __future__ import annotations

from targets.kimi_k3.planted.build import RACY, bug
from targets.planted import Planted

_CHOSEN = "        if rank < op.topk and key > Uint32(0):\n            sChosen[rank] = expert\n"
_TERM = "            total += mWeights[m, slot].to(Float32) * sF[tid, slot]\n"


def router() -> list[Planted]:
    return [
        bug("router", "routing", "second-best-expert", "the best expert is passed over",
            (_CHOSEN, "        if rank > 0 and rank <= op.topk and key > Uint32(0):\n            sChosen[rank - 1] = expert\n")),
        bug("router", "routing", "one-choice-twice", "the last choice repeats the one before",
            ("            e = sChosen[tid]\n", "            e = sChosen[tid if tid + 1 < op.topk else tid - 1]\n")),
        bug("router", "routing", "weights-not-normalised", "weights are the scores themselves",
            ("(s / total).to(BFloat16)", "s.to(BFloat16)")),
        bug("router", "routing", "weights-from-biased-scores", "weights use the scores with the correction bias",
            ("            s = Float32(0.0) if z != z else s\n", "            s = Float32(0.0) if z != z else z\n")),
        bug("router", "routing", "bias-ignored", "experts are chosen without the correction bias",
            ("order_key(sigmoid(logit(mLogits, mRemote, m, e)) + mBias[e])",
             "order_key(sigmoid(logit(mLogits, mRemote, m, e)))")),
        bug("router", "routing", "scores-compared-in-bf16", "experts are chosen by scores that are rounded to bf16",
            ("order_key(sigmoid(logit(mLogits, mRemote, m, e)) + mBias[e])",
             "order_key((sigmoid(logit(mLogits, mRemote, m, e)) + mBias[e]).to(BFloat16).to(Float32))")),
        bug("router", "routing", "ids-in-reverse", "ids and weights are stored in ascending order of score",
            ("            mIds[m, tid] = e\n            mWeights[m, tid] =",
             "            mIds[m, op.topk - 1 - tid] = e\n            mWeights[m, op.topk - 1 - tid] =")),
        bug("router", "barrier", "no-barrier-before-ranking", "candidates are ranked before all warps wrote theirs",
            ("    warp_best(rKey, first, sKey, sId, op)\n    cute.arch.sync_threads()\n",
             "    warp_best(rKey, first, sKey, sId, op)\n"), expect=RACY),
        bug("router", "tail", "last-expert-never-seen", "the last expert is left out of the selection",
            ("        if tid % 32 + 32 * j < op.each and e < op.experts:",
             "        if tid % 32 + 32 * j < op.each and e < op.experts - 1:")),
    ]  # fmt: skip


def latent_moe() -> list[Planted]:
    return [
        bug("latent-moe", "routing", "last-expert-dropped", "the expert of lowest rank is not added",
            ("        for slot in cutlass.range(op.topk, unroll_full=True):",
             "        for slot in cutlass.range(op.topk - 1, unroll_full=True):")),
        bug("latent-moe", "routing", "weight-of-the-next-slot", "an expert is weighed with the next one's weight",
            (_TERM, "            total += mWeights[m, (slot + 1) % op.topk].to(Float32) * sF[tid, slot]\n")),
        bug("latent-moe", "routing", "experts-of-first-row", "every row goes through the experts of row 0",
            ("    row = (mIds[m, slot], tile * 8 + lane // 4)\n", "    row = (mIds[0, slot], tile * 8 + lane // 4)\n")),
        bug("latent-moe", "scale", "scale-ignored", "the groups' scales are taken as 2^-6",
            ("    half = (byte + Uint32(64)) << 7\n", "    half = ((byte & Uint32(64)) + Uint32(121)) << 7\n")),
        bug("latent-moe", "scale", "exponent-plus-one", "scales are twice as large",
            ("    half = (byte + Uint32(64)) << 7\n", "    half = (byte + Uint32(65)) << 7\n")),
        bug("latent-moe", "scale", "scale-of-the-neighbour", "odd groups take the scale of the even one before",
            ("w.scales[expert, row, group].to(Uint32)", "w.scales[expert, row, group - group % 2].to(Uint32)")),
        bug("latent-moe", "scale", "sign-dropped", "two of eight codes lose their sign",
            ("lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w1}",
             "lop3.b32 m, s, 0x00000000, m, 0xEA;              mul.rn.bf16x2 {$w1}")),
        bug("latent-moe", "scale", "half-codes-lost", "the code of 0.5 counts as zero in one of four pairs",
            ("shl.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;", "shl.b32 m, {$r0}, 2;  and.b32 m, m, 0x01800180;")),
        bug("latent-moe", "layout", "columns-not-paired", "columns of the hidden vector do not match the codes",
            ("                        pair_up(rX[None, i])\n", "")),
        bug("latent-moe", "layout", "gate-and-up-swapped", "w1 and w3 change places",
            ("    up = (Codes(w.w1, w.w1_scale), Codes(w.w3, w.w3_scale))\n",
             "    up = (Codes(w.w3, w.w3_scale), Codes(w.w1, w.w1_scale))\n")),
        bug("latent-moe", "clamp", "up-not-bounded", "the up branch has no bound of 25",
            ("(25.0 * cute.math.tanh(u * 0.04))", "u")),
        bug("latent-moe", "clamp", "gate-not-bounded", "the gate branch has no bound of 4",
            ("    return 4.0 * cute.math.tanh(g * 0.25) * sigmoid(g)", "    return g * sigmoid(g)")),
        bug("latent-moe", "epsilon", "latent-norm-epsilon-times-ten", "1e-4 in the norm of the latent",
            ("cute.math.rsqrt(square / op.k + op.eps)", "cute.math.rsqrt(square / op.k + 10.0 * op.eps)")),
        bug("latent-moe", "gain", "shared-expert-one-percent", "the shared expert counts 1 % less",
            ("(round_bf16(acc) + ex.addend[m, n].to(Float32))", "(round_bf16(acc) + 0.99 * ex.addend[m, n].to(Float32))")),
        bug("latent-moe", "rounding", "experts-added-in-bf16", "the weighted sum is rounded after every expert",
            (_TERM, "            total = round_bf16(total + mWeights[m, slot].to(Float32) * sF[tid, slot])\n")),
        bug("latent-moe", "rounding", "expert-product-not-rounded", "an expert's result keeps f32 before its weight",
            ("                sF[lane * 2, slot] = round_bf16(rC[0] * CODE_SCALE)\n",
             "                sF[lane * 2, slot] = rC[0] * CODE_SCALE\n"),
            ("                sF[lane * 2 + 1, slot] = round_bf16(rC[1] * CODE_SCALE)\n",
             "                sF[lane * 2 + 1, slot] = rC[1] * CODE_SCALE\n"), band=True),
        bug("latent-moe", "barrier", "no-barrier-before-weighted-sum", "experts are summed before all are done",
            ("    cute.arch.sync_threads()\n    if tid < 8:\n        total = Float32(0.0)",
             "    if tid < 8:\n        total = Float32(0.0)"), expect=RACY),
    ]  # fmt: skip
