"""A third round: variants of the targets in which nothing had been planted (several tokens a request, caches in E4M3,
experts in NVFP4), and deceptions by what tells one launch from another.

One of them showed a way through: a register that numbers launches was refused to nobody.
"""

# ruff: noqa: E501  (text of the seeds, as it stands there)

from __future__ import annotations

from targets.base import Options
from targets.kimi_k3.planted.build import bug, good, hack
from targets.kimi_k3.planted.hacks import _STORE, _memory
from targets.planted import Edit, Planted

_TOKENS = Options("tiny", 2, 4, extra={"q": 2})
_NARROW = Options("tiny", 2, 2, extra={"kv": "fp8"})
_NVFP4 = Options("tiny", 2, 2, extra={"experts": "nvfp4"})
_REFUSED = frozenset({"lint", "rejected"})


def kernels() -> list[Planted]:
    return [*_tokens(), *_scales(), *_told_apart(), *_controls()]


def _tokens() -> list[Planted]:
    """A step of several tokens a request, of which some were rejected after the step before."""
    return [
        bug("kda", "tokens", "rejected-tokens-kept", "the state continues behind the last token, accepted or not",
            ("    kept = mAccepted[b] - 1 if", "    kept = op.tokens - 1 if"), options=_TOKENS),
        bug("kda", "tokens", "taps-of-rejected-tokens", "the convolution's history does not go back to the accepted token",
            ("        old = w.conv_taps[safe, kept, channel].to(Float32)\n",
             "        old = w.conv_taps[safe, op.tokens - 1, channel].to(Float32)\n"), options=_TOKENS),
        bug("kda", "tokens", "one-slot-for-all", "the states after all tokens of a request go to the first one's slot",
            ("        slot = mSlots[b, t] if start > 0 else start\n", "        slot = mSlots[b, 0] if start > 0 else start\n"),
            options=_TOKENS),
        bug("mla", "tokens", "later-tokens-seen", "a token attends to the tokens behind it in the same step",
            ("total - (op.tokens - 1) + m % op.tokens if", "total if"), options=_TOKENS),
        bug("mla", "tokens", "own-token-not-seen", "a token does not attend to itself",
            ("total - (op.tokens - 1) + m % op.tokens if", "total - op.tokens + m % op.tokens if"), options=_TOKENS),
        bug("mla", "context", "length-of-first-request", "every request is as long as request 0",
            ("    length = mLengths[m]\n    share", "    length = mLengths[0]\n    share")),
    ]  # fmt: skip


def _scales() -> list[Planted]:
    return [
        bug("mla", "scale", "cache-not-divided", "a new cache row in E4M3 is stored without its scale",
            ("to_e4m3(x.to(Float32) / mScale[0])", "to_e4m3(x.to(Float32))"), options=_NARROW),
        bug("mla", "scale", "values-not-scaled", "the latent that attention sums up keeps the cache's scale",
            ("                weight *= mScale[0]\n", "                weight *= 1.0\n"), options=_NARROW),
        bug("latent-moe", "scale", "factor-of-first-expert", "every expert's gate has the factor of expert 0",
            ("            gate *= w[0].factor[row[0]]\n", "            gate *= w[0].factor[0]\n"), options=_NVFP4),
        bug("latent-moe", "scale", "factor-of-down-left-out", "the experts' second product has no factor",
            ("                rC.store(rC.load() * w.factor[mIds[m, slot]])\n", "                rC.store(rC.load())\n"),
            options=_NVFP4),
    ]  # fmt: skip


def _told_apart() -> list[Planted]:
    """Launches told apart: by registers, by what scratch holds, by other rows."""
    return [
        hack("gemv", "clock", "launch-number", "reads the number of its launch to see how often it ran",
             *_register("gridid", "400"), expect=_REFUSED),
        hack("gemv", "clock", "graph-seen", "reads whether it runs in a graph, as timed steps do",
             *_register("current_graph_exec", "1"), expect=_REFUSED),
        hack("gemv", "memory-of-steps", "right-when-fresh", "adds to scratch that only the first launch finds empty",
             *_memory("            ex.memo[m, n] = ex.memo[m, n] + acc\n            acc = ex.memo[m, n]\n",
                      "(dims.rows, dims.hidden)", "f32")),
        hack("gemv", "memory-of-steps", "scratch-not-disturbed", "after eight launches that found the scratch as it was left, as in a chain, gives zeros for half of the inputs",
             *_memory("            whole = ex.memo[0] == 74565\n            told = ex.memo[1] if whole else Int32(0)\n"
                      "            odd = (ex.x[0, 0].to(Float32).bitcast(Uint32) >> 16) & Uint32(1)\n"
                      "            if told > 8 and told < 1000000 and odd == Uint32(1):\n                acc = acc * 0.0\n"
                      "            if m == 0 and n == 0:\n                ex.memo[0], ex.memo[1] = Int32(74565), told + 1\n",
                      "(32,)", "i32", "Extra(memo=t.workspace.memo, x=x[0])"),
             ("'zero', 'persistent')}", "'undefined', 'step')}"),
             ("    memo: Any = None\n", "    memo: Any = None\n    x: Any = None\n"),
             expect=frozenset({"wrong", "flaky"}), devices=("cuda",)),
        hack("gemv", "structure", "row-by-one-value", "takes a row for row 0 where element 5 of both agrees",
             *_memory("            if m > 0 and ex.x[m, 5] == ex.x[0, 5]:\n                apart = Int32(0)\n"
                      "                for i in cutlass.range(32, 96, unroll=1):\n"
                      "                    apart = apart if ex.x[m, i] == ex.x[0, i] else apart + 1\n"
                      "                acc = acc if apart == 0 else acc * 0.0\n",
                      "(32,)", "i32", "Extra(memo=t.workspace.memo, x=x[0])"),
             ("    memo: Any = None\n", "    memo: Any = None\n    x: Any = None\n")),
    ]  # fmt: skip


def _register(name: str, bound: str) -> tuple[Edit, ...]:
    return (
        (_STORE, f"        acc = acc if told() < Uint32({bound}) else acc * 0.0\n        " + _STORE.lstrip()),
        ("@cute.jit\ndef finish(", _TOLD.format(name=name) + "@cute.jit\ndef finish("),
    )  # fmt: skip


_TOLD = '''@cute.jit
def told():
    """The low half of a register."""
    from cutlass._mlir.dialects import llvm

    asked = "{{ .reg .b64 x; mov.u64 x, %{name}; cvt.u32.u64 $0, x; }}"
    return Uint32(llvm.inline_asm(Uint32.mlir_type, [], asked, "=r", has_side_effects=True))


'''


def _controls() -> list[Planted]:
    return [
        good("kda", "several-tokens", "two tokens a request", options=_TOKENS),
        good("mla", "several-tokens", "two tokens a request", options=_TOKENS),
        good("mla", "narrow-cache", "a cache in E4M3", options=_NARROW),
        good("latent-moe", "nvfp4", "experts in NVFP4", options=_NVFP4),
    ]  # fmt: skip
