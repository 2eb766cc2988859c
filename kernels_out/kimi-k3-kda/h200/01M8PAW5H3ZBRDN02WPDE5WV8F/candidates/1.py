"""Persistent KDA chain: one cooperative launch for all instances, up to eight tokens; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across instances and edges, so that memory stays busy while
consumers wait for each other; states, taps and the low-rank decay are in registers before the edge that needs them.

At tp8 on an H200 a token takes 30 us an instance, the seed 41; eight take 44 to 45, the seed 51 (docs/kernels-log.md).

It cannot hang: every CTA arrives at an edge before it waits for it and waits for edges in their order, and a producer
waits only for stages that its own CTA's consumers give back in order.
"""

import cutlass
import cutlass.cute as cute
import math
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator
from dataclasses import dataclass
from kernelgen import timeline
from typing import Any, NamedTuple

# ---- common: Device and host pieces that the Kimi K3 seeds share: warp mathematics, a bf16 MMA, loops over layers on the host.

@cute.jit
def sigmoid(x: Float32):
    return 1.0 / (1.0 + cute.math.exp(-x))

@cute.jit
def silu(x: Float32):
    return x * sigmoid(x)

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
def add_bf16x2(a: Uint32, b: Uint32):
    """Two bf16 sums, each rounded once."""
    return pack_bf16(low(a) + low(b), high(a) + high(b))

@cute.jit
def pack_bf16(x: Float32, y: Float32):
    """x rounded to bf16 in bits 0..15, y in bits 16..31."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[y, x]
    )

def smem(dtype, shape, stride):
    """A shared-memory tensor, aligned to 16 bytes."""
    layout = cute.make_layout(shape, stride=stride)
    return SmemAllocator().allocate_tensor(dtype, layout, byte_alignment=16)

# ---- device: Where a thread of a persistent kernel is, and how it comes at memory: addresses of fields, scratch, whole vectors.

class Ctx(NamedTuple):
    """Where a thread is, and the shared memory of its CTA.

    ring: stages of weights (words); full, empty: mbarriers, one each a stage; routed: mbarrier, the ids are known, and
    behind it, for a warp that chooses, one that says that this CTA's logits are posted, one that MLA begins to wait;
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

@cute.jit
def consumers(op: cutlass.Constexpr):
    """Barrier of the consumer warps."""
    cute.arch.barrier(barrier_id=1, number_of_threads=op.threads)

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
def within(i: Int32, n: Any):
    """i, or the last of n: a load is waited for at the end of a branch, so loads stand in none."""
    return i if i < n else n - 1

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

@cute.jit
def vector(c: Ctx, v: cutlass.Constexpr, g: cutlass.Constexpr):
    """Which vector of eight columns this thread has as its v-th."""
    return (c.warp % g.width) * 32 + c.lane + v * 32 * g.width

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

def table(layers):
    """(names, tensors) of the fields of every layer, as a kernel takes them."""
    found = list(layers)
    return tuple(tuple(x) for x in found), tuple(tuple(x.values()) for x in found)

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
    if d.ranks > 1 and d.gpus == 1:
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

# ---- boxes: Boxes: what CTAs send each other says itself that it is there.

FFNS, KDAS, LAYERS, MLAS = 0, 1, 2, 3

@cute.jit
def turn_of(c: Ctx, number: Int32, what: cutlass.Constexpr = FFNS):
    """The half of its boxes that FFN, KDA, layer or MLA `number` of the launch uses: in turn, across launches too."""
    return (c.base[2 + what] + number) & 1

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

# ---- edges: Edges between CTAs: counters that all add to and wait for, one line each; what the next launch counts on from.

ALL, ROUTE = 0, 32
"""Lines of the counters: edges that every CTA waits for in turn; the router's edge, which is waited for later."""

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

# ---- stages: How matrices are cut into stages of the ring, and which rows a CTA has.

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
class TileRows:
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

# ---- plan: Sizes of the persistent kernels for whole rows or packed tiles: boxes, shared memory, shares of the work.

MLA_HEADS = 16
"""Of a rank: a product of tensor cores has so many rows, and no CTA makes two for one page."""

