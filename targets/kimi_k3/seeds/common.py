"""Device and host pieces that the Kimi K3 seeds share: warp mathematics, a bf16 MMA, loops over layers on the host.

Part of a candidate (`seeds.source` bundles the modules into one file), so it knows CuTe DSL only, no target.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator


@cute.jit
def pick(tensors: cutlass.Constexpr, i: Int32):
    """`tensors[i]` for an index known only while the launches are recorded. All have one layout.

    A loop over layers that runs on the host needs one kernel where an unrolled one would compile a copy per layer.
    """
    first = tensors[0]
    address = first.iterator.toint()
    for k in cutlass.range_constexpr(1, len(tensors)):
        address = tensors[k].iterator.toint() if i == k else address
    pointer = cute.make_ptr(first.element_type, address, cute.AddressSpace.gmem, assumed_align=128)
    return cute.make_tensor(pointer, first.layout)


def pick_layer(layers, i, names):
    """A namespace of the tensors `names` of layer i, an index known only while the launches are recorded."""
    return SimpleNamespace(**{n: pick([getattr(x, n) for x in layers], i) for n in names})


@cute.jit
def begin(pdl: cutlass.Constexpr):
    """First thing in a kernel that does not prefetch: wait for the launches before, then let the next one start.

    Released only after its own wait, a launch starts knowing that all but its direct predecessor are complete; so
    what is older (weights, recurrent state) may be read before the wait.
    """
    if cutlass.const_expr(pdl):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def sigmoid(x: Float32):
    return 1.0 / (1.0 + cute.math.exp(-x))


@cute.jit
def silu(x: Float32):
    return x * sigmoid(x)


@cute.jit
def situ(g: Float32, u: Float32):
    """K3's activation: 4 tanh(g/4) sg(g) * 25 tanh(u/25)."""
    return 4.0 * cute.math.tanh(g * 0.25) * sigmoid(g) * (25.0 * cute.math.tanh(u * 0.04))


@cute.jit
def round_bf16(x: Float32):
    return x.to(BFloat16).to(Float32)


@cute.jit
def low(pair: Uint32):
    """The bf16 in bits 0..15, as f32."""
    return (pair << 16).bitcast(Float32)


@cute.jit
def high(pair: Uint32):
    """The bf16 in bits 16..31, as f32."""
    return (pair & Uint32(0xFFFF0000)).bitcast(Float32)


@cute.jit
def lanes_sum(x: Float32, lanes: cutlass.Constexpr):
    """Sum over groups of `lanes` neighbouring lanes (a power of two), in every lane of the group."""
    offset = lanes // 2
    while cutlass.const_expr(offset > 0):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
        offset = offset // 2
    return x


@cute.jit
def lanes_max(x: Float32):
    """Maximum over the warp, in every lane."""
    for i in cutlass.range_constexpr(5):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1 << i))
    return x


@cute.jit
def mma_k32(rC: cute.Tensor, rA: cute.Tensor, b: tuple):
    """rC[4] += A[8 rows, 32] B[32, 8 columns]: two mma.m16n8k16 on bf16 whose rows 8..15 of A are zero.

    With g = lane // 4, q = lane % 4: the four words of rA are eight columns of row g of A, those of b the same columns
    of column g of B; which eight of the 32 a lane has does not matter, as long as A and B agree. rC[0], rC[1] are
    (g, 2q) and (g, 2q + 1). One block of PTX keeps tracing short.
    """
    c = cute.arch.inline_ptx(
        """{
        .reg .f32 c0, c1, c2, c3;
        .reg .b32 z;
        mov.b32 z, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3},
            {{$r0}, z, {$r1}, z}, {{$r4}, {$r5}}, {{$r8}, {$r9}, {$r10}, {$r11}};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r2}, z, {$r3}, z}, {{$r6}, {$r7}}, {c0, c1, c2, c3};
        }""",
        write_only_types=[Float32] * 4,
        read_only_args=[*(rA[i] for i in range(4)), *b, *(rC[i] for i in range(4))],
    )
    for i in cutlass.range_constexpr(4):
        rC[i] = c[i]


@cute.jit
def add_bf16x2(a: Uint32, b: Uint32):
    """Two bf16 sums, each rounded once."""
    return pack_bf16(low(a) + low(b), high(a) + high(b))


@cute.jit
def pack_bf16(x: Float32, y: Float32):
    """x rounded to bf16 in bits 0..15, y in bits 16..31."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[y, x]
    )


@cute.jit
def block_sum(x: Float32, warps: cutlass.Constexpr):
    """Sum of x over a CTA of `warps` warps (at most 32), in a fixed order, in every thread."""
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    sPart = smem(Float32, (warps,), (1,))
    x = lanes_sum(x, 32)
    if lane == 0:
        sPart[tid // 32] = x
    cute.arch.sync_threads()
    part = Float32(0.0)
    if lane < warps:
        part = sPart[lane]
    return lanes_sum(part, 32)


def divisor_near(n, wanted):
    """The smallest divisor of n in [wanted, 2 wanted], else the largest below: a loop count that divides evenly."""
    for d in range(wanted, 2 * wanted + 1):
        if n % d == 0:
            return d
    return max(d for d in range(1, wanted + 1) if n % d == 0)


def divisor_below(n, most):
    return max(d for d in range(1, most + 1) if n % d == 0)


def smem(dtype, shape, stride):
    """A shared-memory tensor, aligned to 16 bytes."""
    layout = cute.make_layout(shape, stride=stride)
    return SmemAllocator().allocate_tensor(dtype, layout, byte_alignment=16)
