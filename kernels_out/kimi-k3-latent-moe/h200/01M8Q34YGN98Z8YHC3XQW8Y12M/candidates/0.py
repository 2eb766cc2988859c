"""The latent MoE FFN of one layer: router, MXFP4 or NVFP4 experts on the latent, shared expert, up-projection.

Experts run per (row, slot) pair on bf16 tensor cores: the 4-bit codes become bf16 by shifts, exactly, and carry their
group's power-of-two scale. Scales from 2^-62 to 2^63 (bytes 65..190) are exact; others are not supported.
"""


from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint16, Uint32
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
def gemv_situ(mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, cfg: cutlass.Constexpr, stream):
    """y = bf(SiTU(bf(x Wg^T), bf(x Wu^T))), W = [Wg; Wu]."""
    op = gemv_shape(mW.shape[0] // 2, mW.shape[1], cfg, True)
    launch_gemv(mX, mW, mY, Extra(), op, stream)


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
def rmsnorm_kernel(
    mX: cute.Tensor, mNorm: cute.Tensor, mOut: cute.Tensor, shape: cutlass.Constexpr
):
    """out[:, :k] = bf(RMS(x[:, :k]; norm)), f32 inside; shape = (k, eps, pdl); grid (M), 256 threads."""
    k, eps, pdl = shape
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    begin(pdl)
    square = Float32(0.0)
    for i in cutlass.range(tid, k, 256, unroll=4):
        x = mX[m, i].to(Float32)
        square += x * x
    scale = cute.math.rsqrt(block_sum(square, 8) / k + eps)
    for i in cutlass.range(tid, k, 256, unroll=4):
        mOut[m, i] = (mX[m, i].to(Float32) * scale * mNorm[i].to(Float32)).to(BFloat16)


@cute.jit
def gemv_normed(
    mX: cute.Tensor,
    mW: cute.Tensor,
    mY: cute.Tensor,
    ex: Extra,
    space: Any,
    cfg: cutlass.Constexpr,
    stream,
):
    """y = bf(RMS(x; ex.norm)) W^T: the norm made by every CTA or, unfused, by a launch of its own into space.normed."""
    if cutlass.const_expr(cfg.fuse_norm):
        gemv(mX, mW, mY, ex, cfg, stream)
    else:
        rmsnorm_kernel(mX, ex.norm, space.normed, (mW.shape[1], cfg.dims.eps, cfg.pdl)).launch(
            grid=(mX.shape[0], 1, 1), block=(256, 1, 1), stream=stream, use_pdl=cfg.pdl
        )
        gemv(space.normed, mW, mY, ex._replace(norm=None), cfg, stream)


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


# ---- router: The router: f32 logits, sigmoid scores, top-k by score plus bias, weights from the scores alone.

LAST = 0x7FFFFFFF


@dataclass(frozen=True)
class TopK:
    """`warps` share the experts, `each` per warp, up to `slots` per lane."""

    experts: int
    topk: int
    warps: int
    pdl: bool

    @property
    def each(self):
        return -(-self.experts // self.warps)

    @property
    def slots(self):
        return -(-self.each // 32)


@cute.jit
def logit(mLogits: cute.Tensor, mRemote: Any, m: Int32, e: Int32):
    x = Float32(0.0)
    if cutlass.const_expr(mRemote is None):
        x = mLogits[m, e]
    else:
        own = mLogits.shape[1]
        if e < own:
            x = mLogits[m, e]
        else:
            x = mRemote[m, e - own]
    return x


@cute.jit
def order_key(z: Float32):
    """Unsigned key in the order of z as a real number (-0 = +0); NaN 1, below every number; 0 stays free for absent."""
    bits = (z + Float32(0.0)).bitcast(Uint32)
    key = ~bits if bits >= Uint32(0x80000000) else bits | Uint32(0x80000000)
    return Uint32(1) if z != z else key


@cute.jit
def warp_best(
    rKey: cute.Tensor, first: Int32, sKey: cute.Tensor, sId: cute.Tensor, op: cutlass.Constexpr
):
    """The warp's topk experts by descending key, equal keys by ascending id, into sKey, sId [warp * topk + rank]."""
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid // 32, tid % 32
    for rank in cutlass.range(op.topk, unroll=1):
        mine = rKey[0]
        for j in cutlass.range_constexpr(1, op.slots):
            mine = rKey[j] if rKey[j] > mine else mine
        best = cute.arch.warp_redux_sync(mine, "max")
        found = Int32(LAST)
        for j in cutlass.range_constexpr(op.slots - 1, -1, -1):
            found = first + 32 * j if rKey[j] == best else found
        expert = cute.arch.warp_redux_sync(found, "min")
        for j in cutlass.range_constexpr(op.slots):
            rKey[j] = Uint32(0) if first + 32 * j == expert else rKey[j]
        if lane == 0:
            sKey[warp * op.topk + rank] = best
            sId[warp * op.topk + rank] = expert


@cute.kernel
def topk_kernel(
    mLogits: cute.Tensor, mRemote: Any, mBias: cute.Tensor, mIds: cute.Tensor, mWeights: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """mLogits f32 [M, rows], mRemote f32 [M, experts - rows] or None, mBias f32 [experts]; grid (M).

    mIds i32 [M, topk] by descending sg(logit) + bias; mWeights bf16 [M, topk] = bf(s / (sum of the chosen s + 1e-20)).
    Every warp sorts out its own topk; the candidates then find their rank by counting the better ones.
    """
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    first = tid // 32 * op.each + tid % 32
    rKey = cute.make_rmem_tensor(cute.make_layout((op.slots,)), Uint32)
    for j in cutlass.range_constexpr(op.slots):
        e = first + 32 * j
        rKey[j] = Uint32(0)
        if tid % 32 + 32 * j < op.each and e < op.experts:
            rKey[j] = order_key(sigmoid(logit(mLogits, mRemote, m, e)) + mBias[e])
    candidates = op.warps * op.topk
    sKey = smem(Uint32, (candidates,), (1,))
    sId = smem(Int32, (candidates,), (1,))
    sChosen = smem(Int32, (op.topk,), (1,))
    warp_best(rKey, first, sKey, sId, op)
    cute.arch.sync_threads()
    for c in cutlass.range(tid, candidates, op.warps * 32, unroll=1):
        key, expert = sKey[c], sId[c]
        rank = Int32(0)
        for other in cutlass.range(candidates, unroll=8):
            ahead = sKey[other] > key or (sKey[other] == key and sId[other] < expert)
            rank += Int32(1) if ahead else Int32(0)
        if rank < op.topk and key > Uint32(0):
            sChosen[rank] = expert
    cute.arch.sync_threads()
    if tid < 32:
        s = Float32(0.0)
        e = Int32(0)
        if tid < op.topk:
            e = sChosen[tid]
            s = sigmoid(logit(mLogits, mRemote, m, e))
            z = s + mBias[e]
            s = Float32(0.0) if z != z else s
        total = lanes_sum(s, 32) + Float32(1e-20)
        if tid < op.topk:
            mIds[m, tid] = e
            mWeights[m, tid] = (s / total).to(BFloat16)


def topk_shape(cfg):
    d = cfg.dims
    if d.topk > min(32, d.experts):
        raise ValueError(f"top {d.topk} of {d.experts}: the weights of a row are made by one warp")
    return TopK(d.experts, d.topk, cfg.topk_warps, cfg.pdl)


@cute.jit
def route(
    mX: cute.Tensor, weights: Any, mLogits: cute.Tensor, mRemote: Any, mIds: cute.Tensor, mWeights: cute.Tensor,
    cfg: cutlass.Constexpr, stream,
):  # fmt: skip
    """Logits and selection, two launches. weights = (router, router_bias)."""
    mRouter, mBias = weights
    gemv(mX, mRouter, mLogits, Extra(), cfg, stream)
    op = topk_shape(cfg)
    topk_kernel(mLogits, mRemote, mBias, mIds, mWeights, op).launch(
        grid=(mX.shape[0], 1, 1),
        block=(op.warps * 32, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


# ---- latent_moe: The latent MoE FFN of one layer: router, MXFP4 or NVFP4 experts on the latent, shared expert, up-projection.

TUNABLES = {
    "expert_up_warps": (4, 2, 8),
    "expert_down_warps": (4, 8, 2),
    "expert_unroll": (4, 2, 8),
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "topk_warps": (8, 4, 16),
    "fuse_norm": (True, False),
    "pdl": (False, True),
}

MOE_WEIGHTS = (
    "router", "router_bias", "latent_down", "w1", "w1_scale", "w3", "w3_scale", "w2", "w2_scale", "latent_norm",
    "latent_up", "shared_gate_up", "shared_down",
)  # fmt: skip

CODE_SCALE = 2.0**62
"""Expanded weights are 2^-62 of their value (see `expand`); sums are multiplied back in f32, exactly."""


@dataclass(frozen=True)
class Experts:
    """Compile-time sizes of one expert product: `groups` of 32 codes along k, four of them (a step) per warp load."""

    topk: int
    rows: int
    groups: int
    warps: int
    unroll: int
    pdl: bool
    nv: bool = False

    @property
    def steps(self):
        return -(-self.groups // 4)


class Codes(NamedTuple):
    """One expert matrix of every expert: codes u8 [experts, rows, k / 2], scales u8 [experts, rows, k / 32]. NVFP4:
    scales e4m3 [experts, rows, k / 16] and factor f32 [experts]."""

    codes: Any
    scales: Any
    factor: Any = None


@cute.jit
def scale_word(byte: Uint32):
    """UE8M0 byte -> 2^(byte - 127 + 64) in both halves of a bf16 pair."""
    half = (byte + Uint32(64)) << 7
    return half | (half << 16)


@cute.jit
def scale_words(pair: Uint32):
    """Two E4M3 of NVFP4 in bits 0..15 -> each times 2^64 in both halves of a bf16 pair, exact; zero becomes 2^-63, with
    which every product vanishes."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 two;
        .reg .b32 x;
        .reg .f16 a, b;
        .reg .f32 c, d;
        cvt.u16.u32 two, {$r0};
        cvt.rn.f16x2.e4m3x2 x, two;
        mov.b32 {a, b}, x;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        cvt.rn.bf16x2.f32 x, c, c;
        add.u32 {$w0}, x, 0x20002000;
        cvt.rn.bf16x2.f32 x, d, d;
        add.u32 {$w1}, x, 0x20002000;
        }""",
        write_only_types=[Uint32, Uint32],
        read_only_args=[pair],
    )


@cute.jit
def expand(word: Uint32, scale: Uint32):
    """Eight codes -> four bf16 pairs, codes (j, j + 4) in pair j: value x 2^-62 x group scale, exact.

    The three low bits of E2M1 land on bf16's lowest exponent bits and highest mantissa bit: value x 2^-126 (0.5 is a
    subnormal there). The factor in `scale` is 2^64 too large. One block of PTX, because it is repeated so often that
    tracing it operation by operation would dominate compile time. lop3 0xEA is (a & b) | c.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 m, s;
        shl.b32 m, {$r0}, 6;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 12;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w0}, m, {$r1};
        shl.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 8;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w1}, m, {$r1};
        shr.b32 m, {$r0}, 2;  and.b32 m, m, 0x01C001C0;  shl.b32 s, {$r0}, 4;
        lop3.b32 m, s, 0x80008000, m, 0xEA;              mul.rn.bf16x2 {$w2}, m, {$r1};
        shr.b32 m, {$r0}, 6;  and.b32 m, m, 0x01C001C0;
        lop3.b32 m, {$r0}, 0x80008000, m, 0xEA;          mul.rn.bf16x2 {$w3}, m, {$r1};
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word, scale],
    )


@cute.jit
def pair_up(rX: cute.Tensor):
    """Reorder eight bf16 in four words from (0 1)(2 3)(4 5)(6 7) to (0 4)(1 5)(2 6)(3 7), as `expand` makes them."""
    even = cute.arch.prmt(rX[0], rX[2], Uint32(0x5410))
    odd = cute.arch.prmt(rX[0], rX[2], Uint32(0x7632))
    rX[2], rX[3] = (
        cute.arch.prmt(rX[1], rX[3], Uint32(0x5410)),
        cute.arch.prmt(rX[1], rX[3], Uint32(0x7632)),
    )
    rX[0], rX[1] = even, odd


@cute.jit
def load_codes(
    w: Codes, at: tuple, rCode: cute.Tensor, rScale: cute.Tensor, groups: cutlass.Constexpr
):
    """32 codes (16 bytes) and their one or two scales, of at = (expert, row, group); scale 0 beyond the last group."""
    expert, row, group = at
    stream = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), Uint32, num_bits_per_copy=128,
        load_cache_mode=cute.nvgpu.LoadCacheMode.STREAMING,
    )  # fmt: skip
    gCode = cute.logical_divide(cute.recast_tensor(w.codes, Uint32), (None, None, 4))
    if group < groups:
        cute.copy(stream, gCode[expert, row, (None, group)], rCode)
        if cutlass.const_expr(w.factor is None):
            rScale[0] = w.scales[expert, row, group].to(Uint32)
        else:
            rScale[0] = cute.recast_tensor(w.scales, Uint16)[expert, row, group].to(Uint32)
    else:
        rCode.fill(0)


@cute.jit
def accumulate(
    rC: cute.Tensor, rX: cute.Tensor, rCode: cute.Tensor, rScale: cute.Tensor, nv: cutlass.Constexpr
):
    """rC[4] += this lane's 32 columns of x (rX[4, 4], paired up) times its 32 codes: eight MMAs."""
    if cutlass.const_expr(nv):
        scales = scale_words(rScale[0])
        for i in cutlass.range_constexpr(4):
            mma_k32(rC, rX[None, i], expand(rCode[i], scales[i // 2]))
    else:
        scale = scale_word(rScale[0])
        for i in cutlass.range(4, unroll_full=True):
            mma_k32(rC, rX[None, i], expand(rCode[i], scale))


@cute.jit
def stage_latent(mL: cute.Tensor, mRemote: Any, sX: cute.Tensor, m: Int32, op: cutlass.Constexpr):
    """sX[4 words, k / 8] = row m of the latent, own columns, then the gathered ones; pairs as `expand` has them."""
    tid, _, _ = cute.arch.thread_idx()
    gL = cute.logical_divide(cute.recast_tensor(mL, Uint32), (None, 4))
    own = mL.shape[1] // 8
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(tid, op.groups * 4, op.warps * 32, unroll=1):
        if cutlass.const_expr(mRemote is None):
            cute.autovec_copy(gL[m, (None, i)], rX)
        elif i < own:
            cute.autovec_copy(gL[m, (None, i)], rX)
        else:
            gRemote = cute.logical_divide(cute.recast_tensor(mRemote, Uint32), (None, 4))
            cute.autovec_copy(gRemote[m, (None, i - own)], rX)
        pair_up(rX)
        cute.autovec_copy(rX, sX[None, i])
    cute.arch.sync_threads()


@cute.jit
def load_round(w: tuple, row: tuple, turn: Int32, into: tuple, op: cutlass.Constexpr):
    """Codes and scales of w1 and w3 of row = (expert, row) for this warp's next `unroll` steps."""
    tid, _, _ = cute.arch.thread_idx()
    rCode, rScale = into
    for u in cutlass.range(op.unroll, unroll_full=True):
        group = (turn + u * op.warps + tid // 32) * 4 + tid % 4
        for half in cutlass.range_constexpr(2):
            load_codes(
                w[half], (*row, group), rCode[None, half, u], rScale[None, half, u], op.groups
            )


@cute.kernel
def expert_up_kernel(
    mL: cute.Tensor,
    mRemote: Any,
    w: tuple,
    mIds: cute.Tensor,
    mH: cute.Tensor,
    op: cutlass.Constexpr,
):
    """mL bf16 [M, own], mRemote bf16 [M, latent - own] or None, w = (w1, w3), mIds i32 [M, topk].

    Grid (rows / 8, topk, M). mH bf16 [M, topk, rows] = bf(SiTU(w1 l, w3 l)), products and SiTU in f32. The warps share
    k; their sums are added in warp order. Codes are loaded a round ahead, the first before the latent is staged.
    """
    tid, _, _ = cute.arch.thread_idx()
    tile, slot, m = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    begin(op.pdl)
    row = (mIds[m, slot], tile * 8 + lane // 4)
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    rC.fill(0.0)
    rCode = cute.make_rmem_tensor(cute.make_layout((4, 2, op.unroll)), Uint32)
    rScale = cute.make_rmem_tensor(cute.make_layout((1, 2, op.unroll)), Uint32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    rScale.fill(0)
    load_round(w, row, Int32(0), (rCode, rScale), op)
    sX = smem(Uint32, (4, op.groups * 4), (1, 4))
    stage_latent(mL, mRemote, sX, m, op)
    for turn in cutlass.range(0, op.steps, op.warps * op.unroll, unroll=1):
        for u in cutlass.range(op.unroll, unroll_full=True):
            group = (turn + u * op.warps + warp) * 4 + lane % 4
            if lane < 4 and group < op.groups:
                for i in cutlass.range(4, unroll_full=True):
                    cute.autovec_copy(sX[None, group * 4 + i], rX[None, i])
            for half in cutlass.range_constexpr(2):
                accumulate(rC[None, half], rX, rCode[None, half, u], rScale[None, half, u], op.nv)
        if turn + op.warps * op.unroll < op.steps:
            load_round(w, row, turn + op.warps * op.unroll, (rCode, rScale), op)
    sC = smem(Float32, (16, op.warps), (1, 16))
    if lane < 4:
        for i in cutlass.range_constexpr(4):
            sC[i // 2 * 8 + lane * 2 + i % 2, warp] = rC[i % 2, i // 2]
    cute.arch.sync_threads()
    if tid < 8:
        gate, up = Float32(0.0), Float32(0.0)
        for part in cutlass.range(op.warps, unroll_full=True):
            gate += sC[tid, part]
            up += sC[tid + 8, part]
        if cutlass.const_expr(op.nv):
            gate *= w[0].factor[row[0]]
            up *= w[1].factor[row[0]]
        mH[m, slot, tile * 8 + tid] = situ(gate * CODE_SCALE, up * CODE_SCALE).to(BFloat16)


@cute.kernel
def expert_down_kernel(
    mH: cute.Tensor, w: Codes, route: tuple, mRemote: Any, mZ: cute.Tensor, op: cutlass.Constexpr
):
    """mH bf16 [M, topk, k], w = w2, route = (ids i32, weights bf16) [M, topk]; grid (rows / 8, M).

    mZ bf16 [M, rows] = bf(bf(sum over slots, in order, of w_e bf(w2_e h)) + remote), fused multiply-adds in f32. A warp
    has whole slots, so that a product is complete before it is rounded.
    """
    tid, _, _ = cute.arch.thread_idx()
    tile, m, _ = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    mIds, mWeights = route
    begin(op.pdl)
    slots = -(-op.topk // op.warps)
    gH = cute.logical_divide(cute.recast_tensor(mH, Uint32), (None, None, 4))
    rCode = cute.make_rmem_tensor(cute.make_layout((4, op.steps, slots)), Uint32)
    rScale = cute.make_rmem_tensor(cute.make_layout((1, op.steps, slots)), Uint32)
    rScale.fill(0)
    for s in cutlass.range(slots, unroll_full=True):
        slot = warp + s * op.warps
        if slot < op.topk:
            for u in cutlass.range(op.steps, unroll_full=True):
                at = (mIds[m, slot], tile * 8 + lane // 4, u * 4 + lane % 4)
                load_codes(w, at, rCode[None, u, s], rScale[None, u, s], op.groups)
    sF = smem(Float32, (8, op.topk), (1, 8))
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for s in cutlass.range(slots, unroll_full=True):
        slot = warp + s * op.warps
        if slot < op.topk:
            rC.fill(0.0)
            for u in cutlass.range(op.steps, unroll_full=True):
                group = u * 4 + lane % 4
                if lane < 4 and group < op.groups:
                    for i in cutlass.range(4, unroll_full=True):
                        cute.autovec_copy(gH[m, slot, (None, group * 4 + i)], rX[None, i])
                        pair_up(rX[None, i])
                accumulate(rC, rX, rCode[None, u, s], rScale[None, u, s], op.nv)
            if cutlass.const_expr(op.nv):
                rC.store(rC.load() * w.factor[mIds[m, slot]])
            if lane < 4:
                sF[lane * 2, slot] = round_bf16(rC[0] * CODE_SCALE)
                sF[lane * 2 + 1, slot] = round_bf16(rC[1] * CODE_SCALE)
    cute.arch.sync_threads()
    if tid < 8:
        total = Float32(0.0)
        for slot in cutlass.range(op.topk, unroll_full=True):
            total += mWeights[m, slot].to(Float32) * sF[tid, slot]
        if cutlass.const_expr(mRemote is not None):
            total = round_bf16(total) + mRemote[m, tile * 8 + tid]
        mZ[m, tile * 8 + tid] = total.to(BFloat16)


def nv_of(dims):
    """Whether the experts are NVFP4. A lane has 32 columns at a time, so they must be whole here too."""
    if dims.experts_format == "nvfp4" and (dims.latent % 32 or dims.expert_dim % 32):
        raise ValueError(
            f"NVFP4 of {dims.latent} and {dims.expert_dim} columns: this kernel takes whole 32"
        )
    return dims.experts_format == "nvfp4"


def moe_weights(dims):
    """The names of a layer's weights."""
    return (*MOE_WEIGHTS, "w1_factor", "w2_factor", "w3_factor") if nv_of(dims) else MOE_WEIGHTS


@cute.jit
def expert_up(mL, mRemote, w, mIds, mH, cfg: cutlass.Constexpr, stream):
    d = cfg.dims
    op = Experts(
        d.topk, d.expert_dim, d.latent // 32, cfg.expert_up_warps, cfg.expert_unroll, cfg.pdl, nv_of(d)
    )  # fmt: skip
    expert_up_kernel(mL, mRemote, w, mIds, mH, op).launch(
        grid=(op.rows // 8, op.topk, mL.shape[0]),
        block=(op.warps * 32, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


@cute.jit
def expert_down(mH, w, route, mRemote, mZ, cfg: cutlass.Constexpr, stream):
    d = cfg.dims
    op = Experts(d.topk, d.latent, d.expert_dim // 32, cfg.expert_down_warps, 0, cfg.pdl, nv_of(d))
    expert_down_kernel(mH, w, route, mRemote, mZ, op).launch(
        grid=(op.rows // 8, mH.shape[0], 1),
        block=(op.warps * 32, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


class Remote(NamedTuple):
    """What the other ranks contribute to one layer, and what is sent to them; None where there are none."""

    latent: Any = None
    logits: Any = None
    moe: Any = None
    shared: Any = None
    delta: Any = None
    send: Any = None


def moe_remote(remote, send, i, dims):
    """The exchange buffers of layer i, an index known only while the launches are recorded."""
    if dims.ranks == 1:
        return Remote()
    names = ["moe", "shared", "delta"]
    names += ["latent"] if dims.latent_sharded else []
    names += ["logits"] if dims.router_sharded else []
    found = {n: pick([getattr(r, n) for r in remote], i) for n in names}
    return Remote(**found, send=pick([s.shared for s in send], i))


@cute.jit
def moe_ffn(mX, w, remote: Remote, mIds, mY, space, cfg: cutlass.Constexpr, stream):
    """mY bf16 [M, hidden] = the FFN's output on mX; mIds i32 [M, topk] receives the routing."""
    route(
        mX, (w.router, w.router_bias), space.logits, remote.logits, mIds, space.routed, cfg, stream
    )
    gemv(mX, w.latent_down, space.latent, Extra(), cfg, stream)
    nv = nv_of(cfg.dims)
    up = (Codes(w.w1, w.w1_scale), Codes(w.w3, w.w3_scale))
    if cutlass.const_expr(nv):
        up = (Codes(w.w1, w.w1_scale, w.w1_factor), Codes(w.w3, w.w3_scale, w.w3_factor))
    expert_up(space.latent, remote.latent, up, mIds, space.expert_hidden, cfg, stream)
    down = Codes(w.w2, w.w2_scale, w.w2_factor if nv else None)
    expert_down(
        space.expert_hidden, down, (mIds, space.routed), remote.moe, space.experts_sum, cfg, stream
    )
    gemv_situ(mX, w.shared_gate_up, space.shared_hidden, cfg, stream)
    exchange = Extra(remote=remote.shared, send=remote.send)
    gemv(space.shared_hidden, w.shared_down, space.shared, exchange, cfg, stream)
    joined = Extra(norm=w.latent_norm, addend=space.shared, tail=remote.delta)
    gemv_normed(space.experts_sum, w.latent_up, mY, joined, space, cfg, stream)


def moe_workspace(dims, cfg):
    m = dims.rows
    found = {
        "logits": ("f32", (m, dims.router_rows), "undefined", "step"),
        "routed": ("bf16", (m, dims.topk), "undefined", "step"),
        "latent": ("bf16", (m, dims.latent_rows), "undefined", "step"),
        "expert_hidden": ("bf16", (m, dims.topk, dims.expert_dim), "undefined", "step"),
        "experts_sum": ("bf16", (m, dims.latent), "undefined", "step"),
        "shared_hidden": ("bf16", (m, dims.shared_dim), "undefined", "step"),
        "shared": ("bf16", (m, dims.hidden_local), "undefined", "step"),
    }
    if not cfg.fuse_norm:
        found["normed"] = ("bf16", (m, max(dims.latent, dims.q_lora)), "undefined", "step")
    return found


def workspace(dims, cfg):
    return {
        **moe_workspace(dims, cfg),
        "sum": ("bf16", (dims.rows, dims.hidden), "undefined", "step"),
    }


@cute.jit
def step(t, cfg, stream):
    """y_i = the FFN's delta on x_i = bf(inputs.x[i] + y_{i-1}); outputs.ids[i] is its routing."""
    x, y, total = t.inputs.x, t.outputs.y, t.workspace.sum
    layers = t.weights.layers
    sharded = cfg.dims.ranks > 1
    remote = t.inputs.remote.layers if sharded else None
    send = t.outputs.send.layers if sharded else None
    for i in cutlass.range(len(layers), unroll=1):
        if i > 0:
            add(pick(x, i), pick(y, i - 1), total, cfg, stream)
        mX = pick([x[0], total], Int32(1) if i > 0 else Int32(0))
        w = pick_layer(layers, i, moe_weights(cfg.dims))
        ids = t.outputs.ids[i, None, None]
        moe_ffn(
            mX, w, moe_remote(remote, send, i, cfg.dims), ids, pick(y, i), t.workspace, cfg, stream
        )
