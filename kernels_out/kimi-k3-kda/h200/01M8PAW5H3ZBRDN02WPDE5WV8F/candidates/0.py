"""KDA attention of one layer: input projection, one recurrent update per head, output projection.

The update is one launch, a CTA per head and request: short convolution, decay, delta rule on the f32 state, norm and
gate. The state is in registers, eight lanes to a row of it, loaded before anything that depends on the projection.
Several tokens a request, and models whose output gate has low rank, take a second kernel that walks the tokens.
"""


from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator


# ---- common: Device and host pieces that the Kimi K3 seeds share: warp mathematics, a bf16 MMA, loops over layers on the host.


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


# ---- gemv: Matrix-vector products y = x W^T for a few rows, weights streamed once per eight rows, on bf16 tensor cores.


class Extra(NamedTuple):
    """What some projections read or write beside x, W and y.

    plus    x is bf(x + plus)
    norm    x is bf(RMS(x; norm)), recomputed by every CTA
    remote  f32, y = bf(bf(product) + remote): the sum of the other ranks' partials
    send    columns from `remote`'s width on go here instead, without a sum
    addend  bf16, y = bf(bf(product) + addend)
    tail    bf16, columns of y beyond the product are copies of it
    """

    plus: Any = None
    norm: Any = None
    remote: Any = None
    send: Any = None
    addend: Any = None
    tail: Any = None


@dataclass(frozen=True)
class Gemv:
    """Compile-time shape of one product: y has `n` columns, `k` columns of x are used.

    `situ`: W holds n gate rows, then n up rows, and y = bf(SiTU(bf(gate), bf(up))). A CTA of `warps` makes `tile` x 8
    columns; the warps share K in blocks of 32 columns and load `unroll` blocks before they use the first.
    """

    n: int
    k: int
    warps: int
    tile: int
    unroll: int
    situ: bool
    eps: float
    pdl: bool

    @property
    def blocks(self):
        return self.k // 32

    @property
    def exact(self):
        return self.blocks % (self.warps * self.unroll) == 0

    @property
    def rounds(self):
        return -(-self.blocks // (self.warps * self.unroll))

    @property
    def parts(self):
        """Rows of W, in units of eight, that a CTA reads."""
        return self.tile * (2 if self.situ else 1)


@cute.jit
def load_weights(gW: cute.Tensor, rW: cute.Tensor, tile: Int32, step: Int32, op: cutlass.Constexpr):
    """One round of this warp's blocks: rW[4 words, part, unroll]; a lane has 16 bytes of row g, columns 8 q of 32."""
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    stream = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), Uint32, num_bits_per_copy=128,
        load_cache_mode=cute.nvgpu.LoadCacheMode.STREAMING,
    )  # fmt: skip
    for u in cutlass.range(op.unroll, unroll_full=True):
        block = (step * op.unroll + u) * op.warps + tid // 32
        for j in cutlass.range_constexpr(op.parts):
            row = (tile * op.tile + j % op.tile) * 8 + lane // 4 + (j // op.tile) * op.n
            if cutlass.const_expr(op.exact):
                cute.copy(stream, gW[row, (None, block * 4 + lane % 4)], rW[None, j, u])
            elif block < op.blocks:
                cute.copy(stream, gW[row, (None, block * 4 + lane % 4)], rW[None, j, u])
            else:
                rW[None, j, u].fill(0)


@cute.jit
def load_rows(
    gX: cute.Tensor,
    plus: Any,
    rX: cute.Tensor,
    span: tuple,
    step: Int32,
    op: cutlass.Constexpr,
):
    """The same blocks of rows span = (first, end) of x, up to eight: rX[4 words, unroll] of row g.

    Absent rows keep the zeros that rX starts with.
    """
    first, end = span
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    m = first + lane // 4
    rPlus = cute.make_rmem_tensor(cute.make_layout((4, op.unroll)), Uint32)
    if cutlass.const_expr(plus is not None and not op.exact):
        rPlus.fill(0)  # beyond the last block x stays 0, and what happens to be in a register may be NaN
    for u in cutlass.range(op.unroll, unroll_full=True):
        block = (step * op.unroll + u) * op.warps + tid // 32
        if m < end and block < op.blocks:
            cute.autovec_copy(gX[m, (None, block * 4 + lane % 4)], rX[None, u])
            if cutlass.const_expr(plus is not None):
                cute.autovec_copy(plus[m, (None, block * 4 + lane % 4)], rPlus[None, u])
    if cutlass.const_expr(plus is not None):
        if m < end:
            for i in cutlass.range_constexpr(4 * op.unroll):
                rX[i] = add_bf16x2(rX[i], rPlus[i])


