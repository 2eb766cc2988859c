"""Persistent decode kernel: one cooperative launch for a run of layers, one row; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across layers and edges, so that memory stays busy while
consumers wait for each other; only the routed experts wait, for their ids. Consumers go from one half of a layer to the
next in one loop, so that AttnRes exists once in the code. What a CTA sends to others says itself that it is there
(boxes), and counters only hint that it is worth looking; nothing is fenced but the plain buffers of dense FFNs.
"""

from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32
from cutlass import BFloat16, Float32, Int32, Uint16, Uint32
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass import BFloat16, Int32, Int64, Uint32
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass import Boolean, Int32, Int64
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass import Float32
from cutlass import Float32, Int32, Int64, Uint32
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator
from dataclasses import dataclass
from kernelgen import timeline
from types import SimpleNamespace
from typing import Any
from typing import Any, NamedTuple
import cutlass
import cutlass.cute as cute
import math

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

# ---- router: The router: f32 logits, sigmoid scores, top-k by score plus bias, weights from the scores alone.

@cute.jit
def order_key(z: Float32):
    """Unsigned key in the order of z as a real number (-0 = +0); NaN 1, below every number; 0 stays free for absent."""
    bits = (z + Float32(0.0)).bitcast(Uint32)
    key = ~bits if bits >= Uint32(0x80000000) else bits | Uint32(0x80000000)
    return Uint32(1) if z != z else key

# ---- latent_moe: The latent MoE FFN of one layer: router, MXFP4 or NVFP4 experts on the latent, shared expert, up-projection.

@cute.jit
def scale_word(byte: Uint32):
    """UE8M0 byte -> 2^(byte - 127 + 64) in both halves of a bf16 pair."""
    half = (byte + Uint32(64)) << 7
    return half | (half << 16)

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

# ---- mla: Absorbed MLA attention of one layer over the paged latent cache.

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

# ---- plan: Sizes and shares of the persistent decode kernel: which rows a CTA has, and how they are cut into ring stages.

STRIDE = 17

"""Floats between rows of partial sums and between slots of reductions: one per warp, odd against bank conflicts."""

