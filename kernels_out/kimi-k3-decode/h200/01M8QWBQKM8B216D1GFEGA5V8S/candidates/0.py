"""One decode step of one tensor-parallel rank through a run of Kimi K3 layers: one launch per operation.

The plain chain that a megakernel has to beat: AttnRes, attention (KDA or MLA), AttnRes, FFN (latent MoE or dense) per
layer, then the closing AttnRes and the final norm. The loop over layers runs on the host while the launches are
recorded, so that equal operations of different layers share one kernel.
"""


from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint16, Uint32, Uint8
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


# ---- attn_res: AttnRes: add to the running prefix, mix it with the bank of earlier blocks by a softmax over sources, normalise.


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


# ---- exchange: Mailboxes between two ranks: vectors of eight bf16 are stored into the other GPU's memory and are their own signal.

EMPTY = 0x80000000


class Link(NamedTuple):
    """What a launch knows of the exchange.

    own, peer: mailboxes u32 [slots, 3, M, vectors, words] of this rank and of the other. epochs i32 [slots, M]: how
    often each slot's row has been received. rank, slot: run-time numbers.
    """

    own: Any
    peer: Any
    epochs: Any
    rank: Int32
    slot: Int32


@dataclass(frozen=True)
class Wire:
    """Compile-time form of the exchange: rows, vectors of eight in a row, `flag` or sentinel, shots, turns of a wait
    (0: for ever), and whether the other rank takes part at all (False: the same work alone, for comparison)."""

    rows: int
    vectors: int
    flag: bool
    two_shot: bool
    spin: int
    paired: bool

    @property
    def words(self):
        return 8 if self.flag else 4


@cute.jit
def place(box: cute.Tensor, link: Link, at: tuple, op: cutlass.Constexpr):
    """Address of the vector at = (region, row, vector) of the link's slot."""
    region, m, i = at
    number = ((Int64(link.slot) * 3 + region) * op.rows + m) * op.vectors + i
    return box.iterator.toint() + number * (4 * op.words)