@dataclass(frozen=True)
class Op:
    """Everything the kernel knows when it is compiled. `d` is cfg.dims.

    tiled: weights pass in packed tiles (`tensor`), for one token to eight, else in whole rows for one. in_flight: how
    many stages may be on their way at once, 0 for the whole ring.
    jitter: delays of up to so many ns (a power of two) before some arrivals, to look for hangs; 0 but in soaks.
    hungry: while fewer stages than this are on their way or wait for the consumers, `in_flight` does not hold.
    burst: as `in_flight`, of a layer's first matrix behind what the ring holds of it, 0: as `in_flight`; burst_ns: from
    one of these to the next (`ring.stage_free`).
    lead: stages' worth that a waiting producer of tiles may ask L2 for, one every lead_pause (`trickle`).
    idle: while MLA waits, memory brings o_proj (1), and the front of the FFN too (2), into L2, a little at a time.
    couples: pairs of rows in hand where a stage has many; then, where it has two, it is given back before its product.
    missing: CTAs that may not have hinted yet when boxes are looked into; what is in a box says so itself. kept: the
    prefix, and the bank's rows if `bank` and there is room, stay in shared memory.
    """

    d: object
    ctas: int
    warps: int
    stage: int
    stages: int
    spin: int
    tiled: bool = False
    in_flight: int = 0
    jitter: int = 0
    missing: int = 0
    kept: bool = False
    hungry: int = 0
    couples: int = 1
    idle: int = 0
    bank: bool = True
    burst: int = 0
    lead: int = 0
    lead_pause: int = 0
    burst_ns: int = 0

    def __post_init__(self):
        channels = 2 * self.d.head_dim + self.state_rows if "K" in self.d.attn else 0
        if not self.tiled and self.threads < channels:
            raise ValueError(
                f"KDA of one token has a thread for each of {channels} channels, {self.warps} warps are too few"
            )

        heads = max(self.d.kda_heads, self.d.mla_heads) if self.d.attn else 0
        if not self.tiled and heads > self.ctas:
            raise ValueError(f"each of {heads} heads has a CTA or more, {self.ctas} are too few")

    def rows(self, k, pair=False):
        return Rows(k, self.warps, self.stage, pair)

    def tiles(self, k):
        return TileRows(k, self.warps, self.stage)

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
    def fresh_at(self):
        """Bytes into the mail, behind the boxes: the newest q, k and v of every KDA (`kda_taps`)."""
        return sum(2 * self.box_bytes(size, n) for _, size, n in self.boxes.values())

    @property
    def fresh_bytes(self):
        """Of a layer."""
        return 6 * self.d.rows * self.d.kda_dim if "K" in self.d.attn else 0

    @property
    def mail_words(self):
        return max(32, (self.fresh_at + len(self.d.attn) * self.fresh_bytes) // 4)

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
            return -(-(self.sums_at + TileRows.TOKENS * max(found)) // STRIDE)
        return max(*found, scores)

    @property
    def sums_at(self):
        """Floats before the sums of tiles: two tiles' partial sums of all warps."""
        return 2 * self.warps * TileRows.ROWS * TileRows.TOKENS

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
            kda = 4 * TileRows.TOKENS * (1 + 3 * d.head_dim + self.state_rows)
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
        return self.kept and self.bank and 2 * self.d.bank_rows * self.d.hidden <= 32768

    @property
    def bank_held(self):
        """Whether they are read once in a half, before its edge, and stay in registers over it: two at most."""
        return not self.bank_kept and self.d.bank_rows <= 2

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

def ctas_of(dims, cfg):
    """The tunable, or one CTA an SM, as long as each has 32 rows of a matrix of `hidden` rows."""
    return cfg.ctas or max(1, min(cfg.sms, dims.hidden // 32))

def refuse_others(dims, rows=1):
    """Raises ValueError for a workload that these kernels do not compute; `rows`: the most tokens."""
    if dims.rows > rows or (dims.rows > 1 and dims.q > 1):
        one = "one row" if rows == 1 else f"up to {rows} rows of different requests"
        raise ValueError(f"the persistent kernel is for {one}")
    if "M" in dims.attn and dims.mla_heads > MLA_HEADS:
        raise ValueError(
            f"the persistent kernel attends with up to {MLA_HEADS} heads of MLA, not {dims.mla_heads}"
        )
    given = (dims.kv, dims.experts_format, dims.taps)
    if given != ("bf16", "mxfp4", ""):
        raise ValueError(
            f"the persistent kernel is for bf16 caches, MXFP4 and no taps, not {given}"
        )

# ---- chain: What the persistent chains of one part of the layer share: their input, a sum, and small vectors fetched early.

@cute.jit
def prefetch_vectors(c: Ctx, layer: Int32, kind: cutlass.Constexpr, op: cutlass.Constexpr):
    """The small vectors of an instance into L2: otherwise their first use costs a trip to memory behind an edge."""
    found = [
        x for x in vectors(op.d) if kind in x[2] and "mlp" not in x[0] and "attn_" not in x[0][:5]
    ] + [("x", 2 * op.d.hidden, kind)]
    for k in cutlass.range_constexpr(len(found)):
        start = field(c, layer, F[found[k][0]], COUNT)
        for line in cutlass.range(c.cta, -(-found[k][1] // 128), op.ctas, unroll=1):
            cute.arch.inline_ptx(
                "prefetch.global.L2 [{$r0}];", read_only_args=[start + Int64(line) * 128]
            )

@cute.jit
def load_x0(c: Ctx, layer: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """rX words [4, per] = x_i of the inputs; before the edge."""
    for v in cutlass.range_constexpr(op.wide.per):
        i = vector(c, v, op.wide)
        if i < op.wide.vecs:
            words_at(field(c, layer, F["x"], COUNT), i, rX[None, v])

@cute.jit
def add_before(
    c: Ctx, layer: Int32, rX: cute.Tensor, own: cutlass.Constexpr, op: cutlass.Constexpr
):
    """rX <- bf(x_i + y_{i-1}): `own` columns of an FFN's y come from the box delta, others from remote_delta; those of
    a KDA all come from the box attn."""
    g = op.wide
    rY = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rY.fill(0)
    if layer > 0:
        if cutlass.const_expr(op.d.attn == ""):
            start = box(c, "delta", turn_of(c, layer - 1), op)
            gathered_from(c, start, layer - 1, rY, own, op)
        else:
            wide_box(c, box(c, "attn", turn_of(c, layer - 1, LAYERS), op), rY, op)
        for v in cutlass.range_constexpr(g.per):
            for e in cutlass.range_constexpr(4):
                rX[e, v] = add_bf16x2(rX[e, v], rY[e, v])

@cute.jit
def await_y(c: Ctx, layer: Int32, edge: Int32, op: cutlass.Constexpr):
    """The edge behind which y of the instance before is there; before the first is none."""
    if layer > 0:
        edge += 1
        timeline.mark(c.track, "edge y", layer, kind="edge")
        wait(c, edge, op, acquire=False)
    return edge

@cute.jit
def take_sum(
    c: Ctx, layer: Int32, edge: Int32, rX: cute.Tensor, own: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rX = the x of an instance of one token, for which it waits; `own` as in `add_before`."""
    load_x0(c, layer, rX, op)
    edge = await_y(c, layer, edge, op)
    timeline.mark(c.track, "sum", layer)
    add_before(c, layer, rX, own, op)
    return edge

@cute.jit
def close(c: Ctx, edge: Int32, counts: tuple, op: cutlass.Constexpr):
    """The last edge, and what the next launch counts on from; counts as in `leave`."""
    edge += 1
    timeline.mark(c.track, "edge y", op.d.layers, kind="edge")
    wait(c, edge, op)
    timeline.end(c.track)
    leave(c, edge, counts, op)

@cute.jit
def post_layer(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """A layer's results are in their boxes. After the last one's edge what all CTAs have read is written."""
    if layer + 1 < op.d.layers:
        hint(c, op)
    else:
        arrive(c, op)

def shape(dims, cfg, rows=1):
    """`rows`: the most tokens the chain is written for. Tiles have stages of their own size; several tokens need them,
    one takes them if the tunable `tiles_from` says so.
    """
    refuse_others(dims, rows)
    tiled = rows > 1 and dims.rows >= cfg.tiles_from
    return Op(
        dims,
        ctas_of(dims, cfg),
        cfg.tile_warps if tiled else cfg.consumer_warps,
        cfg.tile_bytes if tiled else cfg.stage_bytes,
        cfg.tile_stages if tiled else cfg.ring_stages,
        cfg.spin_limit,
        tiled,
        getattr(cfg, "in_flight", 0),
        lead=getattr(cfg, "lead", 0),
        lead_pause=getattr(cfg, "lead_pause", 0),
    )

# ---- exchange: Exchanges between two ranks inside the persistent decode step: partials and shares go straight into the other GPU.

STEPS = 6
"""Where `Ctx.base` counts steps, behind what the turns of the boxes are counted by."""

@cute.jit
def step_number(c: Ctx):
    return Uint32(c.base[STEPS] + 1) & Uint32(0xFFFF)

@cute.jit
def site_at(c: Ctx, name: cutlass.Constexpr, layer: Int32):
    return field(c, layer, F["remote_" + name], COUNT)

@cute.jit
def tell_rank(c: Ctx, name: cutlass.Constexpr, layer: Int32, i: Int32, x: Float32):
    """bf(x) as element i of a site of the other rank's inbox."""
    word = (pack_bf16(Float32(0.0), x) & Uint32(0xFFFF0000)) | step_number(c)
    address = site_at(c, name, layer) + field(c, layer, F["send"], COUNT) + Int64(i) * 4
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[address, word]
    )

# ---- kda_sizes: Sizes of what KDA of several tokens brings besides weights (`kda_bring`): states in stages of the ring, taps.

HEAD = 128

ROW = 4 * HEAD
"""Bytes of a row of a state."""

def channels_of(op):
    """Channels of a CTA: q, k and its own of v."""
    return 2 * HEAD + op.state_rows

def window(op):
    """Channels of v that are copied: whole 16 bytes around this CTA's own."""
    return min(HEAD, -(-(op.state_rows + 7) // 8) * 8)

def pitch_of(op):
    """Channels of a tap in shared memory."""
    return 2 * HEAD + window(op)

def state_stages(op):
    """(rows of a token in a stage, stages a token is cut into, tokens of a stage, stages)."""
    rows, cuts, tokens = op.state_rows, 1, 1
    if rows * ROW <= op.stage:
        tokens = min(op.d.rows, op.stage // (rows * ROW))
    else:
        rows = op.stage // (4 * ROW) * 4
        cuts = -(-op.state_rows // rows)
    return rows, cuts, tokens, -(-op.d.rows // tokens) * cuts

# ---- ring: The ring of stages through which weights pass: one producer fills, all consumer warps give back.

EVICT_FIRST = 0x12F0000000000000

@cute.jit
def passed(bar: Any, parity: Int32, patience: cutlass.Constexpr = 0):
    """1 if the phase of that parity of an mbarrier is over, else 0; asks once, and sleeps for up to `patience` ns."""
    ask, limit = "test_wait", ""
    if cutlass.const_expr(patience > 0):
        ask, limit = "try_wait", f", {patience}"
    return cute.arch.inline_ptx(
        "{ .reg .pred p; "
        f"mbarrier.{ask}.parity.shared::cta.b64 p, [{{$r0}}], {{$r1}}{limit}; "
        "selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[Int32(bar.toint()), parity],
    )

@cute.jit
def stage_free(c: Ctx, it: Int32, op: cutlass.Constexpr, here: Any = None):
    """Slot of stage number `it`, once its last use is over and few enough stages are on their way.

    What is on its way queues before everything else in the memory system: with a whole ring of 200 KB a CTA an edge
    takes 3 us instead of 0.6. But consumers that find nothing in the ring wait for one stage after another, the longer
    the slower their SM is: while fewer than `hungry` stages are on their way or there, the next one waits for none.
    here: which stage of its phase it is, or less than zero, in the decode step. Who asks for more than the ring held
    when the phase began has consumers that are at it and wait for no edge: `burst` stages may travel then, but none is
    asked for sooner than some `burst_ns` after the one before, so that no SM is far ahead of the others.
    """
    slot = it % op.stages
    if it >= op.stages:
        cute.arch.mbarrier_wait(c.empty + slot, (it // op.stages - 1) & 1)
    if cutlass.const_expr(0 < op.in_flight < getattr(op, "hungry", 0) <= op.stages):
        near, far = it - op.in_flight, it - op.hungry
        if far >= 0:
            ready = Int32(0)
            while ready == 0:
                ready = passed(c.full + near % op.stages, (near // op.stages) & 1, 128)
                if ready == 0:
                    ready = passed(c.empty + far % op.stages, (far // op.stages) & 1)
    elif cutlass.const_expr(0 < op.in_flight < op.stages):
        before = it - op.in_flight
        if cutlass.const_expr(here is not None and op.burst > 0):
            before = it - op.burst if here >= op.stages else before
            if cutlass.const_expr(op.burst_ns > 0):
                if here >= op.stages:
                    # nobody passes the barrier of a stage that nobody has asked for: a pause
                    passed(c.full + slot, (it // op.stages) & 1, op.burst_ns)
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
def stage_full(c: Ctx, it: Int32, op: cutlass.Constexpr):
    slot = it % op.stages
    cute.arch.mbarrier_wait(c.full + slot, (it // op.stages) & 1)
    return slot

@cute.jit
def stage_done(c: Ctx, slot: Int32):
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(c.empty + slot)

# ---- products: Products of bf16 rows in the ring with one token, on tensor cores: sums of warps, a row each.

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

def four_in_hand(g):
    """Whether stages have so many rows that a warp takes four at once: then a stage is one turn, not two."""
    return not g.pair and g.per == 1 and g.chunk >= 4 * g.passes

def one_in_hand(g, op):
    """Whether a stage has just two rows of `hidden` columns, single or a pair."""
    pair = op.rows(g.k, pair=True)
    return g.k == op.wide.k and op.wide.chunk == 2 and pair.chunk == 1

@cute.jit
def drain_four(
    c: Ctx,
    it: Int32,
    rows: Int32,
    base: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """`drain` of single rows, four in hand: their sums travel between lanes together."""
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    r = cute.make_rmem_tensor(cute.make_layout((4, g.per, 4)), Uint32)
    for first in cutlass.range(0, rows, g.chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        if c.warp < g.width * g.passes:
            for i in cutlass.range(4 * (c.warp // g.width), n, 4 * g.passes, unroll=1):
                for k in cutlass.range_constexpr(4):
                    start = slot * (op.stage // 16) + within(i + k, n) * g.vecs
                    load_row(c, start, r[None, None, k], g)
                rC.fill(0.0)
                for v in cutlass.range_constexpr(g.per):
                    mma_rows(rC[None, 0], r[None, v, 0], r[None, v, 1], rX[None, v])
                    mma_rows(rC[None, 1], r[None, v, 2], r[None, v, 3], rX[None, v])
                x, y = diagonal(c, rC[None, 0])
                z, w = diagonal(c, rC[None, 1])
                x = x + cute.arch.shuffle_sync_bfly(y, offset=1)
                z = z + cute.arch.shuffle_sync_bfly(w, offset=1)
                x = x + cute.arch.shuffle_sync_bfly(z, offset=2)
                for k in cutlass.range_constexpr(3):
                    x = x + cute.arch.shuffle_sync_bfly(x, offset=(4, 9, 18)[k])
                if c.lane < 4 and i + c.lane < n:
                    c.part[(base + first + i + c.lane) * STRIDE + c.warp % g.width] = x
        stage_done(c, slot)
        it += 1
    return it

@cute.jit
def drain_two(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain_wide` where a stage has two rows: it is given back as soon as they are in registers."""
    g = op.wide
    chunk = Int32(1) if pairs else Int32(2)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for first in cutlass.range(0, rows, chunk, unroll=1):
        slot = stage_full(c, it, op)
        n = Int32(1) if rows - first < chunk else Int32(2)
        # warps beyond the width make sums that nobody keeps
        load_row(c, slot * (op.stage // 16), rA, g)
        load_row(c, slot * (op.stage // 16) + (n - 1) * g.vecs, rB, g)
        stage_done(c, slot)
        rC.fill(0.0)
        for v in cutlass.range_constexpr(g.per):
            mma_rows(rC, rA[None, v], rB[None, v], rX[None, v])
        x, y = diagonal(c, rC)
        total = diagonal_sum(x, y)
        if c.lane < n and c.warp < g.width:
            row = 2 * first if pairs else first
            c.part[(base + row + c.lane) * STRIDE + c.warp] = total
        it += 1
    return it

@cute.jit
def take_stage(
    c: Ctx, it: Int32, n: Int32, rA: cute.Tensor, rB: cute.Tensor, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """The diagonals of a stage's two rows (the first twice if n is 1), which is given back before its product."""
    g = op.wide
    slot = stage_full(c, it, op)
    load_row(c, slot * (op.stage // 16), rA, g)
    load_row(c, slot * (op.stage // 16) + (n - 1) * g.vecs, rB, g)
    stage_done(c, slot)
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    rC.fill(0.0)
    for v in cutlass.range_constexpr(g.per):
        mma_rows(rC[None, v % 2], rA[None, v], rB[None, v], rX[None, v])
    for e in cutlass.range_constexpr(4):
        rC[e, 0] = rC[e, 0] + rC[e, 1]
    return diagonal(c, rC[None, 0])

@cute.jit
def drain_pairs(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain_two` of two stages at a time: their sums travel between lanes together."""
    g = op.wide
    chunk = Int32(1) if pairs else Int32(2)
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    for first in cutlass.range(0, rows, 2 * chunk, unroll=1):
        left = rows - first
        n = Int32(1) if left < chunk else Int32(2)
        m = Int32(0)
        x, y = take_stage(c, it, n, rA, rB, rX, op)
        it += 1
        z, w = Float32(0.0), Float32(0.0)
        if left > chunk:
            m = Int32(1) if left - chunk < chunk else Int32(2)
            z, w = take_stage(c, it, m, rA, rB, rX, op)
            it += 1
        x = x + cute.arch.shuffle_sync_bfly(y, offset=1)
        z = z + cute.arch.shuffle_sync_bfly(w, offset=1)
        x = x + cute.arch.shuffle_sync_bfly(z, offset=2)
        for k in cutlass.range_constexpr(3):
            x = x + cute.arch.shuffle_sync_bfly(x, offset=(4, 9, 18)[k])
        if c.lane < n + m and c.warp < g.width:
            row = 2 * first if pairs else first
            c.part[(base + row + c.lane) * STRIDE + c.warp] = x
    return it

@cute.jit
def drain_twos(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    if cutlass.const_expr(getattr(op, "twos", 1) > 1):
        it = drain_pairs(c, it, rows, pairs, base, rX, op)
    else:
        it = drain_two(c, it, rows, pairs, base, rX, op)
    return it

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
    if cutlass.const_expr(getattr(op, "couples", 1) > 1 and four_in_hand(g)):
        it = drain_four(c, it, rows, base, rX, g, op)
    elif cutlass.const_expr(getattr(op, "couples", 1) > 1 and one_in_hand(g, op)):
        it = drain_twos(c, it, rows, Boolean(g.pair), base, rX, op)
    else:
        it = drain_rows(c, it, rows, base, rX, g, op)
    return it

@cute.jit
def drain_rows(
    c: Ctx,
    it: Int32,
    rows: Int32,
    base: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """`drain`, two rows in hand."""
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

def narrow_warps(g, op):
    """Warps that share a row of few columns, in pairs of blocks of 32; 0 where `drain_narrow` is not for these rows."""
    fits = not g.pair and g.per == 1 and g.exact and g.k % 64 == 0 and g.chunk % 8 == 0
    if getattr(op, "couples", 1) < 3 or not fits:
        return 0
    return max(n for n in range(1, op.warps + 1) if g.k // 64 % n == 0)

def sum_width(g, op):
    """Parts of a row's sum that `drain_laid` leaves."""
    return narrow_warps(g, op) or g.width

@cute.jit
def drain_laid(
    c: Ctx, it: Int32, rows: Int32, base: Int32, rX: Any, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """`drain` where the scratch pool is free: narrow rows find x there, if rX is not None after it was laid there."""
    if cutlass.const_expr(narrow_warps(g, op) > 0):
        if cutlass.const_expr(rX is not None):
            sX = view(c, Uint32, 0, g.k // 2)
            if c.warp < g.width:
                cute.autovec_copy(rX[None, 0], cute.local_tile(sX, (4,), (vector(c, 0, g),)))
            consumers(op)
        it = drain_narrow(c, it, rows, base, g, op)
    else:
        it = drain(c, it, rows, base, rX, g, op)
    return it

@cute.jit
def drain_narrow(
    c: Ctx, it: Int32, rows: Int32, base: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """As `drain`, sixteen rows at once, of two stages where one has eight; x is in the pool's first words.

    A lane has 16 bytes of rows l / 4 and l / 4 + 8; even rows take the blocks of 32 columns of a pair in order, odd
    rows the other first, so that no two lanes of a quarter meet in a bank. The other operand has both blocks of x, one
    in its first column, one in its second: there even and odd rows find their sums, over all lanes of the row.
    """
    width = narrow_warps(g, op)
    each, two = g.k // 64 // width, g.chunk == 8
    step = 16 if two else g.chunk
    row, odd, q = c.lane // 4, c.lane // 4 % 2, c.lane % 4
    sX = view(c, Uint32, 0, g.k // 2)
    place = c.warp % width * (8 * each) + q
    rX = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    for first in cutlass.range(0, rows, step, unroll=1):
        n = rows - first if rows - first < step else Int32(step)
        slot = stage_full(c, it, op)
        later = slot
        if cutlass.const_expr(two):
            if n > 8:
                later = stage_full(c, it + 1, op)
        if c.warp < width:
            for start in cutlass.range(0, n, 16, unroll=1):
                a = slot * (op.stage // 16) + within(start + row, n) * g.vecs
                b = slot * (op.stage // 16) + within(start + row + 8, n) * g.vecs
                if cutlass.const_expr(two):
                    last = n - 9 if n > 8 else n - 1
                    b = later * (op.stage // 16) + (row if row < last else last) * g.vecs
                    a = slot * (op.stage // 16) + within(row, n if n < 8 else Int32(8)) * g.vecs
                rC.fill(0.0)
                for pair in cutlass.range_constexpr(each):
                    for k in cutlass.range_constexpr(2):
                        i = place + pair * 8 + (odd ^ k) * 4
                        cute.autovec_copy(cute.local_tile(sX, (4,), (i,)), rX[None, k])
                        cute.autovec_copy(cute.local_tile(c.ring, (4,), (a + i,)), rA[None, k])
                        cute.autovec_copy(cute.local_tile(c.ring, (4,), (b + i,)), rB[None, k])
                    for k in cutlass.range_constexpr(2):
                        mma_rows(rC[None, k], rA[None, k], rB[None, k], rX[None, k])
                for e in cutlass.range_constexpr(4):
                    rC[e, 0] = rC[e, 0] + rC[e, 1]
                if q == 0:
                    at = (base + first + start + row) * STRIDE + c.warp
                    if start + row < n:
                        c.part[at] = rC[1, 0] if odd == 1 else rC[0, 0]
                    if start + row + 8 < n:
                        c.part[at + 8 * STRIDE] = rC[3, 0] if odd == 1 else rC[2, 0]
        stage_done(c, slot)
        it += 1
        if cutlass.const_expr(two):
            if n > 8:
                stage_done(c, later)
                it += 1
    return it

@cute.jit
def gathered(c: Ctx, i: Int32, width: cutlass.Constexpr):
    """The sum of row i over its warps, in their order."""
    total = c.part[i * STRIDE]
    for w in cutlass.range_constexpr(1, width):
        total += c.part[i * STRIDE + w]
    return total

# ---- kda_out: The output of KDA for one token: o under its norm and gate, o_proj with the other ranks' partial sums.

@cute.jit
def gated(c: Ctx, layer: Int32, slot: Int32, turn: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """rX words [4, per] = bf(RMS(o; o_norm) * sg(g)) of this thread's vectors of eight columns."""
    for v in cutlass.range_constexpr(op.rows(op.d.kda_dim).per):
        gated_vector(c, layer, (slot, turn, v), rX, op)

@cute.jit
def gated_vector(c: Ctx, layer: Int32, at: tuple, rX: cute.Tensor, op: cutlass.Constexpr):
    """Its v-th, at = (slot, turn, v); a head is sixteen lanes, whichever the vector."""
    slot, turn, v = at
    d, g = op.d, op.rows(op.d.kda_dim)
    i = vector(c, v, g)
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
        rX[e, v] = y if slot > 0 else Uint32(0)

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
    if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
        remote = field(c, layer, F["remote_attn"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, most(d.hidden, op.ctas), op)
    it = drain_laid(c, it, n, Int32(0), rO, g, op)
    consumers(op)
    for k in cutlass.range_constexpr(-(-most(d.hidden, op.ctas) // op.threads)):
        i = c.tid + k * op.threads
        if i < n:
            total = gathered(c, i, sum_width(g, op))
            if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
                total = round_bf16(total) + rRemote[k]
            if cutlass.const_expr(d.gpus > 1):
                tell_rank(c, "attn", layer, first + i, total)
            post(c, "attn", turn, first + i, total, op)
            if cutlass.const_expr(y is not None):
                y[first + i] = total.to(BFloat16)
    return it

# ---- kda_seat: Which head of KDA a CTA has, which rows of its state, and which channels go with them.

class Seat(NamedTuple):
    """head (-1: this CTA has none), which slice of its state rows, the first of them and how many."""

    head: Any
    slice: Any
    first: Any
    count: Any

# ---- who has what
@cute.jit
def seat(c: Ctx, op: cutlass.Constexpr):
    per = op.slices
    head = c.cta // per
    part = c.cta % per
    first = HEAD * part // per
    count = HEAD * (part + 1) // per - first
    if head >= op.d.kda_heads:
        head, count = Int32(-1), Int32(0)
    return Seat(head, part, first, count)

@cute.jit
def channel_of(s: Seat, i: Int32, op: cutlass.Constexpr):
    """i-th channel of this CTA: 128 of q, 128 of k, then its own of v."""
    width = op.d.kda_dim
    found = s.head * HEAD + i % HEAD
    if i >= HEAD:
        found += width
    if i >= 2 * HEAD:
        found = 2 * width + s.head * HEAD + s.first + i - 2 * HEAD
    return found

# ---- kda_taps: Taps of the convolution move on when a launch ends: until then its newest q, k and v wait in the mail.

@cute.jit
def fresh(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """Address of the newest of a layer: bf16 [token, q | k | v], written for tokens that have a slot."""
    return c.mail + op.fresh_at + Int64(layer) * op.fresh_bytes

@cute.jit
def move_taps(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    """After the last edge. Eight channels of a token and layer at a time, dealt to the threads of all CTAs."""
    d = op.d
    layers = [n for n, kind in enumerate(d.attn) if kind == "K"]
    vectors = 3 * d.kda_dim // 8
    each = d.rows * vectors
    for i in cutlass.range(
        c.cta * op.threads + c.tid, len(layers) * each, op.ctas * op.threads, unroll=1
    ):
        layer = Int32(layers[0])
        for k in cutlass.range_constexpr(1, len(layers)):
            layer = Int32(layers[k]) if i >= k * each else layer
        slot = slots[i // vectors % d.rows]
        if slot > 0:
            taps = field(c, layer, F["state_conv"], COUNT) + Int64(slot) * (18 * d.kda_dim)
            taps += Int64(i % vectors) * 16
            rT = cute.make_rmem_tensor(cute.make_layout((4, 3)), Uint32)
            words_at(taps + 6 * d.kda_dim, Int32(0), rT[None, 0])
            words_at(taps + 12 * d.kda_dim, Int32(0), rT[None, 1])
            words_at(fresh(c, layer, op), i % each, rT[None, 2])
            for k in cutlass.range_constexpr(3):
                to = cute.make_ptr(
                    Uint32, taps + 6 * d.kda_dim * k, cute.AddressSpace.gmem, assumed_align=16
                )
                cute.autovec_copy(rT[None, k], cute.make_tensor(to, cute.make_layout((4,))))

# ---- kda: KDA between its projections: a CTA has a head and some rows of its state, a warp one row at a time.

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
    s = seat(c, op)
    return Place(s.head, s.slice, s.first, s.count, slots[0])

@cute.jit
def tap_sum(rT: cute.Tensor, rC: cute.Tensor):
    """What three taps add to a channel."""
    u = rT[0].to(Float32) * rC[0] + rT[1].to(Float32) * rC[1]
    return u + rT[2].to(Float32) * rC[2]

@cute.jit
def load_early(c: Ctx, layer: Int32, p: Place, used: cutlass.Constexpr, op: cutlass.Constexpr):
    """`used`: ends with all taps used, in sU, and A_log; else `taps` and `rate` are as they were loaded."""
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
            ch = channel_of(p, c.tid, op)
            taps = field(c, layer, F["state_conv"], COUNT) + Int64(safe) * (18 * d.kda_dim)
            gTap = at(BFloat16, taps, 9 * d.kda_dim)
            for k in cutlass.range_constexpr(3):
                rT[k] = gTap[3 * d.kda_dim * k + ch]
            gConv = at(Float32, field(c, layer, F["conv"], COUNT), 12 * d.kda_dim)
            cute.autovec_copy(cute.local_tile(gConv, (4,), (ch,)), rC)
            if cutlass.const_expr(used):
                sU[c.tid] = tap_sum(rT, rC)
        rate = at(Float32, field(c, layer, F["A_log"], COUNT), d.kda_heads)[p.head]
        if cutlass.const_expr(used):
            rate = cute.math.exp(rate)
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
    """From the projection to o of this CTA's rows, both in boxes; writes the state, and the newest q, k and v to where
    `move_taps` finds them."""
    d = op.d
    proj = box(c, "proj", turn, op)
    if p.head >= 0:
        sU = view(c, Float32, 0, 3 * HEAD)
        sRaw = view(c, Float32, 3 * HEAD * 4, HEAD)
        live = p.slot > 0
        rA = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
        rAf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        rFf = cute.make_rmem_tensor(cute.make_layout((8,)), Float32)
        # all that is in the box is on its way before the first look at any of it
        ch = channel_of(p, within(c.tid, 2 * HEAD + p.count), op)
        f_a = proj + Int64(8 * d.kda_dim) + Int64(c.lane % 16) * 16
        b = proj + Int64(8 * d.kda_dim + 2 * HEAD) + Int64(p.head) * 2
        bits, gate_bits = peek_half(proj + Int64(ch) * 2), peek_half(b)
        peek(f_a, rA)
        if c.tid < 2 * HEAD + p.count:
            x = insist_half(proj + Int64(ch) * 2, bits, op)
            sU[c.tid] = silu(sU[c.tid] + x * s.conv[3])
            if live and (p.slice == 0 or c.tid >= 2 * HEAD):
                gFresh = at(BFloat16, fresh(c, layer, op), 3 * d.kda_dim)
                gFresh[ch] = x.to(BFloat16)
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
        beta = sigmoid(insist_half(b, gate_bits, op))
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
    state = load_early(c, layer, p, True, op)
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

# ---- trickle: While a producer finds its ring full, memory brings what it will want next into L2, a stage's worth at a time.

class Lead(NamedTuple):
    """How far L2 is ahead of the ring: the next byte to ask for, the end of the piece it lies in."""

    at: Any
    end: Any

def no_lead():
    return Lead(Int64(0), Int64(0))

@cute.jit
def trickle(c: Ctx, it: Int32, lead: Lead, here: tuple, after: tuple, op: cutlass.Constexpr):
    """Waits for the slot of stage number `it`. here: where the stage begins and where its piece of memory ends; after:
    the piece that follows. At most `op.lead` stages of each piece are asked for.
    """
    at, end = lead.at, lead.end
    inside = at >= here[0] and at <= here[1]
    beyond = at >= after[0] and at <= after[1]
    if not (inside or beyond):
        at, end = here[0], here[1]
    if it >= op.stages:
        slot, parity = it % op.stages, (it // op.stages - 1) & 1
        ready = passed(c.empty + slot, parity, op.lead_pause)
        while ready == 0:
            if at == here[1] and end == here[1]:
                at, end = after[0], after[1]
            base = here[0] if end == here[1] else after[0]
            left = end - at
            if left > 0 and at - base < op.lead * op.stage:
                size = Int32(left) if left < op.stage else Int32(op.stage)
                to_l2(at, size)
                at += Int64(size)
            ready = passed(c.empty + slot, parity, op.lead_pause)
    return Lead(at, end)

# ---- tensor: Products of streamed bf16 rows with up to eight tokens on tensor cores: m16n8k16, weights as A, tokens as B.

TILE = 16

TOKENS = 8

PACKERS = 512
"""Threads of a CTA that packs."""

@cute.jit
def anew(c: Ctx):
    """The same thread, with its numbers read again: what is computed from them cannot be kept over the layers in
    registers that are needed for tokens, to be spilled to an L1 of which the ring leaves nothing.
    """
    tid, cta = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0}; mov.b32 {$w1}, {$r1};",
        write_only_types=[Int32, Int32],
        read_only_args=[c.tid, c.cta],
    )
    warp = cute.arch.make_warp_uniform(tid // 32)
    return c._replace(tid=tid, warp=warp, lane=tid % 32, cta=cta)

# ---- when weights are loaded
@cute.kernel
def pack_kernel(gFrom: cute.Tensor, gTo: cute.Tensor):
    """Grid (ctas): each packs the rows that it will use, their vectors of eight columns where its tiles want them."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    rows, k = gFrom.shape
    first = rows * cta // ctas
    count = rows * (cta + 1) // ctas - first
    source = cute.make_tensor(
        cute.recast_ptr(gFrom.iterator, dtype=Uint32), cute.make_layout((rows * k // 2,))
    )
    target = cute.make_tensor(
        cute.recast_ptr(gTo.iterator, dtype=Uint32), cute.make_layout((rows * k // 2,))
    )
    r = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(tid, count * (k // 8), PACKERS, unroll=1):
        cute.autovec_copy(cute.local_tile(source, (4,), (first * (k // 8) + i,)), r)
        row, v = i // (k // 8), i % (k // 8)
        tile = row // TILE * TILE
        n = count - tile if count - tile < TILE else Int32(TILE)
        at = (first + tile) * (k // 8) + (row - tile) * 4 + v // 4 * (n * 4) + v % 4
        cute.autovec_copy(r, cute.local_tile(target, (4,), (at,)))

@cute.jit
def pack_rows(
    gFrom: cute.Tensor, gTo: cute.Tensor, rows: cutlass.Constexpr, ctas: cutlass.Constexpr, stream
):
    """The first `rows` rows of a matrix, as `share` deals them to CTAs."""
    k = gFrom.shape[1]
    part = cute.make_tensor(gFrom.iterator, cute.make_layout((rows, k), stride=(k, 1)))
    pack_kernel(part, gTo).launch(grid=(ctas, 1, 1), block=(PACKERS, 1, 1), stream=stream)

# ---- producer
@cute.jit
def fill_tiles(
    c: Ctx, at_: tuple, source: Int64, rows: Int32, after: tuple, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """Stages of `rows` packed rows: tile by tile, slice by slice, one after the other in memory. at_: stage number and
    lead of L2; after: the piece of memory that comes next, (0, 0) if none does.
    """
    it, lead = at_
    end = source + Int64(rows) * g.row_bytes
    for first in cutlass.range(0, rows, TILE, unroll=1):
        n = rows - first if rows - first < TILE else Int32(TILE)
        size = n * g.piece_bytes
        for _ in cutlass.range(g.slices, unroll=1):
            if cutlass.const_expr(op.lead > 0):
                lead = trickle(c, it, lead, (source, end), after, op)
            slot = stage_free(c, it, op)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, size)
            bulk(c, slot, Int32(0), source, size, op)
            source += Int64(size)
            it += 1
    return it, lead

# ---- consumers
@cute.jit
def column(c: Ctx, g: cutlass.Constexpr):
    """Which vector of eight columns this thread has as its first; its token is `lane // 4`. Warps from `width` on have
    none, and must not ask.
    """
    return c.warp * (4 * g.per) + c.lane % 4

def further(v, g):
    """How many vectors its v-th lies behind its first: a constant, so that addresses share a register."""
    return (v // g.per * g.piece + v % g.per) * 4

@cute.jit
def token_words(
    c: Ctx, start: Int64, bytes: cutlass.Constexpr, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rX words [4, vectors] = this thread's columns of its token, rows `bytes` apart at an address; else zeros."""
    token = c.lane // 4
    rX.fill(0)
    if c.warp < g.width and token < op.d.rows:
        mine = start + Int64(token) * bytes + Int64(column(c, g)) * 16
        for v in cutlass.range_constexpr(g.vectors):
            words_at(mine + 16 * further(v, g), Int32(0), rX[None, v])

@cute.jit
def drain_tiles(
    c: Ctx,
    it: Int32,
    rows: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Sums of `rows` rows and all tokens, to be read by `tile_sum` after a barrier. rX words [4, vectors] as `column`
    says, zeros for tokens that are not there.
    """
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for first in cutlass.range(0, rows, TILE, unroll=1):
        rC.fill(0.0)
        n = rows - first if rows - first < TILE else Int32(TILE)
        for j in cutlass.range_constexpr(g.slices):
            slot = stage_full(c, it, op)
            if c.warp < g.width:
                slice_product(c, slot, rC, rX, (n, j), g, op)
            stage_done(c, slot)
            it += 1
        buffer = first // TILE % 2 * (op.warps * TILE * TOKENS)
        keep(c, buffer, rC, g)
        consumers(op)
        for k in cutlass.range_constexpr(-(-TILE * TOKENS // op.threads)):
            i = c.tid + k * op.threads
            if i < n * TOKENS:
                total = Float32(0.0)
                for w in cutlass.range_constexpr(g.width):
                    total += c.part[buffer + w * (TILE * TOKENS) + i]
                c.part[op.sums_at + first * TOKENS + i] = total
    return it

@cute.jit
def slice_product(
    c: Ctx,
    slot: Int32,
    rC: cute.Tensor,
    rX: cute.Tensor,
    where: tuple,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """rC += n rows of the stage times this warp's columns of slice j; rows beyond are read from the last."""
    n, j = where
    rA = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    a = c.lane // 4
    a, b = (a if a < n else n - 1), (a + TILE // 2 if a + TILE // 2 < n else n - 1)
    first = slot * (op.stage // 16) + c.warp * g.per * (n * 4) + c.lane % 4
    for p in cutlass.range_constexpr(g.per):
        i = first + p * (n * 4)
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (i + a * 4,)), rA[None, p])
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (i + b * 4,)), rB[None, p])
    for p in cutlass.range_constexpr(g.per):
        mma_rows(rC, rA[None, p], rB[None, p], rX[None, j * g.per + p])

@cute.jit
def keep(c: Ctx, buffer: Int32, rC: cute.Tensor, g: cutlass.Constexpr):
    """This warp's part of a tile: [row, token]."""
    if c.warp < g.width:
        i = buffer + c.warp * (TILE * TOKENS) + c.lane // 4 * TOKENS + c.lane % 4 * 2
        for half in cutlass.range_constexpr(2):
            c.part[i + half * (TILE // 2 * TOKENS)] = rC[2 * half]
            c.part[i + half * (TILE // 2 * TOKENS) + 1] = rC[2 * half + 1]

@cute.jit
def tile_sum(c: Ctx, row: Int32, token: Int32, op: cutlass.Constexpr):
    """The product of a drained row with a token."""
    return c.part[op.sums_at + row * TOKENS + token]

# ---- kda_bring: What KDA of several tokens brings besides weights, past all registers: states as stages of the ring, taps and the

class Taps(NamedTuple):
    """Of one instance, in shared memory. taps: bf16 [token, tap, channel]; weights: f32 [channel, 4]; mbarriers: they
    are there, nobody needs them any more.
    """

    taps: Any
    weights: Any
    full: Any
    empty: Any

@cute.jit
def slot_of(c: Ctx, token: Int32):
    """State slot of a token, 0 if there is none; first in the pool, for all phases."""
    return view(c, Int32, 0, TOKENS)[token]

@cute.jit
def window_first(s: Seat, op: cutlass.Constexpr):
    """The first channel of v that is copied, within its head."""
    first = s.first // 8 * 8
    return first if first < HEAD - window(op) else Int32(HEAD - window(op))

@cute.jit
def taps_at(c: Ctx, layer: Int32, slot: Int32, op: cutlass.Constexpr):
    """Where a slot's taps begin: bf16 [3, q | k | v]; of slot 0, which is read and not used, for tokens without."""
    known = slot if slot > 0 else Int32(0)
    return field(c, layer, F["state_conv"], COUNT) + Int64(known) * (18 * op.d.kda_dim)

@cute.jit
def states_at(c: Ctx, layer: Int32, slot: Int32, s: Seat, op: cutlass.Constexpr):
    """Where this CTA's rows of a slot's state begin, of slot 0 for tokens without."""
    known = slot if slot > 0 else Int32(0)
    start = field(c, layer, F["state_S"], COUNT)
    start += Int64(known) * (4 * op.d.kda_heads * HEAD * HEAD)
    return start + Int64((s.head * HEAD + s.first) * ROW)

@cute.jit
def state_row(c: Ctx, layer: Int32, slot: Int32, s: Seat, row: Int32, op: cutlass.Constexpr):
    """A row of the state: f32 [128]."""
    return at(Float32, states_at(c, layer, slot, s, op) + Int64(row * ROW), HEAD)

# ---- what is brought
@cute.jit
def open_rows(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    """Shared memory and slots of all warps; ends with a barrier of the CTA."""
    bars = smem(Int64, (2,), (1,)).iterator
    taps = Taps(
        smem(BFloat16, (op.d.rows * 3 * pitch_of(op),), (1,)),
        smem(Float32, (channels_of(op) * 4,), (1,)),
        bars,
        bars + 1,
    )
    if c.tid < TOKENS:
        slot = Int32(0)
        if c.tid < op.d.rows:
            slot = slots[c.tid]
        view(c, Int32, 0, TOKENS)[c.tid] = slot
    if c.tid == 0:
        cute.arch.mbarrier_init(taps.full, 1)
        cute.arch.mbarrier_init(taps.empty, op.warps)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return taps

@cute.jit
def copy(target: Int32, source: Int64, size: Int32, bar: cute.Pointer):
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, Int32(bar.toint())],
    )

@cute.jit
def bring_taps(c: Ctx, taps: Taps, op: cutlass.Constexpr):
    """By a warp of its own: taps and weights of instance after instance, each as soon as the last ones are used up.
    A copy is a part (q, k, v) of a tap of a token; the last three are weights.
    """
    d, pitch = op.d, pitch_of(op)
    s = seat(c, op)
    if s.head >= 0:
        wide, base = Int32(2 * window(op)), window_first(s, op)
        size = d.rows * 3 * pitch * 2 + (2 * HEAD + s.count) * 16
        for layer in cutlass.range(d.layers, unroll=1):
            if layer > 0:
                cute.arch.mbarrier_wait(taps.empty, (layer - 1) & 1)
            if c.lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(taps.full, size)
            cute.arch.sync_warp()
            for i in cutlass.range(c.lane, 9 * d.rows, 32, unroll=1):
                row, part = i // 3, i % 3
                channel = part * d.kda_dim + s.head * HEAD + (base if part == 2 else Int32(0))
                source = taps_at(c, layer, slot_of(c, row // 3), op)
                source += Int64(2 * (row % 3 * (3 * d.kda_dim) + channel))
                target = Int32(taps.taps.iterator.toint()) + 2 * (row * pitch + part * HEAD)
                copy(target, source, wide if part == 2 else Int32(2 * HEAD), taps.full)
            if c.lane < 3:
                channel = c.lane * d.kda_dim + s.head * HEAD
                channel += s.first if c.lane == 2 else Int32(0)
                source = field(c, layer, F["conv"], COUNT) + Int64(16 * channel)
                target = Int32(taps.weights.iterator.toint()) + c.lane * (16 * HEAD)
                copy(target, source, 16 * s.count if c.lane == 2 else Int32(16 * HEAD), taps.full)

@cute.jit
def fill_states(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """Stages of this CTA's rows of all tokens' states, token by token."""
    rows, cuts, tokens, stages = state_stages(op)
    s = seat(c, op)
    if s.head >= 0:
        for n in cutlass.range(stages, unroll=1):
            slot = stage_free(c, it, op)
            first = n // cuts * tokens
            many = op.d.rows - first if op.d.rows - first < tokens else Int32(tokens)
            above = n % cuts * rows
            left = s.count - above if s.count > above else Int32(0)
            left = left if left < rows else Int32(rows)
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, many * left * ROW)
            if left > 0:
                for k in cutlass.range(many, unroll=1):
                    source = states_at(c, layer, slot_of(c, first + k), s, op) + Int64(above * ROW)
                    bulk(c, slot, k * (rows * ROW), source, left * ROW, op)
            it += 1
    return it

# ---- kda_places: Which thread of a CTA has what of KDA for several tokens, and where in shared memory it lies.

class Spot(NamedTuple):
    """token; row of this CTA's part, 0 if it has none here; whether it has; its quad of rows, -1 without; its row in
    the stage.
    """

    token: Any
    row: Any
    there: Any
    quad: Any
    inner: Any

def projected(d):
    """Rows of in_proj that mean something."""
    return 4 * d.kda_dim + d.f_rank + d.kda_heads

def turns_of(op):
    """Turns of threads over the channels of all tokens."""
    return -(-op.d.rows * channels_of(op) // op.threads)

def quads_of(op):
    """Quads of state rows a token."""
    return -(-op.state_rows // 4)

def squares(op):
    """Parts of a head's sum of squares: one of each quad of rows of each CTA that has some of them."""
    return op.slices * quads_of(op)

@cute.jit
def convolved(c: Ctx, op: cutlass.Constexpr):
    """f32 [token, q 128 | k 128 | v of this CTA]."""
    return view(c, Float32, 4 * TOKENS, op.d.rows * channels_of(op))

@cute.jit
def decays(c: Ctx, op: cutlass.Constexpr):
    """f32 [token, 128]."""
    return view(c, Float32, 4 * TOKENS + 4 * TOKENS * channels_of(op), TOKENS * HEAD)

@cute.jit
def mine(c: Ctx, k: cutlass.Constexpr, s: Seat, op: cutlass.Constexpr):
    """(token, channel of this CTA, whether there is such a one) of this thread's k-th; clamped, so that what it loads
    needs no branch: loads in branches wait for each other.
    """
    channels = channels_of(op)
    i = c.tid + k * op.threads
    token, own = i // channels, i % channels
    there = token < op.d.rows and own < 2 * HEAD + s.count
    token = token if there else Int32(0)
    own = own if there else Int32(0)
    return token, own, there

@cute.jit
def place_of(c: Ctx, turn: cutlass.Constexpr, s: Seat, op: cutlass.Constexpr):
    """(token, row of this CTA's part, whether there is such a one, its quad, its row in the stage) of eight lanes in
    a turn of warps over all stages. Clamped, so that what it loads needs no branch.
    """
    rows, cuts, tokens, _ = state_stages(op)
    quads = -(-rows // 4)
    each = -(-tokens * quads // op.warps)
    stage, unit = turn // each, c.warp + turn % each * op.warps
    first, above = stage // cuts * tokens, stage % cuts * rows
    token, quad = first + unit // quads, unit % quads + above // 4
    inner = unit % quads * 4 + c.lane // 8
    row = above + inner
    known = unit < tokens * quads and token < op.d.rows
    there = known and inner < rows and row < s.count
    return Spot(
        token if known else Int32(first),
        row if there else Int32(0),
        there,
        quad if known and quad < quads_of(op) else Int32(-1),
        unit // quads * rows + inner if there else Int32(0),
    )

@cute.jit
def row_token(c: Ctx, op: cutlass.Constexpr):
    """The token of this lane's column of B, the last one for columns that are none."""
    token = c.lane // 4
    return token if token < op.d.rows else Int32(op.d.rows - 1)

@cute.jit
def owned(c: Ctx, k: cutlass.Constexpr, widest: cutlass.Constexpr, op: cutlass.Constexpr):
    """(token, row) of the k-th sum of this thread among [tokens, widest]."""
    i = c.tid + k * op.threads
    return i // widest, i % widest

# ---- kda_rows_out: The output of KDA for several tokens: o under its head's scale, o_proj, the input of the next instance.

@cute.jit
def head_scales(c: Ctx, turn: Int32, sScale: cute.Tensor, op: cutlass.Constexpr):
    """sScale[token, head] = rsqrt(mean o^2 + eps) of the parts that came with o: four lanes a head."""
    d = op.d
    parts = squares(op)
    rounds = -(-parts // 4)
    heads = d.rows * d.kda_heads
    for k in cutlass.range_constexpr(-(-4 * heads // op.threads)):
        i = (c.tid + k * op.threads) // 4
        known = i if i < heads else Int32(0)
        token, head = known // d.kda_heads, known % d.kda_heads
        start = box(c, "sq", turn, op)
        start += Int64(token * op.pitch(d.kda_heads * parts) + head * parts) * 4
        rP = cute.make_rmem_tensor(cute.make_layout((rounds,)), Uint32)
        for n in cutlass.range_constexpr(rounds):
            part = n * 4 + c.lane % 4
            rP[n] = peek_word(start + Int64(part if part < parts else Int32(0)) * 4)
        total = Float32(0.0)
        for n in cutlass.range_constexpr(rounds):
            part = n * 4 + c.lane % 4
            x = insist_word(start + Int64(part if part < parts else Int32(0)) * 4, rP[n], op)
            total += x if part < parts else Float32(0.0)
        cute.arch.sync_warp()
        total = lanes_sum(total, 4)
        if i < heads and c.lane % 4 == 0:
            sScale[i] = cute.math.rsqrt(total / HEAD + d.eps)

@cute.jit
def peek_word(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )

@cute.jit
def insist_word(address: Int64, x: Uint32, op: cutlass.Constexpr):
    turns = Int32(0)
    while x == Uint32(0xFFFFFFFF) and (op.spin == 0 or turns < op.spin):
        x = peek_word(address)
        turns += 1
    return x.bitcast(Float32)

@cute.jit
def gated_rows(c: Ctx, layer: Int32, turn: Int32, rX: cute.Tensor, op: cutlass.Constexpr):
    """rX words [4, vectors] = bf(o times its head's scale) of this thread's columns of its token. What comes as o has
    its norm's weight and its gate in it.
    """
    d = op.d
    g = op.tiles(d.kda_dim)
    rO = cute.make_rmem_tensor(cute.make_layout((4, 2, g.vectors)), Uint32)
    rX.fill(0)
    rO.fill(0)
    token = row_token(c, op)
    here = c.warp < g.width
    sScale = view(c, Float32, 4 * TOKENS, TOKENS * d.kda_heads)
    first = column(c, g)
    o = box(c, "o", turn, op) + Int64(token * op.pitch(d.kda_dim) + first * 8) * 4
    if here:
        for v in cutlass.range_constexpr(g.vectors):
            peek(o + further(v, g) * 32, rO[None, 0, v])
            peek(o + further(v, g) * 32 + 16, rO[None, 1, v])
    head_scales(c, turn, sScale, op)
    if here:
        for v in cutlass.range_constexpr(g.vectors):
            insist(o + further(v, g) * 32, rO[None, 0, v], 4, op)
            insist(o + further(v, g) * 32 + 16, rO[None, 1, v], 4, op)
    consumers(op)
    if here and c.lane // 4 < d.rows:
        for v in cutlass.range_constexpr(g.vectors):
            scale = sScale[token * d.kda_heads + (first + further(v, g)) // 16]
            for e in cutlass.range_constexpr(4):
                pair = []
                for f in cutlass.range_constexpr(2):
                    n = 2 * e + f
                    pair.append(rO[n % 4, n // 4, v].bitcast(Float32) * scale)
                rX[e, v] = pack_bf16(pair[0], pair[1])

@cute.jit
def rows_ahead(
    c: Ctx, dtype: cutlass.Constexpr, address: Int64, n: Int32, widest: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """This thread's f32 of a [tokens, hidden] tensor of `dtype` from a column on, as `owned` deals them; loaded in no
    branch."""
    r = cute.make_rmem_tensor(cute.make_layout((-(-op.d.rows * widest // op.threads),)), Float32)
    r.fill(0.0)
    for k in cutlass.range_constexpr(cute.size(r)):
        token, row = owned(c, k, widest, op)
        there = token < op.d.rows and row < n
        i = token * op.d.hidden + row if there else Int32(0)
        r[k] = one(dtype, address + Int64(i) * (dtype.width // 8)).to(Float32)
    return r

@cute.jit
def one(dtype: cutlass.Constexpr, address: Int64):
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout((1,)))[0]

@cute.jit
def out_rows(
    c: Ctx, layer: Int32, it: Int32, rX: cute.Tensor, y: Any, op: cutlass.Constexpr
):  # fmt: skip
    """y = bf(bf(o W_o^T) + the others' partials) of this CTA's columns; the box attn = bf(y + the next x)."""
    d = op.d
    g = op.tiles(d.kda_dim)
    turn = turn_of(c, layer, LAYERS)
    widest = most(d.hidden, op.ctas)
    first, n = share(d.hidden, c.cta, op.ctas)
    later = layer + 1 if layer + 1 < d.layers else layer
    c = anew(c)
    x = field(c, later, F["x"], COUNT) + Int64(first) * 2
    rNext = rows_ahead(c, BFloat16, x, n, widest, op)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_attn"], COUNT) + Int64(first) * 4
        rRemote = rows_ahead(c, Float32, remote, n, widest, op)
    it = drain_tiles(c, it, n, rX, g, op)
    consumers(op)
    c = anew(c)
    for k in cutlass.range_constexpr(cute.size(rNext)):
        token, row = owned(c, k, widest, op)
        if token < d.rows and row < n:
            total = tile_sum(c, row, token, op)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k]
            total = round_bf16(total)
            post(c, "attn", turn, token * op.pitch(d.hidden) + first + row, total + rNext[k], op)
            y[token * d.hidden + first + row] = total.to(BFloat16)
    return it

# ---- kda_update: The update of KDA for several tokens: convolution, decays and the recurrence, from the projection to o.

class Late(NamedTuple):
    """What an edge is not waited for: words of two rows of f_b, their biases, A_log."""

    rows: Any
    bias: Any
    rate: Any

@cute.jit
def load_late(c: Ctx, layer: Int32, s: Seat, op: cutlass.Constexpr):
    """On their way while the projection is posted and the edge awaited, when no token is in registers."""
    rF = cute.make_rmem_tensor(cute.make_layout((4, 4, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((2,)), Float32)
    head = s.head if s.head >= 0 else Int32(0)
    f_b = field(c, layer, F["f_b"], COUNT) + Int64(head * HEAD * 256)
    bias = at(Float32, field(c, layer, F["dt_bias"], COUNT), op.d.kda_dim)
    for half in cutlass.range_constexpr(2):
        row = c.warp % (HEAD // TILE) * TILE + half * 8 + c.lane // 4
        for e in cutlass.range_constexpr(4):
            words_at(f_b, row * 16 + e * 4 + c.lane % 4, rF[None, e, half])
        rB[half] = bias[head * HEAD + row]
    rate = at(Float32, field(c, layer, F["A_log"], COUNT), op.d.kda_heads)[head]
    return Late(rF, rB, rate)

@cute.jit
def update_rows(
    c: Ctx, layer: Int32, at_: tuple, s: Seat, given: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """From the projection to o of this CTA's rows, both in boxes; writes states and the newest taps. All that
    comes from boxes is asked for before any of it is used. at_: (stage number, turn of the boxes); given: Taps, Late.
    """
    taps, late = given
    it, turn = at_
    d = op.d
    proj = box(c, "proj", turn, op)
    pitch = op.pitch(projected(d))
    if s.head >= 0:
        turns = turns_of(op)
        rows, cuts, tokens, stages = state_stages(op)
        each = -(-tokens * -(-rows // 4) // op.warps)
        rX = cute.make_rmem_tensor(cute.make_layout((turns,)), Uint32)
        rB = cute.make_rmem_tensor(cute.make_layout((stages * each,)), Uint32)
        rG = cute.make_rmem_tensor(cute.make_layout((stages * each,)), Uint32)
        rN = cute.make_rmem_tensor(cute.make_layout((stages * each,)), BFloat16)
        rA = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
        beta_at = proj + Int64((4 * d.kda_dim + HEAD + s.head) * 2)
        gate_at = proj + Int64((3 * d.kda_dim + s.head * HEAD + s.first) * 2)
        f_at = proj + Int64((row_token(c, op) * pitch + 4 * d.kda_dim) * 2 + c.lane % 4 * 16)
        norm = at(BFloat16, field(c, layer, F["o_norm"], COUNT), HEAD)
        for k in cutlass.range_constexpr(turns):
            token, own, _ = mine(c, k, s, op)
            rX[k] = peek_half(proj + Int64((token * pitch + channel_of(s, own, op)) * 2))
        for e in cutlass.range_constexpr(4):
            peek(f_at + e * 64, rA[None, e])
        for j in cutlass.range_constexpr(stages * each):
            p = place_of(c, j, s, op)
            rB[j] = peek_half(beta_at + Int64(p.token * pitch * 2))
            rG[j] = peek_half(gate_at + Int64((p.token * pitch + p.row) * 2))
            rN[j] = norm[s.first + p.row]
        if c.warp < HEAD // TILE:
            for e in cutlass.range_constexpr(4):
                insist(f_at + e * 64, rA[None, e], 2, op)
            cute.arch.sync_warp()
            decay_rows(c, late, rA, op)
        convolve_rows(c, layer, s, (taps, rX), proj, op)
        consumers(op)
        for n in cutlass.range_constexpr(stages):
            slot = stage_full(c, it, op)
            for j in cutlass.range_constexpr(n * each, (n + 1) * each):
                p = place_of(c, j, s, op)
                beta = quick_sigmoid(insist_half(beta_at + Int64(p.token * pitch * 2), rB[j], op))
                g = insist_half(gate_at + Int64((p.token * pitch + p.row) * 2), rG[j], op)
                scale = rN[j].to(Float32) * quick_sigmoid(g)
                # by all lanes, also those without a row: it shuffles
                cute.arch.sync_warp()
                step_row(c, layer, s, (p, slot, beta, scale, turn), op)
            stage_done(c, slot)
            it += 1
    else:
        consumers(op)
    return it

@cute.jit
def step_row(c: Ctx, layer: Int32, s: Seat, given: tuple, op: cutlass.Constexpr):
    """A row of a state: its o and square posted, its new value written. given: Spot, stage, beta, o's scale, turn."""
    p, slot, beta, scale, turn = given
    d = op.d
    rS = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for e in cutlass.range_constexpr(4):
        i = slot * (op.stage // 16) + p.inner * (HEAD // 4) + e * 8 + c.lane % 8
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (i,)), rW)
        for f in cutlass.range_constexpr(4):
            rS[f, e] = rW[f].bitcast(Float32)
    o = delta_row(c, rS, (p.token, p.row, beta), op)
    state = slot_of(c, p.token)
    o = o if state > 0 and p.there else Float32(0.0)
    square = o * o
    square = square + cute.arch.shuffle_sync_bfly(square, offset=8)
    square = square + cute.arch.shuffle_sync_bfly(square, offset=16)
    if p.there and c.lane % 8 == 0:
        i = p.token * op.pitch(d.kda_dim) + s.head * HEAD + s.first + p.row
        post(c, "o", turn, i, o * scale, op)
    if p.quad >= 0 and c.lane == 0:
        i = p.token * op.pitch(d.kda_heads * squares(op)) + s.head * squares(op)
        post(c, "sq", turn, i + s.slice * quads_of(op) + p.quad, square, op)
    if p.there and state > 0:
        gRow = state_row(c, layer, state, s, p.row, op)
        for e in cutlass.range_constexpr(4):
            cute.autovec_copy(rS[None, e], cute.local_tile(gRow, (4,), (e * 8 + c.lane % 8,)))

@cute.jit
def convolve_rows(c: Ctx, layer: Int32, s: Seat, given: tuple, proj: Int64, op: cutlass.Constexpr):
    """silu of the convolution into the pool, the newest of live slots to where `move_taps` finds them; gives back the
    taps in shared memory. given: Taps, new values as peeked.
    """
    taps, rX = given
    d, pitch = op.d, op.pitch(projected(op.d))
    sU, far = convolved(c, op), pitch_of(op)
    beside = s.first - window_first(s, op)
    cute.arch.mbarrier_wait(taps.full, layer & 1)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for k in cutlass.range_constexpr(turns_of(op)):
        token, own, there = mine(c, k, s, op)
        ch = channel_of(s, own, op)
        i = token * 3 * far + own + (beside if own >= 2 * HEAD else Int32(0))
        a, b, e = taps.taps[i], taps.taps[i + far], taps.taps[i + 2 * far]
        cute.autovec_copy(cute.local_tile(taps.weights, (4,), (own,)), rC)
        u = a.to(Float32) * rC[0] + b.to(Float32) * rC[1]
        u = u + e.to(Float32) * rC[2]
        x = insist_half(proj + Int64((token * pitch + ch) * 2), rX[k], op)
        if there:
            sU[c.tid + k * op.threads] = quick_silu(u + x * rC[3])
            slot = slot_of(c, token)
            if slot > 0 and (s.slice == 0 or own >= 2 * HEAD):
                gFresh = at(BFloat16, fresh(c, layer, op), 3 * d.rows * d.kda_dim)
                gFresh[token * 3 * d.kda_dim + ch] = x.to(BFloat16)
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(taps.empty)

@cute.jit
def quick_exp(x: Float32):
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; mul.f32 t, {$r0}, 0f3FB8AA3B; ex2.approx.ftz.f32 {$w0}, t; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )

@cute.jit
def quick_sigmoid(x: Float32):
    """Four instructions, right to 2^-21; infinities give 0 and 1."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; mul.f32 t, {$r0}, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 {$w0}, t; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )

@cute.jit
def quick_silu(x: Float32):
    return x * quick_sigmoid(x)

@cute.jit
def decay_rows(c: Ctx, late: Late, rA: cute.Tensor, op: cutlass.Constexpr):
    """Of all tokens and the head's 128 columns: a warp has sixteen of them, by an MMA over f_a: words rA."""
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC.fill(0.0)
    for e in cutlass.range_constexpr(4):
        mma_rows(rC, late.rows[None, e, 0], late.rows[None, e, 1], rA[None, e])
    sDecay = decays(c, op)
    rate = cute.math.exp(late.rate)
    for i in cutlass.range_constexpr(4):
        row = c.warp * TILE + i // 2 * 8 + c.lane // 4
        token = c.lane % 4 * 2 + i % 2
        gate = quick_sigmoid(rate * (round_bf16(rC[i]) + late.bias[i // 2]))
        sDecay[token * HEAD + row] = quick_exp(-5.0 * gate)

@cute.jit
def delta_row(c: Ctx, rS: cute.Tensor, given: tuple, op: cutlass.Constexpr):
    """S <- S * decay; S += beta (v - S k) k; o = S q for a row; rS f32 [4, 4] are this lane's columns, eight lanes a
    row. q and k get their norms here.
    """
    token, row, beta = given
    channels = channels_of(op)
    sU, sDecay = convolved(c, op), decays(c, op)
    rQ = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    rK = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    rD = cute.make_rmem_tensor(cute.make_layout((4, 4)), Float32)
    v = sU[token * channels + 2 * HEAD + row]
    for e in cutlass.range_constexpr(4):
        for f in cutlass.range_constexpr(4):
            i = (e * 8 + c.lane % 8) * 4 + f
            rQ[f, e] = sU[token * channels + i]
            rK[f, e] = sU[token * channels + HEAD + i]
            rD[f, e] = sDecay[token * HEAD + i]
    q2, k2, seen, o = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
    for e in cutlass.range_constexpr(4):
        for f in cutlass.range_constexpr(4):
            q2 += rQ[f, e] * rQ[f, e]
            k2 += rK[f, e] * rK[f, e]
            rS[f, e] = rS[f, e] * rD[f, e]
            seen += rS[f, e] * rK[f, e]
    q2 = cute.math.rsqrt(lanes_sum(q2, 8) + 1e-6) * HEAD**-0.5
    k2 = cute.math.rsqrt(lanes_sum(k2, 8) + 1e-6)
    change = beta * (v - lanes_sum(seen, 8) * k2) * k2
    for e in cutlass.range_constexpr(4):
        for f in cutlass.range_constexpr(4):
            rS[f, e] = rS[f, e] + change * rK[f, e]
            o += rS[f, e] * rQ[f, e]
    return lanes_sum(o, 8) * q2

# ---- kda_rows: KDA between its projections for up to eight tokens of different sequences: a CTA has a head and some state rows of

@cute.jit
def piece_of(c: Ctx, layer: Int32, name: cutlass.Constexpr, op: cutlass.Constexpr):
    """(address, rows, end) of this CTA's packed rows of in_proj or o_proj."""
    d = op.d
    total = projected(d) if cutlass.const_expr(name == "in_proj") else d.hidden
    g = op.tiles(d.hidden if cutlass.const_expr(name == "in_proj") else d.kda_dim)
    first, n = share(total, c.cta, op.ctas)
    source = field(c, layer, F[name], COUNT) + Int64(first) * g.row_bytes
    return source, n, source + Int64(n) * g.row_bytes

@cute.jit
def fill_kda_rows(c: Ctx, layer: Int32, it: Int32, lead: Lead, op: cutlass.Constexpr):
    """in_proj and o_proj are packed; the states lie between them."""
    d = op.d
    source, n, _ = piece_of(c, layer, "in_proj", op)
    none = (Int64(0), Int64(0))
    it, lead = fill_tiles(c, (it, lead), source, n, none, op.tiles(d.hidden), op)
    it = fill_states(c, layer, it, op)
    source, n, _ = piece_of(c, layer, "o_proj", op)
    later = layer + 1 if layer + 1 < d.layers else layer
    start, _, end = piece_of(c, later, "in_proj", op)
    end = end if layer + 1 < d.layers else start
    return fill_tiles(c, (it, lead), source, n, (start, end), op.tiles(d.kda_dim), op)

@cute.jit
def kda_rows(
    c: Ctx, layer: Int32, at_: tuple, rX: cute.Tensor, taps: Taps, y: Any, op: cutlass.Constexpr
):
    """A KDA instance after its input; not hinted at yet."""
    it, edge = at_
    d = op.d
    g = op.tiles(d.hidden)
    turn = turn_of(c, layer, KDAS)
    rows = projected(d)
    widest = most(rows, op.ctas)
    first, n = share(rows, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    it = drain_tiles(c, it, n, rX, g, op)
    c = anew(c)
    s = seat(c, op)
    late = load_late(c, layer, s, op)
    consumers(op)
    for k in cutlass.range_constexpr(-(-d.rows * widest // op.threads)):
        token, row = owned(c, k, widest, op)
        if token < d.rows and row < n:
            i = token * op.pitch(rows) + first + row
            post(c, "proj", turn, i, tile_sum(c, row, token, op), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge proj", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "update", layer)
    it = update_rows(c, layer, (it, turn), s, (taps, late), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge o", layer, kind="edge")
    wait(c, edge, op, acquire=False)
    timeline.mark(c.track, "o_proj", layer)
    c = anew(c)
    rO = cute.make_rmem_tensor(cute.make_layout((4, op.tiles(d.kda_dim).vectors)), Uint32)
    gated_rows(c, layer, turn, rO, op)
    it = out_rows(c, layer, it, rO, y, op)
    return it, edge

@cute.jit
def load_rows(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """Words [4, vectors]: this thread's columns of its token of x, from the box attn after the first instance."""
    d = op.d
    g = op.tiles(d.hidden)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.vectors)), Uint32)
    rX.fill(0)
    token = c.lane // 4
    if layer == 0:
        token_words(c, field(c, layer, F["x"], COUNT), 2 * d.hidden, rX, g, op)
    elif c.warp < g.width and token < d.rows:
        start = box(c, "attn", turn_of(c, layer - 1, LAYERS), op)
        start += Int64(token * op.pitch(d.hidden) + column(c, g) * 8) * 2
        for v in cutlass.range_constexpr(g.vectors):
            peek(start + 16 * further(v, g), rX[None, v])
        for v in cutlass.range_constexpr(g.vectors):
            insist(start + 16 * further(v, g), rX[None, v], 2, op)
    cute.arch.sync_warp()
    return rX

# ---- setup: What a CTA of a persistent kernel does first: shared memory, mbarriers, the table of addresses.

def further_bars(op):
    """mbarriers behind `Ctx.routed` by which consumers tell the warp that chooses experts, where there is one."""
    return 2 if getattr(op, "units", False) else 0

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
    more = further_bars(op)
    bars = smem(Int64, (2 * op.stages + 1 + more,), (1,)).iterator
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
        for s in cutlass.range_constexpr(more):
            cute.arch.mbarrier_init(c.routed + 1 + s, 1)
    for n in cutlass.range_constexpr(d.layers):
        if tid == 32 * (n % op.warps):
            for i in cutlass.range_constexpr(len(names[n])):
                c.tab[n * COUNT + F[names[n][i]]] = layers[n][i].iterator.toint()
            c.tab[n * COUNT + F["kind"]] = Int64(kinds[n])
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return c

def lasting(op):
    """Workspace that goes on from launch to launch: boxes and counters."""
    return {
        "mail": ("i32", (op.mail_words,), "undefined", "persistent"),
        "sync": ("i32", (128,), "zero", "persistent"),
    }

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

# ---- kda_chain: Persistent KDA chain: one cooperative launch for all instances, up to eight tokens; weights stream through a ring.

TUNABLES = {
    "ring_stages": (7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336),
    "tiles_from": (2, 1),
    "tile_warps": (14, 8),
    "tile_stages": (6, 5, 10, 12, 4, 3, 2),
    "tile_bytes": (28672, 32768, 16384, 14336),
    "in_flight": (2, 3, 0, 4, 1, 5, 6),
    "lead": (0, 2, 4, 6, 8),
    "lead_pause": (900, 400, 1800),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 12, 16, 32, 64, 128, 132),
    "spin_limit": (0, 200000, 2000000),
}

MOST_ROWS = 8

@cute.jit
def produce(c: Ctx, op: cutlass.Constexpr):
    it, lead = Int32(0), no_lead()
    prefetch_vectors(c, Int32(0), "K", op)
    for layer in cutlass.range(op.d.layers, unroll=1):
        if layer + 1 < op.d.layers:
            prefetch_vectors(c, layer + 1, "K", op)
        if cutlass.const_expr(op.tiled):
            it, lead = fill_kda_rows(c, layer, it, lead, op)
        else:
            it = fill_kda(c, layer, it, op)

@cute.jit
def consume(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    d = op.d
    rX = cute.make_rmem_tensor(cute.make_layout((4, op.wide.per)), Uint32)
    rX.fill(0)
    it, edge = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        edge = take_sum(c, layer, edge, rX, d.hidden, op)
        y = at(BFloat16, field(c, layer, F["y"], COUNT), d.hidden)
        it, edge = kda(c, layer, layer, (it, edge), rX, slots, y, op)
        post_layer(c, layer, op)
    close(c, edge, (Int32(0), Int32(d.layers), Int32(d.layers)), op)
    move_taps(c, slots, op)

@cute.jit
def consume_rows(c: Ctx, taps: tuple, op: cutlass.Constexpr):
    """As `consume` for several tokens; a CTA sends its columns of the next instance's x instead of y. Moves no taps."""
    d = op.d
    it, edge = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        edge = await_y(c, layer, edge, op)
        timeline.mark(c.track, "input", layer)
        rX = load_rows(c, layer, op)
        y = at(BFloat16, field(c, layer, F["y"], COUNT), d.rows * d.hidden)
        it, edge = kda_rows(c, layer, (it, edge), rX, taps, y, op)
        post_layer(c, layer, op)
    close(c, edge, (Int32(0), Int32(d.layers), Int32(d.layers)), op)

@cute.kernel
def chain_kernel(
    layers: tuple,
    slots: cute.Tensor,
    mMail: cute.Tensor,
    mSync: cute.Tensor,
    phases: Any,
    names: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Grid (ctas), cooperative; op.warps consumer warps and one producer warp, of tiles one that brings taps."""
    c = open_cta(layers, mSync, mMail, phases, names, (0,) * op.d.layers, op)
    taps = None
    if cutlass.const_expr(op.tiled):
        taps = open_rows(c, slots, op)
    if c.warp == op.warps:
        if c.lane == 0:
            produce(c, op)
    elif cutlass.const_expr(not op.tiled):
        consume(c, slots, op)
    elif c.warp == op.warps + 1:
        bring_taps(c, taps, op)
    else:
        consume_rows(c, taps, op)
    if cutlass.const_expr(op.tiled):
        # behind all roles: within the consumers' it cost registers in their loop over layers
        if c.warp < op.warps:
            move_taps(c, slots, op)

def workspace(dims, cfg):
    op = shape(dims, cfg, MOST_ROWS)
    packed = {
        "packed_in": (
            "bf16",
            (dims.layers, projected(dims), dims.hidden),
            "undefined",
            "persistent",
        ),
        "packed_out": ("bf16", (dims.layers, dims.hidden, dims.kda_dim), "undefined", "persistent"),
    }
    return {**lasting(op), **(packed if op.tiled else {})}

@cute.jit
def prepare(t, cfg, stream):
    op = shape(cfg.dims, cfg, MOST_ROWS)
    empty_boxes(t.workspace.mail, stream)
    if cutlass.const_expr(op.tiled):
        for n in cutlass.range_constexpr(cfg.dims.layers):
            w = t.weights.layers[n]
            rows = projected(cfg.dims)
            pack_rows(w.in_proj, t.workspace.packed_in[n, None, None], rows, op.ctas, stream)
            rows = cfg.dims.hidden
            pack_rows(w.o_proj, t.workspace.packed_out[n, None, None], rows, op.ctas, stream)

@cute.jit
def step(t, cfg, stream):
    """y_i = a of the KDA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    op = shape(cfg.dims, cfg, MOST_ROWS)
    found = [chain_tensors(t, n, cfg.dims) for n in range(cfg.dims.layers)]
    if cutlass.const_expr(op.tiled):
        for n in cutlass.range_constexpr(cfg.dims.layers):
            found[n]["in_proj"] = t.workspace.packed_in[n, None, None]
            found[n]["o_proj"] = t.workspace.packed_out[n, None, None]
    names, tensors = table(found)
    w = t.workspace
    chain_kernel(
        tensors, t.inputs.slots, w.mail, w.sync, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.threads + (64 if op.tiled else 32), 1, 1),
        stream=stream, cooperative=True, min_blocks_per_mp=1,
    )  # fmt: skip