@dataclass(frozen=True)
class Rows:
    """A bf16 matrix with rows of `k` columns as it passes the ring: `warps` consumers, `stage` bytes a stage.

    A row is shared by `width` warps; a thread has `per` vectors of eight columns; `passes` rows are made at a time.
    `pair`: a stage holds as many rows of one half of the matrix as of the other (gate and up).
    """

    k: int
    warps: int
    stage: int
    pair: bool = False

    @property
    def vecs(self):
        return self.k // 8

    @property
    def width(self):
        return min(self.warps, -(-self.vecs // 32))

    @property
    def per(self):
        return -(-self.vecs // (32 * self.width))

    @property
    def exact(self):
        return self.vecs == 32 * self.width * self.per

    @property
    def passes(self):
        return self.warps // self.width

    @property
    def row_bytes(self):
        return 2 * self.k

    @property
    def chunk(self):
        """Rows (pairs of rows) a stage."""
        most = self.stage // (self.row_bytes * (2 if self.pair else 1))
        if most < 1:
            raise ValueError(f"stages of {self.stage} bytes do not hold a row of {self.row_bytes}")
        even = 1 if self.pair else 2
        return most - most % (even * self.passes) if most > even * self.passes else most

@dataclass(frozen=True)
class Tiles:
    """A bf16 matrix with rows of `k` columns as it passes the ring for up to eight tokens: a stage is a tile of sixteen
    rows times a slice of their columns, packed when weights are loaded so that it is one piece of memory.

    A block is 32 columns of a tile's rows, 64 bytes a row: what a warp reads at once. `width` warps share a slice,
    `per` blocks each. The last tile of a CTA has fewer rows and is as much shorter.
    """

    k: int
    warps: int
    stage: int

    ROWS = 16
    TOKENS = 8

    @property
    def blocks(self):
        if self.k % 32:
            raise ValueError(f"{self.k} columns are no whole blocks of 32")
        return self.k // 32

    @property
    def slices(self):
        """As many warps as can share a slice, then as few slices as fit."""
        found = [
            (-self._width(n), n)
            for n in range(1, self.blocks + 1)
            if self.blocks % n == 0 and self.ROWS * 64 * (self.blocks // n) <= self.stage
        ]
        if not found:
            raise ValueError(f"stages of {self.stage} bytes hold no tile of {self.ROWS} rows")
        return min(found)[1]

    def _width(self, slices):
        piece = self.blocks // slices
        return max(w for w in range(1, self.warps + 1) if piece % w == 0)

    @property
    def piece(self):
        """Blocks of a slice."""
        return self.blocks // self.slices

    @property
    def width(self):
        return self._width(self.slices)

    @property
    def per(self):
        return self.piece // self.width

    @property
    def vectors(self):
        """Vectors of eight columns that a thread has of its token."""
        return self.per * self.slices

    @property
    def piece_bytes(self):
        """Of a row in a stage."""
        return 64 * self.piece

    @property
    def row_bytes(self):
        return 2 * self.k

@dataclass(frozen=True)
class CodeRows:
    """MXFP4 rows of `k` columns: codes and scales are separate matrices, copied in whole 16 bytes: `unit` rows."""

    k: int
    stage: int
    parts: int

    @property
    def code_bytes(self):
        return self.k // 2

    @property
    def scale_bytes(self):
        return self.k // 32

    @property
    def unit(self):
        return 16 // math.gcd(16, self.scale_bytes)

    @property
    def chunk(self):
        """Rows of each of the `parts` matrices a stage."""
        most = self.stage // (self.parts * (self.code_bytes + self.scale_bytes))
        return most - most % self.unit

def share(n, cta, ctas, unit=1):
    """(first, count) of the rows of CTA `cta`, whole units."""
    units = n // unit
    first = units * cta // ctas * unit
    return first, units * (cta + 1) // ctas * unit - first

def most(n, ctas, unit=1):
    """The largest share."""
    return -(-n // unit // ctas) * unit

@dataclass(frozen=True)
class Op:
    """Everything the kernel knows when it is compiled. `d` is cfg.dims.

    tiled: weights pass in packed tiles (`tensor`), for one token to eight, else in whole rows for one. in_flight: how
    many stages may be on their way at once, 0 for the whole ring. direct: who needs values of other CTAs waits for them
    alone: 1 within an instance, 2 from one to the next too, whose edge is passed only before boxes are used again.
    jitter: delays of up to so many ns (a power of two) before some arrivals, to look for hangs; 0 but in soaks.
    missing: CTAs that may not have hinted yet when boxes are looked into; what is in a box says so itself. kept: the
    prefix, and the bank's rows if there is room, stay in shared memory.
    """

    d: object
    ctas: int
    warps: int
    stage: int
    stages: int
    spin: int
    tiled: bool = False
    in_flight: int = 0
    direct: int = 0
    jitter: int = 0
    missing: int = 0
    kept: bool = False

    def __post_init__(self):
        channels = 2 * self.d.head_dim + self.state_rows if "K" in self.d.attn else 0
        if not self.tiled and self.threads < channels:
            raise ValueError(
                f"KDA of one token has a thread for each of {channels} channels, {self.warps} warps are too few"
            )

    def rows(self, k, pair=False):
        return Rows(k, self.warps, self.stage, pair)

    def tiles(self, k):
        return Tiles(k, self.warps, self.stage)

    @property
    def threads(self):
        return self.warps * 32

    @property
    def wide(self):
        return self.rows(self.d.hidden)

    @property
    def up(self):
        """w1 and w3, as pairs of rows."""
        return CodeRows(self.d.latent, self.stage, 2)

    @property
    def down(self):
        """w2: the CTA's rows of one expert are one piece."""
        return CodeRows(self.d.expert_dim, self.stage, 1)

    @property
    def down_rows(self):
        return most(self.d.latent, self.ctas, self.down.unit)

    @property
    def down_slots(self):
        """Experts whose w2 rows share a stage."""
        piece = self.down_rows * (self.down.code_bytes + self.down.scale_bytes)
        return max(1, min(self.d.topk, self.stage // piece))

    @property
    def slices(self):
        """CTAs to a head of KDA, and of MLA."""
        return max(1, self.ctas // max(self.d.kda_heads, self.d.mla_heads))

    @property
    def state_rows(self):
        return most(self.d.head_dim, self.slices)

    @property
    def boxes(self):
        """Name -> (bytes into the mail, bytes of an element, elements): what CTAs send each other, twice, by turns."""
        d, found, at = self.d, {}, 0
        wanted = [("attn", 2, d.hidden)] if d.attn else []
        if "K" in d.attn:
            wanted += [("proj", 2, 4 * d.kda_dim + d.f_rank + d.kda_heads), ("o", 4, d.kda_dim)]
        if "K" in d.attn and self.tiled:
            wanted.append(("sq", 4, d.kda_heads * self.slices * -(-self.state_rows // 4)))
        if "M" in d.attn:
            h = d.mla_heads
            wanted += [
                ("a", 2, d.a_proj_rows), ("q", 2, h * (d.qk_nope + d.qk_rope)), ("query", 2, h * d.kv_dim),
                ("stats", 4, self.ctas * h * 2), ("sums", 4, self.ctas * h * d.kv_lora), ("lat", 2, h * d.kv_lora),
                ("out", 2, d.mla_dim),
            ]  # fmt: skip
        if "E" in d.ffn:
            wanted += [
                ("logits", 4, d.router_rows), ("latent", 2, d.latent_rows), ("hs", 2, d.shared_dim),
                ("h", 2, d.topk * d.expert_dim), ("z", 2, d.latent), ("delta", 2, d.hidden_local),
            ]  # fmt: skip
        for name, size, n in wanted:
            n = d.rows * self.pitch(n) if self.tiled else n
            found[name] = (at, size, n)
            at += 2 * self.box_bytes(size, n)
        return found

    @staticmethod
    def pitch(n):
        """Elements between two tokens' parts of a box of `n` each; a token's part starts at 128 bytes or more."""
        return -(-n // 64) * 64

    @staticmethod
    def box_bytes(size, n):
        return -(-size * n // 128) * 128

    @property
    def mail_words(self):
        return max(32, sum(2 * self.box_bytes(size, n) for _, size, n in self.boxes.values()) // 4)

    @property
    def part_rows(self):
        """The most partial sums that one phase leaves in shared memory."""
        d, g = self.d, self.ctas
        front = most(d.router_rows, g) + most(d.latent_rows, g) + 2 * most(d.shared_dim, g)
        found = [
            most(d.hidden, g) + most(d.hidden_local, g), front, 2 * most(d.topk * d.expert_dim, g, self.up.unit),
        ]  # fmt: skip
        found += [most(d.in_proj_rows, g)] if "K" in d.attn else []
        found += [2 * most(d.dense_dim, g)] if "D" in d.ffn else []
        found += [
            most(n, g) for n in (d.a_proj_rows, d.mla_heads * (d.qk_nope + d.qk_rope)) if "M" in d.attn
        ]  # fmt: skip
        scores = -(-16 * (d.page + 4) // STRIDE) if "M" in d.attn else 0
        if self.tiled:
            return -(-(self.sums_at + Tiles.TOKENS * max(found)) // STRIDE)
        return max(*found, scores)

    @property
    def sums_at(self):
        """Floats before the sums of tiles: two tiles' partial sums of all warps."""
        return 2 * self.warps * Tiles.ROWS * Tiles.TOKENS

    @property
    def pool(self):
        """Bytes of scratch in shared memory, shared by the phases."""
        d = self.d
        kda = 4 * 4 * d.head_dim
        choice = 4 * 36 + 8 * d.experts
        down = 2 * d.topk * d.expert_dim + 4 * d.topk * self.down_rows
        columns = most(d.kv_lora // 8, self.slices)
        absorb = self.new_bytes + self.head_bytes + 32 * (self.threads // columns) * columns
        attend = self.new_bytes + 4 * d.mla_heads * self.query_words + 32 * (d.page + 8) + 192
        columns = most(d.kv_lora // 4, self.slices)
        join = 4 * self.ctas + 16 + 16 * (self.threads // columns) * columns
        if self.tiled:
            kda = 4 * Tiles.TOKENS * (1 + 3 * d.head_dim + self.state_rows)
        found = [kda, choice, down, 2 * d.latent] + (
            [absorb, attend, join] if "M" in d.attn else []
        )
        return -(-max(found) // 16) * 16

    @property
    def new_bytes(self):
        """The new token's cache row, first in the pool while MLA needs it."""
        return -(-2 * self.d.kv_dim // 128) * 128

    @property
    def reductions(self):
        """Sums over a CTA that are open at a time: of AttnRes, two a source and one more."""
        return 2 * self.d.bank_rows + 4

    @property
    def bank_kept(self):
        """Whether the bank's rows stay in shared memory: few do."""
        return self.kept and 2 * self.d.bank_rows * self.d.hidden <= 32768

    @property
    def kept_words(self):
        """Words of the prefix and of the bank that stay in shared memory, each thread's for itself."""
        rows = 1 + (self.d.bank_rows if self.bank_kept else 0)
        return rows * self.kept_row if self.kept else 0

    @property
    def kept_row(self):
        return 4 * self.wide.per * self.threads

    @property
    def head_bytes(self):
        """The query of a head before W_UK, behind the new row."""
        return -(-2 * (self.d.qk_nope + self.d.qk_rope) // 128) * 128

    @property
    def cache_rows(self):
        """Tokens a stage, whole octets."""
        return min(self.d.page, self.stage // (2 * self.d.kv_dim) // 8 * 8)

    @property
    def cache_stages(self):
        """Stages of a page; all of them stay in the ring while the page is used."""
        return -(-self.d.page // self.cache_rows)

    @property
    def query_words(self):
        """Words between queries of two heads in shared memory."""
        words = self.d.kv_dim // 2
        return words + (16 - words % 32) % 32

    @property
    def value_warps(self):
        """Warps that share the latent columns of P C, sixteen or more each."""
        n = 1
        while 2 * n <= self.warps and self.d.kv_lora % (32 * n) == 0:
            n *= 2
        return n

    @property
    def value_each(self):
        return self.d.kv_lora // self.value_warps // 8

def refuse_others(dims, rows=1):
    """Raises ValueError for a workload that these kernels do not compute; `rows`: the most tokens."""
    if dims.rows > rows or (dims.rows > 1 and dims.q > 1):
        one = "one row" if rows == 1 else f"up to {rows} rows of different requests"
        raise ValueError(f"the persistent kernel is for {one}")
    given = (dims.kv, dims.experts_format, dims.taps)
    if given != ("bf16", "mxfp4", ""):
        raise ValueError(
            f"the persistent kernel is for bf16 caches, MXFP4 and no taps, not {given}"
        )

# ---- fields: The table of addresses: one line per layer, so that one body of code serves all layers of a kind.

KDA = ("in_proj", "f_b", "conv", "A_log", "dt_bias", "o_norm", "o_proj")

MLA = ("a_proj", "q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv", "o_proj")

MOE = (
    "router", "router_bias", "latent_down", "w1", "w1_scale", "w3", "w3_scale", "w2", "w2_scale", "latent_norm",
    "latent_up", "shared_gate_up", "shared_down",
)  # fmt: skip

DENSE = ("dense_gate_up", "dense_down")

MIX = ("attn_res_norm", "attn_res_proj", "attn_norm", "mlp_res_norm", "mlp_res_proj", "mlp_norm")

REMOTE = ("attn", "latent", "logits", "moe", "shared", "delta", "dense")

NAMES = tuple(
    dict.fromkeys(
        [
            *KDA,
            *MLA,
            *MOE,
            *DENSE,
            *MIX,
            *(f"remote_{n}" for n in REMOTE),
            "state_conv",
            "state_S",
            "kv",
            "send",
            "kind",
            "x",
            "y",
        ]
    )
)

COUNT = len(NAMES)

F = {name: i for i, name in enumerate(NAMES)}

IS_MLA, IS_DENSE = 1, 2

def layer_tensors(t, n, dims):
    """Field -> tensor of layer n, those it has."""
    found = {}
    w = t.weights.layers[n]
    for name in (
        *MIX,
        *(KDA if dims.attn[n] == "K" else MLA),
        *(MOE if dims.ffn[n] == "E" else DENSE),
    ):
        found[name] = getattr(w, name)
    state = t.states.layers[n]
    if dims.attn[n] == "K":
        found |= {"state_conv": state.conv, "state_S": state.S}
    else:
        found |= {"kv": state.kv}
    if dims.ranks > 1:
        remote = t.inputs.remote.layers[n]
        found |= {f"remote_{r}": getattr(remote, r) for r in REMOTE if hasattr(remote, r)}
        if dims.ffn[n] == "E":
            sends = t.outputs.send.layers
            # where a layer without experts leaves a gap, the numbers are names, not indices
            found["send"] = (sends[n] if isinstance(sends, list) else getattr(sends, str(n))).shared
    return found

def chain_tensors(t, n, dims):
    """As `layer_tensors` for instance n of a chain of FFNs or KDAs, its own input and output included."""
    found = {"x": t.inputs.x[n], "y": t.outputs.y[n]}
    w = t.weights.layers[n]
    found |= {name: getattr(w, name) for name in (MOE if dims.ffn else KDA)}
    if not dims.ffn:
        found |= {"state_conv": t.states.layers[n].conv, "state_S": t.states.layers[n].S}
    if dims.ranks > 1:
        remote = t.inputs.remote.layers[n]
        found |= {f"remote_{r}": getattr(remote, r) for r in REMOTE if hasattr(remote, r)}
        if dims.ffn:
            found["send"] = t.outputs.send.layers[n].shared
    return found

def kind(dims, n):
    return (IS_MLA if dims.attn[n] == "M" else 0) | (IS_DENSE if dims.ffn[n] == "D" else 0)

def vectors(dims):
    """(field, bytes, kinds of layer that have it): small things that are wanted just after an edge."""
    d = dims
    found = [(name, 2 * d.hidden, "KM") for name in MIX]
    if "K" in d.attn:
        found += [
            ("o_norm", 2 * d.head_dim, "K"),
            ("dt_bias", 4 * d.kda_dim, "K"),
            ("A_log", 4 * d.kda_heads, "K"),
        ]
    if "M" in d.attn:
        found += [("q_a_norm", 2 * d.q_lora, "M"), ("kv_a_norm", 2 * d.kv_lora, "M")]
    if "E" in d.ffn:
        found += [("router_bias", 4 * d.experts, "E"), ("latent_norm", 2 * d.latent, "E")]
    if d.ranks > 1:
        found.append(("remote_attn", 4 * d.hidden, "KM"))
        if "E" in d.ffn:
            found += [
                ("remote_moe", 4 * d.latent, "E"), ("remote_shared", 4 * d.hidden_local, "E"),
                ("remote_delta", 2 * (d.hidden - d.hidden_local), "E"),
            ]  # fmt: skip
            found += (
                [("remote_latent", 2 * (d.latent - d.latent_rows), "E")] if d.latent_sharded else []
            )
            found += (
                [("remote_logits", 4 * (d.experts - d.router_rows), "E")]
                if d.router_sharded
                else []
            )
    return found

# ---- device: Device pieces of the persistent kernel: edges between CTAs, the ring of weights, dot products, sums over a CTA.

EVICT_FIRST = 0x12F0000000000000

class Ctx(NamedTuple):
    """Where a thread is, and the shared memory of its CTA.

    ring: stages of weights (words); full, empty: mbarriers, one each a stage; routed: mbarrier, the ids are known;
    part, red: sums of warps; tab: addresses by layer and field; sync: counters of the edges (global), a line each:
    ALL at 0, ROUTE at 32, the record of a spin that gave up at 64, what the counters were at the launch from 96; mail:
    boxes of what CTAs send each other (global); track, brought: timelines of consumers and producer, None in a normal
    build; list: what the producer brings of each matrix (`bring`), where it has one;
    kept: this thread's columns of the prefix and, where there is room, of the bank (words).
    """

    tid: Any
    warp: Any
    lane: Any
    cta: Any
    ring: Any
    full: Any
    empty: Any
    routed: Any
    part: Any
    red: Any
    tab: Any
    ids: Any
    weights: Any
    own: Any
    pool: Any
    sync: Any
    base: Any
    mail: Any
    track: Any
    brought: Any
    list: Any
    kept: Any

ALL, ROUTE = 0, 32

"""Lines of the counters: edges that every CTA waits for in turn; the router's edge, which is waited for later."""

@cute.jit
def consumers(op: cutlass.Constexpr):
    """Barrier of the consumer warps."""
    cute.arch.barrier(barrier_id=1, number_of_threads=op.threads)

@cute.jit
def dawdle(c: Ctx, op: cutlass.Constexpr):
    """One arrival in sixteen is late by up to `jitter` ns, by a hash of the clock; nothing in a normal build."""
    if cutlass.const_expr(getattr(op, "jitter", 0) > 0):
        if c.tid == 0:
            cute.arch.inline_ptx(
                """{
                .reg .u32 a, b;
                .reg .pred p;
                mov.u32 a, %clock;
                xor.b32 a, a, {$r0};
                mul.lo.u32 a, a, 0x9E3779B1;
                shr.u32 b, a, 28;
                setp.eq.u32 p, b, 0;
                shr.u32 a, a, 8;
                and.b32 a, a, {$r1};
                @p nanosleep.u32 a;
                }""",
                read_only_args=[c.cta * 7919, Int32(op.jitter - 1)],
            )

@cute.jit
def arrive(c: Ctx, op: cutlass.Constexpr):
    """All that this CTA's consumers wrote is visible to who waits for this edge."""
    dawdle(c, op)
    consumers(op)
    if c.tid == 0:
        cute.arch.red(c.sync, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")

@cute.jit
def hint(c: Ctx, op: cutlass.Constexpr, line: cutlass.Constexpr = ALL):
    """This CTA's consumers have posted: it is worth looking into the boxes. Orders nothing; what is in a box says so.

    A release here would first drain all that the CTA wrote, about a microsecond under load.
    """
    dawdle(c, op)
    consumers(op)
    if c.tid == 0:
        cute.arch.red(c.sync + line, Int32(1), op="add", dtype="u32", sem="relaxed", scope="gpu")

@cute.jit
def counter(c: Ctx, line: cutlass.Constexpr, acquire: cutlass.Constexpr):
    seen = Int32(0)
    if cutlass.const_expr(acquire):
        seen = cute.arch.load(c.sync + line, Int32, sem="acquire", scope="gpu")
    else:
        seen = cute.arch.load(c.sync + line, Int32, sem="relaxed", scope="gpu")
    return seen

@cute.jit
def wait(
    c: Ctx,
    edge: Int32,
    op: cutlass.Constexpr,
    line: cutlass.Constexpr = ALL,
    acquire: cutlass.Constexpr = True,
    missing: cutlass.Constexpr = 0,
):
    """Until every CTA (but `missing`) arrived at edge number `edge` (counted from 1) of this launch on this line.

    `acquire`: what they wrote before an `arrive` can be read then. After a `hint` there is nothing to acquire.
    """
    if c.tid == 0:
        await_line(c, edge, op, line, acquire, missing)
    consumers(op)

@cute.jit
def await_line(
    c: Ctx,
    edge: Int32,
    op: cutlass.Constexpr,
    line: cutlass.Constexpr,
    acquire: cutlass.Constexpr,
    missing: cutlass.Constexpr,
):
    """As `wait`, by one thread."""
    base = c.base[line // 32]
    target = base + edge * op.ctas - missing
    seen = counter(c, line, acquire)
    if cutlass.const_expr(op.spin == 0):
        while seen - target < 0:
            seen = counter(c, line, acquire)
    else:
        turns = Int32(0)
        while seen - target < 0 and turns < op.spin:
            seen = counter(c, line, acquire)
            turns += 1
        if seen - target < 0:
            record = cute.make_tensor(c.sync + 64, cute.make_layout((4,)))
            record[0], record[1], record[2], record[3] = (
                c.cta + 1,
                edge,
                seen - base,
                target - base,
            )

@cute.jit
def leave(c: Ctx, edge: Int32, counts: tuple, op: cutlass.Constexpr):
    """The next launch counts on from here. After the last edge, when every CTA has read where this one began.

    counts: FFNs with experts, KDAs, layers and MLAs, those that the kernel has.
    """
    if c.tid == 0 and c.cta == 0:
        state = cute.make_tensor(c.sync + 96, cute.make_layout((6,)))
        state[0] = c.base[0] + edge * op.ctas
        state[1] = c.base[1] + counts[0] * op.ctas
        for k in cutlass.range_constexpr(len(counts)):
            state[2 + k] = c.base[2 + k] + counts[k]

# ---- boxes: an element that is all ones is empty; no result of bf16 or f32 arithmetic has these bits
@cute.jit
def box(c: Ctx, name: cutlass.Constexpr, turn: Int32, op: cutlass.Constexpr):
    """Address of a box for this turn (0 or 1)."""
    start, size, n = op.boxes[name]
    return c.mail + start + Int64(turn) * op.box_bytes(size, n)

@cute.jit
def post(c: Ctx, name: cutlass.Constexpr, turn: Int32, i: Int32, x: Float32, op: cutlass.Constexpr):
    """x into element i of a box; its place for the other turn is emptied, which all have read by now.

    One thread has an element always, so emptying and filling it keep their order.
    """
    size = op.boxes[name][1]
    here = box(c, name, turn, op) + Int64(i) * size
    there = box(c, name, 1 - turn, op) + Int64(i) * size
    if cutlass.const_expr(size == 2):
        cute.arch.inline_ptx(
            """{
            .reg .b16 h, e;
            cvt.rn.bf16.f32 h, {$r1};
            mov.b16 e, 0xFFFF;
            st.relaxed.gpu.global.b16 [{$r0}], h;
            st.relaxed.gpu.global.b16 [{$r2}], e;
            }""",
            read_only_args=[here, x, there],
        )
    else:
        cute.arch.inline_ptx(
            """{
            .reg .b32 e;
            mov.b32 e, 0xFFFFFFFF;
            st.relaxed.gpu.global.f32 [{$r0}], {$r1};
            st.relaxed.gpu.global.b32 [{$r2}], e;
            }""",
            read_only_args=[here, x, there],
        )

def registers(n, first, step):
    """The operand of a vector instruction: n registers of inline PTX from number `first` on."""
    return "{" + ", ".join("{$r" + str(first + step * k) + "}" for k in range(n)) + "}"

@cute.jit
def post_some(here: Int64, there: Int64, r: cute.Tensor, n: cutlass.Constexpr):
    """As `post`, n = 2 or 4 f32 at once: r[n] to `here`; its place for the other turn is emptied."""
    size = ".v" + str(n)
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global{size}.f32 [{{$r0}}], {registers(n, 3, 1)};"
        f" st.relaxed.gpu.global{size}.b32 [{{$r1}}], {registers(n, 2, 0)};",
        read_only_args=[here, there, Uint32(0xFFFFFFFF), *(r[k] for k in range(n))],
    )

@cute.jit
def empty_some(there: Int64, n: cutlass.Constexpr):
    """n = 2 or 4 f32 of a box are emptied by a CTA that has nothing for them this time."""
    size = ".v" + str(n)
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global{size}.b32 [{{$r0}}], {registers(n, 1, 0)};",
        read_only_args=[there, Uint32(0xFFFFFFFF)],
    )

@cute.jit
def peek(address: Int64, r: cute.Tensor):
    """r[4 words] = 16 bytes of a box, whether they are there or not."""
    words = cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
    for e in cutlass.range_constexpr(4):
        r[e] = words[e]

@cute.jit
def empty(r: cute.Tensor, size: cutlass.Constexpr):
    """Whether one of the elements in four words is empty: a half of ~w that is zero borrows from its highest bit."""
    found = Uint32(0)
    for e in cutlass.range_constexpr(4):
        if cutlass.const_expr(size == 2):
            found = found | ((~r[e] - Uint32(0x00010001)) & r[e] & Uint32(0x80008000))
        else:
            found = found | (Uint32(1) if r[e] == Uint32(0xFFFFFFFF) else Uint32(0))
    return found != Uint32(0)

@cute.jit
def insist(address: Int64, r: cute.Tensor, size: cutlass.Constexpr, op: cutlass.Constexpr):
    """After `peek`: again until all elements are there."""
    if cutlass.const_expr(op.spin == 0):
        while empty(r, size):
            peek(address, r)
    else:
        turns = Int32(0)
        while empty(r, size) and turns < op.spin:
            peek(address, r)
            turns += 1

@cute.jit
def at(dtype: cutlass.Constexpr, address: Int64, n: cutlass.Constexpr):
    """n elements in global memory at an address that is a multiple of 16."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((n,)))

@cute.jit
def words_at(address: Int64, i: Int32, r: cute.Tensor):
    """r[4 words] = the i-th 16 bytes at an address."""
    pointer = cute.make_ptr(
        Uint32, address + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
    )
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout((4,))), r)

@cute.jit
def view(c: Ctx, dtype: cutlass.Constexpr, offset: cutlass.Constexpr, n: cutlass.Constexpr):
    """n elements of the scratch pool, `offset` bytes in."""
    pointer = cute.recast_ptr(c.pool.iterator + offset // 4, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout((n,)))

@cute.jit
def field(c: Ctx, layer: Int32, f: cutlass.Constexpr, fields: cutlass.Constexpr):
    return c.tab[layer * fields + f]

@cute.jit
def unpack(r: cute.Tensor, x: cute.Tensor):
    """x[8] f32 of r[4] words of bf16."""
    for e in cutlass.range_constexpr(4):
        x[2 * e], x[2 * e + 1] = low(r[e]), high(r[e])

FFNS, KDAS, LAYERS, MLAS = 0, 1, 2, 3

@cute.jit
def turn_of(c: Ctx, number: Int32, what: cutlass.Constexpr = FFNS):
    """The half of its boxes that FFN, KDA, layer or MLA `number` of the launch uses: in turn, across launches too."""
    return (c.base[2 + what] + number) & 1

@cute.jit
def wide_box(c: Ctx, start: Int64, r: cute.Tensor, op: cutlass.Constexpr):
    """r words [4, per]: this thread's columns of a box of `hidden` elements."""
    g = op.wide
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            peek(start + Int64(vector(c, v, g)) * 16, r[None, v])
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            insist(start + Int64(vector(c, v, g)) * 16, r[None, v], 2, op)

@cute.jit
def peek_half(address: Int64):
    """The bits of one bf16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; ld.relaxed.gpu.global.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[address],
    )

@cute.jit
def insist_half(address: Int64, x: Uint32, op: cutlass.Constexpr):
    turns = Int32(0)
    while x == Uint32(0xFFFF) and (op.spin == 0 or turns < op.spin):
        x = peek_half(address)
        turns += 1
    return low(x)

@cute.jit
def gathered_from(
    c: Ctx, start: Int64, layer: Int32, rY: cute.Tensor, own: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rY words [4, per]: the first `own` columns from a box, the others as they came from other ranks."""
    g = op.wide
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < own // 8:
            peek(start + Int64(i) * 16, rY[None, v])
        elif i < g.vecs:
            if cutlass.const_expr(own < op.d.hidden):
                words_at(field(c, layer, F["remote_delta"], COUNT), i - own // 8, rY[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < own // 8:
            insist(start + Int64(i) * 16, rY[None, v], 2, op)

@cute.jit
def ahead(c: Ctx, address: Int64, n: Int32, most_: cutlass.Constexpr, op: cutlass.Constexpr):
    """This thread's f32 of `n` at an address (at most `most_`), on their way before they are wanted."""
    turns = -(-most_ // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((turns,)), Float32)
    r.fill(0.0)
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < n:
            pointer = cute.make_ptr(
                Float32, address + Int64(i) * 4, cute.AddressSpace.gmem, assumed_align=4
            )
            r[k] = cute.make_tensor(pointer, cute.make_layout((1,)))[0]
    return r

# ---- producer
@cute.jit
def stage_free(c: Ctx, it: Int32, op: cutlass.Constexpr):
    """Slot of stage number `it`, once its last use is over and few enough stages are on their way.

    What is on its way queues before everything else in the memory system: with a whole ring of 200 KB a CTA an edge
    takes 3 us instead of 0.6.
    """
    slot = it % op.stages
    if it >= op.stages:
        cute.arch.mbarrier_wait(c.empty + slot, (it // op.stages - 1) & 1)
    if cutlass.const_expr(0 < op.in_flight < op.stages):
        before = it - op.in_flight
        if before >= 0:
            cute.arch.mbarrier_wait(c.full + before % op.stages, (before // op.stages) & 1)
    return slot

@cute.jit
def bulk(c: Ctx, slot: Int32, offset: Int32, source: Int64, size: Int32, op: cutlass.Constexpr):
    target = Int32(c.ring.iterator.toint()) + slot * op.stage + offset
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[
            target, source, size, Int32((c.full + slot).toint()), Int64(EVICT_FIRST)
        ],
    )  # fmt: skip

@cute.jit
def to_l2(address: Int64, size: Int32):
    """A piece of memory into L2; both are multiples of 16."""
    if size > 0:
        cute.arch.inline_ptx(
            "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[address, size]
        )

@cute.jit
def fill(
    c: Ctx, it: Int32, source: Int64, rows: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """Stages of `rows` rows that lie together."""
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_free(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, n * g.row_bytes)
        bulk(c, slot, Int32(0), source + Int64(first) * g.row_bytes, n * g.row_bytes, op)
        it += 1
    return it

@cute.jit
def fill_pairs(
    c: Ctx,
    it: Int32,
    source: Int64,
    apart: Int64,
    rows: Int32,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """As `fill`, with as many rows from `apart` bytes further on."""
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_free(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * n * g.row_bytes)
        start = source + Int64(first) * g.row_bytes
        bulk(c, slot, Int32(0), start, n * g.row_bytes, op)
        bulk(c, slot, Int32(g.chunk * g.row_bytes), start + apart, n * g.row_bytes, op)
        it += 1
    return it

@cute.jit
def bring(c: Ctx, layer: Int32, it: Int32, part: Int32, op: cutlass.Constexpr):
    """Stages of this CTA's rows of matrix number `part` of `table.PARTS`: one copy of the code for all of them, which
    one warp alone would else fetch anew every time."""
    row = cute.make_tensor(c.list.iterator + part * 6, cute.make_layout((6,)))
    source = c.tab[layer * COUNT + row[0]] + Int64(row[1])
    rows, row_bytes, chunk, apart = row[2], row[3], row[4], row[5]
    for first in cutlass.range(0, rows, chunk, unroll=1):
        slot = stage_free(c, it, op)
        n = rows - first if rows - first < chunk else chunk
        start = source + Int64(first) * row_bytes
        size = n * row_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * size if apart > 0 else size)
        bulk(c, slot, Int32(0), start, size, op)
        if apart > 0:
            bulk(c, slot, chunk * row_bytes, start + Int64(apart), size, op)
        it += 1
    return it

# ---- consumers
@cute.jit
def stage_full(c: Ctx, it: Int32, op: cutlass.Constexpr):
    slot = it % op.stages
    cute.arch.mbarrier_wait(c.full + slot, (it // op.stages) & 1)
    return slot

@cute.jit
def stage_done(c: Ctx, slot: Int32):
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(c.empty + slot)

@cute.jit
def vector(c: Ctx, v: cutlass.Constexpr, g: cutlass.Constexpr):
    """Which vector of eight columns this thread has as its v-th."""
    return (c.warp % g.width) * 32 + c.lane + v * 32 * g.width

@cute.jit
def mma_rows(rC: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, rX: cute.Tensor):
    """rC += two rows times x: each lane's four words of row a and of row b with the same lane's words of x.

    A lane's words are columns of its own row of the MMA (g for a, g + 8 for b), its x the same columns of column g of
    the other operand; so only the diagonal of the product means anything, and it sums over the four lanes of g.
    """
    out = cute.arch.inline_ptx(
        """{
        .reg .f32 c0, c1, c2, c3;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3},
            {{$r0}, {$r4}, {$r1}, {$r5}}, {{$r8}, {$r9}}, {{$r12}, {$r13}, {$r14}, {$r15}};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r2}, {$r6}, {$r3}, {$r7}}, {{$r10}, {$r11}}, {c0, c1, c2, c3};
        }""",
        write_only_types=[Float32] * 4,
        read_only_args=[
            *(rA[i] for i in range(4)), *(rB[i] for i in range(4)), *(rX[i] for i in range(4)),
            *(rC[i] for i in range(4)),
        ],
    )  # fmt: skip
    for i in cutlass.range_constexpr(4):
        rC[i] = out[i]

@cute.jit
def diagonal(c: Ctx, rC: cute.Tensor):
    """(row a, row b): this lane's element of the diagonal, zero in lanes that have none."""
    g, q = c.lane // 4, c.lane % 4
    odd = g % 2 == 1
    a = rC[1] if odd else rC[0]
    b = rC[3] if odd else rC[2]
    mine = q == g // 2
    a = a if mine else Float32(0.0)
    b = b if mine else Float32(0.0)
    return a, b

@cute.jit
def diagonal_sum(a: Float32, b: Float32):
    """Sum of the diagonal: row a in lane 0, row b in lane 1 (of a's eight lanes b borrows the neighbours)."""
    x = a + cute.arch.shuffle_sync_bfly(b, offset=1)
    for offset in cutlass.range_constexpr(3):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=(4, 9, 18)[offset])
    return x

@cute.jit
def load_row(c: Ctx, first: Int32, rW: cute.Tensor, g: cutlass.Constexpr):
    """rW[4, per]: this thread's words of the row that starts at 16 bytes times `first` in the ring."""
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if cutlass.const_expr(g.exact):
            cute.autovec_copy(cute.local_tile(c.ring, (4,), (first + i,)), rW[None, v])
        else:
            rW[None, v].fill(0)
            if i < g.vecs:
                cute.autovec_copy(cute.local_tile(c.ring, (4,), (first + i,)), rW[None, v])

@cute.jit
def drain(
    c: Ctx,
    it: Int32,
    rows: Int32,
    base: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """part[base + row, warp of the row] for `rows` rows (pairs: 2 row is gate, 2 row + 1 up); rX words [4, per]."""
    halves = 2 if g.pair else 1
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        if c.warp < g.width * g.passes:
            for i in cutlass.range(2 * (c.warp // g.width), halves * n, 2 * g.passes, unroll=1):
                a, b = i, i + 1
                if cutlass.const_expr(g.pair):
                    a, b = i // 2, g.chunk + i // 2
                else:
                    b = i + 1 if i + 1 < n else i
                load_row(c, slot * (op.stage // 16) + a * g.vecs, rA, g)
                load_row(c, slot * (op.stage // 16) + b * g.vecs, rB, g)
                rC.fill(0.0)
                for v in cutlass.range_constexpr(g.per):
                    mma_rows(rC, rA[None, v], rB[None, v], rX[None, v])
                x, y = diagonal(c, rC)
                sum = diagonal_sum(x, y)
                if c.lane < 2 and i + c.lane < halves * n:
                    c.part[(base + halves * first + i + c.lane) * STRIDE + c.warp % g.width] = sum
        stage_done(c, slot)
        it += 1
    return it

@cute.jit
def drain_wide(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain` for rows of `hidden` columns, single or in pairs as the caller finds at run time: one copy of the code
    serves them all."""
    g, h = op.wide, op.rows(op.d.hidden, pair=True)
    chunk = Int32(h.chunk) if pairs else Int32(g.chunk)
    halves = Int32(2) if pairs else Int32(1)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for first in cutlass.range(0, rows, chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = rows - first if rows - first < chunk else chunk
        if g.width * g.passes > c.warp:
            for i in cutlass.range(2 * (c.warp // g.width), halves * n, 2 * g.passes, unroll=1):
                a, b = i, i + 1
                if pairs:
                    a, b = i // 2, chunk + i // 2
                else:
                    b = i + 1 if i + 1 < n else i
                load_row(c, slot * (op.stage // 16) + a * g.vecs, rA, g)
                load_row(c, slot * (op.stage // 16) + b * g.vecs, rB, g)
                rC.fill(0.0)
                for v in cutlass.range_constexpr(g.per):
                    mma_rows(rC, rA[None, v], rB[None, v], rX[None, v])
                x, y = diagonal(c, rC)
                total = diagonal_sum(x, y)
                if c.lane < 2 and i + c.lane < halves * n:
                    c.part[(base + halves * first + i + c.lane) * STRIDE + c.warp % g.width] = total
        stage_done(c, slot)
        it += 1
    return it

@cute.jit
def gathered(c: Ctx, i: Int32, width: cutlass.Constexpr):
    """The sum of row i over its warps, in their order."""
    total = c.part[i * STRIDE]
    for w in cutlass.range_constexpr(1, width):
        total += c.part[i * STRIDE + w]
    return total

@cute.jit
def put(c: Ctx, slot: cutlass.Constexpr, x: Float32):
    """This warp's part of reduction `slot`."""
    x = lanes_sum(x, 32)
    if c.lane == 0:
        c.red[slot * STRIDE + c.warp] = x

@cute.jit
def put_two(c: Ctx, slot: cutlass.Constexpr, x: Float32, y: Float32):
    """This warp's parts of the reductions `slot` and `slot` + 1: half of the lanes go on with either."""
    upper = c.lane >= 16
    sum = (y if upper else x) + cute.arch.shuffle_sync_bfly(x if upper else y, offset=16)
    sum = lanes_sum(sum, 16)
    if c.lane % 16 == 0:
        c.red[(slot + c.lane // 16) * STRIDE + c.warp] = sum

@cute.jit
def take_two(c: Ctx, slot: cutlass.Constexpr, width: cutlass.Constexpr):
    """Both sums of the first `width` (at most 16) warps' parts, after a barrier."""
    x = Float32(0.0)
    if c.lane % 16 < width:
        x = c.red[(slot + c.lane // 16) * STRIDE + c.lane % 16]
    x = lanes_sum(x, 16)
    return cute.arch.shuffle_sync(x, 0), cute.arch.shuffle_sync(x, 16)

@cute.jit
def take(c: Ctx, slot: cutlass.Constexpr, width: cutlass.Constexpr):
    """Sum of the first `width` warps' parts, after a barrier."""
    x = Float32(0.0)
    if c.lane % 16 < width:
        x = c.red[slot * STRIDE + c.lane % 16]
    return lanes_sum(x, 16)

# ---- setup: What a CTA of a persistent kernel does first: shared memory, mbarriers, the table of addresses.

@cute.jit
def open_cta(
    layers: tuple,
    mSync: cute.Tensor,
    mMail: Any,
    phases: Any,
    names: cutlass.Constexpr,
    kinds: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """The context of a thread. layers: tensors of each layer, names: their fields; ends with a barrier of the CTA."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    d = op.d
    ring = cute.make_tensor(
        cutlass.memory.SmemAllocator().allocate_tensor(
            Uint32, cute.make_layout((op.stages * op.stage // 4,)), byte_alignment=128
        ).iterator,
        cute.make_layout((op.stages * op.stage // 4,)),
    )  # fmt: skip
    bars = smem(Int64, (2 * op.stages + 1,), (1,)).iterator
    c = Ctx(
        tid, warp, tid % 32, cta, ring, bars, bars + op.stages, bars + 2 * op.stages,
        smem(Float32, (op.part_rows * STRIDE,), (1,)), smem(Float32, (op.reductions * STRIDE,), (1,)),
        smem(Int64, (d.layers * COUNT,), (1,)), smem(Int32, (d.topk,), (1,)), smem(Float32, (d.topk,), (1,)),
        smem(Float32, (-(-d.hidden_local // op.ctas),), (1,)), smem(Uint32, (op.pool // 4,), (1,)),
        mSync.iterator, smem(Int32, (8,), (1,)),
        Int64(0) if cutlass.const_expr(mMail is None) else mMail.iterator.toint(),
        timeline.track(phases, cta, tid == 0), timeline.track(phases, op.ctas + cta, tid == op.threads),
        smem(Int32, (160,), (1,)) if cutlass.const_expr(op.kept) else None,
        smem(Uint32, (op.kept_words,), (1,)) if cutlass.const_expr(op.kept_words > 0) else None,
    )  # fmt: skip
    if tid < 8:
        c.base[tid] = mSync[96 + tid]
    if tid == 0:
        for s in cutlass.range_constexpr(op.stages):
            cute.arch.mbarrier_init(c.full + s, 1)
            cute.arch.mbarrier_init(c.empty + s, op.warps)
        cute.arch.mbarrier_init(c.routed, 1)
    for n in cutlass.range_constexpr(d.layers):
        if tid == 32 * (n % op.warps):
            for i in cutlass.range_constexpr(len(names[n])):
                c.tab[n * COUNT + F[names[n][i]]] = layers[n][i].iterator.toint()
            c.tab[n * COUNT + F["kind"]] = Int64(kinds[n])
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return c

@cute.kernel
def empty_kernel(mMail: cute.Tensor):
    """All boxes empty; grid (words / 128), 128 threads."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 128 + tid
    if i < cute.size(mMail):
        mMail[i] = Int32(-1)

@cute.jit
def empty_boxes(mMail: cute.Tensor, stream):
    empty_kernel(mMail).launch(
        grid=(cute.ceil_div(cute.size(mMail), 128), 1, 1), block=(128, 1, 1), stream=stream
    )

# ---- vectors: Vectors in the registers of the consumers: loaded from buffers and boxes, normalised, two rows joined.

@cute.jit
def situ_pair(c: Ctx, row: Int32, width: cutlass.Constexpr):
    """SiTU(bf(gate), bf(up)) of the pair whose gate row is `row`."""
    gate = round_bf16(gathered(c, row, width))
    up = round_bf16(gathered(c, row + 1, width))
    return situ(gate, up)

@cute.jit
def load_x(c: Ctx, mX: cute.Tensor, rX: cute.Tensor, g: cutlass.Constexpr):
    """rX words [4, per]: this thread's columns of a bf16 vector."""
    for v in cutlass.range_constexpr(g.per):
        rX[None, v].fill(0)
        i = vector(c, v, g)
        if i < g.vecs:
            words_at(mX.iterator.toint(), i, rX[None, v])

@cute.jit
def load_box(
    c: Ctx, name: cutlass.Constexpr, turn: Int32, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """As `load_x` from a box: all loads before the first look at one."""
    start = box(c, name, turn, op)
    for v in cutlass.range_constexpr(g.per):
        rX[None, v].fill(0)
        i = vector(c, v, g)
        if i < g.vecs:
            peek(start + Int64(i) * 16, rX[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            insist(start + Int64(i) * 16, rX[None, v], 2, op)

@cute.jit
def load_norm(c: Ctx, norm: Int64, g: cutlass.Constexpr):
    """This thread's words [4, per] of a norm's weights."""
    rN = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rN.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(norm, vector(c, v, g), rN[None, v])
    return rN

@cute.jit
def normalise(
    c: Ctx, rX: cute.Tensor, rN: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """rX words [4, per] <- bf(RMS(x; norm)); a barrier inside."""
    square = Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            a, b = low(rX[e, v]), high(rX[e, v])
            square += a * a + b * b
    put(c, 0, square)
    consumers(op)
    scale = cute.math.rsqrt(take(c, 0, g.width) / g.k + op.d.eps)
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            a = low(rX[e, v]) * scale * low(rN[e, v])
            rX[e, v] = pack_bf16(a, high(rX[e, v]) * scale * high(rN[e, v]))

# ---- mix: AttnRes in every CTA: a thread has the same columns of the prefix, of the bank and of x.

class Early(NamedTuple):
    """weight f32 [8, per] = norm x proj; out words [4, per]."""

    weight: Any
    out: Any

class Banks(NamedTuple):
    """Addresses of bank rows of earlier layers and of those written here; where these lie in shared memory, or None."""

    old: Any
    new: Any
    kept: Any

@cute.kernel
def vectors_kernel(norms: tuple, projs: tuple, mOut: cute.Tensor, n: cutlass.Constexpr):
    """mOut[half, column] = norm x proj, f32; grid (columns / 128, halves)."""
    tid, _, _ = cute.arch.thread_idx()
    block, step, _ = cute.arch.block_idx()
    i = block * 128 + tid
    if i < n:
        x = Float32(0.0)
        for k in cutlass.range_constexpr(len(norms)):
            if step == k:
                x = norms[k][i].to(Float32) * projs[k][i].to(Float32)
        mOut[step * n + i] = x

@cute.jit
def weigh_vectors(norms: tuple, projs: tuple, mOut: cute.Tensor, n: cutlass.Constexpr, stream):
    vectors_kernel(norms, projs, mOut, n).launch(
        grid=(-(-n // 128), len(norms), 1), block=(128, 1, 1), stream=stream
    )

@cute.jit
def kept_at(c: Ctx, sKept: cute.Tensor, row: Int32, v: cutlass.Constexpr, op: cutlass.Constexpr):
    """Where this thread keeps its v-th words of a row, for itself."""
    return cute.local_tile(sKept, (4,), ((row * op.wide.per + v) * op.threads + c.tid,))

@cute.jit
def bank_words(
    c: Ctx, banks: Banks, s: cutlass.Constexpr, v: cutlass.Constexpr, r: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """r[4] = this thread's v-th words of row s."""
    g, d = op.wide, op.d
    i = vector(c, v, g)
    if cutlass.const_expr(banks.kept is not None):
        cute.autovec_copy(kept_at(c, banks.kept, s, v, op), r)
    elif cutlass.const_expr(s < d.bank_old):
        words_at(banks.old, s * g.vecs + i, r)
    else:
        words_at(banks.new, (s - d.bank_old) * g.vecs + i, r)

@cute.jit
def keep_old(c: Ctx, banks: Banks, op: cutlass.Constexpr):
    """Rows of earlier layers into shared memory; a thread reads what it wrote itself."""
    g, d = op.wide, op.d
    if cutlass.const_expr(banks.kept is not None):
        rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        for s in cutlass.range_constexpr(d.bank_old):
            for v in cutlass.range_constexpr(g.per):
                i = vector(c, v, g)
                if i < g.vecs:
                    words_at(banks.old, s * g.vecs + i, rB)
                    cute.autovec_copy(rB, kept_at(c, banks.kept, s, v, op))

@cute.jit
def sums(r: cute.Tensor, rW: cute.Tensor, v: cutlass.Constexpr, two: tuple):
    """(squares, weighted sum) + those of four words of a source."""
    square, total = two
    for e in cutlass.range_constexpr(4):
        a, b = low(r[e]), high(r[e])
        square += a * a + b * b
        total += a * rW[2 * e, v] + b * rW[2 * e + 1, v]
    return square, total

@cute.jit
def early(c: Ctx, banks: Banks, sources: Int32, weight: Int64, out: Int64, op: cutlass.Constexpr):
    g, d = op.wide, op.d
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rW = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    if cutlass.const_expr(not g.exact):
        rW.fill(0.0)
        rO.fill(0)
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            pointer = cute.make_ptr(
                Float32, weight + Int64(i) * 32, cute.AddressSpace.gmem, assumed_align=16
            )
            gW = cute.make_tensor(pointer, cute.make_layout((4, 2)))
            for k in cutlass.range_constexpr(2):
                cute.autovec_copy(gW[None, k], cute.local_tile(rW[None, v], (4,), (k,)))
            words_at(out, i, rO[None, v])
    for s in cutlass.range_constexpr(d.bank_rows):
        if s < sources:
            two = (Float32(0.0), Float32(0.0))
            for v in cutlass.range_constexpr(g.per):
                rB.fill(0)
                if vector(c, v, g) < g.vecs:
                    bank_words(c, banks, s, v, rB, op)
                two = sums(rB, rW, v, two)
            put_two(c, 2 * s, two[0], two[1])
    return Early(rW, rO)

@cute.jit
def late(
    c: Ctx, banks: Banks, rP: cute.Tensor, e: Early, sources: Int32, closing: Boolean, rX: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """rX words [4, per] = bf(RMS(m; out)), m the mix of the bank and the prefix rP, in bf16 where it closes the run."""
    g, d = op.wide, op.d
    last = d.bank_rows
    two = (Float32(0.0), Float32(0.0))
    for v in cutlass.range_constexpr(g.per):
        two = sums(rP[None, v], e.weight, v, two)
    put_two(c, 2 * last, two[0], two[1])
    consumers(op)
    rS = cute.make_rmem_tensor(cute.make_layout((last + 1,)), Float32)
    top = -Float32.inf
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = -Float32.inf
        if s < sources or s == last:
            square, total = take_two(c, 2 * s, g.width)
            rS[s] = cute.math.rsqrt(square / d.hidden + d.eps) * total
        top = cute.arch.fmax(top, rS[s])
    total = Float32(0.0)
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = cute.math.exp(rS[s] - top)
        total += rS[s]
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = rS[s] / total
    rM = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            rM[2 * w, v], rM[2 * w + 1, v] = low(rP[w, v]) * rS[last], high(rP[w, v]) * rS[last]
    for s in cutlass.range_constexpr(last):
        if s < sources:
            for v in cutlass.range_constexpr(g.per):
                rB.fill(0)
                if vector(c, v, g) < g.vecs:
                    bank_words(c, banks, s, v, rB, op)
                for w in cutlass.range_constexpr(4):
                    rM[2 * w, v] = rM[2 * w, v] + low(rB[w]) * rS[s]
                    rM[2 * w + 1, v] = rM[2 * w + 1, v] + high(rB[w]) * rS[s]
    if closing:
        for v in cutlass.range_constexpr(g.per):
            for w in cutlass.range_constexpr(4):
                pair = pack_bf16(rM[2 * w, v], rM[2 * w + 1, v])
                rM[2 * w, v], rM[2 * w + 1, v] = low(pair), high(pair)
    square = Float32(0.0)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(8):
            square += rM[w, v] * rM[w, v]
    put(c, 2 * last + 2, square)
    consumers(op)
    scale = cute.math.rsqrt(take(c, 2 * last + 2, g.width) / d.hidden + d.eps)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a = rM[2 * w, v] * scale * low(e.out[w, v])
            b = rM[2 * w + 1, v] * scale * high(e.out[w, v])
            rX[w, v] = pack_bf16(a, b)

# ---- kda: KDA between its projections: a CTA has a head and some rows of its state, a warp one row at a time.

HEAD = 128

class State(NamedTuple):
    """What is loaded early. rows: state rows of this warp f32 [4, turns]; f_b words [4, turns]; taps: of this
    thread's channel."""

    rows: Any
    f_b: Any
    conv: Any
    taps: Any
    bias: Any
    rate: Any

class Place(NamedTuple):
    """head (-1: this CTA has none), first state row and how many, state slot (<= 0: none)."""

    head: Any
    slice: Any
    first: Any
    count: Any
    slot: Any

@cute.jit
def fill_kda(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    source = field(c, layer, F["in_proj"], COUNT) + Int64(first) * op.wide.row_bytes
    it = fill(c, it, source, n, op.wide, op)
    g = op.rows(d.kda_dim)
    first, n = share(d.hidden, c.cta, op.ctas)
    return fill(c, it, field(c, layer, F["o_proj"], COUNT) + Int64(first) * g.row_bytes, n, g, op)

@cute.jit
def place(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    per = op.slices
    head = c.cta // per
    part = c.cta % per
    first = HEAD * part // per
    count = HEAD * (part + 1) // per - first
    if head >= op.d.kda_heads:
        head, count = Int32(-1), Int32(0)
    return Place(head, part, first, count, slots[0])

@cute.jit
def channel(c: Ctx, p: Place, i: Int32, op: cutlass.Constexpr):
    """i-th channel of this CTA: 128 of q, 128 of k, then its own of v."""
    width = op.d.kda_dim
    found = p.head * HEAD + i % HEAD
    if i >= HEAD:
        found += width
    if i >= 2 * HEAD:
        found = 2 * width + p.head * HEAD + p.first + i - 2 * HEAD
    return found

@cute.jit
def load_early(c: Ctx, layer: Int32, p: Place, op: cutlass.Constexpr):
    """Ends with all taps used, in sU: others may shift them after the next edge."""
    d = op.d
    sU = view(c, Float32, 0, 3 * HEAD)
    turns, looks = -(-op.state_rows // op.warps), -(-HEAD // (2 * op.warps))
    rS = cute.make_rmem_tensor(cute.make_layout((4, turns)), Float32)
    rF = cute.make_rmem_tensor(cute.make_layout((4, looks)), Uint32)
    rT = cute.make_rmem_tensor(cute.make_layout((3,)), BFloat16)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rS.fill(0.0)
    rF.fill(0)
    rT.fill(0.0)
    rC.fill(0.0)
    rate, bias = Float32(0.0), Float32(0.0)
    if p.head >= 0:
        safe = p.slot if p.slot > 0 else Int32(0)
        state = field(c, layer, F["state_S"], COUNT) + Int64(safe) * (4 * d.kda_heads * HEAD * HEAD)
        for j in cutlass.range_constexpr(turns):
            row = c.warp + j * op.warps
            if row < p.count:
                gRow = at(Float32, state + Int64((p.head * HEAD + p.first + row) * 512), HEAD)
                cute.autovec_copy(cute.local_tile(gRow, (4,), (c.lane,)), rS[None, j])
        f_b = field(c, layer, F["f_b"], COUNT) + Int64(p.head * HEAD * 256)
        for j in cutlass.range_constexpr(looks):
            row = (c.warp + j * op.warps) * 2 + c.lane // 16
            if row < HEAD:
                words_at(f_b, row * 16 + c.lane % 16, rF[None, j])
        if c.tid < 2 * HEAD + p.count:
            ch = channel(c, p, c.tid, op)
            taps = field(c, layer, F["state_conv"], COUNT) + Int64(safe) * (18 * d.kda_dim)
            gTap = at(BFloat16, taps, 9 * d.kda_dim)
            for k in cutlass.range_constexpr(3):
                rT[k] = gTap[3 * d.kda_dim * k + ch]
            gConv = at(Float32, field(c, layer, F["conv"], COUNT), 12 * d.kda_dim)
            cute.autovec_copy(cute.local_tile(gConv, (4,), (ch,)), rC)
            u = rT[0].to(Float32) * rC[0] + rT[1].to(Float32) * rC[1]
            sU[c.tid] = u + rT[2].to(Float32) * rC[2]
        rate = cute.math.exp(at(Float32, field(c, layer, F["A_log"], COUNT), d.kda_heads)[p.head])
        if c.tid < HEAD:
            bias = at(Float32, field(c, layer, F["dt_bias"], COUNT), d.kda_dim)[
                p.head * HEAD + c.tid
            ]
    return State(rS, rF, rC, rT, bias, rate)

@cute.jit
def update(
    c: Ctx,
    layer: Int32,
    p: Place,
    s: State,
    turn: Int32,
    op: cutlass.Constexpr,
):
    """From the projection to o of this CTA's rows, both in boxes; writes the state and the taps."""
    d = op.d
    proj = box(c, "proj", turn, op)
    if p.head >= 0:
        sU = view(c, Float32, 0, 3 * HEAD)
        sRaw = view(c, Float32, 3 * HEAD * 4, HEAD)
        live = p.slot > 0
        if c.tid < 2 * HEAD + p.count:
            ch = channel(c, p, c.tid, op)
            x = insist_half(proj + Int64(ch) * 2, peek_half(proj + Int64(ch) * 2), op)
            sU[c.tid] = silu(sU[c.tid] + x * s.conv[3])
            if live and (p.slice == 0 or c.tid >= 2 * HEAD):
                taps = field(c, layer, F["state_conv"], COUNT) + Int64(p.slot) * (18 * d.kda_dim)
                gTap = at(BFloat16, taps, 9 * d.kda_dim)
                gTap[ch] = s.taps[1]
                gTap[3 * d.kda_dim + ch] = s.taps[2]
                gTap[6 * d.kda_dim + ch] = x.to(BFloat16)
        rA = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        rAf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rFf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        f_a = proj + Int64(8 * d.kda_dim) + Int64(c.lane % 16) * 16
        peek(f_a, rA)
        insist(f_a, rA, 2, op)
        unpack(rA, rAf)
        for j in cutlass.range_constexpr(-(-HEAD // (2 * op.warps))):
            row = (c.warp + j * op.warps) * 2 + c.lane // 16
            unpack(s.f_b[None, j], rFf)
            raw = Float32(0.0)
            for e in cutlass.range_constexpr(8):
                raw += rAf[e] * rFf[e]
            raw = round_bf16(lanes_sum(raw, 16))
            if c.lane % 16 == 0 and row < HEAD:
                sRaw[row] = raw
        consumers(op)
        if c.tid < HEAD:
            gate = sigmoid(s.rate * (sRaw[c.tid] + s.bias))
            sRaw[c.tid] = cute.math.exp(-5.0 * gate)
        consumers(op)
        b = proj + Int64(8 * d.kda_dim + 2 * HEAD) + Int64(p.head) * 2
        beta = sigmoid(insist_half(b, peek_half(b), op))
        rows_update(c, layer, p, s, (sU, sRaw, beta), turn, op)
    else:
        consumers(op)
        consumers(op)

@cute.jit
def rows_update(
    c: Ctx, layer: Int32, p: Place, s: State, given: tuple, turn: Int32, op: cutlass.Constexpr
):
    sU, sDecay, beta = given
    rQ = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rK = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rD = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    cute.autovec_copy(cute.local_tile(sU, (4,), (c.lane,)), rQ)
    cute.autovec_copy(cute.local_tile(sU, (4,), (32 + c.lane,)), rK)
    cute.autovec_copy(cute.local_tile(sDecay, (4,), (c.lane,)), rD)
    q2, k2 = Float32(0.0), Float32(0.0)
    for e in cutlass.range_constexpr(4):
        q2 += rQ[e] * rQ[e]
        k2 += rK[e] * rK[e]
    q2 = cute.math.rsqrt(lanes_sum(q2, 32) + 1e-6) * HEAD**-0.5
    k2 = cute.math.rsqrt(lanes_sum(k2, 32) + 1e-6)
    for e in cutlass.range_constexpr(4):
        rQ[e] = rQ[e] * q2
        rK[e] = rK[e] * k2
    state = field(c, layer, F["state_S"], COUNT) + Int64(p.slot) * (
        4 * op.d.kda_heads * HEAD * HEAD
    )
    for j in cutlass.range_constexpr(-(-op.state_rows // op.warps)):
        row = c.warp + j * op.warps
        if row < p.count:
            seen, o = Float32(0.0), Float32(0.0)
            for e in cutlass.range_constexpr(4):
                s.rows[e, j] = s.rows[e, j] * rD[e]
                seen += s.rows[e, j] * rK[e]
            change = beta * (sU[2 * HEAD + row] - lanes_sum(seen, 32))
            for e in cutlass.range_constexpr(4):
                s.rows[e, j] = s.rows[e, j] + change * rK[e]
                o += s.rows[e, j] * rQ[e]
            o = lanes_sum(o, 32)
            if c.lane == 0:
                post(c, "o", turn, p.head * HEAD + p.first + row, o, op)
            if p.slot > 0:
                gRow = at(Float32, state + Int64((p.head * HEAD + p.first + row) * 512), HEAD)
                cute.autovec_copy(s.rows[None, j], cute.local_tile(gRow, (4,), (c.lane,)))

@cute.jit
def gated(c: Ctx, layer: Int32, slot: Int32, turn: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """rX words [4, 1] = bf(RMS(o; o_norm) * sg(g)) of this thread's eight columns; a head is sixteen lanes."""
    d, g = op.d, op.rows(op.d.kda_dim)
    i = vector(c, 0, g)
    rW = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rO = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rG = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rGf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rN = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rNf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
    rW.fill(0)
    rG.fill(0)
    o = box(c, "o", turn, op) + Int64(i) * 32
    gate = box(c, "proj", turn, op) + Int64(6 * d.kda_dim) + Int64(i) * 16
    if i < g.vecs:
        peek(o, rW[None, 0])
        peek(o + 16, rW[None, 1])
        peek(gate, rG)
    words_at(field(c, layer, F["o_norm"], COUNT), i % 16, rN)
    if i < g.vecs:
        insist(o, rW[None, 0], 4, op)
        insist(o + 16, rW[None, 1], 4, op)
        insist(gate, rG, 2, op)
    unpack(rN, rNf)
    unpack(rG, rGf)
    for e in cutlass.range_constexpr(8):
        rO[e] = rW[e % 4, e // 4].bitcast(Float32)
    square = Float32(0.0)
    for e in cutlass.range_constexpr(8):
        square += rO[e] * rO[e]
    scale = cute.math.rsqrt(lanes_sum(square, 16) / HEAD + d.eps)
    for e in cutlass.range_constexpr(4):
        a = rO[2 * e] * scale * rNf[2 * e] * sigmoid(rGf[2 * e])
        b = rO[2 * e + 1] * scale * rNf[2 * e + 1] * sigmoid(rGf[2 * e + 1])
        y = pack_bf16(a, b)
        rX[e, 0] = y if slot > 0 else Uint32(0)

@cute.jit
def kda(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    slots: cute.Tensor,
    y: Any,
    op: cutlass.Constexpr,
):
    """The box attn (and y, where given) = a of a KDA layer, number `number` of the launch; not hinted at yet."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, KDAS)
    p = place(c, slots, op)
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    state = load_early(c, layer, p, op)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "proj", turn, first + i, gathered(c, i, op.wide.width), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge proj", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "update", layer)
    update(c, layer, p, state, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge o", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "o_proj", layer)
    g = op.rows(d.kda_dim)
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    gated(c, layer, p.slot, turn, rO, op)
    it = out_projection(c, layer, it, rO, y, g, op)
    return it, edge

@cute.jit
def out_projection(
    c: Ctx,
    layer: Int32,
    it: Int32,
    rO: cute.Tensor,
    y: Any,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """The box attn (and y, where given) = bf(bf(x W_o^T) + the others' partials) of this CTA's rows."""
    d = op.d
    turn = turn_of(c, layer, LAYERS)
    first, n = share(d.hidden, c.cta, op.ctas)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_attn"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, most(d.hidden, op.ctas), op)
    it = drain(c, it, n, Int32(0), rO, g, op)
    consumers(op)
    for k in cutlass.range_constexpr(-(-most(d.hidden, op.ctas) // op.threads)):
        i = c.tid + k * op.threads
        if i < n:
            total = gathered(c, i, g.width)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k]
            post(c, "attn", turn, first + i, total, op)
            if cutlass.const_expr(y is not None):
                y[first + i] = total.to(BFloat16)
    return it

# ---- kda_half: KDA as half a layer of the decode step: the pieces of `kda`, with nothing awaited before the products that is loaded.

@cute.jit
def load_ahead(c: Ctx, layer: Int32, p: Place, op: cutlass.Constexpr):
    """As `kda.load_early`, but for what is made of taps and of A_log: `rate` is A_log itself."""
    d = op.d
    turns, looks = -(-op.state_rows // op.warps), -(-HEAD // (2 * op.warps))
    rS = cute.make_rmem_tensor(cute.make_layout((4, turns)), Float32)
    rF = cute.make_rmem_tensor(cute.make_layout((4, looks)), Uint32)
    rT = cute.make_rmem_tensor(cute.make_layout((3,)), BFloat16)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rS.fill(0.0)
    rF.fill(0)
    rT.fill(0.0)
    rC.fill(0.0)
    rate, bias = Float32(0.0), Float32(0.0)
    if p.head >= 0:
        safe = p.slot if p.slot > 0 else Int32(0)
        state = field(c, layer, F["state_S"], COUNT) + Int64(safe) * (4 * d.kda_heads * HEAD * HEAD)
        for j in cutlass.range_constexpr(turns):
            row = c.warp + j * op.warps
            if row < p.count:
                gRow = at(Float32, state + Int64((p.head * HEAD + p.first + row) * 512), HEAD)
                cute.autovec_copy(cute.local_tile(gRow, (4,), (c.lane,)), rS[None, j])
        f_b = field(c, layer, F["f_b"], COUNT) + Int64(p.head * HEAD * 256)
        for j in cutlass.range_constexpr(looks):
            row = (c.warp + j * op.warps) * 2 + c.lane // 16
            if row < HEAD:
                words_at(f_b, row * 16 + c.lane % 16, rF[None, j])
        if c.tid < 2 * HEAD + p.count:
            ch = channel(c, p, c.tid, op)
            taps = field(c, layer, F["state_conv"], COUNT) + Int64(safe) * (18 * d.kda_dim)
            gTap = at(BFloat16, taps, 9 * d.kda_dim)
            for k in cutlass.range_constexpr(3):
                rT[k] = gTap[3 * d.kda_dim * k + ch]
            gConv = at(Float32, field(c, layer, F["conv"], COUNT), 12 * d.kda_dim)
            cute.autovec_copy(cute.local_tile(gConv, (4,), (ch,)), rC)
        rate = at(Float32, field(c, layer, F["A_log"], COUNT), d.kda_heads)[p.head]
        if c.tid < HEAD:
            gBias = at(Float32, field(c, layer, F["dt_bias"], COUNT), d.kda_dim)
            bias = gBias[p.head * HEAD + c.tid]
    return State(rS, rF, rC, rT, bias, rate)

@cute.jit
def use_taps(c: Ctx, p: Place, s: State, op: cutlass.Constexpr):
    """What the taps add to this thread's channel, where `update` looks; others may shift them after the next edge."""
    sU = view(c, Float32, 0, 3 * HEAD)
    if p.head >= 0 and c.tid < 2 * HEAD + p.count:
        u = s.taps[0].to(Float32) * s.conv[0] + s.taps[1].to(Float32) * s.conv[1]
        sU[c.tid] = u + s.taps[2].to(Float32) * s.conv[2]

@cute.jit
def kda_half(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    slots: cute.Tensor,
    op: cutlass.Constexpr,
):
    """The box attn of a KDA layer, number `number` of the launch; not hinted at yet."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, KDAS)
    p = place(c, slots, op)
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    s = load_ahead(c, layer, p, op)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    use_taps(c, p, s, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "proj", turn, first + i, gathered(c, i, op.wide.width), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge proj", layer, kind="edge")
    s = State(s.rows, s.f_b, s.conv, s.taps, s.bias, cute.math.exp(s.rate))
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "update", layer)
    update(c, layer, p, s, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge o", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "o_proj", layer)
    g = op.rows(d.kda_dim)
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    gated(c, layer, p.slot, turn, rO, op)
    it = out_projection(c, layer, it, rO, None, g, op)
    return it, edge

# ---- moe_fill: What the producer brings of an FFN: the front, routed experts once the routing is known, the up-projection.

@cute.jit
def fill_front(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    for name, rows in (("router", d.router_rows), ("latent_down", d.latent_rows)):
        first, n = share(rows, c.cta, op.ctas)
        source = field(c, layer, F[name], COUNT) + Int64(first) * op.wide.row_bytes
        it = fill(c, it, source, n, op.wide, op)
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.shared_dim, c.cta, op.ctas)
    source = field(c, layer, F["shared_gate_up"], COUNT) + Int64(first) * g.row_bytes
    it = fill_pairs(c, it, source, Int64(d.shared_dim * g.row_bytes), n, g, op)
    g = op.rows(d.shared_dim)
    shared = field(c, layer, F["shared_down"], COUNT)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = fill(c, it, shared + Int64(first) * g.row_bytes, n, g, op)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first, n = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = fill(c, it, shared + Int64(d.hidden_local + first) * g.row_bytes, n, g, op)
    return it

@cute.jit
def fill_up(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """w1 and w3 rows of the routed experts: stages [w1 codes | w3 codes | w1 scales | w3 scales]."""
    d, g = op.d, op.up
    first, n = share(d.topk * d.expert_dim, c.cta, op.ctas, g.unit)
    at_row, end = first, first + n
    while at_row < end:
        slot = at_row // d.expert_dim
        row = at_row % d.expert_dim
        n = end - at_row if end - at_row < g.chunk else Int32(g.chunk)
        n = n if n < d.expert_dim - row else d.expert_dim - row
        source = Int64(c.ids[slot]) * d.expert_dim + row
        s = stage_free(c, it, op)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + s, 2 * n * (g.code_bytes + g.scale_bytes))
        for half in cutlass.range_constexpr(2):
            name = "w3" if half else "w1"
            codes = field(c, layer, F[name], COUNT) + source * g.code_bytes
            scales = field(c, layer, F[name + "_scale"], COUNT) + source * g.scale_bytes
            bulk(c, s, Int32(half * g.chunk * g.code_bytes), codes, n * g.code_bytes, op)
            at_scale = 2 * g.chunk * g.code_bytes + half * g.chunk * g.scale_bytes
            bulk(c, s, Int32(at_scale), scales, n * g.scale_bytes, op)
        it += 1
        at_row += n
    return it

@cute.jit
def fill_down(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """This CTA's rows of w2 of every routed expert, `down_slots` experts a stage: [codes | scales] each."""
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    piece = op.down_rows * (g.code_bytes + g.scale_bytes)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        s = stage_free(c, it, op)
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        cute.arch.mbarrier_arrive_and_expect_tx(
            c.full + s, many * n * (g.code_bytes + g.scale_bytes)
        )
        for k in cutlass.range(many, unroll=1):
            source = Int64(c.ids[start + k]) * d.latent + first
            codes = field(c, layer, F["w2"], COUNT) + source * g.code_bytes
            scales = field(c, layer, F["w2_scale"], COUNT) + source * g.scale_bytes
            bulk(c, s, k * piece, codes, n * g.code_bytes, op)
            bulk(c, s, k * piece + op.down_rows * g.code_bytes, scales, n * g.scale_bytes, op)
        it += 1
    return it

@cute.jit
def fill_moe(c: Ctx, layer: Int32, it: Int32, turn: Int32, op: cutlass.Constexpr):
    """All of one FFN; waits for the routing, number `turn` of the launch, before the routed experts."""
    d = op.d
    timeline.mark(c.brought, "bring front", layer)
    it = fill_front(c, layer, it, op)
    timeline.mark(c.brought, "routing", layer, kind="wait")
    cute.arch.mbarrier_wait(c.routed, turn & 1)
    timeline.mark(c.brought, "bring experts", layer)
    it = fill_up(c, layer, it, op)
    it = fill_down(c, layer, it, op)
    g = op.rows(d.latent)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    source = field(c, layer, F["latent_up"], COUNT) + Int64(first) * g.row_bytes
    return fill(c, it, source, n, g, op)

@cute.jit
def fill_dense(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    d = op.d
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    source = field(c, layer, F["dense_gate_up"], COUNT) + Int64(first) * g.row_bytes
    it = fill_pairs(c, it, source, Int64(d.dense_dim * g.row_bytes), n, g, op)
    g = op.rows(d.dense_dim)
    first, n = share(d.hidden, c.cta, op.ctas)
    source = field(c, layer, F["dense_down"], COUNT) + Int64(first) * g.row_bytes
    return fill(c, it, source, n, g, op)

# ---- moe_dense: The FFN of a layer without experts in the persistent kernel.

class Space(NamedTuple):
    """Plain buffers between CTAs, bf16, global: proj of MLA, hs and delta of dense FFNs; mla: MlaSpace."""

    proj: Any
    hs: Any
    delta: Any
    mla: Any

@cute.jit
def dense(
    c: Ctx, layer: Int32, it: Int32, edge: Int32, rX: cute.Tensor, ws: Space, op: cutlass.Constexpr
):
    """The FFN of a layer without experts; ws.delta is complete at the next edge."""
    d = op.d
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        ws.hs[first + i] = situ_pair(c, 2 * i, g.width).to(BFloat16)
    arrive(c, op)
    edge += 1
    wait(c, edge, op)
    g = op.rows(d.dense_dim)
    rH = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    load_x(c, ws.hs, rH, g)
    first, n = share(d.hidden, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rH, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        y = gathered(c, i, g.width)
        if cutlass.const_expr(d.ranks > 1):
            y = (
                round_bf16(y)
                + at(Float32, field(c, layer, F["remote_dense"], COUNT), d.hidden)[first + i]
            )
        ws.delta[first + i] = y.to(BFloat16)
    return it, edge

# ---- moe_route: Top-k in the persistent kernel, by every CTA for itself, from the logits in their box.

@cute.jit
def logit_at(c: Ctx, layer: Int32, e: Int32, turn: Int32, op: cutlass.Constexpr):
    """Where the logit of expert e is: in its box or, sharded, among those of other ranks."""
    found = box(c, "logits", turn, op) + Int64(e) * 4
    if cutlass.const_expr(op.d.router_sharded and op.d.ranks > 1):
        own = op.d.router_rows
        if e >= own:
            found = field(c, layer, F["remote_logits"], COUNT) + Int64(e - own) * 4
    return found

@cute.jit
def peek_word(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[address],
    )

@cute.jit
def insist_word(address: Int64, x: Float32, op: cutlass.Constexpr):
    turns = Int32(0)
    while x.bitcast(Uint32) == Uint32(0xFFFFFFFF) and (op.spin == 0 or turns < op.spin):
        x = peek_word(address)
        turns += 1
    return x

@cute.jit
def topk_th(c: Ctx, sBest: cute.Tensor, n: cutlass.Constexpr, topk: cutlass.Constexpr):
    """The topk-th largest of n <= 32 keys, 0 if fewer are not; by every warp for itself."""
    mine = Uint32(0)
    if c.lane < n:
        mine = Uint32(sBest[c.lane])
    ahead = Int32(0)
    for k in cutlass.range_constexpr(n):
        rival = cute.arch.shuffle_sync(mine, k)
        ahead += Int32(1) if rival > mine or (rival == mine and k < c.lane) else Int32(0)
    found = mine if ahead == topk - 1 and c.lane < n else Uint32(0)
    return cute.arch.warp_redux_sync(found, "max")

@cute.jit
def load_bias(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """The biases of this thread's experts."""
    each = -(-op.d.experts // op.warps)
    slots = -(-each // 32)
    gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), op.d.experts)
    rBias = cute.make_rmem_tensor(cute.make_layout((slots,)), Float32)
    rBias.fill(0.0)
    for j in cutlass.range_constexpr(slots):
        e = c.warp * each + c.lane + 32 * j
        if c.lane + 32 * j < each and e < op.d.experts:
            rBias[j] = gBias[e]
    return rBias

@cute.jit
def choose(
    c: Ctx, layer: Int32, turn: Int32, rBias: cute.Tensor, mIds: cute.Tensor, op: cutlass.Constexpr
):
    """c.ids, c.weights = the routing, made by every CTA for itself."""
    d = op.d
    each = -(-d.experts // op.warps)
    slots = -(-each // 32)
    gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), d.experts)
    first = c.warp * each + c.lane
    rKey = cute.make_rmem_tensor(cute.make_layout((slots,)), Uint32)
    rLogit = cute.make_rmem_tensor(cute.make_layout((slots,)), Float32)
    rLogit.fill(0.0)
    for j in cutlass.range_constexpr(slots):
        e = first + 32 * j
        if c.lane + 32 * j < each and e < d.experts:
            rLogit[j] = peek_word(logit_at(c, layer, e, turn, op))
    for j in cutlass.range_constexpr(slots):
        e = first + 32 * j
        rKey[j] = Uint32(0)
        if c.lane + 32 * j < each and e < d.experts:
            x = insist_word(logit_at(c, layer, e, turn, op), rLogit[j], op)
            rKey[j] = order_key(sigmoid(x) + rBias[j])
    # of the best few of every warp the topk-th is a bound; what reaches it are few, and these are ranked
    few = -(-d.topk // op.warps)
    sBest = view(c, Uint32, 0, op.warps * few)
    sCount = view(c, Int32, 4 * 32, 1)
    sKey = view(c, Uint32, 4 * 36, d.experts)
    sId = view(c, Int32, 4 * 36 + 4 * d.experts, d.experts)
    if c.tid == 0:
        sCount[0] = Int32(0)
    mine = cute.make_rmem_tensor(cute.make_layout((slots,)), Uint32)
    for j in cutlass.range_constexpr(slots):
        mine[j] = rKey[j]
    for rank in cutlass.range_constexpr(few):
        best = mine[0]
        for j in cutlass.range_constexpr(1, slots):
            best = mine[j] if mine[j] > best else best
        top = cute.arch.warp_redux_sync(best, "max")
        # equal keys leave together: the bound only gets lower
        for j in cutlass.range_constexpr(slots):
            mine[j] = Uint32(0) if mine[j] == top else mine[j]
        if c.lane == 0:
            sBest[c.warp * few + rank] = top
    consumers(op)
    bound = topk_th(c, sBest, op.warps * few, d.topk)
    for j in cutlass.range_constexpr(slots):
        if rKey[j] >= bound and rKey[j] > Uint32(0):
            place = cute.arch.inline_ptx(
                "atom.shared.add.u32 {$w0}, [{$r0}], 1;",
                write_only_types=[Int32], read_only_args=[Int32(sCount.iterator.toint())],
            )  # fmt: skip
            sKey[place], sId[place] = rKey[j], first + 32 * j
    consumers(op)
    count = sCount[0]
    for i in cutlass.range(c.tid, count, op.threads, unroll=1):
        # a tensor over a recast pointer forgets that it is unsigned
        key, expert = Uint32(sKey[i]), sId[i]
        rank = Int32(0)
        for k in cutlass.range(count, unroll=4):
            rival = Uint32(sKey[k])
            ahead = rival > key or (rival == key and sId[k] < expert)
            rank += Int32(1) if ahead else Int32(0)
        if rank < d.topk:
            c.ids[rank] = expert
    consumers(op)
    if c.tid == 0:
        cute.arch.mbarrier_arrive(c.routed)
    if c.warp == 0:
        s = Float32(0.0)
        e = Int32(0)
        if c.lane < d.topk:
            e = c.ids[c.lane]
            x = peek_word(logit_at(c, layer, e, turn, op))
            s = sigmoid(insist_word(logit_at(c, layer, e, turn, op), x, op))
            z = s + gBias[e]
            s = Float32(0.0) if z != z else s
        total = lanes_sum(s, 32) + Float32(1e-20)
        if c.lane < d.topk:
            c.weights[c.lane] = round_bf16(s / total)
            if c.cta == 0:
                mIds[c.lane] = e

# ---- moe_experts: Routed MXFP4 experts in the persistent kernel, one token.

CODE_SCALE = 2.0**62

"""Expanded codes are 2^-62 of their value."""

@cute.jit
def group(c: Ctx, at_code: Int32, at_scale: Int32):
    """(codes, scale) of one group of 32: four words from the ring, 16 bytes times `at_code` in, and their factor."""
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    cute.autovec_copy(cute.local_tile(c.ring, (4,), (at_code,)), rW)
    byte = cute.recast_tensor(c.ring, Uint8)[at_scale]
    return rW, scale_word(Uint32(byte) & Uint32(0xFF))

@cute.jit
def groups_times(rC: cute.Tensor, a: tuple, b: tuple, rX: cute.Tensor):
    """rC += a group of row a and one of row b times the same 32 columns of x, rX words [4, 4]; times 2^-62."""
    for i in cutlass.range_constexpr(4):
        mma_rows(rC, expand(a[0][i], a[1]), expand(b[0][i], b[1]), rX[None, i])

@cute.jit
def experts_up(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """h [slot, row] = bf(SiTU(w1 layer, w3 layer)) of this CTA's pairs of rows. A warp has a pair, a lane whole groups.

    Pairs are dealt to warps in turn without regard to stages, so that those without a pair in one stage are at work in
    the next.
    """
    d, g = op.d, op.up
    groups = d.latent // 32
    turns = -(-groups // 32)
    sX = view(c, Uint32, 0, d.latent // 2)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    stage_latent(c, layer, turn, sX, op)
    first, n = share(d.topk * d.expert_dim, c.cta, op.ctas, g.unit)
    at_row, end = first, first + n
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    while at_row < end:
        row = at_row % d.expert_dim
        many = end - at_row if end - at_row < g.chunk else Int32(g.chunk)
        many = many if many < d.expert_dim - row else d.expert_dim - row
        slot = stage_full(c, it, op)
        start = (c.warp + op.warps - (at_row - first) % op.warps) % op.warps
        for r in cutlass.range(start, many, op.warps, unroll=1):
            code = (slot * op.stage + r * g.code_bytes) // 16
            scale = slot * op.stage + 2 * g.chunk * g.code_bytes + r * g.scale_bytes
            rC.fill(0.0)
            for v in cutlass.range_constexpr(turns):
                j = c.lane + 32 * v
                load_group(sX, j, groups, rX)
                j = j if j < groups else groups - 1
                groups_times(
                    rC,
                    group(c, code + j, scale + j),
                    group(c, code + g.chunk * g.code_bytes // 16 + j, scale + g.chunk * g.scale_bytes + j),
                    rX,
                )  # fmt: skip
            x, y = diagonal(c, rC)
            sum = diagonal_sum(x, y)
            if c.lane < 2:
                c.part[(2 * (at_row - first + r) + c.lane) * STRIDE] = sum
        stage_done(c, slot)
        it += 1
        at_row += many
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        gate, up = c.part[2 * i * STRIDE] * CODE_SCALE, c.part[(2 * i + 1) * STRIDE] * CODE_SCALE
        post(c, "h", turn, first + i, situ(gate, up), op)
    return it

@cute.jit
def load_group(sX: cute.Tensor, j: Int32, groups: cutlass.Constexpr, rX: cute.Tensor):
    """rX words [4, 4] = group j of x, zero beyond the last; sX as `group_place` has it."""
    for i in cutlass.range_constexpr(4):
        if cutlass.const_expr(groups % 32 != 0):
            rX[None, i].fill(0)
        if j < groups:
            cute.autovec_copy(cute.local_tile(sX, (4,), (i * groups + j,)), rX[None, i])

@cute.jit
def group_place(i: Int32, groups: cutlass.Constexpr):
    """Where the i-th 16 bytes of x lie: first those of all groups, then the seconds; neighbours do not clash."""
    return i % 4 * groups + i // 4

@cute.jit
def stage_latent(c: Ctx, layer: Int32, turn: Int32, sX: cute.Tensor, op: cutlass.Constexpr):
    """sX = the latent, own and gathered, pairs in the order of `expand`: every warp needs all of it."""
    d = op.d
    vecs, own = d.latent // 8, d.latent_rows // 8
    per = -(-vecs // op.threads)
    start = box(c, "latent", turn, op)
    rL = cute.make_rmem_tensor(cute.make_layout((4, per)), Uint32)
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < own:
            peek(start + Int64(i) * 16, rL[None, v])
        elif i < vecs:
            if cutlass.const_expr(d.latent_rows < d.latent):
                words_at(field(c, layer, F["remote_latent"], COUNT), i - own, rL[None, v])
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < own:
            insist(start + Int64(i) * 16, rL[None, v], 2, op)
        if i < vecs:
            pair_up(rL[None, v])
            place = group_place(i, d.latent // 32)
            cute.autovec_copy(rL[None, v], cute.local_tile(sX, (4,), (place,)))
    consumers(op)

@cute.jit
def stage_hidden(c: Ctx, turn: Int32, sH: cute.Tensor, op: cutlass.Constexpr):
    """sH words = h of each expert as `group_place` has it, pairs in the order of `expand`."""
    vecs = op.d.topk * op.d.expert_dim // 8
    per = -(-vecs // op.threads)
    start = box(c, "h", turn, op)
    rH = cute.make_rmem_tensor(cute.make_layout((4, per)), Uint32)
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < vecs:
            peek(start + Int64(i) * 16, rH[None, v])
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < vecs:
            insist(start + Int64(i) * 16, rH[None, v], 2, op)
            pair_up(rH[None, v])
            each = op.d.expert_dim // 8
            place = i // each * each + group_place(i % each, each // 4)
            cute.autovec_copy(rH[None, v], cute.local_tile(sH, (4,), (place,)))

@cute.jit
def sixteen_rows(
    c: Ctx, place: Int32, k: Int32, r0: Int32, n: Int32, given: tuple, op: cutlass.Constexpr
):
    """sF[slot k, row] = bf(w2 h) of the rows r0 .. r0 + 15 of `n` whose piece starts at byte `place` of the ring."""
    sH, sF = given
    d, g = op.d, op.down
    groups = d.expert_dim // 32
    octet, quarter = c.lane // 4, c.lane % 4
    a = r0 + octet if r0 + octet < n else n - 1
    b = r0 + octet + 8 if r0 + octet + 8 < n else n - 1
    scales = place + op.down_rows * g.code_bytes
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC.fill(0.0)
    for v in cutlass.range_constexpr(-(-groups // 4)):
        j = 4 * v + quarter
        load_group(cute.local_tile(sH, (16 * groups,), (k,)), j, groups, rX)
        j = j if j < groups else groups - 1
        groups_times(
            rC,
            group(c, (place + a * g.code_bytes) // 16 + j, scales + a * g.scale_bytes + j),
            group(c, (place + b * g.code_bytes) // 16 + j, scales + b * g.scale_bytes + j),
            rX,
        )
    x, y = diagonal(c, rC)
    if quarter == octet // 2:
        if r0 + octet < n:
            sF[k * op.down_rows + r0 + octet] = round_bf16(x * CODE_SCALE)
        if r0 + octet + 8 < n:
            sF[k * op.down_rows + r0 + octet + 8] = round_bf16(y * CODE_SCALE)

@cute.jit
def experts_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has sixteen rows of one expert, four lanes a pair of rows (eight apart) and a lane whole groups of both, so
    that a row's sum is one element of the diagonal. Pieces are dealt to warps without regard to stages.
    """
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    sH = view(c, Uint32, 0, d.topk * d.expert_dim // 2)
    sF = view(c, Float32, 2 * d.topk * d.expert_dim, d.topk * op.down_rows)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_moe"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, op.down_rows, op)
    stage_hidden(c, turn, sH, op)
    consumers(op)
    piece = op.down_rows * (g.code_bytes + g.scale_bytes)
    units = -(-op.down_rows // 16)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        mine = (c.warp + op.warps - start * units % op.warps) % op.warps
        for unit in cutlass.range(mine, many * units, op.warps, unroll=1):
            k = unit // units
            sixteen_rows(
                c, slot * op.stage + k * piece, start + k, unit % units * 16, n, (sH, sF), op
            )
        stage_done(c, slot)
        it += 1
    consumers(op)
    for turn_ in cutlass.range_constexpr(-(-op.down_rows // op.threads)):
        i = c.tid + turn_ * op.threads
        if i < n:
            total = Float32(0.0)
            for k in cutlass.range(d.topk, unroll_full=True):
                total += c.weights[k] * sF[k * op.down_rows + i]
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[turn_]
            post(c, "z", turn, first + i, total, op)
    return it

# ---- moe: The FFN with experts in the persistent kernel: router, shared expert, routed experts, up-projection, in order.

@cute.jit
def router(c: Ctx, turn: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """This CTA's logits."""
    first, n = share(op.d.router_rows, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "logits", turn, first + i, gathered(c, i, op.wide.width), op)
    return it

@cute.jit
def front(c: Ctx, turn: Int32, it: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """Latent and the shared expert's hidden vector, this CTA's share. Starts behind a `hint`, which is a barrier."""
    d, g = op.d, op.wide
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    it = drain(c, it, n_l, Int32(0), rX, g, op)
    it = drain(c, it, n_s, n_l, rX, op.rows(d.hidden, pair=True), op)
    consumers(op)
    for i in cutlass.range(c.tid, n_l + n_s, op.threads, unroll=1):
        if i < n_l:
            post(c, "latent", turn, first_l + i, gathered(c, i, g.width), op)
        else:
            j = i - n_l
            post(c, "hs", turn, first_s + j, situ_pair(c, n_l + 2 * j, g.width), op)
    return it

@cute.jit
def shared_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """c.own = bf(shared partial + the others') of the columns whose up-projection this CTA makes; the rest is sent.

    Ends with a barrier: the experts' sums go where these were.
    """
    d = op.d
    g = op.rows(d.shared_dim)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        remote = field(c, layer, F["remote_shared"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, most(d.hidden_local, op.ctas), op)
    load_box(c, "hs", turn, rX, g, op)
    it = drain(c, it, n, Int32(0), rX, g, op)
    if cutlass.const_expr(d.hidden > d.hidden_local):
        first_s, n_s = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = drain(c, it, n_s, n, rX, g, op)
        consumers(op)
        gSend = at(BFloat16, field(c, layer, F["send"], COUNT), d.hidden - d.hidden_local)
        for k in cutlass.range_constexpr(-(-most(d.hidden_local, op.ctas) // op.threads)):
            i = c.tid + k * op.threads
            if i < n:
                c.own[i] = round_bf16(round_bf16(gathered(c, i, g.width)) + rRemote[k])
        for i in cutlass.range(c.tid, n_s, op.threads, unroll=1):
            gSend[first_s + i] = gathered(c, n + i, g.width).to(BFloat16)
    else:
        consumers(op)
        for i in cutlass.range(c.tid, n, op.threads, unroll=1):
            c.own[i] = round_bf16(gathered(c, i, g.width))
    consumers(op)
    return it

@cute.jit
def up_projection(c: Ctx, rN: cute.Tensor, turn: Int32, it: Int32, y: Any, op: cutlass.Constexpr):
    """delta (and y, where given) = bf(bf(bf(RMS(z; latent_norm)) W_up^T) + shared) of this CTA's columns."""
    d = op.d
    g = op.rows(d.latent)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    load_box(c, "z", turn, rX, g, op)
    normalise(c, rX, rN, g, op)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        u = round_bf16(gathered(c, i, g.width))
        post(c, "delta", turn, first + i, u + c.own[i], op)
        if cutlass.const_expr(y is not None):
            y[first + i] = (u + c.own[i]).to(BFloat16)
    return it

@cute.jit
def moe(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    out: tuple,
    op: cutlass.Constexpr,
):
    """The FFN of a layer with experts, number `number` of the launch; delta is posted when its edge is hinted at.

    out = (ids, y or None). The router goes first and has an edge of its own: its logits travel while the rest of the
    front is drained.
    """
    it, edge = at_
    mIds, y = out
    turn = turn_of(c, number)
    timeline.mark(c.track, "router", layer)
    it = router(c, turn, it, rX, op)
    hint(c, op, ROUTE)
    timeline.mark(c.track, "front", layer)
    it = front(c, turn, it, rX, op)
    hint(c, op)
    timeline.mark(c.track, "edge logits", layer, kind="edge")
    rBias = load_bias(c, layer, op)
    wait(c, number + 1, op, ROUTE, False)
    timeline.mark(c.track, "choose", layer)
    choose(c, layer, turn, rBias, mIds, op)
    edge += 1
    timeline.mark(c.track, "edge front", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "shared down", layer)
    it = shared_down(c, layer, turn, it, op)
    timeline.mark(c.track, "experts up", layer)
    it = experts_up(c, layer, turn, it, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "experts down", layer)
    it = experts_down(c, layer, turn, it, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge z", layer, kind="edge")
    rN = load_norm(c, field(c, layer, F["latent_norm"], COUNT), op.rows(op.d.latent))
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "up projection", layer)
    it = up_projection(c, rN, turn, it, y, op)
    return it, edge

# ---- brief: Short forms of activations, in the place of `common`'s within the candidate: a definition that comes later counts.

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

# ---- ffn: The FFN with experts in the decode step: its pieces are those of `moe`, its order covers what the chain waits for.

# ---- producer
@cute.jit
def fill_two(c: Ctx, it: Int32, one: tuple, two: tuple, op: cutlass.Constexpr):
    """Stages of the rows of two matrices of `hidden` columns, those of the second behind those of the first; each =
    (address, rows)."""
    g = op.wide
    for first in cutlass.range(0, one[1] + two[1], g.chunk, unroll=1):
        slot = stage_free(c, it, op)
        left = one[1] + two[1] - first
        n = left if left < g.chunk else Int32(g.chunk)
        a = one[1] - first if one[1] > first else Int32(0)
        a = a if a < n else n
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, n * g.row_bytes)
        if a > 0:
            bulk(c, slot, Int32(0), one[0] + Int64(first) * g.row_bytes, a * g.row_bytes, op)
        if n > a:
            source = two[0] + Int64(first + a - one[1]) * g.row_bytes
            bulk(c, slot, a * g.row_bytes, source, (n - a) * g.row_bytes, op)
        it += 1
    return it

@cute.jit
def fill_ffn(c: Ctx, layer: Int32, it: Int32, routing: Int32, op: cutlass.Constexpr):
    """All of one FFN; waits for the routing, number `routing` of the launch, before the routed experts."""
    d = op.d
    row = op.wide.row_bytes
    timeline.mark(c.brought, "bring front", layer)
    first, n = share(d.router_rows, c.cta, op.ctas)
    router = (field(c, layer, F["router"], COUNT) + Int64(first) * row, Int32(n))
    first, n = share(d.latent_rows, c.cta, op.ctas)
    latent = (field(c, layer, F["latent_down"], COUNT) + Int64(first) * row, Int32(n))
    it = fill_two(c, it, router, latent, op)
    for part in cutlass.range(3, unroll=1):
        it = bring(c, layer, it, 6 + part, op)
        if part == 0:
            timeline.mark(c.brought, "routing", layer, kind="wait")
            cute.arch.mbarrier_wait(c.routed, routing & 1)
            timeline.mark(c.brought, "bring experts", layer)
            it = fill_up(c, layer, it, op)
        elif part == 1:
            it = bring(c, layer, it, Int32(9), op)
            it = fill_down(c, layer, it, op)
    return it

# ---- consumers
@cute.jit
def post_front(c: Ctx, pairs: Boolean, turn: Int32, op: cutlass.Constexpr):
    """This CTA's logits and latent, or its elements of the shared expert's hidden vector."""
    d, width = op.d, op.wide.width
    first_r, n_r = share(d.router_rows, c.cta, op.ctas)
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    n = n_s if pairs else n_r + n_l
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        if pairs:
            post(c, "hs", turn, first_s + i, situ_pair(c, 2 * i, width), op)
        else:
            x = gathered(c, i, width)
            if i < n_r:
                post(c, "logits", turn, first_r + i, x, op)
            else:
                post(c, "latent", turn, first_l + i - n_r, x, op)

@cute.jit
def ffn(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    mIds: cute.Tensor,
    op: cutlass.Constexpr,
):
    """The FFN of a layer with experts, number `number` of the launch; delta is posted, not yet hinted at."""
    it, edge = at_
    turn = turn_of(c, number)
    rBias = load_bias(c, layer, op)
    _, n_r = share(op.d.router_rows, c.cta, op.ctas)
    _, n_l = share(op.d.latent_rows, c.cta, op.ctas)
    _, n_s = share(op.d.shared_dim, c.cta, op.ctas)
    for part in cutlass.range(2, unroll=1):
        timeline.mark(c.track, "front", layer)
        it = drain_wide(c, it, n_s if part == 1 else n_r + n_l, part == 1, Int32(0), rX, op)
        consumers(op)
        post_front(c, part == 1, turn, op)
        if part == 0:
            hint(c, op, ROUTE)
            timeline.mark(c.track, "edge route", layer, kind="edge")
            wait(c, number + 1, op, ROUTE, False, op.missing)
            timeline.mark(c.track, "choose", layer)
            choose(c, layer, turn, rBias, mIds, op)
        else:
            consumers(op)
    timeline.mark(c.track, "experts up", layer)
    it = experts_up(c, layer, turn, it, op)
    hint(c, op)
    timeline.mark(c.track, "shared down", layer)
    it = shared_down(c, layer, turn, it, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "experts down", layer)
    it = experts_down(c, layer, turn, it, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge z", layer, kind="edge")
    rN = load_norm(c, field(c, layer, F["latent_norm"], COUNT), op.rows(op.d.latent))
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "up projection", layer)
    it = up_projection(c, rN, turn, it, None, op)
    return it, edge

# ---- mla: MLA in the persistent kernel: a CTA has a share of the heads' columns, and whole pages of the cache for all heads.

class Cache(NamedTuple):
    """table i32 [pages]; pages in sight; length; flat row of the new token, -1 = not inserted."""

    table: Any
    pages: Any
    length: Any
    row: Any

@cute.jit
def cache_of(lengths: cute.Tensor, table: cute.Tensor, mapping: cute.Tensor, op: cutlass.Constexpr):
    length = lengths[0] if lengths[0] > 0 else Int32(0)
    gTable = cute.make_tensor(table.iterator, cute.make_layout((op.d.pages_per_request,)))
    return Cache(gTable, (length + op.d.page - 1) // op.d.page, length, Int32(mapping[0]))

# ---- producer
@cute.jit
def fill_cache(c: Ctx, layer: Int32, it: Int32, cache: Cache, op: cutlass.Constexpr):
    """This CTA's pages, `cache_rows` tokens a stage."""
    d = op.d
    size = d.page * d.kv_dim * 2
    for p in cutlass.range(c.cta, cache.pages, op.ctas, unroll=1):
        source = field(c, layer, F["kv"], COUNT) + Int64(cache.table[p]) * size
        for j in cutlass.range_constexpr(op.cache_stages):
            part = min(op.cache_rows, d.page - j * op.cache_rows) * d.kv_dim * 2
            s = stage_free(c, it, op)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + s, part)
            bulk(c, s, Int32(0), source + j * op.cache_rows * d.kv_dim * 2, Int32(part), op)
            it += 1
    return it

# ---- consumers
@cute.jit
def load_mail(c: Ctx, start: Int64, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr):
    """rX words [4, per]: this thread's columns of bf16 in a box, from an address on."""
    rX.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            peek(start + Int64(vector(c, v, g)) * 16, rX[None, v])
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            insist(start + Int64(vector(c, v, g)) * 16, rX[None, v], 2, op)

@cute.jit
def new_row(c: Ctx, a: Int64, rN: cute.Tensor, op: cutlass.Constexpr):
    """The pool's first kv_dim values: the new token's cache row, of what is in box a; rN: kv_a_norm."""
    d = op.d
    g = op.rows(d.kv_lora)
    sNew = view(c, BFloat16, 0, d.kv_dim)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    sWord = cute.recast_tensor(sNew, Uint32)
    load_mail(c, a + 2 * d.q_lora, rX, g, op)
    normalise(c, rX, rN, g, op)
    if c.warp < g.width:
        for v in cutlass.range_constexpr(g.per):
            i = vector(c, v, g)
            if i < g.vecs:
                cute.autovec_copy(rX[None, v], cute.local_tile(sWord, (4,), (i,)))
    for i in cutlass.range(c.tid, d.qk_rope // 8, op.threads, unroll=1):
        rK = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        place = a + 2 * (d.q_lora + d.kv_lora) + Int64(i) * 16
        peek(place, rK)
        insist(place, rK, 2, op)
        cute.autovec_copy(rK, cute.local_tile(sWord, (4,), (d.kv_lora // 8 + i,)))

@cute.jit
def load_uk(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """This thread's part of W_UK: eight columns, every `groups`-th row of the head; words [4, turns]."""
    d = op.d
    vectors = most(d.kv_lora // 8, op.slices)
    groups = op.threads // vectors
    turns = -(-d.qk_nope // groups)
    rW = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    rW.fill(0)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 8, c.cta % op.slices, op.slices)
    v, group = c.tid % vectors, c.tid // vectors
    if head < d.mla_heads and v < n and group < groups:
        base = field(c, layer, F["w_uk"], COUNT) + Int64(head * d.qk_nope * d.kv_lora * 2)
        for j in cutlass.range_constexpr(turns):
            row = group + j * groups
            if row < d.qk_nope:
                words_at(base, row * (d.kv_lora // 8) + first + v, rW[None, j])
    return rW

@cute.jit
def load_head(c: Ctx, turn: Int32, op: cutlass.Constexpr):
    """The pool behind the new row: the query of this CTA's head, which the CTAs of the head have just posted."""
    d = op.d
    many = (d.qk_nope + d.qk_rope) // 8
    head = c.cta // op.slices
    sWord = view(c, Uint32, op.new_bytes, 4 * many)
    rQ = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    if c.tid < many and head < d.mla_heads:
        start = box(c, "q", turn, op) + Int64(head * many + c.tid) * 16
        peek(start, rQ)
        insist(start, rQ, 2, op)
        cute.autovec_copy(rQ, cute.local_tile(sWord, (4,), (c.tid,)))
    consumers(op)

@cute.jit
def absorb(c: Ctx, rW: cute.Tensor, turn: Int32, op: cutlass.Constexpr):
    """Box query [head, kv_dim]: bf(Q_nope W_UK[h]) of this CTA's columns; the first of a head copies Q_pe."""
    d = op.d
    vectors = most(d.kv_lora // 8, op.slices)
    groups = op.threads // vectors
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 8, c.cta % op.slices, op.slices)
    v, group = c.tid % vectors, c.tid // vectors
    sHead = view(c, BFloat16, op.new_bytes, d.qk_nope + d.qk_rope)
    sPart = view(c, Float32, op.new_bytes + op.head_bytes, groups * vectors * 8)
    if head < d.mla_heads:
        rF = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rS = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rS.fill(0.0)
        if group < groups:
            for j in cutlass.range_constexpr(-(-d.qk_nope // groups)):
                row = group + j * groups
                if row < d.qk_nope:
                    x = sHead[row].to(Float32)
                    unpack(rW[None, j], rF)
                    for e in cutlass.range_constexpr(8):
                        rS[e] = rS[e] + x * rF[e]
            for e in cutlass.range_constexpr(8):
                sPart[(group * vectors + v) * 8 + e] = rS[e]
        consumers(op)
        for i in cutlass.range(c.tid, 8 * n, op.threads, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range(groups, unroll=8):
                total += sPart[k * vectors * 8 + i]
            post(c, "query", turn, head * d.kv_dim + 8 * first + i, total, op)
        if c.cta % op.slices == 0 and c.tid < d.qk_rope:
            pe = sHead[d.qk_nope + c.tid].to(Float32)
            post(c, "query", turn, head * d.kv_dim + d.kv_lora + c.tid, pe, op)

@cute.jit
def mma_k16(rC: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor):
    """rC[4] += A[16, 16] B[16, 8]; rA: rows g, g + 8, then the same eight columns on."""
    out = cute.arch.inline_ptx(
        """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};""",
        write_only_types=[Float32] * 4,
        read_only_args=[
            *(rA[i] for i in range(4)),
            *(rB[i] for i in range(2)),
            *(rC[i] for i in range(4)),
        ],
    )
    for i in cutlass.range_constexpr(4):
        rC[i] = out[i]

@cute.jit
def token_at(c: Ctx, it: Int32, token: Int32, op: cutlass.Constexpr):
    """Where in the ring, in units of 16 bytes, a token of the page starts whose first stage is number `it`."""
    slot = (it + token // op.cache_rows) % op.stages
    return slot * (op.stage // 16) + token % op.cache_rows * (op.d.kv_dim // 8)

@cute.jit
def patch(
    c: Ctx,
    layer: Int32,
    it: Int32,
    physical: Int32,
    left: Int32,
    cache: Cache,
    op: cutlass.Constexpr,
):
    """The new row in its place, in the ring and in the cache; rows beyond the context become zero."""
    d = op.d
    sNew = view(c, Uint32, 0, d.kv_dim // 2)
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    vecs = d.kv_dim // 8
    if cache.row >= 0 and cache.row // d.page == physical:
        place = token_at(c, it, cache.row % d.page, op)
        gRow = field(c, layer, F["kv"], COUNT) + Int64(cache.row) * (2 * d.kv_dim)
        for i in cutlass.range(c.tid, vecs, op.threads, unroll=1):
            cute.autovec_copy(cute.local_tile(sNew, (4,), (i,)), rW)
            cute.autovec_copy(rW, cute.local_tile(c.ring, (4,), (place + i,)))
            pointer = cute.make_ptr(
                Uint32, gRow + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
            )
            cute.autovec_copy(rW, cute.make_tensor(pointer, cute.make_layout((4,))))
        consumers(op)
    if left < d.page:
        rW.fill(0)
        for i in cutlass.range(left * vecs + c.tid, d.page * vecs, op.threads, unroll=1):
            place = token_at(c, it, i // vecs, op) + i % vecs
            cute.autovec_copy(rW, cute.local_tile(c.ring, (4,), (place,)))
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")
    consumers(op)

@cute.jit
def scores(c: Ctx, it: Int32, sQ: cute.Tensor, op: cutlass.Constexpr):
    """part[head, token]: scaled scores of a page; a warp has eight tokens."""
    d = op.d
    g, q = c.lane // 4, c.lane % 4
    words = op.query_words
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA.fill(0)
    for octet in cutlass.range(c.warp, d.page // 8, op.warps, unroll=1):
        rC.fill(0.0)
        row = token_at(c, it, octet * 8 + g, op)
        for k in cutlass.range(d.kv_dim // 32, unroll=2):
            cute.autovec_copy(cute.local_tile(c.ring, (4,), (row + k * 4 + q,)), rB)
            if g < d.mla_heads:
                cute.autovec_copy(
                    cute.local_tile(sQ, (4,), (g * (words // 4) + k * 4 + q,)), rA[None, 0]
                )
            if g + 8 < d.mla_heads:
                cute.autovec_copy(
                    cute.local_tile(sQ, (4,), ((g + 8) * (words // 4) + k * 4 + q,)), rA[None, 1]
                )
            mma_16x32(rC, rA, rB)
        scale = (d.qk_nope + d.qk_rope) ** -0.5
        for i in cutlass.range_constexpr(4):
            c.part[(g + i // 2 * 8) * (d.page + 4) + octet * 8 + 2 * q + i % 2] = rC[i] * scale

@cute.jit
def soften(c: Ctx, left: Int32, sP: cute.Tensor, sState: cute.Tensor, op: cutlass.Constexpr):
    """Online softmax of a page: sP[head, token] bf16; sState[max | sum | factor of all before] of sixteen heads."""
    d = op.d
    turns = -(-d.page // 32)
    for h in cutlass.range(c.warp, d.mla_heads, op.warps, unroll=1):
        before = sState[h]
        top = before
        for t in cutlass.range_constexpr(turns):
            token = t * 32 + c.lane
            if token < d.page and token < left:
                top = cute.arch.fmax(top, c.part[h * (d.page + 4) + token])
        top = lanes_max(top)
        total = Float32(0.0)
        for t in cutlass.range_constexpr(turns):
            token = t * 32 + c.lane
            if token < d.page:
                p = Float32(0.0)
                if token < left:
                    p = cute.math.exp(c.part[h * (d.page + 4) + token] - top)
                total += p
                sP[h * (d.page + 8) + token] = p.to(BFloat16)
        total = lanes_sum(total, 32)
        cute.arch.sync_warp()
        if c.lane == 0:
            factor = cute.math.exp(before - top)
            sState[h] = top
            sState[16 + h] = sState[16 + h] * factor + total
            sState[32 + h] = factor

@cute.jit
def weigh(
    c: Ctx, it: Int32, sP: cute.Tensor, sState: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr
):
    """rC[4, n] = factor rC + P C: a warp makes 8 `each` columns, lane g the columns g * each .. of them."""
    d = op.d
    each, half = op.value_each, op.value_each // 2
    g, q = c.lane // 4, c.lane % 4
    sWord = cute.recast_tensor(sP, Uint32)
    rA = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((2,)), Uint32)
    rRow = cute.make_rmem_tensor(cute.make_layout((half, 4)), Uint32)
    pitch = (d.page + 8) // 2
    for n in cutlass.range_constexpr(each):
        for i in cutlass.range_constexpr(4):
            rC[i, n] = rC[i, n] * sState[32 + g + i // 2 * 8]
    for k in cutlass.range(d.page // 16, unroll=1):
        for i in cutlass.range_constexpr(4):
            rA[i] = sWord[(g + i % 2 * 8) * pitch + k * 8 + q + i // 2 * 4]
            token = k * 16 + 2 * q + i % 2 + i // 2 * 8
            place = token_at(c, it, token, op) * 4 + (c.warp * 8 + g) * half
            cute.autovec_copy(cute.local_tile(c.ring, (half,), (place // half,)), rRow[None, i])
        for n in cutlass.range_constexpr(half):
            for odd in cutlass.range_constexpr(2):
                select = Uint32(0x7632 if odd else 0x5410)
                for i in cutlass.range_constexpr(2):
                    rB[i] = cute.arch.prmt(rRow[n, 2 * i], rRow[n, 2 * i + 1], select)
                mma_k16(rC[None, 2 * n + odd], rA, rB)

@cute.jit
def load_query(c: Ctx, turn: Int32, sQ: cute.Tensor, op: cutlass.Constexpr):
    """sQ = the queries of all heads, `query_words` apart."""
    d = op.d
    words, vecs = op.query_words, d.kv_dim // 8
    turns = -(-d.mla_heads * vecs // op.threads)
    start = box(c, "query", turn, op)
    rW = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < d.mla_heads * vecs:
            peek(start + Int64(i) * 16, rW[None, k])
    for k in cutlass.range_constexpr(turns):
        i = c.tid + k * op.threads
        if i < d.mla_heads * vecs:
            insist(start + Int64(i) * 16, rW[None, k], 2, op)
            place = i // vecs * (words // 4) + i % vecs
            cute.autovec_copy(rW[None, k], cute.local_tile(sQ, (4,), (place,)))

@cute.jit
def entry(c: Ctx, p: Int32, cache: Cache):
    """Where page p is, -1 if there is none."""
    found = Int32(-1)
    if p < cache.pages:
        found = cache.table[p]
    return found

@cute.jit
def attend(
    c: Ctx, layer: Int32, it: Int32, cache: Cache, physical: Int32, turn: Int32, op: cutlass.Constexpr
):  # fmt: skip
    """Boxes sums and stats of this CTA's pages for all heads, the first of them at `physical`.

    A CTA without pages empties its places of the other turn. Not even a maximum of -inf is an empty element.
    """
    d = op.d
    each = op.value_each
    words = op.query_words
    sQ = view(c, Uint32, op.new_bytes, d.mla_heads * words)
    sP = view(c, BFloat16, op.new_bytes + 4 * d.mla_heads * words, 16 * (d.page + 8))
    sState = view(c, Float32, op.new_bytes + 4 * d.mla_heads * words + 32 * (d.page + 8), 48)
    if c.cta < cache.pages:
        load_query(c, turn, sQ, op)
    if c.tid < 16:
        sState[c.tid], sState[16 + c.tid], sState[32 + c.tid] = (
            -Float32.inf,
            Float32(0.0),
            Float32(0.0),
        )
    consumers(op)
    rC = cute.make_rmem_tensor(cute.make_layout((4, each)), Float32)
    rC.fill(0.0)
    for p in cutlass.range(c.cta, cache.pages, op.ctas, unroll=1):
        for j in cutlass.range_constexpr(op.cache_stages):
            stage_full(c, it + j, op)
        left = cache.length - p * d.page
        patch(c, layer, it, physical, left, cache, op)
        physical = entry(c, p + op.ctas, cache)
        scores(c, it, sQ, op)
        consumers(op)
        soften(c, left, sP, sState, op)
        consumers(op)
        if c.warp < op.value_warps:
            weigh(c, it, sP, sState, rC, op)
        for j in cutlass.range_constexpr(op.cache_stages):
            stage_done(c, (it + j) % op.stages)
        it += op.cache_stages
        consumers(op)
    send_sums(c, c.cta < cache.pages, sState, rC, turn, op)
    return it

@cute.jit
def send_sums(
    c: Ctx, any: Boolean, sState: cute.Tensor, rC: cute.Tensor, turn: Int32, op: cutlass.Constexpr
):
    """rC [4, each] of the value warps and the statistics of each head into their boxes, if there are any."""
    d = op.d
    each = op.value_each
    if c.tid < d.mla_heads:
        i = (c.cta * d.mla_heads + c.tid) * 2
        if any:
            post(c, "stats", turn, i, sState[c.tid], op)
            post(c, "stats", turn, i + 1, sState[16 + c.tid], op)
        else:
            empty_some(box(c, "stats", 1 - turn, op) + Int64(i) * 4, 2)
    here, there = box(c, "sums", turn, op), box(c, "sums", 1 - turn, op)
    if c.warp < op.value_warps:
        size = min(4, each)
        rOut = cute.make_rmem_tensor(cute.make_layout((size,)), Float32)
        g, q = c.lane // 4, c.lane % 4
        for i in cutlass.range_constexpr(4):
            h = g + i // 2 * 8
            if h < d.mla_heads:
                first = (c.cta * d.mla_heads + h) * d.kv_lora + (c.warp * 8 + 2 * q + i % 2) * each
                for part in cutlass.range_constexpr(each // size):
                    at_ = Int64(first + size * part) * 4
                    for n in cutlass.range_constexpr(size):
                        rOut[n] = rC[i, size * part + n]
                    if any:
                        post_some(here + at_, there + at_, rOut, size)
                    else:
                        empty_some(there + at_, size)

@cute.jit
def join(c: Ctx, turn: Int32, cache: Cache, op: cutlass.Constexpr):
    """Box lat = bf(sum over CTAs of weight * sum) of this CTA's head and columns."""
    d = op.d
    vectors = most(d.kv_lora // 4, op.slices)
    groups = op.threads // vectors
    turns = -(-op.ctas // groups)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 4, c.cta % op.slices, op.slices)
    parts = cache.pages if cache.pages < op.ctas else Int32(op.ctas)
    sW = view(c, Float32, 0, op.ctas)
    sPart = view(c, Float32, -(-4 * op.ctas // 16) * 16, groups * vectors * 4)
    v, group = c.tid % vectors, c.tid // vectors
    rX = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    rS = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rS.fill(0.0)
    sums = box(c, "sums", turn, op) + Int64(head * (d.kv_lora // 4) + first + v) * 16
    mine = head < d.mla_heads and group < groups and v < n
    if head < d.mla_heads:
        for k in cutlass.range_constexpr(turns):
            s = group + k * groups
            if mine and s < parts:
                peek(sums + Int64(s) * (4 * d.mla_heads * d.kv_lora), rX[None, k])
        if c.warp == 0:
            weights_of(c, head, parts, sW, turn, op)
        consumers(op)
        for k in cutlass.range_constexpr(turns):
            s = group + k * groups
            if mine and s < parts:
                insist(sums + Int64(s) * (4 * d.mla_heads * d.kv_lora), rX[None, k], 4, op)
                for e in cutlass.range_constexpr(4):
                    rS[e] = rS[e] + rX[e, k].bitcast(Float32) * sW[s]
        if group < groups:
            cute.autovec_copy(rS, cute.local_tile(sPart, (4,), (group * vectors + v,)))
        consumers(op)
        for i in cutlass.range(c.tid, 4 * n, op.threads, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range(groups, unroll=8):
                total += sPart[k * vectors * 4 + i]
            post(c, "lat", turn, head * d.kv_lora + 4 * first + i, total, op)

@cute.jit
def weights_of(
    c: Ctx, head: Int32, parts: Int32, sW: cute.Tensor, turn: Int32, op: cutlass.Constexpr
):
    """sW[s] = the weight of CTA s's sums of a head; by one warp."""
    d = op.d
    turns = -(-op.ctas // 32)
    stats = box(c, "stats", turn, op) + Int64(head) * 8
    rS = cute.make_rmem_tensor(cute.make_layout((2, turns)), Float32)
    top = -Float32.inf
    for k in cutlass.range_constexpr(turns):
        s = c.lane + 32 * k
        rS[0, k], rS[1, k] = -Float32.inf, Float32(0.0)
        if s < parts:
            rS[0, k] = peek_word(stats + Int64(s) * (8 * d.mla_heads))
            rS[1, k] = peek_word(stats + Int64(s) * (8 * d.mla_heads) + 4)
    for k in cutlass.range_constexpr(turns):
        s = c.lane + 32 * k
        if s < parts:
            rS[0, k] = insist_word(stats + Int64(s) * (8 * d.mla_heads), rS[0, k], op)
            rS[1, k] = insist_word(stats + Int64(s) * (8 * d.mla_heads) + 4, rS[1, k], op)
        top = cute.arch.fmax(top, rS[0, k])
    top = lanes_max(top)
    total = Float32(0.0)
    for k in cutlass.range_constexpr(turns):
        if c.lane + 32 * k < parts:
            rS[0, k] = cute.math.exp(rS[0, k] - top)
            total += rS[0, k] * rS[1, k]
    total = lanes_sum(total, 32)
    for k in cutlass.range_constexpr(turns):
        if c.lane + 32 * k < parts:
            sW[c.lane + 32 * k] = rS[0, k] / total

@cute.jit
def values(c: Ctx, it: Int32, length: Int32, turn: Int32, op: cutlass.Constexpr):
    """Box out = bf(bf(lat W_UV[h]) * sg(gate)) of this CTA's rows of its head."""
    d = op.d
    g = op.rows(d.kv_lora)
    head = c.cta // op.slices
    if head < d.mla_heads:
        first, n = share(d.v_dim, c.cta % op.slices, op.slices)
        gates = box(c, "a", turn, op) + Int64(2 * (d.q_lora + d.kv_dim + head * d.v_dim + first))
        bits = Uint32(0)
        if c.tid < n:
            bits = peek_half(gates + Int64(c.tid) * 2)
        rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
        load_mail(c, box(c, "lat", turn, op) + Int64(head * d.kv_lora) * 2, rX, g, op)
        it = drain(c, it, n, Int32(0), rX, g, op)
        consumers(op)
        if c.tid < n:
            gate = sigmoid(insist_half(gates + Int64(c.tid) * 2, bits, op))
            y = round_bf16(gathered(c, c.tid, g.width)) * gate
            y = y if length > 0 else Float32(0.0)
            post(c, "out", turn, head * d.v_dim + first + c.tid, y, op)
    return it

@cute.jit
def orphan(c: Ctx, layer: Int32, cache: Cache, op: cutlass.Constexpr):
    """The first CTA inserts the new row when its page is out of sight, so that nobody else does."""
    d = op.d
    if c.cta == 0 and cache.row >= 0:
        seen = Float32(0.0)
        for p in cutlass.range(c.tid, cache.pages, op.threads, unroll=1):
            if cache.table[p] == cache.row // d.page:
                seen = Float32(1.0)
        put(c, 0, seen)
        consumers(op)
        if take(c, 0, op.warps) == 0.0:
            sNew = view(c, BFloat16, 0, d.kv_dim)
            gRow = at(
                BFloat16,
                field(c, layer, F["kv"], COUNT) + Int64(cache.row) * (2 * d.kv_dim),
                d.kv_dim,
            )
            for i in cutlass.range(c.tid, d.kv_dim, op.threads, unroll=1):
                gRow[i] = sNew[i]

@cute.jit
def mla(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    cache: Cache,
    rO: cute.Tensor,
    op: cutlass.Constexpr,
):
    """rO words [4, per]: this thread's columns of the gated values of MLA `number` of the launch."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, MLAS)
    timeline.mark(c.track, "a_proj", layer)
    first, n = share(d.a_proj_rows, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, op.wide, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "a", turn, first + i, gathered(c, i, op.wide.width), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge a", layer, kind="edge")
    g = op.rows(d.q_lora)
    rQ = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rUk = load_uk(c, layer, op)
    rN = load_norm(c, field(c, layer, F["q_a_norm"], COUNT), g)
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "q_b", layer)
    a = box(c, "a", turn, op)
    load_mail(c, a, rQ, g, op)
    normalise(c, rQ, rN, g, op)
    first, n = share(d.mla_heads * (d.qk_nope + d.qk_rope), c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rQ, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        post(c, "q", turn, first + i, gathered(c, i, g.width), op)
    timeline.mark(c.track, "absorb", layer)
    load_head(c, turn, op)
    absorb(c, rUk, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "new row", layer)
    physical = entry(c, c.cta, cache)
    rNew = load_norm(c, field(c, layer, F["kv_a_norm"], COUNT), op.rows(d.kv_lora))
    new_row(c, a, rNew, op)
    consumers(op)
    timeline.mark(c.track, "edge query", layer, kind="edge")
    orphan(c, layer, cache, op)
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "attend", layer)
    it = attend(c, layer, it, cache, physical, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge sums", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "join", layer)
    join(c, turn, cache, op)
    timeline.mark(c.track, "values", layer)
    it = values(c, it, cache.length, turn, op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge out", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "o_proj", layer)
    load_mail(c, box(c, "out", turn, op), rO, op.rows(d.mla_dim), op)
    return it, edge

# ---- decode: Persistent decode kernel: one cooperative launch for a run of layers, one row; weights stream through a ring.

TUNABLES = {
    "ring_stages": (5, 6, 7, 4, 3, 2),
    "stage_bytes": (28672, 14336),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 16, 32, 64, 128, 132),
    "in_flight": (1, 2, 0, 3, 4),
    "missing": (0, 4, 16, 64),
    "jitter": (0, 16384),
    "spin_limit": (0, 2000000, 200000),
}

class Io(NamedTuple):
    """Inputs and outputs that are not of one layer; None where there is none."""

    x0: Any
    delta: Any
    bank_old: Any
    slots: Any
    lengths: Any
    table: Any
    mapping: Any
    bank: Any
    ids: Any
    prefix: Any
    out: Any
    norm: Any
    weigh: Any

def small(dims):
    """(field, lines of 128 bytes, mask and value of the kinds of layer that have it) of the small vectors."""
    kinds = {"K": (IS_MLA, 0), "M": (IS_MLA, IS_MLA), "E": (IS_DENSE, 0), "KM": (0, 0)}
    found = [x for x in vectors(dims) if "res_" not in x[0]]
    return [(F[name], -(-size // 128), *kinds[which]) for name, size, which in found]

def parts(c, op):
    """(field, offset, rows, row bytes, rows a stage, bytes to the other half of pairs) of what a CTA's producer brings;
    the order is that of `produce` and of `fill_ffn`."""
    d, found = op.d, []

    def add(name, rows, g, first_row=0, apart=0):
        first, n = share(rows, c.cta, op.ctas)
        found.append((F[name], (first_row + first) * g.row_bytes, n, g.row_bytes, g.chunk, apart))

    none = (0, 0, 0, 16, 1, 0)
    if "K" in d.attn:
        add("in_proj", 4 * d.kda_dim + d.f_rank + d.kda_heads, op.wide)
        add("o_proj", d.hidden, op.rows(d.kda_dim))
    else:
        found += [none] * 2
    if "M" in d.attn:
        add("a_proj", d.a_proj_rows, op.wide)
        add("q_b", d.mla_heads * (d.qk_nope + d.qk_rope), op.rows(d.q_lora))
        head, g = c.cta // op.slices, op.rows(d.kv_lora)
        first, n = share(d.v_dim, c.cta % op.slices, op.slices)
        n = n * Int32(head < d.mla_heads)
        found.append(
            (F["w_uv"], (head * d.v_dim + first) * g.row_bytes, n, g.row_bytes, g.chunk, 0)
        )
        add("o_proj", d.hidden, op.rows(d.mla_dim))
    else:
        found += [none] * 4
    if "E" in d.ffn:
        g = op.rows(d.hidden, pair=True)
        add("shared_gate_up", d.shared_dim, g, 0, d.shared_dim * g.row_bytes)
        g = op.rows(d.shared_dim)
        add("shared_down", d.hidden_local, g)
        add("latent_up", d.hidden_local, op.rows(d.latent))
        add("shared_down", d.hidden - d.hidden_local, g, d.hidden_local)
    return found

@cute.jit
def write_list(c: Ctx, op: cutlass.Constexpr):
    found = parts(c, op)
    for k in cutlass.range_constexpr(len(found)):
        for j in cutlass.range_constexpr(6):
            c.list[6 * k + j] = Int32(found[k][j])
    lines = small(op.d)
    for k in cutlass.range_constexpr(len(lines)):
        for j in cutlass.range_constexpr(4):
            c.list[60 + 4 * k + j] = Int32(lines[k][j])

@cute.jit
def prefetch(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """The small vectors of a layer into L2: otherwise their first use costs a trip to memory behind an edge."""
    what = Int32(field(c, layer, F["kind"], COUNT))
    for k in cutlass.range(len(small(op.d)), unroll=1):
        row = cute.make_tensor(c.list.iterator + 60 + 4 * k, cute.make_layout((4,)))
        if what & row[2] == row[3]:
            start = c.tab[layer * COUNT + row[0]]
            for line in cutlass.range(c.cta, row[1], op.ctas, unroll=1):
                cute.arch.inline_ptx(
                    "prefetch.global.L2 [{$r0}];", read_only_args=[start + Int64(line) * 128]
                )

@cute.jit
def prefetch_parts(c: Ctx, layer: Int32, io: Io, op: cutlass.Constexpr):
    """What a layer's attention loads without the ring, into L2; CTAs of a head share what they share."""
    d = op.d
    what = Int32(field(c, layer, F["kind"], COUNT))
    head, part = c.cta // op.slices, c.cta % op.slices
    lines = 2 * d.hidden // 32
    first, n = share(lines, c.cta, op.ctas)
    to_l2(io.weigh.iterator.toint() + Int64(layer * lines + first) * 128, n * 128)
    if cutlass.const_expr("K" in d.attn):
        if what & IS_MLA == 0 and head < d.kda_heads:
            slot = io.slots[0] if io.slots[0] > 0 else Int32(0)
            n = d.head_dim
            first, rows = share(n, part, op.slices)
            state = field(c, layer, F["state_S"], COUNT) + Int64(slot) * (4 * d.kda_heads * n * n)
            to_l2(state + Int64(head * n + first) * (4 * n), rows * (4 * n))
            to_l2(
                field(c, layer, F["f_b"], COUNT) + Int64(head * n + first) * (2 * d.f_rank),
                rows * (2 * d.f_rank),
            )
            if part < 3:
                conv = field(c, layer, F["conv"], COUNT)
                to_l2(conv + Int64(part * d.kda_dim + head * n) * 16, Int32(16 * n))
            if part < 9:
                taps = field(c, layer, F["state_conv"], COUNT) + Int64(slot) * (18 * d.kda_dim)
                to_l2(taps + Int64(part * d.kda_dim + head * n) * 2, Int32(2 * n))
    if cutlass.const_expr("M" in d.attn):
        if what & IS_MLA != 0 and head < d.mla_heads:
            first, rows = share(d.qk_nope, part, op.slices)
            row = 2 * d.kv_lora
            to_l2(
                field(c, layer, F["w_uk"], COUNT) + Int64(head * d.qk_nope + first) * row,
                rows * row,
            )

@cute.jit
def produce(c: Ctx, io: Io, op: cutlass.Constexpr):
    """The list of one CTA: all stages in the order in which the consumers take them."""
    d = op.d
    it, routed = Int32(0), Int32(0)
    write_list(c, op)
    for ahead_ in cutlass.range(d.layers + 1, unroll=1):
        # small things a layer ahead
        if ahead_ < d.layers:
            prefetch(c, ahead_, op)
            prefetch_parts(c, ahead_, io, op)
        layer = ahead_ - 1
        if layer >= 0:
            what = Int32(field(c, layer, F["kind"], COUNT))
            first, many = Int32(0), Int32(2)
            if what & IS_MLA != 0:
                first, many = Int32(2), Int32(4)
            for part in cutlass.range(many, unroll=1):
                it = bring(c, layer, it, first + part, op)
                if cutlass.const_expr("M" in d.attn):
                    if first == 2 and part == 1:
                        cache = cache_of(io.lengths, io.table, io.mapping, op)
                        it = fill_cache(c, layer, it, cache, op)
            if cutlass.const_expr("D" in d.ffn):
                if what & IS_DENSE != 0:
                    it = fill_dense(c, layer, it, op)
            if cutlass.const_expr("E" in d.ffn):
                if what & IS_DENSE == 0:
                    it = fill_ffn(c, layer, it, routed, op)
                    routed += 1

class Half(NamedTuple):
    """Half a layer, or the end of the run: step, its layer, whether it is the second half, the end, and whether the
    prefix starts anew in this layer; sources in the bank, and the addresses of the mix's vectors."""

    step: Any
    layer: Any
    second: Any
    closing: Any
    opens: Any
    sources: Any
    weight: Any
    out: Any

@cute.jit
def half(c: Ctx, step: Int32, io: Io, op: cutlass.Constexpr):
    d = op.d
    layer = step // 2
    second = step % 2 == 1
    closing = step == 2 * d.layers
    depth = layer + d.first
    opens = depth % d.block == 0 and not closing
    sources = (depth + d.block - 1) // d.block
    weight = io.weigh.iterator.toint() + Int64(step) * (4 * d.hidden)
    out = io.norm.iterator.toint()
    if closing:
        sources = Int32(d.bank_rows)
    else:
        out = field(c, layer, F["attn_norm"], COUNT)
        if second:
            sources += Int32(1) if opens else Int32(0)
            out = field(c, layer, F["mlp_norm"], COUNT)
    return Half(step, layer, second, closing, opens, sources, weight, out)

@cute.jit
def add(c: Ctx, h: Half, routed: Int32, sP: cute.Tensor, io: Io, ws: Space, op: cutlass.Constexpr):
    """The prefix, words [4, per]: bf(before + what the half before made), or only that where it starts anew; sP too."""
    d, g = op.d, op.wide
    rD = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rD.fill(0)
    boxed = h.second
    start, others = box(c, "attn", turn_of(c, h.layer, LAYERS), op), Int64(0)
    own = Int32(g.vecs)
    if h.step == 0:
        if cutlass.const_expr(d.first > 0):
            load_x(c, io.delta, rD, g)
    elif not h.second:
        what = Int32(field(c, h.layer - 1, F["kind"], COUNT))
        if cutlass.const_expr("D" in d.ffn):
            if what & IS_DENSE != 0:
                load_x(c, ws.delta, rD, g)
        if cutlass.const_expr("E" in d.ffn):
            if what & IS_DENSE == 0:
                boxed = h.step > 0
                start, own = box(c, "delta", turn_of(c, routed - 1), op), Int32(d.hidden_local // 8)
                if cutlass.const_expr(d.hidden_local < d.hidden):
                    others = field(c, h.layer - 1, F["remote_delta"], COUNT)
    if boxed:
        for v in cutlass.range_constexpr(g.per):
            i = vector(c, v, g)
            if i < g.vecs:
                peek((start if i < own else others - Int64(own) * 16) + Int64(i) * 16, rD[None, v])
        for v in cutlass.range_constexpr(g.per):
            i = vector(c, v, g)
            if i < own:
                insist(start + Int64(i) * 16, rD[None, v], 2, op)
    anew = h.second and h.opens
    rP = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for v in cutlass.range_constexpr(g.per):
        cute.autovec_copy(kept_at(c, sP, Int32(0), v, op), rP[None, v])
    for v in cutlass.range_constexpr(g.per):
        for e in cutlass.range_constexpr(4):
            sum = add_bf16x2(rP[e, v], rD[e, v])
            if cutlass.const_expr(d.first == 0):
                sum = rP[e, v] if h.step == 0 else sum
            rP[e, v] = rD[e, v] if anew else sum
    keep_row(c, rP, sP, Int32(0), op)
    return rP

@cute.jit
def store_wide(c: Ctx, r: cute.Tensor, address: Int64, op: cutlass.Constexpr):
    """This thread's words of a vector of `hidden`; one replica of the warps."""
    for v in cutlass.range_constexpr(op.wide.per):
        i = vector(c, v, op.wide)
        if i < op.wide.vecs and c.warp < op.wide.width:
            pointer = cute.make_ptr(
                Uint32, address + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
            )
            cute.autovec_copy(r[None, v], cute.make_tensor(pointer, cute.make_layout((4,))))

@cute.jit
def keep_row(c: Ctx, r: cute.Tensor, sKept: cute.Tensor, row: Int32, op: cutlass.Constexpr):
    """This thread's columns of a vector of `hidden` as a row in shared memory, where only the same thread looks."""
    for v in cutlass.range_constexpr(op.wide.per):
        cute.autovec_copy(r[None, v], kept_at(c, sKept, row, v, op))

@cute.jit
def keep(c: Ctx, h: Half, rP: cute.Tensor, banks: Banks, io: Io, op: cutlass.Constexpr):
    """The prefix where it is wanted later: as a row of the bank, of this CTA's own for its own use and of the output
    by the first CTA, and at the end of the run."""
    d = op.d
    target = io.prefix.iterator.toint()
    wanted = h.closing
    if cutlass.const_expr(d.bank_rows > d.bank_old):
        if h.opens and not h.second:
            number = (h.layer + d.first) // d.block
            row = Int64((number - d.bank_old) * d.hidden * 2)
            target = io.bank.iterator.toint() + row
            wanted = h.step >= 0
            if cutlass.const_expr(banks.kept is None):
                store_wide(c, rP, banks.new + row, op)
            else:
                keep_row(c, rP, banks.kept, number, op)
    if wanted and c.cta == 0:
        store_wide(c, rP, target, op)

@cute.jit
def attention(
    c: Ctx, layer: Int32, number: tuple, at_: tuple, rX: cute.Tensor, io: Io, op: cutlass.Constexpr
):
    """Box attn of a layer; number: KDAs and MLAs before it in the launch."""
    d = op.d
    it, edge = at_
    what = Int32(field(c, layer, F["kind"], COUNT))
    if cutlass.const_expr("K" in d.attn):
        if what & IS_MLA == 0:
            it, edge = kda_half(c, layer, number[0], (it, edge), rX, io.slots, op)
    if cutlass.const_expr("M" in d.attn):
        if what & IS_MLA != 0:
            cache = cache_of(io.lengths, io.table, io.mapping, op)
            go = op.rows(d.mla_dim)
            rO = cute.make_rmem_tensor(cute.make_layout((4, go.per)), Uint32)
            it, edge = mla(c, layer, number[1], (it, edge), rX, cache, rO, op)
            it = out_projection(c, layer, it, rO, None, go, op)
    return it, edge

@cute.jit
def consume(c: Ctx, io: Io, ws: Space, own: Int64, op: cutlass.Constexpr):
    """own: address of this CTA's bank rows, where they are not kept in shared memory."""
    d, g = op.d, op.wide
    words = cute.make_tensor(c.kept.iterator, cute.make_layout((op.kept_row,)))
    kept = None
    if cutlass.const_expr(op.bank_kept):
        kept = cute.make_tensor(
            c.kept.iterator + op.kept_row, cute.make_layout((d.bank_rows * op.kept_row,))
        )
    banks = Banks(
        Int64(0) if cutlass.const_expr(io.bank_old is None) else io.bank_old.iterator.toint(), own, kept
    )  # fmt: skip
    keep_old(c, banks, op)
    rP = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rP.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(io.x0.iterator.toint(), vector(c, v, g), rP[None, v])
    keep_row(c, rP, words, Int32(0), op)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    it, edge, routed, kdas, mlas = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    for step in cutlass.range(2 * d.layers + 1, unroll=1):
        h = half(c, step, io, op)
        timeline.mark(c.track, "early", h.layer)
        before = early(c, banks, h.sources, h.weight, h.out, op)
        if step > 0:
            edge += 1
            timeline.mark(c.track, "edge mix", h.layer, kind="edge")
            wait(c, edge, op, acquire="D" in d.ffn, missing=0 if "D" in d.ffn else op.missing)
        timeline.mark(c.track, "mix", h.layer)
        rP = add(c, h, routed, words, io, ws, op)
        keep(c, h, rP, banks, io, op)
        late(c, banks, rP, before, h.sources, h.closing, rX, op)
        release = Boolean(False)
        if not h.closing:
            what = Int32(field(c, h.layer, F["kind"], COUNT))
            if not h.second:
                it, edge = attention(c, h.layer, (kdas, mlas), (it, edge), rX, io, op)
                kdas += Int32(1) if what & IS_MLA == 0 else Int32(0)
                mlas += Int32(1) if what & IS_MLA != 0 else Int32(0)
            else:
                if cutlass.const_expr("D" in d.ffn):
                    if what & IS_DENSE != 0:
                        it, edge = dense(c, h.layer, it, edge, rX, ws, op)
                        release = h.second
                if cutlass.const_expr("E" in d.ffn):
                    if what & IS_DENSE == 0:
                        mIds = at(
                            Int32, io.ids.iterator.toint() + Int64(routed * d.topk * 4), d.topk
                        )
                        it, edge = ffn(c, h.layer, routed, (it, edge), rX, mIds, op)
                        routed += 1
            if release:
                arrive(c, op)
            else:
                hint(c, op)
    if c.cta == 0:
        store_wide(c, rX, io.out.iterator.toint(), op)
    timeline.end(c.track)
    leave(c, edge, (routed, kdas, Int32(d.layers), mlas), op)

@cute.kernel
def decode_kernel(
    layers: tuple,
    io: Io,
    ws: Space,
    mBank: cute.Tensor,
    mMail: cute.Tensor,
    mSync: cute.Tensor,
    phases: Any,
    names: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Grid (ctas), cooperative; op.warps consumer warps and a producer warp."""
    c = open_cta(
        layers, mSync, mMail, phases, names, tuple(kind(op.d, n) for n in range(op.d.layers)), op
    )
    if c.warp == op.warps:
        if c.lane == 0:
            produce(c, io, op)
    else:
        size = op.d.hidden * 2 * max(1, op.d.bank_rows - op.d.bank_old)
        consume(c, io, ws, mBank.iterator.toint() + Int64(c.cta) * size, op)

def shape(dims, cfg):
    refuse_others(dims)
    fits = max(1, min(cfg.sms, dims.hidden // 32))
    return Op(
        dims,
        cfg.ctas or fits,
        cfg.consumer_warps,
        cfg.stage_bytes,
        cfg.ring_stages,
        cfg.spin_limit,
        in_flight=cfg.in_flight,
        jitter=cfg.jitter,
        missing=cfg.missing,
        kept=True,
    )

def workspace(dims, cfg):
    op = shape(dims, cfg)
    bf = lambda n: ("bf16", (max(n, 8),), "undefined", "step")  # noqa: E731
    return {
        "hs": bf(dims.dense_dim), "delta": bf(dims.hidden),
        "bank": bf(8 if op.bank_kept else op.ctas * dims.hidden * max(1, dims.bank_rows - dims.bank_old)),
        "weigh": ("f32", ((2 * dims.layers + 1) * dims.hidden,), "undefined", "persistent"),
        "sync": ("i32", (128,), "zero", "persistent"), "mail": ("i32", (op.mail_words,), "undefined", "persistent"),
    }  # fmt: skip

@cute.jit
def prepare(t, cfg, stream):
    """All boxes empty; products of norms and projections of AttnRes."""
    empty_boxes(t.workspace.mail, stream)
    w = t.weights
    halves = [x for n in range(cfg.dims.layers) for x in (w.layers[n], w.layers[n])]
    norms = [x.mlp_res_norm if k % 2 else x.attn_res_norm for k, x in enumerate(halves)]
    projs = [x.mlp_res_proj if k % 2 else x.attn_res_proj for k, x in enumerate(halves)]
    weigh_vectors(
        (*norms, w.out_res_norm), (*projs, w.out_res_proj), t.workspace.weigh, cfg.dims.hidden, stream
    )  # fmt: skip

@cute.jit
def step(t, cfg, stream):
    """The layers of the run, then h = the closing AttnRes and out = bf(RMS(h; out_norm))."""
    d, op = cfg.dims, shape(cfg.dims, cfg)
    found = [layer_tensors(t, n, d) for n in range(d.layers)]
    i, o, w = t.inputs, t.outputs, t.workspace
    has_k, has_m = "K" in d.attn, "M" in d.attn
    io = Io(
        i.x0, i.delta if d.first else None, i.bank if d.first else None, i.slots if has_k else None,
        i.lengths if has_m else None, i.block_table if has_m else None, i.slot_mapping if has_m else None,
        o.bank if d.bank_rows > d.bank_old else None, o.ids if "E" in d.ffn else None, o.prefix, o.out,
        t.weights.out_norm, t.workspace.weigh,
    )  # fmt: skip
    ws = Space(None, w.hs, w.delta, None)
    tensors = tuple(tuple(x.values()) for x in found)
    names = tuple(tuple(x) for x in found)
    decode_kernel(
        tensors, io, ws, w.bank, w.mail, w.sync, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.threads + 32, 1, 1), stream=stream, cooperative=True,
        min_blocks_per_mp=1,
    )  # fmt: skip
