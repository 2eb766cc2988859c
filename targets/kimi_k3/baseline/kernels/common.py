"""Device functions that the Triton kernels share: programmatic launch, activations, the 4-bit format.

No kernel lives here. Annotations are left to `tl.constexpr`: they are what Triton reads.
"""

import triton
import triton.language as tl

SHIFT = tl.constexpr(2.0**100)
"""x is scaled up before it meets codes that are 2^-126 of their value, so that no product leaves float32's range."""
UNSHIFT = tl.constexpr(2.0**26)


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the launches before, then let the next one start: what is older may be read before this."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_open(PDL: tl.constexpr, OPEN: tl.constexpr):
    """`begin`; with OPEN the next launch starts at once: for short kernels, before a launch that reads nothing but
    weights until it may.

    That launch has to use `begin`, so that what comes after it can count on all before its direct predecessor again.
    """
    if PDL:
        if OPEN:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        else:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(weights, program, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """Ask for 4 KB pieces of what a later launch reads to be in L2: every STRIDE-th piece, CHUNKS in all, LANES a
    program. Nothing waits for them."""
    i = program * LANES + tl.arange(0, LANES)
    at = weights.to(tl.int64) + i.to(tl.int64) * (STRIDE * 4096)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0; }",
        "=r,l,r", [at, (i < CHUNKS).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2.0 * sigmoid(2.0 * x) - 1.0


@triton.jit
def situ(gate, up):
    """4 tanh(g / 4) sg(g) * 25 tanh(u / 25)."""
    return 100.0 * tanh(gate * 0.25) * sigmoid(gate) * tanh(up * 0.04)


@triton.jit
def bf(x):
    """Rounded to BF16, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def decode(words, NIBBLE: tl.constexpr):
    """Code NIBBLE of eight in each int32, as float32 of 2^-126 of its value: sign, two exponent bits and one of
    mantissa are moved to float32's places; the code for a half becomes a subnormal, exactly."""
    bits = ((words << (28 - 4 * NIBBLE)) >> 6) & -2118123520
    return tl.cast(bits, tl.float32, bitcast=True)


@triton.jit
def group_scale(byte):
    """2^(byte - 127), times what `decode` and SHIFT left out."""
    return tl.cast(byte.to(tl.int32) << 23, tl.float32, bitcast=True) * UNSHIFT