@cute.jit
def store_words(address: Int64, r: tuple):
    """16 bytes, visible to the other GPU as soon as they arrive; each word whole."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *r],
    )


@cute.jit
def load_words(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def put(address: Int64, r: cute.Tensor, flag: Uint32, op: cutlass.Constexpr):
    """r[4 words] into a mailbox."""
    if cutlass.const_expr(op.flag):
        store_words(address, (r[0], flag, r[1], flag))
        store_words(address + 16, (r[2], flag, r[3], flag))
    else:
        words = [r[e] if r[e] != Uint32(EMPTY) else Uint32(0) for e in range(4)]
        store_words(address, tuple(words))


@cute.jit
def look(address: Int64, r: cute.Tensor, op: cutlass.Constexpr):
    """r[words] = the vector's place as it is."""
    for half in cutlass.range_constexpr(op.words // 4):
        found = load_words(address + 16 * half)
        for e in cutlass.range_constexpr(4):
            r[half * 4 + e] = found[e]


@cute.jit
def missing(r: cute.Tensor, flag: Uint32, op: cutlass.Constexpr):
    """Whether some of it has not come yet."""
    wrong = Uint32(0)
    if cutlass.const_expr(op.flag):
        for e in cutlass.range_constexpr(4):
            wrong = wrong | (r[2 * e + 1] ^ flag)
    else:
        for e in cutlass.range_constexpr(4):
            wrong = wrong | (Uint32(1) if r[e] == Uint32(EMPTY) else Uint32(0))
    return wrong != Uint32(0)


@cute.jit
def take(address: Int64, r: cute.Tensor, out: cute.Tensor, flag: Uint32, op: cutlass.Constexpr):
    """out[4 words] = the vector, once it is there; r[words] is what `look` saw of it."""
    if cutlass.const_expr(op.spin == 0):
        while missing(r, flag, op):
            look(address, r, op)
    else:
        turns = Int32(0)
        while missing(r, flag, op) and turns < op.spin:
            look(address, r, op)
            turns += 1
    for e in cutlass.range_constexpr(4):
        if cutlass.const_expr(op.flag):
            out[e] = r[2 * e]
        else:
            out[e] = r[e]
    if cutlass.const_expr(not op.flag):
        store_words(address, tuple(Uint32(EMPTY) for _ in range(4)))


@cute.jit
def new_flag(link: Link, m: Int32):
    """The number that marks what is sent in this step."""
    return Uint32(link.epochs[link.slot, m] + 1)


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


# ---- collectives: The exchanges of a layer between two ranks as launches of their own: one-shot all-reduce, all-gather, reduce-scatter.

ATTN = 0

LATENT = 1

MOE = 2

SHARED = 3

DELTA = 4

SITES = 5
"""Exchanges of a layer; the dense FFN has MOE's place."""

REDUCE = 0

GATHER = 1

SCATTER = 2


@dataclass(frozen=True)
class Swap:
    """Compile-time form of an exchange: `vectors` of eight that cross each way, threads, and what is made of them."""

    kind: int
    vectors: int
    threads: int
    wire: Any
    pdl: bool


@cute.jit
def vectors_of(mT: cute.Tensor):
    """bf16 [M, n] as words in vectors of four."""
    return cute.logical_divide(cute.recast_tensor(mT, Uint32), (None, 4))


@cute.kernel
def swap_kernel(mX: cute.Tensor, mY: cute.Tensor, link: Link, op: cutlass.Constexpr):
    """Grid (M). mX bf16 [M, n]; REDUCE: mY = bf(sum over ranks); GATHER: mY [M, 2 n] = rank 0's, then rank 1's columns;
    SCATTER: mY [M, n / 2] = this rank's columns of the sum."""
    tid, _, _ = cute.arch.thread_idx()
    m, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    flag = new_flag(link, m)
    gX, gY = vectors_of(mX), vectors_of(mY)
    other = 1 - link.rank
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rIn = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rSeen = cute.make_rmem_tensor(cute.make_layout((op.wire.words,)), Uint32)
    for i in cutlass.range(tid, op.vectors, op.threads, unroll=1):
        theirs = i + other * op.vectors if cutlass.const_expr(op.kind == SCATTER) else i
        cute.autovec_copy(gX[m, (None, theirs)], rX)
        put(place(link.peer, link, (link.rank, m, i), op.wire), rX, flag, op.wire)
    for i in cutlass.range(tid, op.vectors, op.threads, unroll=1):
        address = place(link.own, link, (other, m, i), op.wire)
        look(address, rSeen, op.wire)
        take(address, rSeen, rIn, flag, op.wire)
        mine = i + link.rank * op.vectors if cutlass.const_expr(op.kind == SCATTER) else i
        cute.autovec_copy(gX[m, (None, mine)], rX)
        if cutlass.const_expr(op.kind == GATHER):
            cute.autovec_copy(rX, gY[m, (None, i + link.rank * op.vectors)])
            cute.autovec_copy(rIn, gY[m, (None, i + other * op.vectors)])
        else:
            for e in cutlass.range_constexpr(4):
                rX[e] = add_bf16x2(rX[e], rIn[e])
            cute.autovec_copy(rX, gY[m, (None, i)])
    cute.arch.sync_threads()
    if tid == 0:
        link.epochs[link.slot, m] = Int32(flag)


@cute.jit
def swap(mX, mY, link: Link, kind: cutlass.Constexpr, cfg: cutlass.Constexpr, stream):
    """One exchange. Its CTAs wait, so they are one cluster or, from nine rows on, a cooperative grid."""
    rows, columns = mX.shape
    vectors = columns // 16 if cutlass.const_expr(kind == SCATTER) else columns // 8
    wire = Wire(rows, cfg.dims.hidden // 8, True, False, 0, True)
    threads = min(512, -(-vectors // 32) * 32)
    if cutlass.const_expr(rows <= 8):
        op = Swap(kind, vectors, threads, wire, cfg.pdl)
        swap_kernel(mX, mY, link, op).launch(
            grid=(rows, 1, 1), block=(threads, 1, 1), cluster=(rows, 1, 1), stream=stream, use_pdl=cfg.pdl
        )  # fmt: skip
    else:
        op = Swap(kind, vectors, threads, wire, False)
        swap_kernel(mX, mY, link, op).launch(
            grid=(rows, 1, 1), block=(threads, 1, 1), stream=stream, cooperative=True
        )


def site(t, n, which):
    """The link of one of the exchanges of layer n."""
    return Link(
        t.workspace.mail, t.peers[0].workspace.mail, t.workspace.epochs, t.rank, n * SITES + which
    )


def collectives_workspace(dims):
    """Mailboxes, and what is exchanged."""
    if dims.router_sharded:
        raise ValueError("a sharded router's logits are f32: this seed exchanges bf16 alone")
    slots, m = SITES * dims.layers, dims.rows

    def wide(n):
        return ("bf16", (m, n), "undefined", "step")

    return {
        "mail": ("u32", (slots, 3, m, dims.hidden // 8, 8), "zero", "persistent"),
        "epochs": ("i32", (slots, m), "zero", "persistent"),
        "partial": wide(dims.hidden), "latent_all": wide(dims.latent), "moe_partial": wide(dims.latent),
        "delta_own": wide(dims.hidden_local),
    }  # fmt: skip


@cute.jit
def moe_between(n, t, w, mIds, cfg: cutlass.Constexpr, stream):
    """space.delta = the FFN's output of layer n on space.x, with the other rank."""
    d, space = cfg.dims, t.workspace
    mX = space.x
    route(mX, (w.router, w.router_bias), space.logits, None, mIds, space.routed, cfg, stream)
    gemv(mX, w.latent_down, space.latent, Extra(), cfg, stream)
    latent = space.latent
    if cutlass.const_expr(d.latent_sharded):
        latent = space.latent_all
        swap(space.latent, latent, site(t, n, LATENT), GATHER, cfg, stream)
    nv = nv_of(d)
    up = (Codes(w.w1, w.w1_scale), Codes(w.w3, w.w3_scale))
    if cutlass.const_expr(nv):
        up = (Codes(w.w1, w.w1_scale, w.w1_factor), Codes(w.w3, w.w3_scale, w.w3_factor))
    expert_up(latent, None, up, mIds, space.expert_hidden, cfg, stream)
    down = Codes(w.w2, w.w2_scale, w.w2_factor if nv else None)
    expert_down(
        space.expert_hidden, down, (mIds, space.routed), None, space.moe_partial, cfg, stream
    )
    swap(space.moe_partial, space.experts_sum, site(t, n, MOE), REDUCE, cfg, stream)
    gemv_situ(mX, w.shared_gate_up, space.shared_hidden, cfg, stream)
    gemv(space.shared_hidden, w.shared_down, space.partial, Extra(), cfg, stream)
    swap(space.partial, space.shared, site(t, n, SHARED), SCATTER, cfg, stream)
    joined = Extra(norm=w.latent_norm, addend=space.shared)
    gemv_normed(space.experts_sum, w.latent_up, space.delta_own, joined, space, cfg, stream)
    swap(space.delta_own, space.delta, site(t, n, DELTA), GATHER, cfg, stream)


# ---- kda: KDA attention of one layer: input projection, one recurrent update per head, output projection.

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


def kda_workspace(dims):
    return {
        "kda_proj": ("bf16", (dims.rows, dims.in_proj_rows), "undefined", "step"),
        "kda_out": ("bf16", (dims.rows, dims.kda_dim), "undefined", "step"),
    }


# ---- mla: Absorbed MLA attention of one layer over the paged latent cache.

MLA_WEIGHTS = ("a_proj", "q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv", "o_proj")

HEADS = 16
"""Heads per CTA: the rows of one MMA; missing heads are zero rows."""


@dataclass(frozen=True)
class Mla:
    """Compile-time sizes. A tile of the context is 8 tokens per warp."""

    heads: int
    q_lora: int
    lora: int
    nope: int
    rope: int
    v: int
    page: int
    splits: int
    warps: int
    eps: float
    pdl: bool
    tokens: int = 1
    fp8: bool = False

    @property
    def width(self):
        return self.lora + self.rope

    @property
    def tile(self):
        return 8 * self.warps

    @property
    def each(self):
        """Columns of the latent that one lane group makes in a warp's share: n-tiles of eight columns."""
        return self.lora // self.warps // 8


def mla_shape(dims, cfg):
    tokens = dims.pages_per_request * dims.page
    tile = 8 * cfg.mla_warps
    busy = max(1, 2 * cfg.sms // dims.rows)
    splits = min(cfg.kv_splits, busy, -(-tokens // tile))
    return Mla(
        dims.mla_heads, dims.q_lora, dims.kv_lora, dims.qk_nope, dims.qk_rope, dims.v_dim, dims.page, splits,
        cfg.mla_warps, dims.eps, cfg.pdl, dims.q, dims.kv == "fp8",
    )  # fmt: skip


def mla_weights(dims):
    """The names of a layer's weights."""
    return (*MLA_WEIGHTS, "k_scale", "q_scale") if dims.kv == "fp8" else MLA_WEIGHTS


@cute.jit
def cache_row(mKv: cute.Tensor, page: Int32, offset: Int32):
    """One token's row of the cache as vectors of eight columns, in words; 64-bit offsets, as caches pass 2^31 bytes."""
    _, size, width = mKv.shape
    row = Int64(page) * size + offset
    pointer = mKv.iterator + cute.assume(row * width, divby=8)
    gRow = cute.make_tensor(pointer, cute.make_layout((1, width), stride=(width, 1)))
    words = mKv.element_type.width // 4
    return cute.logical_divide(cute.recast_tensor(gRow, Uint32), (None, words))


@cute.jit
def to_e4m3(x: Float32):
    """The byte of x rounded to nearest even E4M3, saturating, in bits 0..7."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 pair;
        cvt.rn.satfinite.e4m3x2.f32 pair, {$r0}, {$r1};
        cvt.u32.u16 {$w0}, pair;
        }""",
        write_only_types=[Uint32],
        read_only_args=[Float32(0.0), x],
    )


@cute.jit
def widen(word: Uint32):
    """Four E4M3 as two words of two bf16 each, exactly."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 low, high;
        .reg .b32 x, y;
        .reg .f16 a, b;
        .reg .f32 c, d;
        mov.b32 {low, high}, {$r0};
        cvt.rn.f16x2.e4m3x2 x, low;
        cvt.rn.f16x2.e4m3x2 y, high;
        mov.b32 {a, b}, x;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        cvt.rn.bf16x2.f32 {$w0}, d, c;
        mov.b32 {a, b}, y;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        cvt.rn.bf16x2.f32 {$w1}, d, c;
        }""",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )


@cute.jit
def narrow_query(rQ: cute.Tensor, scale: Float32):
    """Eight bf16 become f8(x / scale), still as bf16."""
    for i in cutlass.range_constexpr(2):
        word = Uint32(0)
        for j in cutlass.range_constexpr(2):
            pair = rQ[2 * i + j]
            word |= to_e4m3(low(pair) / scale) << (16 * j)
            word |= to_e4m3(high(pair) / scale) << (16 * j + 8)
        rQ[2 * i], rQ[2 * i + 1] = widen(word)


@cute.jit
def insert(
    mA: cute.Tensor,
    mNorm: cute.Tensor,
    mSlots: cute.Tensor,
    mKv: cute.Tensor,
    mScale: cute.Tensor,
    op: cutlass.Constexpr,
):
    """Cache row of this row's new token: [bf(RMS(kv_c; norm)) | k_pe], as E4M3 over mScale with `fp8`; a negative slot
    inserts nothing."""
    tid, _, _ = cute.arch.thread_idx()
    _, m, _ = cute.arch.block_idx()
    square = Float32(0.0)
    for i in cutlass.range(tid, op.lora, 256, unroll=1):
        x = mA[m, op.q_lora + i].to(Float32)
        square += x * x
    scale = cute.math.rsqrt(block_sum(square, 8) / op.lora + op.eps)
    slot = mSlots[m]
    if slot >= 0:
        where = mKv.iterator
        if cutlass.const_expr(op.fp8):
            where = cute.recast_ptr(where, dtype=Uint8)
        flat = cute.make_tensor(where + slot * op.width, cute.make_layout((op.width,)))
        for i in cutlass.range(tid, op.width, 256, unroll=1):
            x = mA[m, op.q_lora + i]
            if i < op.lora:
                x = (x.to(Float32) * scale * mNorm[i].to(Float32)).to(BFloat16)
            if cutlass.const_expr(op.fp8):
                x = to_e4m3(x.to(Float32) / mScale[0]).to(Uint8)
            flat[i] = x


@cute.jit
def absorb(mQ: cute.Tensor, mUk: cute.Tensor, mQuery: cute.Tensor, op: cutlass.Constexpr):
    """query[:lora] = bf(Q_nope W_UK[h]); query[lora:] = Q_pe. The CTA's threads share columns, then rows of W_UK."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    columns = op.lora // 8
    parts = 256 // columns
    part, column = tid // columns, tid % columns
    gUk = cute.logical_divide(mUk[h, None, None], (None, 8))
    sPart = smem(Float32, (8, columns, parts), (1, 8, op.lora))
    first = h * (op.nope + op.rope)
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rSum = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rSum.fill(0.0)
    for i in cutlass.range(op.nope // parts, unroll=8):
        row = i * parts + part
        cute.autovec_copy(gUk[row, (None, column)], rW)
        rSum.store(rSum.load() + rW.load().to(Float32) * mQ[m, first + row].to(Float32))
    cute.autovec_copy(rSum, sPart[None, column, part])
    cute.arch.sync_threads()
    for c in cutlass.range(tid, op.lora, 256, unroll=1):
        total = Float32(0.0)
        for p in cutlass.range(parts, unroll_full=True):
            total += sPart[c % 8, c // 8, p]
        mQuery[m, h, c] = total.to(BFloat16)
    if tid < op.rope:
        mQuery[m, h, op.lora + tid] = mQ[m, first + op.nope + tid]


@cute.jit
def spread_lengths(mLengths: cute.Tensor, mSeen: cute.Tensor, op: cutlass.Constexpr):
    """mSeen[m]: how many tokens row m sees, its own the last of them; mLengths i32 [B] counts all of its request."""
    tid, _, _ = cute.arch.thread_idx()
    _, m, _ = cute.arch.block_idx()
    if tid == 0:
        total = mLengths[m // op.tokens]
        mSeen[m] = total - (op.tokens - 1) + m % op.tokens if total > 0 else Int32(0)


@cute.kernel
def absorb_kernel(
    mA: cute.Tensor, mQ: cute.Tensor, w: tuple, mSlots: cute.Tensor, mKv: cute.Tensor, lengths: tuple,
    mQuery: cute.Tensor, op: cutlass.Constexpr,
):  # fmt: skip
    """mA bf16 [M, q_c | kv_c | k_pe | gate], mQ bf16 [M, H x (nope | rope)], w = (w_uk, kv_a_norm, k_scale or None);
    grid (H + 1, M).

    mQuery bf16 [M, H, lora + rope]; the last CTA of a row inserts the new token into the cache, and with several tokens
    a request writes how many the row sees: lengths = (of the requests, of the rows). 256 threads.
    """
    h, _, _ = cute.arch.block_idx()
    begin(op.pdl)
    if h < op.heads:
        absorb(mQ, w[0], mQuery, op)
    else:
        insert(mA, w[1], mSlots, mKv, w[2], op)
        if cutlass.const_expr(op.tokens > 1):
            spread_lengths(lengths[0], lengths[1], op)


@cute.jit
def mma_16x32(rC: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor):
    """rC[4] += A[16, 32] B[32, 8]: as mma_k32, with rA[None, 0] of row g and rA[None, 1] of row g + 8."""
    c = cute.arch.inline_ptx(
        """{
        .reg .f32 c0, c1, c2, c3;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3},
            {{$r0}, {$r4}, {$r1}, {$r5}}, {{$r8}, {$r9}}, {{$r12}, {$r13}, {$r14}, {$r15}};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r2}, {$r6}, {$r3}, {$r7}}, {{$r10}, {$r11}}, {c0, c1, c2, c3};
        }""",
        write_only_types=[Float32] * 4,
        read_only_args=[
            *(rA[i, 0] for i in range(4)), *(rA[i, 1] for i in range(4)), *(rB[i] for i in range(4)),
            *(rC[i] for i in range(4)),
        ],
    )  # fmt: skip
    for i in cutlass.range_constexpr(4):
        rC[i] = c[i]


@cute.jit
def load_query(mQuery: cute.Tensor, sQ: cute.Tensor, scales: tuple, op: cutlass.Constexpr):
    """sQ[head, (4 words, vector)]: this CTA's heads, zero where there is none."""
    tid, _, _ = cute.arch.thread_idx()
    _, m, block = cute.arch.block_idx()
    vectors = op.width // 8
    gQ = cute.logical_divide(cute.recast_tensor(mQuery, Uint32), (None, None, 4))
    rQ = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(tid, HEADS * vectors, op.warps * 32, unroll=1):
        row, v = i // vectors, i % vectors
        rQ.fill(0)
        if block * HEADS + row < op.heads:
            cute.autovec_copy(gQ[m, block * HEADS + row, (None, v)], rQ)
            if cutlass.const_expr(op.fp8):
                narrow_query(rQ, scales[1][0])
        cute.autovec_copy(rQ, sQ[row, (None, v)])


@cute.jit
def load_tile(
    mKv: cute.Tensor, mTable: cute.Tensor, sK: cute.Tensor, span: tuple, op: cutlass.Constexpr
):
    """sK[token, (4 words, vector)]: cache rows of tokens span = (first, end); rows beyond the end are zero.

    All loads of a thread are issued before its first store.
    """
    tid, _, _ = cute.arch.thread_idx()
    _, m, _ = cute.arch.block_idx()
    first, end = span
    vectors = op.width // 8
    count = -(-op.tile * vectors // (op.warps * 32))
    rK = cute.make_rmem_tensor(cute.make_layout((4, count)), Uint32)
    rK.fill(0)
    for n in cutlass.range(count, unroll_full=True):
        i = n * op.warps * 32 + tid
        token = first + i // vectors
        if i < op.tile * vectors and token < end:
            gRow = cache_row(mKv, mTable[m, token // op.page], token % op.page)
            if cutlass.const_expr(op.fp8):
                rNarrow = cute.make_rmem_tensor(cute.make_layout((2,)), Uint32)
                cute.autovec_copy(gRow[0, (None, i % vectors)], rNarrow)
                rK[0, n], rK[1, n] = widen(rNarrow[0])
                rK[2, n], rK[3, n] = widen(rNarrow[1])
            else:
                cute.autovec_copy(gRow[0, (None, i % vectors)], rK[None, n])
    for n in cutlass.range(count, unroll_full=True):
        i = n * op.warps * 32 + tid
        if i < op.tile * vectors:
            cute.autovec_copy(rK[None, n], sK[i // vectors, (None, i % vectors)])


@cute.jit
def score_tile(
    sQ: cute.Tensor, sK: cute.Tensor, sS: cute.Tensor, factor: Float32, op: cutlass.Constexpr
):
    """sS[head, token] = scaled scores, times `factor`; a warp has eight tokens."""
    tid, _, _ = cute.arch.thread_idx()
    warp, g, q = tid // 32, tid % 32 // 4, tid % 4
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC.fill(0.0)
    for k in cutlass.range(op.width // 32, unroll=2):
        cute.autovec_copy(sQ[g, (None, k * 4 + q)], rA[None, 0])
        cute.autovec_copy(sQ[g + 8, (None, k * 4 + q)], rA[None, 1])
        cute.autovec_copy(sK[warp * 8 + g, (None, k * 4 + q)], rB)
        mma_16x32(rC, rA, rB)
    scale = (op.nope + op.rope) ** -0.5
    for i in cutlass.range_constexpr(4):
        sS[g + i // 2 * 8, warp * 8 + 2 * q + i % 2] = rC[i] * (scale * factor)


@cute.jit
def soften(
    sS: cute.Tensor,
    sP: cute.Tensor,
    sAlpha: cute.Tensor,
    rState: cute.Tensor,
    left: Int32,
    op: cutlass.Constexpr,
):
    """Online softmax: sP[token, head, hi or lo] = exp(score - new maximum) as the sum of two bf16.

    A warp has whole heads. rState[max or sum, head of the warp]; sAlpha[head] is the factor of all summed before.
    """
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid // 32, tid % 32
    per = HEADS // op.warps
    for j in cutlass.range_constexpr(per):
        h = warp * per + j
        top = rState[0, j]
        for t in cutlass.range_constexpr(op.tile // 32):
            top = cute.arch.fmax(
                top, sS[h, t * 32 + lane] if t * 32 + lane < left else -Float32.inf
            )
        top = lanes_max(top)
        total = Float32(0.0)
        for t in cutlass.range_constexpr(op.tile // 32):
            token = t * 32 + lane
            p = cute.math.exp(sS[h, token] - top) if token < left else Float32(0.0)
            total += p
            hi = p.to(BFloat16)
            sP[token, h, 0] = hi
            sP[token, h, 1] = (p - hi.to(Float32)).to(BFloat16)
        alpha = cute.math.exp(rState[0, j] - top)
        if lane == 0:
            sAlpha[h] = alpha
        rState[1, j] = rState[1, j] * alpha + lanes_sum(total, 32)
        rState[0, j] = top


@cute.jit
def sum_tile(
    sP: cute.Tensor, sK: cute.Tensor, sAlpha: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr
):
    """rC[4, n] = alpha rC + P C: a warp makes lora / warps columns, lane g the columns g * each .. of them.

    P arrives as two bf16 summands; a k16 step of each is one half of mma_16x32, with the same B twice.
    """
    tid, _, _ = cute.arch.thread_idx()
    warp, g, q = tid // 32, tid % 32 // 4, tid % 4
    half = op.each // 2
    sWord = cute.recast_tensor(sP, Uint32)
    sColumn = cute.logical_divide(sK, (None, half))
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rRow = cute.make_rmem_tensor(cute.make_layout((half, 4)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for n in cutlass.range(op.each, unroll_full=True):
        for i in cutlass.range_constexpr(4):
            rC[i, n] = rC[i, n] * sAlpha[g + i // 2 * 8]
    for k in cutlass.range(op.tile // 16, unroll=1):
        for part in cutlass.range_constexpr(2):
            for row in cutlass.range_constexpr(2):
                rA[2 * part, row] = sWord[k * 8 + q, g + 8 * row, part]
                rA[2 * part + 1, row] = sWord[k * 8 + q + 4, g + 8 * row, part]
        for i in cutlass.range_constexpr(4):
            token = k * 16 + 2 * q + i % 2 + i // 2 * 8
            cute.autovec_copy(sColumn[token, (None, warp * 8 + g)], rRow[None, i])
        for n in cutlass.range(half, unroll_full=True):
            for odd in cutlass.range_constexpr(2):
                select = Uint32(0x7632 if odd else 0x5410)
                for i in cutlass.range_constexpr(2):
                    rB[i] = cute.arch.prmt(rRow[n, 2 * i], rRow[n, 2 * i + 1], select)
                    rB[i + 2] = rB[i]
                mma_16x32(rC[None, 2 * n + odd], rA, rB)


@cute.kernel
def attention_kernel(
    mQuery: cute.Tensor,
    mKv: cute.Tensor,
    where: tuple,
    scales: tuple,
    mSum: cute.Tensor,
    mStat: cute.Tensor,
    op: cutlass.Constexpr,
):
    """mQuery bf16 [M, H, lora + rope], mKv bf16 or e4m3 [pages, page, lora + rope], where = (block_table, lengths) by
    row, scales = (k_scale, q_scale) or Nones.

    Grid (splits, M, H / 16): this split's share of the context, whole tiles. mSum f32 [M, splits, H, lora] = sum of
    exp(s - max) c; mStat f32 [M, splits, H, 2] = (max, sum of exp); an empty share gives (-inf, 0).
    """
    tid, _, _ = cute.arch.thread_idx()
    split, m, block = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    mTable, mLengths = where
    begin(op.pdl)
    words = op.width // 2
    # rows of sQ are 64 bytes apart modulo 128, rows of sK 16 modulo 64: fragments of both products miss conflicts
    sQ = cute.logical_divide(
        smem(Uint32, (HEADS, words), (words + (16 - words % 32) % 32, 1)), (None, 4)
    )
    sTile = smem(Uint32, (op.tile, words), (words + (4 - words % 16) % 16, 1))
    sK = cute.logical_divide(sTile, (None, 4))
    sS = smem(Float32, (HEADS, op.tile), (op.tile + 4, 1))
    sP = smem(BFloat16, (op.tile, HEADS, 2), (1, op.tile + 8, HEADS * (op.tile + 8)))
    sAlpha = smem(Float32, (HEADS,), (1,))
    load_query(mQuery, sQ, scales, op)
    factor = scales[0][0] * scales[1][0] if cutlass.const_expr(op.fp8) else Float32(1.0)
    length = mLengths[m]
    share = cute.ceil_div(cute.ceil_div(length, op.tile), op.splits) * op.tile
    first = split * share
    end = first + share if first + share < length else length
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.each)), Float32)
    rC.fill(0.0)
    rState = cute.make_rmem_tensor(cute.make_layout((2, HEADS // op.warps)), Float32)
    for j in cutlass.range_constexpr(HEADS // op.warps):
        rState[0, j], rState[1, j] = -Float32.inf, Float32(0.0)
    for start in cutlass.range(first, end, op.tile, unroll=1):
        load_tile(mKv, mTable, sK, (start, end), op)
        cute.arch.sync_threads()
        score_tile(sQ, sK, sS, factor, op)
        cute.arch.sync_threads()
        soften(sS, sP, sAlpha, rState, end - start, op)
        cute.arch.sync_threads()
        sum_tile(sP, sTile, sAlpha, rC, op)
        cute.arch.sync_threads()
    for j in cutlass.range_constexpr(HEADS // op.warps):
        h = block * HEADS + warp * (HEADS // op.warps) + j
        if lane == 0 and h < op.heads:
            mStat[m, split, h, 0], mStat[m, split, h, 1] = rState[0, j], rState[1, j]
    store_sums(rC, mSum, op)


@cute.jit
def store_sums(rC: cute.Tensor, mSum: cute.Tensor, op: cutlass.Constexpr):
    """rC[i, n] is head g + 8 (i / 2), column (2 q + i % 2) * each + n of the warp's share."""
    tid, _, _ = cute.arch.thread_idx()
    split, m, block = cute.arch.block_idx()
    warp, g, q = tid // 32, tid % 32 // 4, tid % 4
    gSum = cute.logical_divide(mSum, (None, None, None, op.each))
    rOut = cute.make_rmem_tensor(cute.make_layout((op.each,)), Float32)
    for i in cutlass.range_constexpr(4):
        h = block * HEADS + g + i // 2 * 8
        if h < op.heads:
            for n in cutlass.range_constexpr(op.each):
                rOut[n] = rC[i, n]
            cute.autovec_copy(rOut, gSum[m, split, h, (None, warp * 8 + 2 * q + i % 2)])


@cute.jit
def split_weights(
    mStat: cute.Tensor, sWeight: cute.Tensor, mScale: cute.Tensor, op: cutlass.Constexpr
):
    """sWeight[split] = exp(max_split - max) / total, of e4m3 times mScale, by the first warp; zero without tokens."""
    lane, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    top = -Float32.inf
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        top = cute.arch.fmax(top, mStat[m, s, h, 0])
    top = lanes_max(top)
    total = Float32(0.0)
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        if mStat[m, s, h, 1] > 0.0:
            total += cute.math.exp(mStat[m, s, h, 0] - top) * mStat[m, s, h, 1]
    total = lanes_sum(total, 32)
    for s in cutlass.range(lane, op.splits, 32, unroll=1):
        weight = Float32(0.0)
        if mStat[m, s, h, 1] > 0.0:
            weight = cute.math.exp(mStat[m, s, h, 0] - top) / total
            if cutlass.const_expr(op.fp8):
                weight *= mScale[0]
        sWeight[s] = weight


@cute.jit
def join_splits(mSum: cute.Tensor, sWeight: cute.Tensor, sLat: cute.Tensor, op: cutlass.Constexpr):
    """sLat = bf(sum over splits of weight * sum): threads share columns in vectors of four, then the splits."""
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    vectors = op.lora // 4
    groups = 256 // vectors
    group, vector = tid // vectors, tid % vectors
    gSum = cute.logical_divide(mSum, (None, None, None, 4))
    sPart = smem(Float32, (4, vectors, groups), (1, 4, op.lora))
    rX = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rSum = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rSum.fill(0.0)
    for s in cutlass.range(group, op.splits, groups, unroll=16):
        cute.autovec_copy(gSum[m, s, h, (None, vector)], rX)
        rSum.store(rSum.load() + rX.load() * sWeight[s])
    cute.autovec_copy(rSum, sPart[None, vector, group])
    cute.arch.sync_threads()
    for c in cutlass.range(tid, op.lora, 256, unroll=1):
        total = Float32(0.0)
        for g in cutlass.range(groups, unroll_full=True):
            total += sPart[c % 4, c // 4, g]
        sLat[c] = total.to(BFloat16)
    cute.arch.sync_threads()


@cute.kernel
def combine_kernel(
    mSum: cute.Tensor, mStat: cute.Tensor, mA: cute.Tensor, mUv: cute.Tensor, mLengths: cute.Tensor, mOut: cute.Tensor,
    mScale: cute.Tensor, op: cutlass.Constexpr,
):  # fmt: skip
    """Joins the splits: lat = bf(sum p c); y = bf(bf(lat W_UV[h]) * sg(gate)), mOut bf16 [M, H v]; grid (H, M).

    mA holds the gate in its last H v columns, mUv bf16 [H, v, lora]; length 0 gives zeros. 256 threads.
    """
    tid, _, _ = cute.arch.thread_idx()
    h, m, _ = cute.arch.block_idx()
    lane = tid % 32
    begin(op.pdl)
    sWeight = smem(Float32, (op.splits,), (1,))
    sLat = smem(BFloat16, (op.lora,), (1,))
    if tid < 32:
        split_weights(mStat, sWeight, mScale, op)
    cute.arch.sync_threads()
    join_splits(mSum, sWeight, sLat, op)
    gUv = cute.logical_divide(mUv, (None, None, 8))
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    for j in cutlass.range(tid // 32, op.v, 8, unroll=8):
        dot = Float32(0.0)
        for i in cutlass.range(lane, op.lora // 8, 32, unroll=2):
            cute.autovec_copy(gUv[h, j, (None, i)], rW)
            cute.autovec_copy(cute.local_tile(sLat, (8,), (i,)), rX)
            product = rX.load().to(Float32) * rW.load().to(Float32)
            dot += product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        dot = lanes_sum(dot, 32)
        if lane == 0:
            gate = sigmoid(mA[m, op.q_lora + op.width + h * op.v + j].to(Float32))
            y = round_bf16(dot) * gate
            mOut[m, h * op.v + j] = (y if mLengths[m] > 0 else Float32(0.0)).to(BFloat16)


@cute.jit
def mla_core(w, mKv, inputs, space, cfg: cutlass.Constexpr, stream):
    """From space.mla_proj [M, a_proj_rows] to space.mla_out [M, H v]: four launches (five without the fused norm)."""
    op = mla_shape(cfg.dims, cfg)
    rows = space.mla_proj.shape[0]
    blocks = cute.ceil_div(op.heads, HEADS)
    a = space.mla_proj
    scales = (w.k_scale, w.q_scale) if op.fp8 else (None, None)
    table, lengths = inputs.block_table, inputs.lengths
    if cutlass.const_expr(op.tokens > 1):
        pages = table.shape[1]
        by_row = cute.make_layout(((op.tokens, rows // op.tokens), pages), stride=((0, pages), 1))
        table, lengths = cute.make_tensor(table.iterator, by_row), space.mla_seen
    gemv_normed(a, w.q_b, space.mla_q, Extra(norm=w.q_a_norm), space, cfg, stream)
    absorb_kernel(
        a,
        space.mla_q,
        (w.w_uk, w.kv_a_norm, scales[0]),
        inputs.slot_mapping,
        mKv,
        (inputs.lengths, lengths),
        space.mla_query,
        op,
    ).launch(
        grid=(op.heads + 1, rows, 1),
        block=(256, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )
    attention_kernel(
        space.mla_query, mKv, (table, lengths), scales, space.mla_sums, space.mla_stats, op
    ).launch(
        grid=(op.splits, rows, blocks), block=(op.warps * 32, 1, 1), stream=stream, use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )  # fmt: skip
    combine_kernel(
        space.mla_sums, space.mla_stats, a, w.w_uv, lengths, space.mla_out, scales[0], op
    ).launch(
        grid=(op.heads, rows, 1),
        block=(256, 1, 1),
        stream=stream,
        use_pdl=op.pdl,
        min_blocks_per_mp=1,
    )


def mla_workspace(dims, cfg):
    m, h, op = dims.rows, dims.mla_heads, mla_shape(dims, cfg)
    found = {
        "mla_proj": ("bf16", (m, dims.a_proj_rows), "undefined", "step"),
        "mla_q": ("bf16", (m, h * (dims.qk_nope + dims.qk_rope)), "undefined", "step"),
        "mla_query": ("bf16", (m, h, dims.kv_dim), "undefined", "step"),
        "mla_sums": ("f32", (m, op.splits, h, dims.kv_lora), "undefined", "step"),
        "mla_stats": ("f32", (m, op.splits, h, 2), "undefined", "step"),
        "mla_out": ("bf16", (m, dims.mla_dim), "undefined", "step"),
    }
    if op.tokens > 1:
        found["mla_seen"] = ("i32", (m,), "undefined", "step")
    if not cfg.fuse_norm:
        found["normed"] = ("bf16", (m, max(dims.latent, dims.q_lora)), "undefined", "step")
    return found


# ---- decode: One decode step of one tensor-parallel rank through a run of Kimi K3 layers: one launch per operation.

TUNABLES = {
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (4, 2, 1),
    "gemv_unroll": (4, 2, 7),
    "attn_res_vectors": (2, 1, 4),
    "kda_threads": (512, 256, 1024),
    "kv_splits": (64, 32, 16, 128),
    "mla_warps": (8, 4),
    "expert_up_warps": (4, 2, 8),
    "expert_down_warps": (4, 8, 2),
    "expert_unroll": (2, 4, 8),
    "topk_warps": (8, 4, 16),
    "fuse_norm": (True, False),
    "pdl": (False, True),
}


def members(kinds, kind):
    """Layers of one kind, in order."""
    return [n for n, k in enumerate(kinds) if k == kind]


def mask(kinds, kind):
    """Bit n is set when layer n is of that kind: a constant that the host loop can test with a run-time n."""
    return sum(1 << n for n in members(kinds, kind))


def numbered(level, n):
    """Entry n of a level of `t` that has no entry for some layers: with gaps it is a namespace, not a list."""
    return level[n] if isinstance(level, list) else getattr(level, str(n))


@cute.jit
def bits_before(value: cutlass.Constexpr, n: Int32, layers: cutlass.Constexpr):
    """Bits of `value` below n: which of its kind layer n is."""
    count = Int32(0)
    for k in cutlass.range_constexpr(layers):
        if cutlass.const_expr((value >> k) & 1 == 1):
            count += Int32(1) if n > k else Int32(0)
    return count


def pick_member(layers, kinds, kind, n, names):
    """The tensors `names` of layer n, which is of that kind."""
    found = members(kinds, kind)
    return pick_layer(
        [layers[k] for k in found], bits_before(mask(kinds, kind), n, len(kinds)), names
    )


@cute.jit
def bit(value: cutlass.Constexpr, n: Int32, layers: cutlass.Constexpr):
    """Bit n of a compile-time mask."""
    found = Int32(0)
    for k in cutlass.range_constexpr(layers):
        if cutlass.const_expr((value >> k) & 1 == 1):
            found = Int32(1) if n == k else found
    return found


@cute.jit
def attention(n, t, cfg: cutlass.Constexpr, stream):
    """space.attn = a of layer n on space.x, o_proj and its all-reduce included."""
    d, space = cfg.dims, t.workspace
    sharded, peers = d.ranks > 1 and d.gpus == 1, d.gpus > 1
    extra = Extra(remote=pick([r.attn for r in t.inputs.remote.layers], n)) if sharded else Extra()
    out = space.partial if peers else space.attn
    if cutlass.const_expr("K" in d.attn):
        if bit(mask(d.attn, "K"), n, d.layers) == 1:
            w = pick_member(t.weights.layers, d.attn, "K", n, KDA_WEIGHTS)
            s = pick_member(t.states.layers, d.attn, "K", n, KDA_STATES)
            gemv(space.x, w.in_proj, space.kda_proj, Extra(), cfg, stream)
            kda_core(w, s, t.inputs, space, cfg, stream)
            gemv(space.kda_out, w.o_proj, out, extra, cfg, stream)
    if cutlass.const_expr("M" in d.attn):
        if bit(mask(d.attn, "M"), n, d.layers) == 1:
            w = pick_member(t.weights.layers, d.attn, "M", n, mla_weights(d))
            s = pick_member(t.states.layers, d.attn, "M", n, ("kv",))
            gemv(space.x, w.a_proj, space.mla_proj, Extra(), cfg, stream)
            mla_core(w, s.kv, t.inputs, space, cfg, stream)
            gemv(space.mla_out, w.o_proj, out, extra, cfg, stream)
    if cutlass.const_expr(peers):
        swap(out, space.attn, site(t, n, ATTN), REDUCE, cfg, stream)


@cute.jit
def ffn(n, t, cfg: cutlass.Constexpr, stream):
    """space.delta = output of the FFN of layer n on space.x."""
    d, space = cfg.dims, t.workspace
    sharded, peers = d.ranks > 1 and d.gpus == 1, d.gpus > 1
    if cutlass.const_expr("D" in d.ffn):
        if bit(mask(d.ffn, "D"), n, d.layers) == 1:
            w = pick_member(t.weights.layers, d.ffn, "D", n, ("dense_gate_up", "dense_down"))
            gemv_situ(space.x, w.dense_gate_up, space.dense_hidden, cfg, stream)
            extra = Extra()
            if cutlass.const_expr(sharded):
                dense = [t.inputs.remote.layers[k].dense for k in members(d.ffn, "D")]
                extra = Extra(remote=dense[0])
            out = space.partial if peers else space.delta
            gemv(space.dense_hidden, w.dense_down, out, extra, cfg, stream)
            if cutlass.const_expr(peers):
                swap(out, space.delta, site(t, n, MOE), REDUCE, cfg, stream)
    if cutlass.const_expr("E" in d.ffn):
        if bit(mask(d.ffn, "E"), n, d.layers) == 1:
            which = bits_before(mask(d.ffn, "E"), n, d.layers)
            experts = members(d.ffn, "E")
            w = pick_layer([t.weights.layers[k] for k in experts], which, moe_weights(d))
            remote = [t.inputs.remote.layers[k] for k in experts] if sharded else None
            send = [numbered(t.outputs.send.layers, k) for k in experts] if sharded else None
            ids = t.outputs.ids[which, None, None]
            if cutlass.const_expr(peers):
                moe_between(n, t, w, ids, cfg, stream)
            else:
                exchange = moe_remote(remote, send, which, d)
                moe_ffn(space.x, w, exchange, ids, space.delta, space, cfg, stream)


def bank(t, dims):
    """The bank's two parts: rows of earlier layers, and rows written here; None where there is none."""
    old = t.inputs.bank if dims.first > 0 else None
    new = t.outputs.bank if dims.bank_rows > dims.bank_old else None
    return old, new


def workspace(dims, cfg):
    wide = ("bf16", (dims.rows, dims.hidden), "undefined", "step")
    found = {"x": wide, "attn": wide, "delta": wide}
    if "K" in dims.attn:
        found |= kda_workspace(dims)
    if "M" in dims.attn:
        found |= mla_workspace(dims, cfg)
    if "E" in dims.ffn:
        found |= moe_workspace(dims, cfg)
    if "D" in dims.ffn:
        found["dense_hidden"] = ("bf16", (dims.rows, dims.dense_dim), "undefined", "step")
    return found | collectives_workspace(dims) if dims.gpus > 1 else found


def mix_vectors(t):
    """Three lists over the half layers (attention, FFN, attention, ..., closing): norm, proj and output norm."""
    halves = [(w, kind) for w in t.weights.layers for kind in ("attn", "mlp")]
    norm = [getattr(w, f"{kind}_res_norm") for w, kind in halves]
    proj = [getattr(w, f"{kind}_res_proj") for w, kind in halves]
    out = [getattr(w, f"{kind}_norm") for w, kind in halves]
    last = t.weights
    return [*norm, last.out_res_norm], [*proj, last.out_res_proj], [*out, last.out_norm]


@cute.jit
def mix(half, t, cfg: cutlass.Constexpr, stream):
    """The AttnRes step before half layer `half` = 2 n (attention of layer n), 2 n + 1 (its FFN) or the closing one.

    Before attention P <- bf(P + delta), banked when layer n opens a block; before the FFN P <- bf(P + a), or P <- a
    when n opens a block. One launch site, so one kernel.
    """
    d, space = cfg.dims, t.workspace
    n = half // 2
    layer = n + d.first
    second = half % 2 == 1
    closing = half == 2 * d.layers
    opens = layer % d.block == 0 and not closing
    restart = second and opens
    norm, proj, out_norm = mix_vectors(t)
    incoming = t.inputs.delta if d.first > 0 else space.delta
    which = Int32(2) if restart else Int32(1) if half > 0 else Int32(0)
    prefix = pick([t.inputs.x0, t.outputs.prefix, space.attn], which)
    which = Int32(2) if second else Int32(1) if half > 0 else Int32(0)
    delta = pick([incoming, space.delta, space.attn], which)
    target = pick([space.x, t.outputs.out], Int32(1) if closing else Int32(0))
    sources = (layer + d.block - 1) // d.block + (Int32(1) if restart else Int32(0))
    row = layer // d.block - d.bank_old if opens and not second else Int32(-1)
    add = Int32(0) if restart or layer + half == 0 else Int32(1)
    state = MixState(sources, Int32(row), add, Int32(1) if closing else Int32(0))
    tensors = Mix(
        prefix, t.outputs.prefix, delta, *bank(t, d), pick(norm, half), pick(proj, half), pick(out_norm, half), target
    )  # fmt: skip
    attn_res(tensors, state, cfg, stream)


@cute.kernel
def copy_kernel(mX: cute.Tensor, mY: cute.Tensor, op: cutlass.Constexpr):
    """mY = mX, bf16 [M, hidden] in vectors of eight; grid (vectors / 256, M)."""
    tid, _, _ = cute.arch.thread_idx()
    part, m, _ = cute.arch.block_idx()
    begin(op.pdl)
    gX, gY = (cute.logical_divide(x, (None, 8)) for x in (mX, mY))
    rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    at = part * 256 + tid
    if at < op.vectors:
        cute.autovec_copy(gX[m, (None, at)], rX)
        cute.autovec_copy(rX, gY[m, (None, at)])


@dataclass(frozen=True)
class Copy:
    vectors: int
    pdl: bool


@cute.jit
def tap(n, t, cfg: cutlass.Constexpr, stream):
    """outputs.taps of a layer that a drafter looks at: P as the AttnRes step before its attention left it."""
    d = cfg.dims
    tapped = sum(1 << (int(i) - d.first) for i in d.taps.split(","))
    if bit(tapped, n, d.layers) == 1:
        op = Copy(d.hidden // 8, cfg.pdl)
        out = t.outputs.taps[bits_before(tapped, n, d.layers), None, None]
        copy_kernel(t.outputs.prefix, out, op).launch(
            grid=(cute.ceil_div(op.vectors, 256), d.rows, 1),
            block=(256, 1, 1),
            stream=stream,
            use_pdl=op.pdl,
        )


@cute.jit
def step(t, cfg, stream):
    """The layers of the run, then h = the closing AttnRes and out = bf(RMS(h; out_norm))."""
    d = cfg.dims
    for half in cutlass.range(2 * d.layers + 1, unroll=1):
        mix(half, t, cfg, stream)
        if half % 2 == 1:
            ffn(half // 2, t, cfg, stream)
        elif half < 2 * d.layers:
            if cutlass.const_expr(d.taps != ""):
                tap(half // 2, t, cfg, stream)
            attention(half // 2, t, cfg, stream)
