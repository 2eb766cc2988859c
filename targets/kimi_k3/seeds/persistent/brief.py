"""Short forms of activations, in the place of `common`'s in the decode step (`source` says so).

Right to 2^-21, far below a rounding to bf16; the long forms are issued by all warps and fetched anew in every layer.
"""

import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def sigmoid(x: Float32):
    return cute.arch.inline_ptx(
        """{
        .reg .f32 e;
        mul.f32 e, {$r0}, 0fBFB8AA3B;
        ex2.approx.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.f32 {$w0}, e;
        }""",
        write_only_types=[Float32],
        read_only_args=[x],
    )


@cute.jit
def silu(x: Float32):
    return x * sigmoid(x)