@cute.jit
def normed_rows(
    mX: cute.Tensor, mNorm: cute.Tensor, sX: cute.Tensor, m0: Int32, op: cutlass.Constexpr
):
    """sX[8 rows, k / 2 words] = bf(RMS(x; norm)) of the rows from m0, f32 inside, one rounding. Ends with a barrier.

    The warps share the rows, several to a row when there are few; rows beyond the last are not written.
    """
    tid, _, _ = cute.arch.thread_idx()
    words = op.k // 2
    per = max(1, op.warps // min(8, mX.shape[0]))
    row, part, lane = tid // 32 // per, tid // 32 % per, tid % 32
    gX = cute.recast_tensor(mX, Uint32)
    gNorm = cute.recast_tensor(mNorm, Uint32)
    sSquare = smem(Float32, (8, per), (per, 1))
    for r in cutlass.range(row, 8, op.warps // per, unroll=1):
        if m0 + r < mX.shape[0]:
            square = Float32(0.0)
            for i in cutlass.range(part * 32 + lane, words, 32 * per, unroll=8):
                x = gX[m0 + r, i]
                square += low(x) * low(x) + high(x) * high(x)
            square = lanes_sum(square, 32)
            if lane == 0:
                sSquare[r, part] = square
    cute.arch.sync_threads()
    for r in cutlass.range(row, 8, op.warps // per, unroll=1):
        if m0 + r < mX.shape[0]:
            square = Float32(0.0)
            for p in cutlass.range(per, unroll_full=True):
                square += sSquare[r, p]
            scale = cute.math.rsqrt(square / op.k + op.eps)
            for i in cutlass.range(part * 32 + lane, words, 32 * per, unroll=8):
                x, w = gX[m0 + r, i], gNorm[i]
                sX[r, i] = pack_bf16(low(x) * scale * low(w), high(x) * scale * high(w))
    cute.arch.sync_threads()


@cute.jit
def finish(acc: Float32, up: Float32, at: tuple, mY: cute.Tensor, ex: Extra, op: cutlass.Constexpr):
    """Epilogue of element at = (m, n): the roundings of the specification, then the store."""
    m, n = at
    if cutlass.const_expr(op.situ):
        mY[m, n] = situ(round_bf16(acc), round_bf16(up)).to(mY.element_type)
    elif cutlass.const_expr(ex.send is not None):
        own = ex.remote.shape[1]
        if n < own:
            mY[m, n] = (round_bf16(acc) + ex.remote[m, n]).to(mY.element_type)
        else:
            ex.send[m, n - own] = acc.to(ex.send.element_type)
    elif cutlass.const_expr(ex.remote is not None):
        mY[m, n] = (round_bf16(acc) + ex.remote[m, n]).to(mY.element_type)
    elif cutlass.const_expr(ex.addend is not None):
        mY[m, n] = (round_bf16(acc) + ex.addend[m, n].to(Float32)).to(mY.element_type)
    else:
        mY[m, n] = acc.to(mY.element_type)


@cute.kernel
def gemv_kernel(
    mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, ex: Extra, op: cutlass.Constexpr
):
    """mX bf16 [M, >= k], mW bf16 [n or 2n, k], mY bf16 or f32 [M, >= n]; grid (n / 8 tile, M / 8).

    The weights are the B operand (n = 8 rows), x is A (16 rows, the upper 8 zero). Each lane takes 16 contiguous
    bytes of a row, so k is permuted alike in A and B. f32 sums, warps added in order, rounded as `Extra` says.
    """
    tid, _, _ = cute.arch.thread_idx()
    tile, group, _ = cute.arch.block_idx()
    m0 = group * 8
    gW = cute.logical_divide(cute.recast_tensor(mW, Uint32), (None, 4))
    rW = cute.make_rmem_tensor(cute.make_layout((4, op.parts, op.unroll)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.unroll)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.parts)), Float32)
    rX.fill(0)
    rC.fill(0.0)
    load_weights(gW, rW, tile, Int32(0), op)
    begin(op.pdl)
    plus = None
    if cutlass.const_expr(ex.norm is not None):
        # 16 bytes of padding keep the eight rows of a fragment in different banks
        sX = smem(Uint32, (8, op.k // 2), (op.k // 2 + 4, 1))
        normed_rows(mX, ex.norm, sX, m0, op)
        gX = cute.logical_divide(sX, (None, 4))
        span = (Int32(0), mX.shape[0] - m0)
    else:
        gX = cute.logical_divide(cute.recast_tensor(mX, Uint32), (None, 4))
        span = (m0, Int32(mX.shape[0]))
        if cutlass.const_expr(ex.plus is not None):
            plus = cute.logical_divide(cute.recast_tensor(ex.plus, Uint32), (None, 4))
    for step in cutlass.range(op.rounds, unroll=1):
        load_rows(gX, plus, rX, span, step, op)
        for u in cutlass.range(op.unroll, unroll_full=True):
            for j in cutlass.range_constexpr(op.parts):
                mma_k32(rC[None, j], rX[None, u], tuple(rW[i, j, u] for i in range(4)))
        if step + 1 < op.rounds:
            load_weights(gW, rW, tile, step + 1, op)
    sum_and_store(rC, mY, ex, op)


@cute.jit
def sum_and_store(rC: cute.Tensor, mY: cute.Tensor, ex: Extra, op: cutlass.Constexpr):
    """Add the warps' shares of K in warp order and finish each element."""
    tid, _, _ = cute.arch.thread_idx()
    tile, group, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    lane = tid % 32
    width = op.tile * 8
    sC = smem(Float32, (8, op.parts * 8, op.warps), (1, 8, op.parts * 64))
    for j in cutlass.range_constexpr(op.parts):
        for i in cutlass.range_constexpr(2):
            sC[lane // 4, j * 8 + lane % 4 * 2 + i, tid // 32] = rC[i, j]
    cute.arch.sync_threads()
    for item in cutlass.range(tid, 8 * width, op.warps * 32, unroll=1):
        r, c = item // width, item % width
        m = group * 8 + r
        if m < mY.shape[0]:
            acc = Float32(0.0)
            up = Float32(0.0)
            for w in cutlass.range(op.warps, unroll_full=True):
                acc += sC[r, c, w]
                if cutlass.const_expr(op.situ):
                    up += sC[r, width + c, w]
            finish(acc, up, (m, tile * width + c), mY, ex, op)
    if cutlass.const_expr(ex.tail is not None):
        threads = op.warps * 32
        for i in cutlass.range(tile * threads + tid, ex.tail.shape[1], tiles * threads, unroll=1):
            for r in cutlass.range_constexpr(8):
                if group * 8 + r < mY.shape[0]:
                    mY[group * 8 + r, op.n + i] = ex.tail[group * 8 + r, i]


def gemv_shape(n, k, cfg, situ):
    """Fit the tunables to a product: whole tiles, rounds that divide k, and enough bytes in flight for a small n."""
    warps, unroll = cfg.gemv_warps, cfg.gemv_unroll
    tile = divisor_below(n // 8, cfg.gemv_tile)
    if n // (8 * tile) < 2 * cfg.sms:
        tile = 1
    if n // 8 < cfg.sms and k >= 2048:
        warps, unroll = (
            16,
            7,
        )  # at most one CTA per SM: each must keep all the loads in flight itself
    blocks = k // 32
    if blocks % warps == 0:
        unroll = divisor_near(blocks // warps, unroll)
    else:
        unroll = min(unroll, -(-blocks // warps))
    return Gemv(n, k, warps, tile, unroll, situ, cfg.dims.eps, cfg.pdl)


@cute.jit
def gemv(
    mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, ex: Extra, cfg: cutlass.Constexpr, stream
):
    """y = x W^T with the extras of `ex`; n and k are W's."""
    op = gemv_shape(mW.shape[0], mW.shape[1], cfg, False)
    launch_gemv(mX, mW, mY, ex, op, stream)


@cute.jit
def launch_gemv(
    mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, ex: Extra, op: cutlass.Constexpr, stream
):
    gemv_kernel(mX, mW, mY, ex, op).launch(
        grid=(op.n // (8 * op.tile), cute.ceil_div(mX.shape[0], 8), 1),
        block=(op.warps * 32, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


@cute.kernel
def add_kernel(mX: cute.Tensor, mY: cute.Tensor, mOut: cute.Tensor, pdl: cutlass.Constexpr):
    """out = bf(x + y), bf16 [M, columns]; grid (columns / 256, M)."""
    tid, _, _ = cute.arch.thread_idx()
    bid, m, _ = cute.arch.block_idx()
    begin(pdl)
    i = bid * 256 + tid
    if i < mX.shape[1]:
        mOut[m, i] = (mX[m, i].to(Float32) + mY[m, i].to(Float32)).to(BFloat16)


@cute.jit
def add(mX: cute.Tensor, mY: cute.Tensor, mOut: cute.Tensor, cfg: cutlass.Constexpr, stream):
    add_kernel(mX, mY, mOut, cfg.pdl).launch(
        grid=(cute.ceil_div(mX.shape[1], 256), mX.shape[0], 1),
        block=(256, 1, 1),
        stream=stream,
        use_pdl=cfg.pdl,
    )


@cute.jit
def gemv_of_sum(
    mX: cute.Tensor,
    mPlus: cute.Tensor,
    mSum: Any,
    mW: cute.Tensor,
    mY: cute.Tensor,
    cfg: cutlass.Constexpr,
    stream,
):
    """y = bf(x + plus) W^T, the sum made while x is loaded or, unfused, by a launch of its own into mSum."""
    if cutlass.const_expr(cfg.fuse_add):
        gemv(mX, mW, mY, Extra(plus=mPlus), cfg, stream)
    else:
        add(mX, mPlus, mSum, cfg, stream)
        gemv(mSum, mW, mY, Extra(), cfg, stream)


# ---- kda: KDA attention of one layer: input projection, one recurrent update per head, output projection.

TUNABLES = {
    "kda_threads": (512, 256, 1024),
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "fuse_add": (True, False),
    "pdl": (False, True),
}

KDA_WEIGHTS = ("in_proj", "f_b", "conv", "A_log", "dt_bias", "o_norm", "o_proj")

KDA_STATES = ("conv", "S")

K = 128
"""Width of a head, of its keys and of the low-rank decay projection; the lane mapping depends on it."""


@dataclass(frozen=True)
class Kda:
    """Compile-time sizes; `width` = heads x 128."""

    heads: int
    threads: int
    eps: float
    pdl: bool
    tokens: int = 1
    low_rank: bool = False

    @property
    def f_at(self):
        """Column of f_a in a projected row; g_a follows it in models with a low-rank gate."""
        return 3 * self.width + self.heads if self.low_rank else 4 * self.width

    @property
    def beta_at(self):
        return 3 * self.width if self.low_rank else 4 * self.width + K

    @property
    def width(self):
        return self.heads * K

    @property
    def passes(self):
        """Rows of the state per thread: eight lanes share a row."""
        return K * 8 // self.threads


class KdaTensors(NamedTuple):
    """conv f32 [3 D, 4], f_b bf16 [D, 128], A_log f32 [H], dt_bias f32 [D], o_norm bf16 [128]; the states conv_taps
    bf16 [slots, 3, 3 D] (oldest tap first) and S f32 [slots, H, V, K]; slots i32 [M]."""

    conv: Any
    f_b: Any
    A_log: Any
    dt_bias: Any
    o_norm: Any
    conv_taps: Any
    S: Any
    slots: Any


@cute.jit
def convolve(mY: cute.Tensor, w: KdaTensors, sU: cute.Tensor, at: tuple, op: cutlass.Constexpr):
    """sU[q 128 | k 128 | v 128] = silu of the four-tap convolution of this head's channels; shifts the history."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, slot = at
    for c in cutlass.range(tid, 3 * K, op.threads, unroll=1):
        channel = c // K * op.width + h * K + c % K
        safe = slot if slot > 0 else 0
        tap0 = w.conv_taps[safe, 0, channel]
        tap1 = w.conv_taps[safe, 1, channel]
        tap2 = w.conv_taps[safe, 2, channel]
        x = mY[m, channel]
        u = tap0.to(Float32) * w.conv[channel, 0] + tap1.to(Float32) * w.conv[channel, 1]
        u += tap2.to(Float32) * w.conv[channel, 2] + x.to(Float32) * w.conv[channel, 3]
        sU[c] = silu(u)
        if slot > 0:
            w.conv_taps[slot, 0, channel] = tap1
            w.conv_taps[slot, 1, channel] = tap2
            w.conv_taps[slot, 2, channel] = x


@cute.jit
def decay(mY: cute.Tensor, w: KdaTensors, sDecay: cute.Tensor, at: tuple, op: cutlass.Constexpr):
    """sDecay[k] = exp(-5 sg(exp(A_log) (bf(f_a W_fb^T) + dt_bias))): sixteen lanes to a row of f_b."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = at
    lane = tid % 16
    gY = cute.logical_divide(mY, (None, 8))
    gF = cute.logical_divide(w.f_b, (None, 8))
    rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rF = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    cute.autovec_copy(gY[m, (None, op.f_at // 8 + lane)], rX)
    rate = cute.math.exp(w.A_log[h])
    for k in cutlass.range(tid // 16, K, op.threads // 16, unroll=4):
        cute.autovec_copy(gF[h * K + k, (None, lane)], rF)
        dot = (rX.load().to(Float32) * rF.load().to(Float32)).reduce(
            cute.ReductionOp.ADD, Float32(0.0), 0
        )
        raw = round_bf16(lanes_sum(dot, 16))
        if lane == 0:
            gate = sigmoid(rate * (raw + w.dt_bias[h * K + k]))
            sDecay[k] = cute.math.exp(-5.0 * gate)


@cute.jit
def norm_scale(sX: cute.Tensor):
    """rsqrt(sum x^2 + 1e-6) of 128 values, by every warp for itself."""
    tid, _, _ = cute.arch.thread_idx()
    square = Float32(0.0)
    for i in cutlass.range_constexpr(4):
        x = sX[tid % 32 + 32 * i]
        square += x * x
    return cute.math.rsqrt(lanes_sum(square, 32) + 1e-6)


@cute.jit
def share(sX: cute.Tensor):
    """This lane's 16 of 128 values, as rS has them: 4 at (8 c + lane) * 4, c = 0..3."""
    tid, _, _ = cute.arch.thread_idx()
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    for c in cutlass.range_constexpr(4):
        cute.autovec_copy(cute.local_tile(sX, (4,), (c * 8 + tid % 8,)), rX[None, c])
    return rX


@cute.jit
def delta_rule(
    rS: cute.Tensor,
    sU: cute.Tensor,
    sDecay: cute.Tensor,
    sO: cute.Tensor,
    beta: Float32,
    op: cutlass.Constexpr,
):
    """S <- S * decay; S += beta (v - S k) k; o = S q, on this thread's rows. sums over k: 16 in order, then 8 lanes."""
    tid, _, _ = cute.arch.thread_idx()
    sQ = cute.local_tile(sU, (K,), (0,))
    sK = cute.local_tile(sU, (K,), (1,))
    q = share(sQ).load() * (norm_scale(sQ) * K**-0.5)
    k = share(sK).load() * norm_scale(sK)
    d = share(sDecay).load()
    for p in cutlass.range_constexpr(op.passes):
        row = p * (op.threads // 8) + tid // 8
        s = rS[None, None, p].load() * d
        seen = lanes_sum((s * k).reduce(cute.ReductionOp.ADD, Float32(0.0), 0), 8)
        s = s + k * (beta * (sU[2 * K + row] - seen))
        rS[None, None, p].store(s)
        o = lanes_sum((s * q).reduce(cute.ReductionOp.ADD, Float32(0.0), 0), 8)
        if tid % 8 == 0:
            sO[row] = o


@cute.kernel
def kda_kernel(mY: cute.Tensor, w: KdaTensors, mOut: cute.Tensor, op: cutlass.Constexpr):
    """mY bf16 [M, q D | k D | v D | g D | f_a 128 | b H | pad], mOut bf16 [M, D]; grid (H, M).

    All f32 between the projection (bf16) and out = bf(RMS(o; o_norm) * sg(g)). A request in the null slot (id <= 0)
    gets zeros and touches no state.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    slot = w.slots[m]
    at = (h, m, slot)
    rS = cute.make_rmem_tensor(cute.make_layout((4, 4, op.passes)), Float32)
    gS = cute.logical_divide(w.S[slot if slot > 0 else 0, h, None, None], (None, 4))
    for p in cutlass.range_constexpr(op.passes):
        for c in cutlass.range_constexpr(4):
            row = p * (op.threads // 8) + tid // 8
            cute.autovec_copy(gS[row, (None, c * 8 + tid % 8)], rS[None, c, p])
    begin(op.pdl)
    sU, sDecay, sO = (
        smem(Float32, (3 * K,), (1,)),
        smem(Float32, (K,), (1,)),
        smem(Float32, (K,), (1,)),
    )
    convolve(mY, w, sU, at, op)
    decay(mY, w, sDecay, at, op)
    cute.arch.sync_threads()
    beta = sigmoid(mY[m, 4 * op.width + K + h].to(Float32))
    delta_rule(rS, sU, sDecay, sO, beta, op)
    if slot > 0:
        for p in cutlass.range_constexpr(op.passes):
            for c in cutlass.range_constexpr(4):
                row = p * (op.threads // 8) + tid // 8
                cute.autovec_copy(rS[None, c, p], gS[row, (None, c * 8 + tid % 8)])
    cute.arch.sync_threads()
    scale = head_scale(sO, op)
    if tid < K:
        gate = sigmoid(mY[m, 3 * op.width + h * K + tid].to(Float32))
        y = sO[tid] * scale * w.o_norm[tid].to(Float32) * gate
        mOut[m, h * K + tid] = (y if slot > 0 else Float32(0.0)).to(BFloat16)


@cute.jit
def head_scale(sO: cute.Tensor, op: cutlass.Constexpr):
    """rsqrt(mean o^2 + eps) over the head, by every warp for itself."""
    tid, _, _ = cute.arch.thread_idx()
    square = Float32(0.0)
    for i in cutlass.range_constexpr(4):
        x = sO[tid % 32 + 32 * i]
        square += x * x
    return cute.math.rsqrt(lanes_sum(square, 32) / K + op.eps)


def kda_shape(cfg):
    d = cfg.dims
    if (d.head_dim, d.f_rank) != (K, K):
        raise ValueError(f"head_dim {d.head_dim} and f_rank {d.f_rank}: this kernel is for {K}")
    low_rank = d.gate_rank > 0
    if low_rank and (d.gate_rank != K or d.kda_heads % 8):
        raise ValueError(
            f"gate_rank {d.gate_rank}, {d.kda_heads} heads: this kernel is for {K} and multiples of 8"
        )
    return Kda(d.kda_heads, cfg.kda_threads, d.eps, cfg.pdl, d.q, low_rank)


@cute.jit
def convolve_tokens(
    mY: cute.Tensor, w: KdaTensors, sAll: cute.Tensor, at: tuple, op: cutlass.Constexpr
):
    """sAll[token, q 128 | k 128 | v 128] of all tokens of request b. at = (head, b, conv page, accepted - 1): the page
    becomes the two taps before the new tokens, then these. A thread has whole channels, so it reads before it writes.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, b, page, kept = at
    safe = page if page > 0 else 0
    for c in cutlass.range(tid, 3 * K, op.threads, unroll=1):
        channel = c // K * op.width + h * K + c % K
        old = w.conv_taps[safe, kept, channel].to(Float32)
        middle = w.conv_taps[safe, kept + 1, channel]
        young = w.conv_taps[safe, kept + 2, channel]
        if page > 0:
            w.conv_taps[page, 0, channel] = middle
            w.conv_taps[page, 1, channel] = young
        middle, young = middle.to(Float32), young.to(Float32)
        for t in cutlass.range_constexpr(op.tokens):
            new = mY[b * op.tokens + t, channel]
            if page > 0:
                w.conv_taps[page, t + 2, channel] = new
            new = new.to(Float32)
            total = old * w.conv[channel, 0] + middle * w.conv[channel, 1]
            total += young * w.conv[channel, 2] + new * w.conv[channel, 3]
            sAll[t, c] = silu(total)
            old, middle, young = middle, young, new


@cute.jit
def gate_of(mY: cute.Tensor, mG: cute.Tensor, sGate: cute.Tensor, at: tuple, op: cutlass.Constexpr):
    """sGate[k] = sg(g) of a row and head: g = bf(g_a W_gb^T) with a low-rank gate (mG = W_gb), else in the row."""
    tid, _, _ = cute.arch.thread_idx()
    h, row = at
    if cutlass.const_expr(op.low_rank):
        lane = tid % 16
        gY = cute.logical_divide(mY, (None, 8))
        gG = cute.logical_divide(mG, (None, 8))
        rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
        rG = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
        cute.autovec_copy(gY[row, (None, (op.f_at + K) // 8 + lane)], rX)
        for k in cutlass.range(tid // 16, K, op.threads // 16, unroll=4):
            cute.autovec_copy(gG[h * K + k, (None, lane)], rG)
            product = rX.load().to(Float32) * rG.load().to(Float32)
            value = round_bf16(lanes_sum(product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0), 16))
            if lane == 0:
                sGate[k] = sigmoid(value)
    else:
        if tid < K:
            sGate[tid] = sigmoid(mY[row, 3 * op.width + h * K + tid].to(Float32))


@cute.kernel
def kda_tokens_kernel(
    mY: cute.Tensor, w: KdaTensors, more: tuple, mOut: cute.Tensor, op: cutlass.Constexpr
):
    """As kda_kernel for `op.tokens` tokens of a request in order, grid (H, B); more = (accepted i32 [B], g_b bf16 [D,
    128]), None where there is none. w.slots i32 [B, tokens]: the state after each token goes there unless the id is
    <= 0; the request starts from slot accepted - 1 of its row, a null one gets zeros and touches nothing.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, b, _ = cute.arch.block_idx()
    mAccepted, mG = more
    kept = mAccepted[b] - 1 if cutlass.const_expr(op.tokens > 1) else 0
    mSlots = cute.make_tensor(
        w.slots.iterator,
        cute.make_layout((mY.shape[0] // op.tokens, op.tokens), stride=(op.tokens, 1)),
    )
    start = mSlots[b, kept]
    page = mSlots[b, 0] if start > 0 else start
    rS = cute.make_rmem_tensor(cute.make_layout((4, 4, op.passes)), Float32)
    gS = cute.logical_divide(w.S[start if start > 0 else 0, h, None, None], (None, 4))
    for p in cutlass.range_constexpr(op.passes):
        for c in cutlass.range_constexpr(4):
            cute.autovec_copy(
                gS[p * (op.threads // 8) + tid // 8, (None, c * 8 + tid % 8)], rS[None, c, p]
            )
    begin(op.pdl)
    sAll = smem(Float32, (op.tokens, 3 * K), (3 * K, 1))
    sDecay, sGate = smem(Float32, (K,), (1,)), smem(Float32, (K,), (1,))
    sO = smem(Float32, (K,), (1,))
    convolve_tokens(mY, w, sAll, (h, b, page, kept), op)
    for t in cutlass.range(op.tokens, unroll=1):
        m = b * op.tokens + t
        decay(mY, w, sDecay, (h, m, start), op)
        gate_of(mY, mG, sGate, (h, m), op)
        cute.arch.sync_threads()
        strength = sigmoid(mY[m, op.beta_at + h].to(Float32))
        delta_rule(rS, sAll[t, None], sDecay, sO, strength, op)
        slot = mSlots[b, t] if start > 0 else start
        gTarget = cute.logical_divide(w.S[slot if slot > 0 else 0, h, None, None], (None, 4))
        if slot > 0:
            for p in cutlass.range_constexpr(op.passes):
                for c in cutlass.range_constexpr(4):
                    row = p * (op.threads // 8) + tid // 8
                    cute.autovec_copy(rS[None, c, p], gTarget[row, (None, c * 8 + tid % 8)])
        cute.arch.sync_threads()
        normed = head_scale(sO, op)
        if tid < K:
            out = sO[tid] * normed * w.o_norm[tid].to(Float32) * sGate[tid]
            mOut[m, h * K + tid] = (out if start > 0 else Float32(0.0)).to(BFloat16)
        cute.arch.sync_threads()


@cute.jit
def kda_tokens(
    mY: cute.Tensor, w: KdaTensors, more: tuple, mOut: cute.Tensor, cfg: cutlass.Constexpr, stream
):
    op = kda_shape(cfg)
    kda_tokens_kernel(mY, w, more, mOut, op).launch(
        grid=(op.heads, mY.shape[0] // op.tokens, 1),
        block=(op.threads, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


@cute.jit
def kda_update(mY: cute.Tensor, w: KdaTensors, mOut: cute.Tensor, cfg: cutlass.Constexpr, stream):
    op = kda_shape(cfg)
    kda_kernel(mY, w, mOut, op).launch(
        grid=(op.heads, mY.shape[0], 1),
        block=(op.threads, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


@cute.jit
def kda_core(weights, states, inputs, space, cfg, stream):
    """From space.kda_proj [M, in_proj_rows] to space.kda_out [M, D]."""
    w = KdaTensors(
        weights.conv, weights.f_b, weights.A_log, weights.dt_bias, weights.o_norm, states.conv, states.S, inputs.slots
    )  # fmt: skip
    d = cfg.dims
    if cutlass.const_expr(d.q > 1 or d.gate_rank > 0):
        accepted = inputs.accepted if d.q > 1 else None
        g_b = weights.g_b if d.gate_rank > 0 else None
        kda_tokens(space.kda_proj, w, (accepted, g_b), space.kda_out, cfg, stream)
    else:
        kda_update(space.kda_proj, w, space.kda_out, cfg, stream)


def kda_weights(dims):
    """The names of a layer's weights."""
    return (*KDA_WEIGHTS, "g_b") if dims.gate_rank > 0 else KDA_WEIGHTS


def kda_workspace(dims):
    return {
        "kda_proj": ("bf16", (dims.rows, dims.in_proj_rows), "undefined", "step"),
        "kda_out": ("bf16", (dims.rows, dims.kda_dim), "undefined", "step"),
    }


def workspace(dims, cfg):
    total = {} if cfg.fuse_add else {"sum": ("bf16", (dims.rows, dims.hidden), "undefined", "step")}
    return {**kda_workspace(dims), **total}


@cute.jit
def step(t, cfg, stream):
    """y_i = a of the KDA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    x, y, space = t.inputs.x, t.outputs.y, t.workspace
    mSum = None if cfg.fuse_add else space.sum
    remote = [r.attn for r in t.inputs.remote.layers] if cfg.dims.ranks > 1 else None
    gemv(x[0], t.weights.layers[0].in_proj, space.kda_proj, Extra(), cfg, stream)
    for i in cutlass.range(len(x), unroll=1):
        w = pick_layer(t.weights.layers, i, kda_weights(cfg.dims))
        s = pick_layer(t.states.layers, i, KDA_STATES)
        if i > 0:
            gemv_of_sum(pick(x, i), pick(y, i - 1), mSum, w.in_proj, space.kda_proj, cfg, stream)
        kda_core(w, s, t.inputs, space, cfg, stream)
        extra = Extra() if remote is None else Extra(remote=pick(remote, i))
        gemv(space.kda_out, w.o_proj, pick(y, i), extra, cfg, stream)
