"""Persistent decode kernel: one cooperative launch for a run of layers, one row; weights stream through a ring.

A producer lane per CTA follows a fixed list of weight rows across layers and edges, so that memory stays busy while
consumers wait for each other; only the routed experts wait, for their ids. Consumers go from one half of a layer to the
next in one loop, so that AttnRes exists once in the code. What a CTA sends to others says itself that it is there
(boxes), and counters only hint that it is worth looking; nothing is fenced but the plain buffers of dense FFNs and the
last edge, after which what all have read is written.

With `units` a warp of its own chooses experts and brings what a layer needs early into L2, and with `packed` too their
codes come from copies whose bits lie better (`tile_pack`: 1.85 GB more a layer at tp8, for up to 16 layers). `hungry`,
`couples`, `bank` and `idle` are explained at `plan.Op`, `dots` and `hold` at `unit_plan.DecodeOp`; docs/kernels-log.md
has what each was made for.
"""

import cutlass
import cutlass.cute as cute
import math
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint16, Uint32, Uint8
from cutlass.memory import SmemAllocator
from dataclasses import dataclass, replace
from kernelgen import timeline
from typing import Any, NamedTuple

# ---- common: Device and host pieces that the Kimi K3 seeds share: warp mathematics, a bf16 MMA, loops over layers on the host.

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
    if dims.ranks > 1 and dims.gpus == 1:
        remote = t.inputs.remote.layers[n]
        found |= {f"remote_{r}": getattr(remote, r) for r in REMOTE if hasattr(remote, r)}
        if dims.ffn[n] == "E":
            sends = t.outputs.send.layers
            # where a layer without experts leaves a gap, the numbers are names, not indices
            found["send"] = (sends[n] if isinstance(sends, list) else getattr(sends, str(n))).shared
    return found

def table(layers):
    """(names, tensors) of the fields of every layer, as a kernel takes them."""
    found = list(layers)
    return tuple(tuple(x) for x in found), tuple(tuple(x.values()) for x in found)

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

def registers(n, first, step):
    """The operand of a vector instruction: n registers of inline PTX from number `first` on."""
    return "{" + ", ".join("{$r" + str(first + step * k) + "}" for k in range(n)) + "}"

@cute.jit
def send_some(here: Int64, r: cute.Tensor, n: cutlass.Constexpr):
    """n = 2 or 4 f32 at once: r[n] to `here`; somebody empties its place for the other turn (`empty_some`)."""
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global.v{n}.f32 [{{$r0}}], {registers(n, 1, 1)};",
        read_only_args=[here, *(r[k] for k in range(n))],
    )

@cute.jit
def send_words(here: Int64, r: cute.Tensor, n: cutlass.Constexpr):
    """As `send_some`: n = 1, 2 or 4 words, two bf16 or f16 each."""
    size = ".v" + str(n) if n > 1 else ""
    value = registers(n, 1, 1) if n > 1 else "{$r1}"
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global{size}.b32 [{{$r0}}], {value};",
        read_only_args=[here, *(r[k] for k in range(n))],
    )

@cute.jit
def empty_some(there: Int64, n: cutlass.Constexpr):
    """n = 1, 2 or 4 words of a box are emptied."""
    size = ".v" + str(n) if n > 1 else ""
    value = registers(n, 1, 0) if n > 1 else "{$r1}"
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global{size}.b32 [{{$r0}}], {value};",
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

# ---- stages: How matrices are cut into stages of the ring, and which rows a CTA has.

STRIDE = 17
"""Floats between rows of partial sums and between slots of reductions: one per warp, odd against bank conflicts."""

SHARED_MEMORY = 232448
"""Bytes that a CTA can have on sm_90a, sm_100a and sm_103a."""

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

def one_in_hand(g, op):
    """Whether a stage has just two rows of `hidden` columns, single or a pair."""
    pair = op.rows(g.k, pair=True)
    return g.k == op.wide.k and op.wide.chunk == 2 and pair.chunk == 1

# ---- exchange: Exchanges between two ranks inside the persistent decode step: partials and shares go straight into the other GPU.

STEPS = 6
"""Where `Ctx.base` counts steps, behind what the turns of the boxes are counted by."""

def inbox_sites(d):
    """(what is exchanged, first word, words) in a layer's part of the inbox."""
    wanted = [("attn", d.hidden)]
    if "D" in d.ffn:
        wanted.append(("dense", d.hidden))
    if "E" in d.ffn:
        wanted += [("moe", d.latent), ("shared", d.hidden_local), ("delta", d.hidden_local)]
        wanted += [("latent", d.latent_rows)] if d.latent_sharded else []
    found, at = [], 0
    for name, n in wanted:
        found.append((name, at, n))
        at += -(-n // 32) * 32
    return found

def inbox_words(d):
    """Of a layer, whole lines of 128 bytes."""
    _, at, n = inbox_sites(d)[-1]
    return at + -(-n // 32) * 32

def inbox(d):
    """The workspace entry. Raises ValueError for what is not exchanged here."""
    if d.gpus != 2 or d.router_sharded or d.layers < 2:
        raise ValueError("the exchange is for two GPUs, two layers or more, and a whole router")
    return ("u32", (d.layers, inbox_words(d)), "zero", "persistent")

@cute.jit
def open_inbox(c: Ctx, own: cute.Tensor, peer: cute.Tensor, rank: Int32, op: cutlass.Constexpr):
    """Each site of each layer into the table of addresses: `remote_NAME` is the own inbox's, `send` how far from there
    the other rank's is, `x` this rank's number. Ends with a barrier of the CTA."""
    sites, words = inbox_sites(op.d), inbox_words(op.d)
    for n in cutlass.range(c.tid, op.d.layers, op.threads + 32, unroll=1):
        start = own.iterator.toint() + Int64(n) * (4 * words)
        for name, at, _ in sites:
            c.tab[n * COUNT + F["remote_" + name]] = start + 4 * at
        c.tab[n * COUNT + F["send"]] = peer.iterator.toint() - own.iterator.toint()
        c.tab[n * COUNT + F["x"]] = Int64(rank)
    cute.arch.sync_threads()

@cute.jit
def close_inbox(c: Ctx, op: cutlass.Constexpr):
    """The step is counted, after the last edge, when every CTA has read its number."""
    if c.tid == 0 and c.cta == 0:
        cute.make_tensor(c.sync + 96 + STEPS, cute.make_layout((1,)))[0] = c.base[STEPS] + 1

@cute.jit
def rank_here(c: Ctx):
    return Int32(c.tab[F["x"]])

def own_first(c, op):
    """First rows of the shared expert's down-projection: of this rank's columns, and of the others'."""
    if op.d.gpus == 1:
        return 0, op.d.hidden_local
    rank = rank_here(c)
    return rank * op.d.hidden_local, (1 - rank) * op.d.hidden_local

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

@cute.jit
def look_word(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )

@cute.jit
def hear_rank(c: Ctx, name: cutlass.Constexpr, layer: Int32, i: Int32, op: cutlass.Constexpr):
    """Element i of a site of the own inbox, once it has come."""
    address = site_at(c, name, layer) + Int64(i) * 4
    number, word, turns = step_number(c), look_word(address), Int32(0)
    while ((word ^ number) & Uint32(0xFFFF)) != Uint32(0) and (op.spin == 0 or turns < op.spin):
        word = look_word(address)
        turns += 1
    return high(word)

@cute.jit
def look_eight(address: Int64, r: cute.Tensor):
    """r[8] = eight words of the inbox, new or not."""
    for half in cutlass.range_constexpr(2):
        words = cute.arch.inline_ptx(
            "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address + 16 * half],
        )
        for e in cutlass.range_constexpr(4):
            r[4 * half + e] = words[e]

@cute.jit
def lacking(r: cute.Tensor, number: Uint32):
    wrong = Uint32(0)
    for e in cutlass.range_constexpr(8):
        wrong = wrong | (r[e] ^ number)
    return (wrong & Uint32(0xFFFF)) != Uint32(0)

@cute.jit
def hear_eight(c: Ctx, address: Int64, r: cute.Tensor, out: cute.Tensor, op: cutlass.Constexpr):
    """After `look_eight`: again until all are there; out[4 words] = them as pairs of bf16."""
    number, turns = step_number(c), Int32(0)
    while lacking(r, number) and (op.spin == 0 or turns < op.spin):
        look_eight(address, r)
        turns += 1
    for e in cutlass.range_constexpr(4):
        out[e] = (r[2 * e] >> 16) | (r[2 * e + 1] & Uint32(0xFFFF0000))

@cute.jit
def join_ranks(
    c: Ctx, name: cutlass.Constexpr, layer: Int32, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rX words [4, per], this rank's partial of this thread's columns, becomes bf(the sum over both ranks)."""
    start = site_at(c, name, layer)
    rIn = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Uint32)
    rSum = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for v in cutlass.range_constexpr(g.per):
        rIn[None, v].fill(0)
        if vector(c, v, g) < g.vecs:
            look_eight(start + Int64(vector(c, v, g)) * 32, rIn[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            hear_eight(c, start + Int64(i) * 32, rIn[None, v], rSum, op)
            for e in cutlass.range_constexpr(4):
                rX[e, v] = add_bf16x2(rX[e, v], rSum[e])

@cute.jit
def look_either(
    c: Ctx, name: cutlass.Constexpr, layer: Int32, at: tuple, r: cute.Tensor, op: cutlass.Constexpr
):
    """r[8]: eight columns gathered over the ranks as they are; at = (the own box, vectors of a rank, which vector)."""
    start, own, i = at
    k = i - rank_here(c) * own
    if k >= 0 and k < own:
        peek(start + Int64(k) * 16, r)
    else:
        look_eight(site_at(c, name, layer) + Int64(i % own) * 32, r)

@cute.jit
def take_either(
    c: Ctx, name: cutlass.Constexpr, layer: Int32, at: tuple, r: cute.Tensor, out: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """After `look_either`: out[4 words] = those columns, once they are there."""
    start, own, i = at
    k = i - rank_here(c) * own
    if k >= 0 and k < own:
        insist(start + Int64(k) * 16, r, 2, op)
        for e in cutlass.range_constexpr(4):
            out[e] = r[e]
    else:
        hear_eight(c, site_at(c, name, layer) + Int64(i % own) * 32, r, out, op)

@cute.jit
def gather_wide(
    c: Ctx, name: cutlass.Constexpr, layer: Int32, start: Int64, own: cutlass.Constexpr, rD: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """rD words [4, per] = this thread's columns of a vector of `hidden`, of which each rank has `own` vectors."""
    g = op.wide
    rIn = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Uint32)
    for v in cutlass.range_constexpr(g.per):
        rIn[None, v].fill(0)
        if vector(c, v, g) < g.vecs:
            look_either(c, name, layer, (start, own, vector(c, v, g)), rIn[None, v], op)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            at = (start, own, vector(c, v, g))
            take_either(c, name, layer, at, rIn[None, v], rD[None, v], op)

@cute.jit
def sum_shared(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """c.own, this rank's partial of the shared expert for its own columns, becomes bf(the sum)."""
    first, n = share(op.d.hidden_local, c.cta, op.ctas)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        c.own[i] = round_bf16(c.own[i] + hear_rank(c, "shared", layer, first + i, op))

# ---- edges: Edges between CTAs: counters that all add to and wait for, one line each; what the next launch counts on from.

ALL, ROUTE = 0, 32
"""Lines of the counters: edges that every CTA waits for in turn; the router's edge, which is waited for later."""

@cute.jit
def dawdle(c: Ctx, op: cutlass.Constexpr):
    """One arrival in sixteen is late by up to `jitter` ns, by a hash of arrivals so far; nothing in a normal build."""
    if cutlass.const_expr(getattr(op, "jitter", 0) > 0):
        if c.tid == 0:
            mixed = (Uint32(counter(c, ALL, False)) + Uint32(c.cta * 7919)) * Uint32(0x9E3779B1)
            if mixed >> 28 == Uint32(0):
                late = (mixed >> 8) & Uint32(op.jitter - 1)
                cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[late])

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

# ---- sums: Sums over the consumer warps of a CTA.

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

# ---- mix: AttnRes in every CTA: a thread has the same columns of the prefix, of the bank and of x.

class Early(NamedTuple):
    """weight f32 [8, per] = norm x proj; out words [4, per]; bank words [4, per, rows], where they are held so long."""

    weight: Any
    out: Any
    bank: Any

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
def row_words(
    c: Ctx, banks: Banks, rK: Any, s: cutlass.Constexpr, v: cutlass.Constexpr, op: cutlass.Constexpr
):
    """This thread's v-th words of row s: held, or read now."""
    r = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    if cutlass.const_expr(rK is not None):
        for e in cutlass.range_constexpr(4):
            r[e] = rK[e, v, s]
    else:
        r.fill(0)
        if vector(c, v, op.wide) < op.wide.vecs:
            bank_words(c, banks, s, v, r, op)
    return r

@cute.jit
def again(c: Ctx):
    """The same thread, its lane read again: addresses made of that are not kept over the loop in registers."""
    lane = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[c.lane]
    )
    return c._replace(lane=lane)

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
    rK = None
    if cutlass.const_expr(op.bank_held):
        rK = cute.make_rmem_tensor(cute.make_layout((4, g.per, d.bank_rows)), Uint32)
        rK.fill(0)
        here = again(c)
        for s in cutlass.range_constexpr(d.bank_rows):
            if s < sources:
                for v in cutlass.range_constexpr(g.per):
                    if vector(here, v, g) < g.vecs:
                        bank_words(here, banks, s, v, rK[None, v, s], op)
    for s in cutlass.range_constexpr(d.bank_rows):
        if s < sources:
            two = (Float32(0.0), Float32(0.0))
            for v in cutlass.range_constexpr(g.per):
                two = sums(row_words(c, banks, rK, s, v, op), rW, v, two)
            put_two(c, 2 * s, two[0], two[1])
    return Early(rW, rO, rK)

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
            rS[s] = cute.math.rsqrt(square * (1.0 / d.hidden) + d.eps) * total
        top = cute.arch.fmax(top, rS[s])
    total = Float32(0.0)
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = cute.math.exp(rS[s] - top)
        total += rS[s]
    # products instead of quotients, which take eight instructions and a branch each, in every warp
    share = 1.0 / total
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = rS[s] * share
    rM = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            rM[2 * w, v], rM[2 * w + 1, v] = low(rP[w, v]) * rS[last], high(rP[w, v]) * rS[last]
    for s in cutlass.range_constexpr(last):
        if s < sources:
            for v in cutlass.range_constexpr(g.per):
                rB = row_words(c, banks, e.bank, s, v, op)
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
    scale = cute.math.rsqrt(take(c, 2 * last + 2, g.width) * (1.0 / d.hidden) + d.eps)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a = rM[2 * w, v] * scale * low(e.out[w, v])
            b = rM[2 * w + 1, v] * scale * high(e.out[w, v])
            rX[w, v] = pack_bf16(a, b)

# ---- columns: Who makes columns of a half's result posts their parts of the sums of the AttnRes that comes (box dots, `dots`).

VALUES = 8

class Next(NamedTuple):
    """The half that comes: address of its norm x projection, rows in the bank, whether the prefix starts anew; and
    whether this half's end releases what was written."""

    banks: Any
    weight: Any
    sources: Any
    anew: Any
    releases: Any

class Columns(NamedTuple):
    """Of a thread's columns, one a turn, as they were loaded: weight f32 [turns]; bits of bf16 [turns] of the prefix
    and of what other ranks add where this one makes nothing, and of bank rows [2, turns]; which rows are there [2]."""

    weight: Any
    prefix: Any
    others: Any
    bank: Any
    there: Any

def dot_turns(op):
    """Columns of a thread that posts sums."""
    return -(-op.dot_columns // (32 * op.dot_warps))

@cute.jit
def eight_sums(c: Ctx, r: cute.Tensor):
    """Sums over the warp of r[8]; lane 4 k and the three behind it have the k-th."""
    values = [r[k] for k in range(VALUES)]
    for offset in cutlass.range_constexpr(3):
        many, apart = (4, 2, 1)[offset], (16, 8, 4)[offset]
        upper = c.lane & apart != 0
        kept = []
        for k in cutlass.range_constexpr(many):
            x, y = values[k], values[k + many]
            other = cute.arch.shuffle_sync_bfly(x if upper else y, offset=apart)
            kept.append((y if upper else x) + other)
        values = kept
    x = values[0]
    for offset in cutlass.range_constexpr(2):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=2 - offset)
    return x

@cute.jit
def half_bits(address: Int64):
    """The bits of the bf16 at an address, on their way: nothing is done with them that would wait for them."""
    return cute.arch.inline_ptx(
        "ld.global.u16 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )

@cute.jit
def dot_index(c: Ctx, k: cutlass.Constexpr, op: cutlass.Constexpr):
    """Which of the CTA's columns a thread of the last warps has as its k-th; less than zero in those before them."""
    return (c.warp - (op.warps - op.dot_warps)) * 32 + c.lane + k * 32 * op.dot_warps

@cute.jit
def ask_columns(c: Ctx, nx: Next, own: tuple, others: tuple, op: cutlass.Constexpr):
    """This thread's columns on their way, long before they are wanted; all warps ask, so that loads stand in no branch.
    own = (first, number) of the columns that this CTA makes, others = (address, first, number) of those that only
    other ranks make, None where there are none."""
    d, turns = op.d, dot_turns(op)
    rW = cute.make_rmem_tensor(cute.make_layout((turns,)), Float32)
    rP = cute.make_rmem_tensor(cute.make_layout((turns,)), Uint32)
    rOthers = cute.make_rmem_tensor(cute.make_layout((turns,)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((2, turns)), Uint32)
    rB.fill(0)
    rOthers.fill(0)
    there = tuple(s < nx.sources for s in range(d.bank_rows))
    here = again(c)
    for k in cutlass.range_constexpr(turns):
        i = dot_index(here, k, op)
        i = i if i > 0 else Int32(0)
        column = own[0] + within(i, own[1])
        if cutlass.const_expr(others is not None):
            place = within(i - own[1], others[2])
            place = others[1] + (place if place > 0 else Int32(0))
            column = column if i < own[1] else d.hidden_local + place
            rOthers[k] = half_bits(others[0] + Int64(place) * 2)
        pointer = cute.make_ptr(
            Float32, nx.weight + Int64(column) * 4, cute.AddressSpace.gmem, assumed_align=4
        )
        rW[k] = cute.make_tensor(pointer, cute.make_layout((1,)))[0]
        for s in cutlass.range_constexpr(d.bank_rows):
            start = nx.banks.old + s * d.hidden * 2
            if cutlass.const_expr(s >= d.bank_old):
                start = nx.banks.new + (s - d.bank_old) * d.hidden * 2
            # any memory will do for a row that is not there
            rB[s, k] = half_bits((start if there[s] else nx.weight) + Int64(column) * 2)
        rP[k] = prefix_at(c, column, op)
    return Columns(rW, rP, rOthers, rB, there)

@cute.jit
def prefix_at(c: Ctx, column: Int32, op: cutlass.Constexpr):
    """A column of the prefix, from where the thread that has it keeps it, as the bits of a bf16."""
    g = op.wide
    i = column // 8
    place = (i // (32 * g.width) * op.threads + i % (32 * g.width)) * 8 + column % 8
    kept = cute.make_tensor(
        cute.recast_ptr(c.kept.iterator, dtype=Uint16), cute.make_layout((2 * op.kept_row,))
    )
    return kept[place].to(Uint32)

@cute.jit
def sums_at(c: Ctx, op: cutlass.Constexpr):
    """Where those who make columns leave them for those who post sums, f32."""
    start = op.plain_reductions * STRIDE + VALUES * op.warps + 4
    return cute.make_tensor(c.red.iterator + start, cute.make_layout((op.dot_columns,)))

@cute.jit
def close_half(c: Ctx, nx: Next, place: tuple, cols: Columns, op: cutlass.Constexpr):
    """This CTA's columns are posted, and in `sums_at`: says so, then the last warps post their sums, which say
    themselves that they are there. place = (layer, whether its FFN made them, how many this CTA made, how many in all).
    """
    # ptxas takes the lanes of a warp to be together at the end of the loop over halves, and counts it in registers of
    # the warp; where lanes had parted in the loop over columns they were not, and the loop was counted twice
    cute.arch.sync_warp()
    if nx.releases:
        arrive(c, op)
    else:
        hint(c, op)
    layer, second, own, n = place
    if c.warp >= op.warps - op.dot_warps:
        sSum = sums_at(c, op)
        rV = cute.make_rmem_tensor(cute.make_layout((VALUES,)), Float32)
        rV.fill(0.0)
        for k in cutlass.range_constexpr(dot_turns(op)):
            i = dot_index(c, k, op)
            x = pack_bf16(Float32(0.0), sSum[within(i, own)])
            x = x if i < own else cols.others[k] << 16
            p = add_bf16x2(cols.prefix[k] << 16, x)
            p = x if nx.anew else p
            p = high(p) if i < n else Float32(0.0)
            w = cols.weight[k] if i < n else Float32(0.0)
            rV[0] = rV[0] + p * p
            rV[1] = rV[1] + p * w
            for s in cutlass.range_constexpr(op.d.bank_rows):
                b = (cols.bank[s, k] << 16).bitcast(Float32)
                b = b if cols.there[s] else Float32(0.0)
                rV[2 + s] = rV[2 + s] + p * b
                rV[4 + s] = rV[4 + s] + b * w
        x = eight_sums(c, rV)
        if c.lane % 4 == 0:
            entry = (second * op.ctas + c.cta) * op.dot_warps + c.warp - (op.warps - op.dot_warps)
            post(c, "dots", turn_of(c, layer, LAYERS), entry * VALUES + c.lane // 4, x, op)
    cute.arch.sync_warp()

# ---- latent_moe_codes: Part of the latent MoE: 4-bit expert matrices (MXFP4, NVFP4), their codes as bf16, and products with them.

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
def ask_until(bar: Any, parity: Int32):
    """Waits for the phase of that parity of an mbarrier by asking again and again: a lane whose next copy waits for it
    hears sooner than one that `mbarrier_wait` lets sleep."""
    ready = Int32(0)
    while ready == 0:
        ready = passed(bar, parity)

@cute.jit
def at_hand(x: Int32):
    """x, computed here: what a wait is followed by shall be ready when it ends, and a compiler moves it behind."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )

@cute.jit
def at_hand_address(x: Int64):
    """As `at_hand`."""
    return cute.arch.inline_ptx(
        "mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[x]
    )

@cute.jit
def stage_free(c: Ctx, it: Int32, op: cutlass.Constexpr, quick: Any = None):
    """Slot of stage number `it`, once its last use is over and few enough stages are on their way.

    What is on its way queues before everything else in the memory system: with a whole ring of 200 KB a CTA an edge
    takes 3 us instead of 0.6. But consumers that find nothing in the ring wait for one stage after another, the longer
    the slower their SM is: while fewer than `hungry` stages are on their way or there, the next one waits for none.
    quick: whether consumers are at what is brought and wait for no edge, in the decode step: then `burst` stages may
    travel.
    """
    slot = it % op.stages
    hungry = 0 < op.in_flight < getattr(op, "hungry", 0) <= op.stages
    paced = 0 < op.in_flight < op.stages and not hungry
    if cutlass.const_expr(paced):
        before = it - op.in_flight
        if cutlass.const_expr(quick is not None and op.burst > 0):
            before = it - op.burst if quick else before
        near, turn = at_hand(before % op.stages), at_hand((before // op.stages) & 1)
    if it >= op.stages:
        ask_until(c.empty + slot, (it // op.stages - 1) & 1)
    if cutlass.const_expr(hungry):
        near, far = it - op.in_flight, it - op.hungry
        if far >= 0:
            ready = Int32(0)
            while ready == 0:
                ready = passed(c.full + near % op.stages, (near // op.stages) & 1, 128)
                if ready == 0:
                    ready = passed(c.empty + far % op.stages, (far // op.stages) & 1)
    elif cutlass.const_expr(paced):
        if before >= 0:
            ask_until(c.full + near, turn)
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
        n = rows - first if rows - first < g.chunk else Int32(g.chunk)
        start = at_hand_address(source + Int64(first) * g.row_bytes)
        size = at_hand(n * g.row_bytes)
        slot = stage_free(c, it, op)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, size)
        bulk(c, slot, Int32(0), start, size, op)
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
    """Stages of this CTA's rows of matrix number `part` of `decode_bring.parts`: one copy of the code for all of them,
    which one warp alone would else fetch anew every time.

    Quick are those of a layer's first matrix that the ring did not hold when it began, and the first of the shared
    expert's, which comes behind a stage of a row or two."""
    row = cute.make_tensor(c.list.iterator + part * 6, cute.make_layout((6,)))
    source = c.tab[layer * COUNT + row[0]] + Int64(row[1])
    rows, row_bytes, chunk, apart = row[2], row[3], row[4], row[5]
    for first in cutlass.range(0, rows, chunk, unroll=1):
        quick = first // chunk >= op.stages if part == 0 or part == 2 else part == 6 and first == 0
        n = rows - first if rows - first < chunk else chunk
        start = at_hand_address(source + Int64(first) * row_bytes)
        size = at_hand(n * row_bytes)
        slot = stage_free(c, it, op, quick)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * size if apart > 0 else size)
        bulk(c, slot, Int32(0), start, size, op)
        if apart > 0:
            bulk(c, slot, chunk * row_bytes, start + Int64(apart), size, op)
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

@cute.jit
def stage_loaded(c: Ctx, slot: Int32):
    """As `stage_done`, where nothing that the compiler keeps in place has used what was loaded of the stage.

    An arrival does not wait for the loads before it: behind others that wait for memory they can still be on their way
    when the stage is filled again, by the async proxy (seen in the latent MoE, docs/kernels-log.md, L19). Products do
    not help where they come last: ptxas moves them behind the arrival. Where sums of them are stored or added before,
    `stage_done` does; `sandbox.sass.early_arrivals` of the machine code tells which it is.
    """
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")
    stage_done(c, slot)

# ---- row_products: Rows of `hidden` columns in the ring, two a stage, times one token on tensor cores; a stage can be held over an

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

class Rows2(NamedTuple):
    """Words [4, per] of the two rows of a stage."""

    a: Any
    b: Any

def no_rows(op):
    return Rows2(*(cute.make_rmem_tensor(cute.make_layout((4, op.wide.per)), Uint32) for _ in "ab"))

@cute.jit
def load_stage(c: Ctx, it: Int32, n: Int32, r: Rows2, op: cutlass.Constexpr):
    """A stage's two rows (the first twice if n is 1), which is given back."""
    g = op.wide
    slot = stage_full(c, it, op)
    load_row(c, slot * (op.stage // 16), r.a, g)
    load_row(c, slot * (op.stage // 16) + (n - 1) * g.vecs, r.b, g)
    stage_loaded(c, slot)

@cute.jit
def hold(c: Ctx, it: Int32, rows: Int32, pairs: Boolean, op: cutlass.Constexpr):
    """The first stage of `drain_pairs` before what it is multiplied with is known: the ring has room for one more while
    this CTA waits for others. Zeros where there are no rows."""
    r = no_rows(op)
    for x in r:
        # not what it was a half ago, which would stay in registers until then
        x.fill(0)
    if rows > 0:
        load_stage(c, it, Int32(2) if pairs or rows > 1 else Int32(1), r, op)
    return r

@cute.jit
def drain_two(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain_wide` where a stage has two rows: it is given back once they are in registers, before their product."""
    g = op.wide
    chunk = Int32(1) if pairs else Int32(2)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    r = no_rows(op)
    for first in cutlass.range(0, rows, chunk, unroll=1):
        n = Int32(1) if rows - first < chunk else Int32(2)
        # warps beyond the width make sums that nobody keeps
        load_stage(c, it, n, r, op)
        rC.fill(0.0)
        for v in cutlass.range_constexpr(g.per):
            mma_rows(rC, r.a[None, v], r.b[None, v], rX[None, v])
        x, y = diagonal(c, rC)
        total = diagonal_sum(x, y)
        if c.lane < n and c.warp < g.width:
            row = 2 * first if pairs else first
            c.part[(base + row + c.lane) * STRIDE + c.warp] = total
        it += 1
    return it

@cute.jit
def times_stage(c: Ctx, r: Rows2, rX: cute.Tensor, op: cutlass.Constexpr):
    """The diagonals of a stage's two rows."""
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    rC.fill(0.0)
    for v in cutlass.range_constexpr(op.wide.per):
        mma_rows(rC[None, v % 2], r.a[None, v], r.b[None, v], rX[None, v])
    for e in cutlass.range_constexpr(4):
        rC[e, 0] = rC[e, 0] + rC[e, 1]
    return diagonal(c, rC[None, 0])

@cute.jit
def drain_pairs(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr,
    held: Any = None,
):  # fmt: skip
    """`drain_two` of two stages at a time: their sums travel between lanes together. held = (the first one's `Rows2`,
    whether it is there)."""
    g = op.wide
    chunk = Int32(1) if pairs else Int32(2)
    r, here = (no_rows(op), Boolean(False)) if held is None else held
    for first in cutlass.range(0, rows, 2 * chunk, unroll=1):
        left = rows - first
        n = Int32(1) if left < chunk else Int32(2)
        m = Int32(0)
        if first > 0 or not here:
            load_stage(c, it, n, r, op)
        x, y = times_stage(c, r, rX, op)
        it += 1
        z, w = Float32(0.0), Float32(0.0)
        if left > chunk:
            m = Int32(1) if left - chunk < chunk else Int32(2)
            load_stage(c, it, m, r, op)
            z, w = times_stage(c, r, rX, op)
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
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr,
    held: Any = None,
):  # fmt: skip
    if cutlass.const_expr(getattr(op, "twos", 1) > 1):
        it = drain_pairs(c, it, rows, pairs, base, rX, op, held)
    else:
        it = drain_two(c, it, rows, pairs, base, rX, op)
    return it

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
    gathers = d.gpus > 1 and d.latent_sharded
    rIn = cute.make_rmem_tensor(cute.make_layout((8, per if gathers else 1)), Uint32)
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if cutlass.const_expr(gathers):
            rIn[None, v].fill(0)
            if i < vecs:
                look_either(c, "latent", layer, (start, own, i), rIn[None, v], op)
        elif i < own:
            peek(start + Int64(i) * 16, rL[None, v])
        elif i < vecs:
            if cutlass.const_expr(d.latent_rows < d.latent):
                words_at(field(c, layer, F["remote_latent"], COUNT), i - own, rL[None, v])
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if cutlass.const_expr(gathers):
            if i < vecs:
                take_either(c, "latent", layer, (start, own, i), rIn[None, v], rL[None, v], op)
        elif i < own:
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
    if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
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
            if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
                total = round_bf16(total) + rRemote[turn_]
            if cutlass.const_expr(d.gpus > 1):
                tell_rank(c, "moe", layer, first + i, total)
            post(c, "z", turn, first + i, total, op)
    return it

# ---- router: The router: f32 logits, sigmoid scores, top-k by score plus bias, weights from the scores alone.

@cute.jit
def order_key(z: Float32):
    """Unsigned key in the order of z as a real number (-0 = +0); NaN 1, below every number; 0 stays free for absent."""
    bits = (z + Float32(0.0)).bitcast(Uint32)
    key = ~bits if bits >= Uint32(0x80000000) else bits | Uint32(0x80000000)
    return Uint32(1) if z != z else key

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

# ---- products: Products of bf16 rows in the ring with one token, on tensor cores: sums of warps, a row each.

def four_in_hand(g):
    """Whether stages have so many rows that a warp takes four at once: then a stage is one turn, not two."""
    return not g.pair and g.per == 1 and g.chunk >= 4 * g.passes

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
def drain(
    c: Ctx,
    it: Int32,
    rows: Int32,
    base: Int32,
    rX: cute.Tensor,
    g: cutlass.Constexpr,
    op: cutlass.Constexpr,
    held: Any = None,
):
    """part[base + row, warp of the row] for `rows` rows (pairs: 2 row is gate, 2 row + 1 up); rX words [4, per]. held:
    as `drain_pairs`."""
    if cutlass.const_expr(getattr(op, "couples", 1) > 1 and four_in_hand(g)):
        it = drain_four(c, it, rows, base, rX, g, op)
    elif cutlass.const_expr(getattr(op, "couples", 1) > 1 and one_in_hand(g, op)):
        it = drain_twos(c, it, rows, Boolean(g.pair), base, rX, op, held)
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

@cute.jit
def drain_wide(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr,
    held: Any = None,
):  # fmt: skip
    """`drain` for rows of `hidden` columns, single or in pairs as the caller finds at run time: one copy of the code
    serves them all."""
    if cutlass.const_expr(getattr(op, "couples", 1) > 1 and one_in_hand(op.wide, op)):
        it = drain_twos(c, it, rows, pairs, base, rX, op, held)
    else:
        it = drain_wide_rows(c, it, rows, pairs, base, rX, op)
    return it

@cute.jit
def drain_wide_rows(
    c: Ctx, it: Int32, rows: Int32, pairs: Boolean, base: Int32, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """`drain_wide`, whatever a stage holds."""
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

# ---- moe: The FFN with experts in the persistent kernel: router, shared expert, routed experts, up-projection, in order.

@cute.jit
def shared_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """c.own = bf(shared partial + the others') of the columns whose up-projection this CTA makes; the rest is sent.

    Ends with a barrier: the experts' sums go where these were.
    """
    d = op.d
    g = op.rows(d.shared_dim)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    sends = d.hidden > d.hidden_local
    if cutlass.const_expr(sends and d.gpus == 1):
        remote = field(c, layer, F["remote_shared"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, most(d.hidden_local, op.ctas), op)
    load_box(c, "hs", turn, rX, g, op)
    it = drain(c, it, n, Int32(0), rX, g, op)
    if cutlass.const_expr(sends):
        first_s, n_s = share(d.hidden - d.hidden_local, c.cta, op.ctas)
        it = drain(c, it, n_s, n, rX, g, op)
        consumers(op)
        if cutlass.const_expr(d.gpus == 1):
            gSend = at(BFloat16, field(c, layer, F["send"], COUNT), d.hidden - d.hidden_local)
        for k in cutlass.range_constexpr(-(-most(d.hidden_local, op.ctas) // op.threads)):
            i = c.tid + k * op.threads
            if i < n:
                own = round_bf16(gathered(c, i, g.width))
                if cutlass.const_expr(d.gpus == 1):
                    own = round_bf16(own + rRemote[k])
                c.own[i] = own
        for i in cutlass.range(c.tid, n_s, op.threads, unroll=1):
            if cutlass.const_expr(d.gpus > 1):
                tell_rank(c, "shared", layer, first_s + i, gathered(c, n + i, g.width))
            else:
                gSend[first_s + i] = gathered(c, n + i, g.width).to(BFloat16)
    else:
        consumers(op)
        for i in cutlass.range(c.tid, n, op.threads, unroll=1):
            c.own[i] = round_bf16(gathered(c, i, g.width))
    consumers(op)
    return it

@cute.jit
def up_projection(
    c: Ctx, layer: Int32, rN: cute.Tensor, turn: Int32, it: Int32, y: Any, op: cutlass.Constexpr,
    nx: Any = None,
):  # fmt: skip
    """delta (and y, where given) = bf(bf(bf(RMS(z; latent_norm)) W_up^T) + shared) of this CTA's columns; with nx box
    dots of them and of a share of those that only other ranks make, and the half is closed."""
    d = op.d
    g = op.rows(d.latent)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    first, n = share(d.hidden_local, c.cta, op.ctas)
    if cutlass.const_expr(nx is not None):
        sSum, others, all_ = sums_at(c, op), None, n
        if cutlass.const_expr(d.hidden_local < d.hidden):
            first_o, n_o = share(d.hidden - d.hidden_local, c.cta, op.ctas)
            others, all_ = (field(c, layer, F["remote_delta"], COUNT), first_o, n_o), n + n_o
        cols = ask_columns(c, nx, (first, n), others, op)
    load_box(c, "z", turn, rX, g, op)
    if cutlass.const_expr(d.gpus > 1):
        join_ranks(c, "moe", layer, rX, g, op)
    normalise(c, rX, rN, g, op)
    it = drain(c, it, n, Int32(0), rX, g, op)
    consumers(op)
    if cutlass.const_expr(d.gpus > 1):
        sum_shared(c, layer, op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        u = round_bf16(gathered(c, i, g.width))
        if cutlass.const_expr(d.gpus > 1):
            tell_rank(c, "delta", layer, first + i, u + c.own[i])
        post(c, "delta", turn, first + i, u + c.own[i], op)
        if cutlass.const_expr(y is not None):
            y[first + i] = (u + c.own[i]).to(BFloat16)
        if cutlass.const_expr(nx is not None):
            sSum[i] = u + c.own[i]
    if cutlass.const_expr(nx is not None):
        close_half(c, nx, (layer, Int32(1), n, all_), cols, op)
    return it

# ---- moe_fill: What the producer brings of an FFN: the front, routed experts once the routing is known, the up-projection.

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
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        found = []
        for k in cutlass.range_constexpr(op.down_slots):
            source = Int64(c.ids[within(start + k, d.topk)]) * d.latent + first
            codes = field(c, layer, F["w2"], COUNT) + source * g.code_bytes
            scales = field(c, layer, F["w2_scale"], COUNT) + source * g.scale_bytes
            found.append((at_hand_address(codes), at_hand_address(scales)))
        s = stage_free(c, it, op)
        cute.arch.mbarrier_arrive_and_expect_tx(
            c.full + s, many * n * (g.code_bytes + g.scale_bytes)
        )
        for k in cutlass.range_constexpr(op.down_slots):
            if k < many:
                place = Int32(k * piece)
                bulk(c, s, place, found[k][0], n * g.code_bytes, op)
                place = Int32(k * piece + op.down_rows * g.code_bytes)
                bulk(c, s, place, found[k][1], n * g.scale_bytes, op)
        it += 1
    return it

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

# ---- tile_plan: Sizes of the tile kernel (a chain of FFNs for 1 to 8 tokens): tiles of weight rows, ring stages, shared memory.

SHIFT = 64
"""Bytes between the even and the odd rows of a tile, so that neighbouring rows lie in different banks."""

STAGE = 28672
"""Bytes of weights of a full stage of bf16 rows."""

CODE_TILE = 8
"""Rows of w1, and as many of w3, in a stage: sixteen rows of an MMA."""

@dataclass(frozen=True)
class Tile:
    """A bf16 matrix with rows of `k` columns, `height` (8 or 16) rows at a time.

    A stage has all rows of a tile and some of their columns; a warp has two steps of 32 columns of every 64 * active,
    the same ones whatever the height, so that tiles of both heights take the same registers of x.
    """

    k: int
    warps: int
    height: int

    @property
    def active(self):
        """Warps that take part."""
        return max(a for a in range(1, self.warps + 1) if self.k // 64 % a == 0)

    @property
    def spans(self):
        """How many times 64 * active columns a row has: a warp has eight registers of x for each."""
        return self.k // 64 // self.active

    @property
    def wide(self):
        """Spans in a stage: two of them if it holds no more bytes than one of sixteen rows by 896 columns."""
        fits = 256 * self.active * self.height <= STAGE
        return 2 if fits and self.height == 8 and self.spans % 2 == 0 else 1

    @property
    def slices(self):
        """Stages of a tile."""
        return self.spans // self.wide

    @property
    def piece(self):
        """Bytes of one row in a stage."""
        return 128 * self.active * self.wide

    @property
    def block(self):
        """Bytes from the even rows to the odd ones."""
        return self.height // 2 * self.piece + SHIFT

    @property
    def bytes(self):
        return self.block + self.height // 2 * self.piece

@dataclass(frozen=True)
class TileOp:
    """Everything the kernel knows when it is compiled. `d` is cfg.dims."""

    d: object
    ctas: int
    warps: int
    wanted: int
    spin: int
    early: int = 0
    """CTAs that may be missing when boxes are looked into that say themselves what is there."""
    in_flight: int = 0
    """Stages that may be on their way at once, 0: the whole ring (`ring.stage_free` says why)."""
    ahead: int = 0
    """Chunks of w2 of a warp's first expert that are made operands before h is there, for a single token."""
    packed: bool = False
    """Whether codes are read from copies that `tile_pack` made."""

    @property
    def threads(self):
        return self.warps * 32

    @property
    def stride(self):
        """Floats between rows of partial sums: one a warp, odd against bank conflicts."""
        return max(STRIDE, self.warps | 1)

    @property
    def tokens(self):
        return self.d.rows

    @property
    def alone(self):
        """One token: its vectors pass through shared memory, a warp of its own routes it."""
        return self.d.rows == 1

    @property
    def block(self):
        """Threads of a CTA: consumers, a producer warp, for one token a routing warp."""
        return self.threads + (64 if self.alone else 32)

    @property
    def vector_words(self):
        """Shared memory for the vectors of a single token: x, or hs and the latent, or h of all its experts, or z."""
        d = self.d
        found = max(d.hidden, d.shared_dim + d.latent, d.topk * d.expert_dim)
        return found // 2 if self.alone else 4

    @property
    def fenced(self):
        """Whether edges order what was written before; else a value says itself that it is there."""
        return self.d.rows > 1

    def tile(self, k, height):
        return Tile(k, self.warps, height)

    @property
    def front_rows(self):
        d, g = self.d, self.ctas
        return most(d.latent_rows, g) + 2 * most(d.shared_dim, g)

    @property
    def shared_rows(self):
        d, g = self.d, self.ctas
        return most(d.hidden_local, g) + most(d.hidden - d.hidden_local, g)

    # ---- experts

    @property
    def up(self):
        """w1 and w3."""
        return CodeRows(self.d.latent, 0, 2)

    @property
    def up_block(self):
        return CODE_TILE * self.up.code_bytes + SHIFT

    @property
    def up_scales(self):
        """Where the scales of w1 begin in a stage; those of w3 follow."""
        return -(-(self.up_block + CODE_TILE * self.up.code_bytes) // 128) * 128

    @property
    def up_bytes(self):
        return self.up_scales + 2 * CODE_TILE * self.up.scale_bytes

    @property
    def up_units(self):
        """Stages that an expert's w1 and w3 make."""
        return self.d.expert_dim // CODE_TILE

    @property
    def up_active(self):
        """Warps that share the columns of w1 and w3, 128 at a time."""
        chunks = self.d.latent // 128
        return max(a for a in range(1, self.warps + 1) if chunks % a == 0)

    @property
    def up_chunks(self):
        """Times 128 columns that a warp has."""
        return self.d.latent // 128 // self.up_active

    @property
    def down(self):
        """w2."""
        return CodeRows(self.d.expert_dim, 0, 1)

    @property
    def down_rows(self):
        return most(self.d.latent, self.ctas, self.down.unit)

    @property
    def down_piece(self):
        """Bytes of the CTA's rows of one expert: codes, then scales."""
        return self.down_rows * (self.down.code_bytes + self.down.scale_bytes)

    @property
    def down_slots(self):
        """Experts whose w2 rows share a stage."""
        return max(1, min(self.touched, self.stage // self.down_piece))

    @property
    def down_tiles(self):
        return -(-self.down_rows // 16)

    @property
    def down_chunks(self):
        """Times 128 columns of w2."""
        return -(-self.d.expert_dim // 128)

    @property
    def down_share(self):
        """Warps that share the experts of one tile of w2 rows."""
        return self.warps // self.down_tiles

    @property
    def touched(self):
        """The most experts that the tokens can ask for."""
        return min(self.d.experts, self.d.topk * self.tokens)

    @property
    def pairs(self):
        """Tokens times experts of a token."""
        return self.d.topk * self.tokens

    @property
    def held(self):
        """Stages times tokens of w1 and w3 whose sums wait in shared memory."""
        if self.tokens == 1:
            return most(self.d.topk * self.up_units, self.ctas)
        return max(self.tokens, 24)

    # ---- memory

    @property
    def stage(self):
        """Bytes of a ring stage."""
        d = self.d
        found = [self.tile(k, h).bytes for k, h in
                 ((d.hidden, 8), (d.shared_dim, 16), (d.latent, 8))]  # fmt: skip
        return -(-max(*found, self.up_bytes, self.down_piece) // 128) * 128

    @property
    def part_slots(self):
        """Sums of `warps` numbers that one phase leaves in shared memory; keys of the top-k lie there too."""
        d, t = self.d, self.tokens
        rows = max(
            most(d.router_rows, self.ctas), self.front_rows, self.shared_rows, 16 * self.down_tiles
        )
        return max(rows * t, 16 * self.held, -(-t * d.experts // self.stride))

    @property
    def stages(self):
        """Of the ring: as many as wanted, or as fit."""
        d = self.d
        lists = (
            self.touched * (8 + 8 * self.tokens) + 2 * self.tokens * d.experts + 4 * self.held + 256
        )
        small = (
            self.part_slots * self.stride * 4
            + d.layers * 8 * 32
            + lists
            + self.tokens * (self.stride + 16) * 4
        )
        small += most(d.hidden_local, self.ctas) * self.tokens * 4 + 512 + 4 * self.vector_words
        small += 8 * d.experts + 128 if self.alone else 0
        fit = (SHARED_MEMORY - 1024 - small) // self.stage
        return max(2, min(self.wanted or 7, fit))

    @property
    def boxes(self):
        """Name -> (bytes into an instance's record, bytes of an element, elements): what CTAs send each other."""
        d, t, found, at = self.d, self.tokens, {}, 0
        wanted = [
            ("logits", 4, t * d.router_rows), ("latent", 2, t * d.latent_rows), ("hs", 2, t * d.shared_dim),
            ("z", 2, t * d.latent), ("x", 2, t * d.hidden), ("h", 2, t * d.topk * d.expert_dim),
        ]  # fmt: skip
        for name, size, n in wanted:
            found[name] = (at, size, n)
            at += -(-size * n // 128) * 128
        return found

    @property
    def record(self):
        """Bytes of one instance's boxes."""
        start, size, n = self.boxes["h"]
        return start + -(-size * n // 128) * 128

    @property
    def emptied(self):
        """Bytes of a record that say themselves whether they are there."""
        return self.record

    @property
    def mail_words(self):
        """Two sets of records, used by turns: what one step uses, the step before has emptied."""
        return (1 if self.fenced else 2) * self.d.layers * self.record // 4

def refuse_others_tiles(dims):
    """Raises ValueError for a workload that this kernel does not compute."""
    if dims.rows > 8:
        raise ValueError("the tile kernel is for 1 to 8 rows")
    if dims.experts_format != "mxfp4":
        raise ValueError(f"the tile kernel is for MXFP4, not {dims.experts_format}")
    if Tile(dims.shared_dim, 14, 16).slices > 1:
        raise ValueError(
            "the tile kernel takes rows of the shared expert that are whole in a stage"
        )
    if dims.expert_dim % 64 or dims.latent % 128 or dims.hidden % 64 or dims.shared_dim % 64:
        raise ValueError("the tile kernel takes whole 64 columns, and whole 128 of the latent")

# ---- tile_codes: MXFP4 codes of the tile kernel: from the ring to bf16 operands of an MMA, exactly, and products of sixteen rows.

CODE_SCALE_T = 2.0**62
"""Expanded codes are 2^-62 of their value."""

@cute.jit
def spread(word: Uint32, scale: Uint32):
    """As `latent_moe.expand`, two instructions in seven cheaper: a product makes two copies of a nibble, 6 and 12 bits
    up, of which one gives the magnitude and the other the sign. Multiplications run beside the logic, which is scarce.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 m, y;
        and.b32 m, {$r0}, 0x000F000F;  mul.lo.u32 m, m, 0x1040;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w0}, m, {$r1};
        and.b32 m, {$r0}, 0x00F000F0;  mul.lo.u32 m, m, 0x104;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w1}, m, {$r1};
        shr.b32 y, {$r0}, 8;
        and.b32 m, y, 0x000F000F;      mul.lo.u32 m, m, 0x1040;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w2}, m, {$r1};
        and.b32 m, y, 0x00F000F0;      mul.lo.u32 m, m, 0x104;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w3}, m, {$r1};
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word, scale],
    )

@cute.jit
def spread_packed(word: Uint32, scale: Uint32):
    """`spread` of a word of `tile_pack`: twelve instructions for eight codes instead of seventeen, and five instead of
    nine that are logic or shifts. A product moves the word up; bit 31 of the factor adds a bit where nothing is
    carried, and keeps ptxas from making a shift of the product. lop3 0x28 is (a ^ b) & c.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 a, b, c, d;
        shf.r.wrap.b32 b, {$r0}, {$r0}, 6;
        mul.lo.u32 a, {$r0}, 0x80000100;        lop3.b32 a, a, {$r0}, 0x81C081C0, 0x28;
        mul.lo.u32 c, {$r0}, 0x80000010;        mul.lo.u32 d, b, 0x80000010;
        and.b32 b, b, 0x81C081C0;               and.b32 c, c, 0x81C081C0;
        and.b32 d, d, 0x81C081C0;               mul.rn.bf16x2 {$w0}, a, {$r1};
        mul.rn.bf16x2 {$w1}, b, {$r1};          mul.rn.bf16x2 {$w2}, c, {$r1};
        mul.rn.bf16x2 {$w3}, d, {$r1};
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word, scale],
    )

@cute.jit
def operands(word: Uint32, scale: Uint32, op: cutlass.Constexpr):
    """Four bf16 pairs of a word of the ring, codes (j, j + 4) in pair j."""
    if cutlass.const_expr(op.packed):
        found = spread_packed(word, scale)
    else:
        found = spread(word, scale)
    return found

@cute.jit
def scale_of(byte: Uint32):
    """As `scale_word`, a multiplication instead of three instructions of logic."""
    return byte * Uint32(0x00800080) + Uint32(0x20002000)

@cute.jit
def group_of(c: Any, at_code: Int32, at_scale: Int32):
    """(codes, factor) of one group of 32: four words from the ring, 16 bytes times `at_code` in."""
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    cute.autovec_copy(cute.local_tile(c.ring, (4,), (at_code,)), rW)
    byte = cute.recast_tensor(c.ring, Uint8)[at_scale]
    return rW, scale_of(Uint32(byte) & Uint32(0xFF))

@cute.jit
def codes_times(
    rC: cute.Tensor, columns: tuple, a: tuple, b: tuple, rX: cute.Tensor, op: cutlass.Constexpr
):
    """rC[4, columns] += a group of row g and one of row g + 8 times the same 32 columns of x, rX words [4, 4]; times
    2^-62. Products on one column wait for each other, some 35 cycles each, those on several do not."""
    for i in cutlass.range_constexpr(4):
        mma_rows(
            rC[None, columns[i % len(columns)]], operands(a[0][i], a[1], op), operands(b[0][i], b[1], op),
            rX[None, i],
        )  # fmt: skip

def sum_columns(v, op):
    """Columns of sums that chunk v adds to: two of its own for one token, whose kernels have the registers."""
    return (2 * v, 2 * v + 1) if op.tokens == 1 else (0,)

def sums_of(chunks, op):
    """How many columns chunks add to."""
    return 1 + max(max(sum_columns(v, op)) for v in range(chunks))

@cute.jit
def join_columns(rC: cute.Tensor):
    """Column 0 of rC[4, columns] = the sum of all."""
    for v in cutlass.range_constexpr(1, rC.shape[1]):
        for e in cutlass.range_constexpr(4):
            rC[e, 0] = rC[e, 0] + rC[e, v]

@cute.jit
def unit_times(c: Any, slot: Int32, rL: cute.Tensor, op: cutlass.Constexpr):
    """rC[4] of sixteen rows, even ones of w1 and odd ones of w3; this warp's columns."""
    g = op.up
    each = 2 if op.tokens == 1 else 1
    rC = cute.make_rmem_tensor(cute.make_layout((4, each * op.up_chunks)), Float32)
    rC.fill(0.0)
    half, i = c.lane // 4 % 2, c.lane // 8
    code = (slot * op.stage + half * op.up_block) // 16 + i * (g.code_bytes // 16)
    scale = slot * op.stage + op.up_scales + (half * CODE_TILE + i) * g.scale_bytes
    for v in cutlass.range_constexpr(op.up_chunks):
        j = (c.warp * op.up_chunks + v) * 4 + c.lane % 4
        codes_times(
            rC, tuple(range(each * v, each * v + each)), group_of(c, code + j, scale + j),
            group_of(c, code + 4 * (g.code_bytes // 16) + j, scale + 4 * g.scale_bytes + j), rL[None, None, v],
            op,
        )  # fmt: skip
    join_columns(rC)
    return rC

@cute.jit
def piece_times(
    c: Any, piece: Int32, tile: Int32, v: Any, given: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """rC += chunk v of the rows 16 tile .. of the piece at byte `piece` of the ring times rX; given = (rC, its columns,
    rX, rows)."""
    rC, columns, rX, n = given
    g = op.down
    groups = op.d.expert_dim // 32
    a = tile * 16 + c.lane // 4
    b = a + 8 if a + 8 < n else n - 1
    a = a if a < n else n - 1
    scales = piece + op.down_rows * g.code_bytes
    j = 4 * v + c.lane % 4
    j = j if j < groups else groups - 1
    codes_times(
        rC, columns, group_of(c, piece // 16 + a * (g.code_bytes // 16) + j, scales + a * g.scale_bytes + j),
        group_of(c, piece // 16 + b * (g.code_bytes // 16) + j, scales + b * g.scale_bytes + j), rX, op,
    )  # fmt: skip

# ---- tile_rank: The last part of a top-k by one warp: from keys and scores in its registers to ids and weights, in shared memory.

@cute.jit
def push(c: Any, rKey: cute.Tensor, rScore: cute.Tensor, bound: Uint32, op: cutlass.Constexpr):
    """Experts whose key reaches the bound into c.key, c.found and c.score: how many. Each lane's lie together."""
    each = -(-op.d.experts // 32)
    mine = Int32(0)
    for j in cutlass.range_constexpr(each):
        mine += Int32(1) if rKey[j] >= bound and rKey[j] > Uint32(0) else Int32(0)
    end = mine
    for k in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync(end, (c.lane - (1 << k)) & 31)
        end += below if c.lane >= (1 << k) else Int32(0)
    at_ = end - mine
    for j in cutlass.range_constexpr(each):
        if rKey[j] >= bound and rKey[j] > Uint32(0):
            c.key[at_], c.found[at_], c.score[at_] = rKey[j], Uint16(c.lane + 32 * j), rScore[j]
            at_ += 1
    cute.arch.sync_warp()
    return cute.arch.shuffle_sync(end, 31)

@cute.jit
def bound_alone(c: Any, mine: Uint32, topk: cutlass.Constexpr):
    """As `bound_of`, through shared memory: a warp alone would wait for every shuffle."""
    c.best[c.lane] = mine
    cute.arch.sync_warp()
    rBest = cute.make_rmem_tensor(cute.make_layout((4, 8)), Uint32)
    for k in cutlass.range_constexpr(8):
        cute.autovec_copy(cute.local_tile(c.best, (4,), (k,)), rBest[None, k])
    ahead_ = Int32(0)
    for k in cutlass.range_constexpr(32):
        rival = rBest[k % 4, k // 4]
        ahead_ += Int32(1) if rival > mine or (rival == mine and k < c.lane) else Int32(0)
    return cute.arch.warp_redux_sync(mine if ahead_ == topk - 1 else Uint32(0), "max")

@cute.jit
def rank_alone(c: Any, given: tuple, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.share = the routing of a single token, by this warp; producer and consumers are told.

    given = keys, scores, the largest key of this lane's experts; c has lane, cta, key, found, score, best, ids, share
    and the mbarrier routed.
    """
    rKey, rScore, top = given
    d = op.d
    count = push(c, rKey, rScore, bound_alone(c, top, d.topk), op)
    for i in cutlass.range(c.lane, count, 32, unroll=1):
        # a tensor over a recast pointer forgets that it is unsigned
        key, e, s = Uint32(c.key[i]), Int32(c.found[i]), c.score[i]
        rank = Int32(0)
        for k in cutlass.range(count, unroll=8):
            rival, other = Uint32(c.key[k]), Int32(c.found[k])
            rank += Int32(1) if rival > key or (rival == key and other < e) else Int32(0)
        if rank < d.topk:
            c.ids[rank] = e
            # of a score that is no number the key is 1, below all others
            c.share[rank] = Float32(0.0) if key == Uint32(1) else s
    cute.arch.sync_warp()
    s = Float32(0.0)
    if c.lane < d.topk:
        s = c.share[c.lane]
    total = lanes_sum(s, 32) + Float32(1e-20)
    if c.lane < d.topk:
        c.share[c.lane] = round_bf16(s / total)
        if c.cta == 0:
            mIds[c.lane] = c.ids[c.lane]
    cute.arch.sync_warp()
    if c.lane == 0:
        cute.arch.mbarrier_arrive(c.routed)

# ---- units: Routed experts of the decode step as the tile kernel has them, and a warp of its own that chooses them.

# ---- producer
@cute.jit
def fill_experts(c: Ctx, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """This CTA's units: [8 rows of w1 | 8 of w3, shifted | scales of both], of experts in the order of the choice."""
    d, t = op.d, op.tile
    g = t.up
    first, n = share(d.topk * t.up_units, c.cta, op.ctas)
    codes, scales = CODE_TILE * g.code_bytes, CODE_TILE * g.scale_bytes
    for u in cutlass.range(first, first + n, unroll=1):
        row = Int64(c.ids[u // t.up_units] * d.expert_dim + u % t.up_units * CODE_TILE)
        found = []
        for half in cutlass.range_constexpr(2):
            name = "w3" if half else "w1"
            w = field(c, layer, F[name], COUNT) + row * g.code_bytes
            s = field(c, layer, F[name + "_scale"], COUNT) + row * g.scale_bytes
            found += [at_hand_address(w), at_hand_address(s)]
        slot = stage_free(c, it, op, u > first)
        cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * (codes + scales))
        for half in cutlass.range_constexpr(2):
            bulk(c, slot, Int32(half * t.up_block), found[2 * half], Int32(codes), op)
            place = Int32(t.up_scales + half * scales)
            bulk(c, slot, place, found[2 * half + 1], Int32(scales), op)
        it += 1
    return it

# ---- the warp that chooses
class Ranking(NamedTuple):
    """What `rank_alone` wants of a context; score, key, found and best are scratch in the pool."""

    lane: Any
    cta: Any
    key: Any
    found: Any
    score: Any
    best: Any
    ids: Any
    share: Any
    routed: Any

@cute.jit
def choose_alone(c: Ctx, layer: Int32, number: Int32, mIds: cute.Tensor, op: cutlass.Constexpr):
    """c.ids, c.weights of FFN `number` of the launch, by this warp; no load stands in a branch."""
    d = op.d
    each = -(-d.experts // 32)
    at_ = op.choice_at
    r = Ranking(
        c.lane, c.cta, view(c, Uint32, at_ + 128, d.experts), view(c, Uint16, at_ + 128 + 8 * d.experts, d.experts),
        view(c, Float32, at_ + 128 + 4 * d.experts, d.experts), view(c, Uint32, at_, 32), c.ids, c.weights, c.routed,
    )  # fmt: skip
    turn = turn_of(c, number)
    gBias = at(Float32, field(c, layer, F["router_bias"], COUNT), d.experts)
    rKey = cute.make_rmem_tensor(cute.make_layout((each,)), Uint32)
    rScore = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    rBias = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    rKey.fill(0)
    for j in cutlass.range_constexpr(each):
        rBias[j] = gBias[within(c.lane + 32 * j, d.experts)]
    # in the order of this CTA's consumers first: what they had in the pool is over
    cute.arch.mbarrier_wait(c.routed + 1, number & 1)
    await_line(c, number + 1, op, ROUTE, False, 0)
    for j in cutlass.range_constexpr(each):
        rScore[j] = peek_word(logit_at(c, layer, within(c.lane + 32 * j, d.experts), turn, op))
    top = Uint32(0)
    for j in cutlass.range_constexpr(each):
        if c.lane + 32 * j < d.experts:
            x = insist_word(logit_at(c, layer, c.lane + 32 * j, turn, op), rScore[j], op)
            rScore[j] = sigmoid(x)
            rKey[j] = order_key(rScore[j] + rBias[j])
            top = rKey[j] if rKey[j] > top else top
    rank_alone(r, (rKey, rScore, top), mIds, op)

# ---- consumers
@cute.jit
def ask_latent(c: Ctx, layer: Int32, turn: Int32, op: cutlass.Constexpr):
    """This thread's 16 bytes each of the latent, own and gathered, on their way."""
    vecs, own = op.d.latent // 8, op.d.latent_rows // 8
    many = -(-vecs // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((4, many)), Uint32)
    for v in cutlass.range_constexpr(many):
        i = within(c.tid + v * op.threads, vecs)
        address = box(c, "latent", turn, op) + Int64(i) * 16
        if cutlass.const_expr(op.d.latent_rows < op.d.latent):
            other = field(c, layer, F["remote_latent"], COUNT) + Int64(i - own) * 16
            address = address if i < own else other
        peek(address, r[None, v])
    return r

@cute.jit
def keep_latent(c: Ctx, turn: Int32, r: cute.Tensor, op: cutlass.Constexpr):
    """The pool's first words = the latent that was asked for, pairs in the order of codes. Ends with a barrier."""
    vecs, own = op.d.latent // 8, op.d.latent_rows // 8
    sX = view(c, Uint32, 0, op.d.latent // 2)
    for v in cutlass.range_constexpr(r.shape[1]):
        i = within(c.tid + v * op.threads, vecs)
        if i < own:
            insist(box(c, "latent", turn, op) + Int64(i) * 16, r[None, v], 2, op)
        pair_up(r[None, v])
        if c.tid + v * op.threads < vecs:
            cute.autovec_copy(r[None, v], cute.local_tile(sX, (4,), (i,)))
    consumers(op)

@cute.jit
def units_up(c: Ctx, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """h [slot, row] = bf(SiTU(w1 latent, w3 latent)) of this CTA's units; the latent is in the pool."""
    t = op.tile
    sX = view(c, Uint32, 0, op.d.latent // 2)
    rL = cute.make_rmem_tensor(cute.make_layout((4, 4, t.up_chunks)), Uint32)
    rL.fill(0)
    if c.lane < 4 and c.warp < t.up_active:
        for k in cutlass.range_constexpr(4 * t.up_chunks):
            i = ((c.warp * t.up_chunks + k // 4) * 4 + c.lane % 4) * 4 + k % 4
            cute.autovec_copy(cute.local_tile(sX, (4,), (i,)), rL[None, k % 4, k // 4])
    first, n = share(op.d.topk * t.up_units, c.cta, op.ctas)
    for u in cutlass.range(n, unroll=1):
        slot = stage_full(c, it, op)
        if c.warp < t.up_active:
            rC = unit_times(c, slot, rL, t)
            if c.lane % 4 == 0:
                row = (16 * u + c.lane // 4) * STRIDE + c.warp
                c.part[row], c.part[row + 8 * STRIDE] = rC[0, 0], rC[2, 0]
        stage_done(c, slot)
        it += 1
    consumers(op)
    for i in cutlass.range(c.tid, CODE_TILE * n, op.threads, unroll=1):
        gate = gathered(c, 2 * i, t.up_active) * CODE_SCALE_T
        up = gathered(c, 2 * i + 1, t.up_active) * CODE_SCALE_T
        r = i % CODE_TILE
        place = CODE_TILE * first + i - r + r % 4 * 2 + r // 4
        post(c, "h", turn, place, situ(gate, up), op)
    return it

@cute.jit
def keep_hidden(c: Ctx, turn: Int32, op: cutlass.Constexpr):
    """The pool's first words = h of all experts as it was sent. Ends with a barrier."""
    vecs = op.d.topk * op.d.expert_dim // 8
    many = -(-vecs // op.threads)
    sH = view(c, Uint32, 0, 4 * vecs)
    start = box(c, "h", turn, op)
    r = cute.make_rmem_tensor(cute.make_layout((4, many)), Uint32)
    for v in cutlass.range_constexpr(many):
        peek(start + Int64(within(c.tid + v * op.threads, vecs)) * 16, r[None, v])
    for v in cutlass.range_constexpr(many):
        i = within(c.tid + v * op.threads, vecs)
        insist(start + Int64(i) * 16, r[None, v], 2, op)
        if c.tid + v * op.threads < vecs:
            cute.autovec_copy(r[None, v], cute.local_tile(sH, (4,), (i,)))
    consumers(op)

@cute.jit
def sixteen_times(
    c: Ctx, piece: Int32, tile: Int32, expert: Int32, n: Int32, chunks: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """(row g, row g + 8) of sixteen rows of w2 times these chunks of the expert's h, in every fourth lane."""
    t = op.tile
    groups = op.d.expert_dim // 32
    sH = view(c, Uint32, 0, op.d.topk * op.d.expert_dim // 2)
    rC = cute.make_rmem_tensor(cute.make_layout((4, sums_of(len(chunks), t))), Float32)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rC.fill(0.0)
    for v in chunks:
        group = 4 * v + c.lane % 4
        rX.fill(0)
        if c.lane < 4 and group < groups:
            for k in cutlass.range_constexpr(4):
                i = (expert * groups + group) * 4 + k
                cute.autovec_copy(cute.local_tile(sH, (4,), (i,)), rX[None, k])
        piece_times(c, piece, tile, v, (rC, sum_columns(v, t), rX, n), t)
    join_columns(rC)
    return rC[0, 0] * CODE_SCALE_T, rC[2, 0] * CODE_SCALE_T

@cute.jit
def units_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has one tile of sixteen rows and every `down_share`-th expert.
    """
    d, t = op.d, op.tile
    first, n = share(d.latent, c.cta, op.ctas, t.down.unit)
    if cutlass.const_expr(d.ranks > 1):
        remote = field(c, layer, F["remote_moe"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, op.down_rows, op)
    keep_hidden(c, turn, op)
    tile, turn_ = c.warp % t.down_tiles, c.warp // t.down_tiles
    expert = turn_ if turn_ < t.down_share else Int32(d.topk)
    a, b = Float32(0.0), Float32(0.0)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        end = start + op.down_slots if start + op.down_slots < d.topk else Int32(d.topk)
        while expert < end:
            piece = slot * op.stage + (expert - start) * t.down_piece
            x, y = sixteen_times(c, piece, tile, expert, n, tuple(range(t.down_chunks)), op)
            a += c.weights[expert] * round_bf16(x)
            b += c.weights[expert] * round_bf16(y)
            expert += t.down_share
        stage_done(c, slot)
        it += 1
    if turn_ < t.down_share and c.lane % 4 == 0:
        row = tile * 16 + c.lane // 4
        if row < n:
            c.part[row * STRIDE + turn_] = a
        if row + 8 < n:
            c.part[(row + 8) * STRIDE + turn_] = b
    consumers(op)
    for k in cutlass.range_constexpr(-(-op.down_rows // op.threads)):
        i = c.tid + k * op.threads
        if i < n:
            total = gathered(c, i, t.down_share)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k]
            post(c, "z", turn, first + i, total, op)
    return it

# ---- ffn: The FFN with experts in the decode step, in orders that cover what the chain of FFNs waits for.

# ---- producer
@cute.jit
def fill_two(c: Ctx, it: Int32, one: tuple, two: tuple, op: cutlass.Constexpr):
    """Stages of the rows of two matrices of `hidden` columns, those of the second behind those of the first; each =
    (address, rows)."""
    g = op.wide
    for first in cutlass.range(0, one[1] + two[1], g.chunk, unroll=1):
        left = one[1] + two[1] - first
        n = left if left < g.chunk else Int32(g.chunk)
        a = one[1] - first if one[1] > first else Int32(0)
        a = a if a < n else n
        slot = stage_free(c, it, op)
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
    if cutlass.const_expr(op.router_first):
        for part in cutlass.range(2, unroll=1):
            source = router[0] if part == 0 else latent[0]
            it = fill(c, it, source, router[1] if part == 0 else latent[1], op.wide, op)
    else:
        it = fill_two(c, it, router, latent, op)
    if cutlass.const_expr(op.units and op.shared_first):
        for part in cutlass.range(4, unroll=1):
            which = 6 + part if part < 2 else 11 - part
            if part == 3:
                timeline.mark(c.brought, "routing", layer, kind="wait")
                cute.arch.mbarrier_wait(c.routed, routing & 1)
                timeline.mark(c.brought, "bring experts", layer)
                it = fill_experts(c, layer, it, op)
                it = fill_down(c, layer, it, op)
            it = bring(c, layer, it, which, op)
    else:
        for part in cutlass.range(3, unroll=1):
            it = bring(c, layer, it, 6 + part, op)
            if part == 0:
                timeline.mark(c.brought, "routing", layer, kind="wait")
                cute.arch.mbarrier_wait(c.routed, routing & 1)
                timeline.mark(c.brought, "bring experts", layer)
                if cutlass.const_expr(op.units):
                    it = fill_experts(c, layer, it, op)
                else:
                    it = fill_up(c, layer, it, op)
            elif part == 1:
                it = bring(c, layer, it, Int32(9), op)
                it = fill_down(c, layer, it, op)
    return it

# ---- consumers
@cute.jit
def post_front(c: Ctx, layer: Int32, part: Int32, turn: Int32, op: cutlass.Constexpr):
    """This CTA's logits and latent (with `router_first` the latent is a part of its own), or its elements of the shared
    expert's hidden vector; parts lie in `c.part` one behind the other."""
    d, width = op.d, op.wide.width
    first_r, n_r = share(d.router_rows, c.cta, op.ctas)
    first_l, n_l = share(d.latent_rows, c.cta, op.ctas)
    first_s, n_s = share(d.shared_dim, c.cta, op.ctas)
    start, n = Int32(0), n_r + n_l
    if cutlass.const_expr(op.router_first):
        start, n = (Int32(0), n_r) if part == 0 else (n_r, n_l)
    if part == op.fronts - 1:
        start, n = n_r + n_l, n_s
    for k in cutlass.range(c.tid, n, op.threads, unroll=1):
        if part == op.fronts - 1:
            post(c, "hs", turn, first_s + k, situ_pair(c, start + 2 * k, width), op)
        else:
            i = start + k
            x = gathered(c, i, width)
            if i < n_r:
                post(c, "logits", turn, first_r + i, x, op)
            else:
                post(c, "latent", turn, first_l + i - n_r, x, op)
                if cutlass.const_expr(d.gpus > 1 and d.latent_sharded):
                    tell_rank(c, "latent", layer, first_l + i - n_r, x)

@cute.jit
def ffn(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    mIds: cute.Tensor,
    op: cutlass.Constexpr,
    nx: Any = None,
    held: Any = None,
):
    """The FFN of a layer with experts, number `number` of the launch; delta is posted, not yet hinted at."""
    it, edge = at_
    turn = turn_of(c, number)
    if cutlass.const_expr(not op.units):
        rBias = load_bias(c, layer, op)
    _, n_r = share(op.d.router_rows, c.cta, op.ctas)
    _, n_l = share(op.d.latent_rows, c.cta, op.ctas)
    _, n_s = share(op.d.shared_dim, c.cta, op.ctas)
    for part in cutlass.range(op.fronts, unroll=1):
        timeline.mark(c.track, "front", layer)
        start, n = Int32(0), n_r + n_l
        if cutlass.const_expr(op.router_first):
            start, n = (Int32(0), n_r) if part == 0 else (n_r, n_l)
        if part == op.fronts - 1:
            start, n = n_r + n_l, n_s
        first = None
        if cutlass.const_expr(held is not None):
            first = (held[0], held[1] and part == 0)
        it = drain_wide(c, it, n, part == op.fronts - 1, start, rX, op, first)
        consumers(op)
        post_front(c, layer, part, turn, op)
        if part == 0:
            hint(c, op, ROUTE)
            if cutlass.const_expr(op.units):
                # the warp that chooses may use the pool again
                if c.tid == 0:
                    cute.arch.mbarrier_arrive(c.routed + 1)
            else:
                timeline.mark(c.track, "edge route", layer, kind="edge")
                wait(c, number + 1, op, ROUTE, False, op.missing)
                timeline.mark(c.track, "choose", layer)
                choose(c, layer, turn, rBias, mIds, op)
        elif cutlass.const_expr(not op.units):
            consumers(op)
    if cutlass.const_expr(op.units):
        it, edge = units(c, layer, number, (it, edge), op)
    else:
        it, edge = rows(c, layer, turn, (it, edge), op)
    hint(c, op)
    edge += 1
    timeline.mark(c.track, "edge z", layer, kind="edge")
    rN = load_norm(c, field(c, layer, F["latent_norm"], COUNT), op.rows(op.d.latent))
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "up projection", layer)
    it = up_projection(c, layer, rN, turn, it, None, op, nx)
    return it, edge

@cute.jit
def rows(c: Ctx, layer: Int32, turn: Int32, at_: tuple, op: cutlass.Constexpr):
    """Box z, with experts whose pairs of rows warps have whole; the shared expert's second half between theirs."""
    it, edge = at_
    timeline.mark(c.track, "experts up", layer)
    it = experts_up(c, layer, turn, it, op)
    hint(c, op)
    timeline.mark(c.track, "shared down", layer)
    it = shared_down(c, layer, turn, it, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "experts down", layer)
    return experts_down(c, layer, turn, it, op), edge

@cute.jit
def units(c: Ctx, layer: Int32, number: Int32, at_: tuple, op: cutlass.Constexpr):
    """Box z, with experts in units; the shared expert's second half is made while a warp chooses, behind an edge of its
    own (`shared_first`), or, without one, while h travels."""
    it, edge = at_
    turn = turn_of(c, number)
    if cutlass.const_expr(op.shared_first):
        hint(c, op)
        edge += 1
        timeline.mark(c.track, "edge front", layer, kind="edge")
        wait(c, edge, op, acquire=False, missing=op.missing)
        timeline.mark(c.track, "shared down", layer)
        rL = ask_latent(c, layer, turn, op)
        it = shared_down(c, layer, turn, it, op)
    else:
        rL = ask_latent(c, layer, turn, op)
    keep_latent(c, turn, rL, op)
    timeline.mark(c.track, "routing", layer, kind="wait")
    cute.arch.mbarrier_wait(c.routed, number & 1)
    timeline.mark(c.track, "experts up", layer)
    it = units_up(c, turn, it, op)
    hint(c, op)
    if cutlass.const_expr(not op.shared_first):
        timeline.mark(c.track, "shared down", layer)
        it = shared_down(c, layer, turn, it, op)
    edge += 1
    timeline.mark(c.track, "edge h", layer, kind="edge")
    wait(c, edge, op, acquire=False, missing=op.missing)
    timeline.mark(c.track, "experts down", layer)
    return units_down(c, layer, turn, it, op), edge

# ---- moe_dense: The FFN of a layer without experts in the persistent kernel.

class Space(NamedTuple):
    """Plain buffers between CTAs, bf16, global: proj of MLA, hs and delta of dense FFNs; mla: MlaSpace."""

    proj: Any
    hs: Any
    delta: Any
    mla: Any

@cute.jit
def dense(
    c: Ctx, layer: Int32, it: Int32, edge: Int32, rX: cute.Tensor, ws: Space, op: cutlass.Constexpr,
    nx: Any = None, held: Any = None,
):  # fmt: skip
    """The FFN of a layer without experts; ws.delta, and with nx box dots, is complete at the next edge."""
    d = op.d
    g = op.rows(d.hidden, pair=True)
    first, n = share(d.dense_dim, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, g, op, held)
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
    if cutlass.const_expr(nx is not None):
        sSum = sums_at(c, op)
        cols = ask_columns(c, nx, (first, n), None, op)
    it = drain(c, it, n, Int32(0), rH, g, op)
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        y = gathered(c, i, g.width)
        if cutlass.const_expr(d.gpus > 1):
            tell_rank(c, "dense", layer, first + i, y)
        if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
            y = (
                round_bf16(y)
                + at(Float32, field(c, layer, F["remote_dense"], COUNT), d.hidden)[first + i]
            )
        ws.delta[first + i] = y.to(BFloat16)
        if cutlass.const_expr(nx is not None):
            sSum[i] = y
    if cutlass.const_expr(nx is not None):
        close_half(c, nx, (layer, Int32(1), n, n), cols, op)
    return it, edge

# ---- halves: Halves of layers: which one it is, and the prefix as it goes on from one to the next.

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
                if cutlass.const_expr(d.gpus > 1):
                    join_ranks(c, "dense", h.layer - 1, rD, g, op)
        if cutlass.const_expr("E" in d.ffn and d.gpus > 1):
            if what & IS_DENSE == 0:
                start = box(c, "delta", turn_of(c, routed - 1), op)
                gather_wide(c, "delta", h.layer - 1, start, d.hidden_local // 8, rD, op)
        elif cutlass.const_expr("E" in d.ffn):
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
        if cutlass.const_expr(d.gpus > 1):
            join_ranks(c, "attn", h.layer, rD, g, op)
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
def releases(c: Ctx, h: Half, op: cutlass.Constexpr):
    """Whether the end of a half releases what was written: behind a dense FFN, whose result lies in a plain buffer, and
    at the last edge."""
    found = h.step + 1 == 2 * op.d.layers
    if cutlass.const_expr("D" in op.d.ffn):
        dense = field(c, within(h.layer, op.d.layers), F["kind"], COUNT) & IS_DENSE != 0
        found = found or (h.second and dense)
    return found

@cute.jit
def next_half(c: Ctx, h: Half, banks: Banks, op: cutlass.Constexpr):
    """What the end of half `h` has to know of the one behind it."""
    opens = h.opens and not h.second
    sources = h.sources + (Int32(1) if opens else Int32(0))
    return Next(banks, h.weight + 4 * op.d.hidden, sources, opens, releases(c, h, op))

@cute.jit
def coming(c: Ctx, h: Any, op: cutlass.Constexpr):
    """(rows, whether they are pairs) of what a half begins with in the ring."""
    d = op.d
    what = Int32(field(c, within(h.layer, d.layers), F["kind"], COUNT))
    rows, pairs = Int32(0), Boolean(False)
    if not h.closing:
        if not h.second:
            if cutlass.const_expr("K" in d.attn):
                _, rows = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
            if cutlass.const_expr("M" in d.attn):
                _, n = share(d.a_proj_rows, c.cta, op.ctas)
                rows = n if what & IS_MLA != 0 else rows
        else:
            if cutlass.const_expr("E" in d.ffn):
                _, rows = share(d.router_rows, c.cta, op.ctas)
                if cutlass.const_expr(not op.router_first):
                    _, n = share(d.latent_rows, c.cta, op.ctas)
                    rows += n
            if cutlass.const_expr("D" in d.ffn):
                pairs = what & IS_DENSE != 0
                _, n = share(d.dense_dim, c.cta, op.ctas)
                rows = n if pairs else rows
    return rows, pairs

# ---- mla_cache: The paged cache of MLA: pages as stages of the ring, and the new token's row in its place.

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
def entry(c: Ctx, p: Int32, cache: Cache):
    """Where page p is, -1 if there is none."""
    found = Int32(-1)
    if p < cache.pages:
        found = cache.table[p]
    return found

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

# ---- decode_bring: What the decode step brings ahead of its consumers: the producer's list, small vectors and idle memory into L2.

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
        own, others = own_first(c, op)
        add("shared_down", d.hidden_local, g, own)
        add("latent_up", d.hidden_local, op.rows(d.latent))
        add("shared_down", d.hidden - d.hidden_local, g, others)
    return found

@cute.jit
def write_list(c: Ctx, op: cutlass.Constexpr):
    found = parts(c, op)
    for k in cutlass.range_constexpr(len(found)):
        for j in cutlass.range_constexpr(6):
            c.list[6 * k + j] = Int32(found[k][j])

@cute.jit
def write_small(c: Ctx, op: cutlass.Constexpr):
    lines = small(op.d)
    for k in cutlass.range_constexpr(len(lines)):
        for j in cutlass.range_constexpr(4):
            c.list[60 + 4 * k + j] = Int32(lines[k][j])

@cute.jit
def prefetch(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """The small vectors of a layer into L2: otherwise their first use costs a trip to memory behind an edge.

    By one lane or, with units, by the lanes of a warp."""
    what = Int32(field(c, layer, F["kind"], COUNT))
    first, every = Int32(0), 1
    if cutlass.const_expr(op.units):
        first, every = c.lane, 32
    for k in cutlass.range(first, len(small(op.d)), every, unroll=1):
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
    if cutlass.const_expr(not op.units):
        write_small(c, op)
    for ahead_ in cutlass.range(d.layers + 1, unroll=1):
        # small things a layer ahead
        if cutlass.const_expr(not op.units):
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

IDLE_PIECE, IDLE_PAUSE = 14336, 1400
"""Bytes that a CTA asks L2 for at once, and nanoseconds until it asks again: a third of what memory can bring."""

@cute.jit
def trickle(c: Ctx, start: Int64, size: Int32, op: cutlass.Constexpr):
    """A piece of memory into L2, slowly; twice as fast if there is more to bring."""
    for at_ in cutlass.range(0, size, IDLE_PIECE, unroll=1):
        to_l2(start + Int64(at_), size - at_ if size - at_ < IDLE_PIECE else Int32(IDLE_PIECE))
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(IDLE_PAUSE // op.idle)])

@cute.jit
def trickle_rows(
    c: Ctx, layer: Int32, name: cutlass.Constexpr, rows: cutlass.Constexpr, row_bytes: cutlass.Constexpr,
    op: cutlass.Constexpr,
):  # fmt: skip
    """This CTA's rows of a matrix."""
    first, n = share(rows, c.cta, op.ctas)
    start = field(c, layer, F[name], COUNT) + Int64(first) * row_bytes
    trickle(c, start, n * row_bytes, op)

@cute.jit
def bring_idle(c: Ctx, layer: Int32, mlas: Int32, op: cutlass.Constexpr):
    """While MLA number `mlas` waits for itself and the ring is full, what comes after it into L2."""
    d = op.d
    cute.arch.mbarrier_wait(c.routed + 2, mlas & 1)
    if c.lane == 0:
        trickle_rows(c, layer, "o_proj", d.hidden, 2 * d.mla_dim, op)
        if cutlass.const_expr(op.idle > 1 and "E" in d.ffn):
            if Int32(field(c, layer, F["kind"], COUNT)) & IS_DENSE == 0:
                trickle_rows(c, layer, "router", d.router_rows, 2 * d.hidden, op)
                trickle_rows(c, layer, "latent_down", d.latent_rows, 2 * d.hidden, op)
    cute.arch.sync_warp()

@cute.jit
def choose_all(c: Ctx, io: Io, op: cutlass.Constexpr):
    """The launch of the warp that chooses experts: what a layer needs early into L2, then its choice."""
    d = op.d
    if c.lane == 0:
        write_small(c, op)
    cute.arch.sync_warp()
    number, mlas = Int32(0), Int32(0)
    for layer in cutlass.range(d.layers, unroll=1):
        prefetch(c, layer, op)
        if c.lane == 0:
            prefetch_parts(c, layer, io, op)
        cute.arch.sync_warp()
        if cutlass.const_expr(op.idle > 0 and "M" in d.attn):
            if Int32(field(c, layer, F["kind"], COUNT)) & IS_MLA != 0:
                bring_idle(c, layer, mlas, op)
                mlas += 1
        if cutlass.const_expr("E" in d.ffn):
            if Int32(field(c, layer, F["kind"], COUNT)) & IS_DENSE == 0:
                mIds = at(Int32, io.ids.iterator.toint() + Int64(number * d.topk * 4), d.topk)
                choose_alone(c, layer, number, mIds, op)
                number += 1

# ---- dots: AttnRes whose sums are made by those who make the columns of its prefix (`dots`).

LOG2_E = 1.4426950408889634

@cute.jit
def red_at(c: Ctx, op: cutlass.Constexpr):
    """Where the eight sums of each warp are, behind the other reductions; behind them products of bank rows."""
    n = VALUES * op.warps + 4
    return cute.make_tensor(c.red.iterator + op.plain_reductions * STRIDE, cute.make_layout((n,)))

@cute.jit
def take_eight(c: Ctx, sRed: cute.Tensor, op: cutlass.Constexpr):
    """Six of the eight sums over all warps, in every lane; after a barrier."""
    x = Float32(0.0)
    for w in cutlass.range_constexpr(-(-op.warps // 4)):
        warp = c.lane // 8 + 4 * w
        if cutlass.const_expr(4 * w + 4 <= op.warps):
            x += sRed[warp * VALUES + c.lane % 8]
        else:
            other = sRed[within(warp, op.warps) * VALUES + c.lane % 8]
            x += other if warp < op.warps else Float32(0.0)
    x = x + cute.arch.shuffle_sync_bfly(x, offset=8)
    x = x + cute.arch.shuffle_sync_bfly(x, offset=16)
    r = cute.make_rmem_tensor(cute.make_layout((6,)), Float32)
    for k in cutlass.range_constexpr(6):
        r[k] = cute.arch.shuffle_sync(x, k)
    return r

def rows_pair(s, t):
    """Which product of two rows of the bank, s <= t < 2."""
    return s + t

@cute.jit
def open_dots(c: Ctx, banks: Banks, op: cutlass.Constexpr):
    """Products of the bank's rows of earlier layers; those of rows that do not exist yet are zero."""
    d, g = op.d, op.wide
    sRed = red_at(c, op)
    rA = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for s in cutlass.range_constexpr(2):
        for t in cutlass.range_constexpr(s, 2):
            total = Float32(0.0)
            if cutlass.const_expr(t < d.bank_old):
                x = Float32(0.0)
                for v in cutlass.range_constexpr(g.per):
                    if vector(c, v, g) < g.vecs:
                        words_at(banks.old, s * g.vecs + vector(c, v, g), rA)
                        words_at(banks.old, t * g.vecs + vector(c, v, g), rB)
                        for e in cutlass.range_constexpr(4):
                            x += low(rA[e]) * low(rB[e]) + high(rA[e]) * high(rB[e])
                put(c, 0, x)
                consumers(op)
                total = take(c, 0, g.width)
                consumers(op)
            if c.tid == 0:
                sRed[VALUES * op.warps + rows_pair(s, t)] = total
    if c.tid == 0:
        # read with the three before it, at once
        sRed[VALUES * op.warps + 3] = Float32(0.0)
    consumers(op)

# ---- all CTAs
@cute.jit
def entry_at(c: Ctx, h: Any, k: cutlass.Constexpr, op: cutlass.Constexpr):
    """Address of this thread's k-th entry of the sums for a half, or of any where it has none."""
    layer = h.layer if h.second else h.layer - 1
    first = Int32(0) if h.second else Int32(op.dot_entries)
    entry = first + within(c.tid + k * op.threads, op.dot_entries)
    return box(c, "dots", turn_of(c, layer, LAYERS), op) + Int64(entry) * (4 * VALUES)

@cute.jit
def ask_dots(c: Ctx, h: Any, op: cutlass.Constexpr):
    """This thread's entries, words [4, 2, turns], there or not; nobody looks at those of the first half."""
    turns = -(-op.dot_entries // op.threads)
    rE = cute.make_rmem_tensor(cute.make_layout((4, 2, turns)), Uint32)
    for k in cutlass.range_constexpr(turns):
        for j in cutlass.range_constexpr(2):
            peek(entry_at(c, h, k, op) + 16 * j, rE[None, j, k])
    return rE

@cute.jit
def own_sums(
    c: Ctx, weight: Int64, rP: cute.Tensor, rK: cute.Tensor, rV: cute.Tensor, op: cutlass.Constexpr
):
    """rV[8] of this thread's columns, for the first half of a launch, before which nobody posts."""
    g = op.wide
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs and c.warp < g.width:
            for k in cutlass.range_constexpr(2):
                pointer = cute.make_ptr(
                    Float32,
                    weight + Int64(2 * i + k) * 16,
                    cute.AddressSpace.gmem,
                    assumed_align=16,
                )
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout((4,))), rW)
                for e in cutlass.range_constexpr(4):
                    w, word = rW[e], 2 * k + e // 2
                    p = high(rP[word, v]) if e % 2 else low(rP[word, v])
                    rV[0] = rV[0] + p * p
                    rV[1] = rV[1] + p * w
                    for s in cutlass.range_constexpr(op.d.bank_rows):
                        b = high(rK[word, v, s]) if e % 2 else low(rK[word, v, s])
                        rV[2 + s] = rV[2 + s] + p * b
                        rV[4 + s] = rV[4 + s] + b * w

@cute.jit
def early_dots(c: Ctx, banks: Banks, h: Any, op: cutlass.Constexpr):
    """What the mix takes that no edge brings: the vector behind it and the bank's rows, zero where there is none."""
    g, d = op.wide, op.d
    rO = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    rK = cute.make_rmem_tensor(cute.make_layout((4, g.per, d.bank_rows)), Uint32)
    rK.fill(0)
    if cutlass.const_expr(not g.exact):
        rO.fill(0)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            words_at(h.out, vector(c, v, g), rO[None, v])
    for s in cutlass.range_constexpr(d.bank_rows):
        if s < h.sources:
            for v in cutlass.range_constexpr(g.per):
                if vector(c, v, g) < g.vecs:
                    bank_words(c, banks, s, v, rK[None, v, s], op)
    return Early(None, rO, rK)

@cute.jit
def inverse_root(x: Float32):
    return cute.arch.inline_ptx(
        "rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )

@cute.jit
def shares(h: Any, rD: cute.Tensor, rG: cute.Tensor, op: cutlass.Constexpr):
    """Weights rS of the bank's rows and of the prefix in the mix, of which `total` is the sum, and what makes the
    weighted rows the mix under its norm; of sums and products of rows.

    With s_i the weighted rows' sum, the mix is s / total, and 1 / RMS of that is total / sqrt(s.s / n + total^2 eps).
    Where rows nearly cancel each other, s.s has the rounding of the products it is made of, not its own.
    """
    d = op.d
    last = d.bank_rows
    rS = cute.make_rmem_tensor(cute.make_layout((last + 1,)), Float32)
    # a power of two instead of one of e; all arguments of the root are eps or more
    rS[last] = inverse_root(rD[0] * (1.0 / d.hidden) + d.eps) * (rD[1] * LOG2_E)
    top = rS[last]
    for s in cutlass.range_constexpr(last):
        score = inverse_root(rG[rows_pair(s, s)] * (1.0 / d.hidden) + d.eps) * (rD[4 + s] * LOG2_E)
        rS[s] = score if s < h.sources else -Float32.inf
        top = cute.arch.fmax(top, rS[s])
    total = Float32(0.0)
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = cute.arch.inline_ptx(
            "ex2.approx.ftz.f32 {$w0}, {$r0};",
            write_only_types=[Float32],
            read_only_args=[rS[s] - top],
        )
        total += rS[s]
    square = rS[last] * rS[last] * rD[0]
    for s in cutlass.range_constexpr(last):
        square += 2.0 * rS[last] * rS[s] * rD[2 + s]
        for t in cutlass.range_constexpr(s, last):
            twice = 1.0 if s == t else 2.0
            square += twice * rS[s] * rS[t] * rG[rows_pair(s, t)]
    square = cute.arch.fmax(square, Float32(0.0))
    return rS, total, inverse_root(square * (1.0 / d.hidden) + total * total * d.eps)

@cute.jit
def late_dots(
    c: Ctx, h: Any, rE: cute.Tensor, rP: cute.Tensor, e: Early, rX: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """As `mix.late`, of the entries of box dots."""
    g, d = op.wide, op.d
    last = d.bank_rows
    sRed = red_at(c, op)
    rV = cute.make_rmem_tensor(cute.make_layout((VALUES,)), Float32)
    rG = cute.make_rmem_tensor(cute.make_layout((3,)), Float32)
    rV.fill(0.0)
    for k in cutlass.range_constexpr(3):
        rG[k] = sRed[VALUES * op.warps + k]
    if h.step == 0:
        own_sums(c, h.weight, rP, e.bank, rV, op)
    else:
        for k in cutlass.range_constexpr(-(-op.dot_entries // op.threads)):
            if c.tid + k * op.threads < op.dot_entries:
                for j in cutlass.range_constexpr(2):
                    insist(entry_at(c, h, k, op) + 16 * j, rE[None, j, k], 4, op)
                    for w in cutlass.range_constexpr(4):
                        rV[4 * j + w] = rV[4 * j + w] + rE[w, j, k].bitcast(Float32)
    x = eight_sums(c, rV)
    if c.lane % 4 == 0:
        sRed[c.warp * VALUES + c.lane // 4] = x
    consumers(op)
    rD = take_eight(c, sRed, op)
    if h.opens and not h.second and c.tid == 0:
        # the prefix is a row of the bank from here on
        number = (h.layer + d.first) // d.block
        for t in cutlass.range_constexpr(last):
            if number == t:
                for s in cutlass.range_constexpr(t):
                    sRed[VALUES * op.warps + rows_pair(s, t)] = rD[2 + s]
                sRed[VALUES * op.warps + rows_pair(t, t)] = rD[0]
    rS, total, scale = shares(h, rD, rG, op)
    # a run's last mix is rounded before its norm
    before = cute.arch.rcp_approx(total) if h.closing else scale
    scale = scale * total
    for s in cutlass.range_constexpr(last + 1):
        rS[s] = rS[s] * before
    rM = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Float32)
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a, b = low(rP[w, v]) * rS[last], high(rP[w, v]) * rS[last]
            for s in cutlass.range_constexpr(last):
                a += low(e.bank[w, v, s]) * rS[s]
                b += high(e.bank[w, v, s]) * rS[s]
            rM[2 * w, v], rM[2 * w + 1, v] = a, b
    if h.closing:
        for v in cutlass.range_constexpr(g.per):
            for w in cutlass.range_constexpr(4):
                pair = pack_bf16(rM[2 * w, v], rM[2 * w + 1, v])
                rM[2 * w, v], rM[2 * w + 1, v] = low(pair) * scale, high(pair) * scale
    for v in cutlass.range_constexpr(g.per):
        for w in cutlass.range_constexpr(4):
            a, b = rM[2 * w, v] * low(e.out[w, v]), rM[2 * w + 1, v] * high(e.out[w, v])
            rX[w, v] = pack_bf16(a, b)

# ---- kda_sizes: Sizes of what KDA of several tokens brings besides weights (`kda_bring`): states in stages of the ring, taps.

HEAD = 128

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
    nx: Any = None,
):
    """The box attn (and y, where given) = bf(bf(x W_o^T) + the others' partials) of this CTA's rows; with nx box dots,
    and the half is closed."""
    d = op.d
    turn = turn_of(c, layer, LAYERS)
    first, n = share(d.hidden, c.cta, op.ctas)
    if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
        remote = field(c, layer, F["remote_attn"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, most(d.hidden, op.ctas), op)
    if cutlass.const_expr(nx is not None):
        sSum = sums_at(c, op)
        cols = ask_columns(c, nx, (first, n), None, op)
    it = drain(c, it, n, Int32(0), rO, g, op)
    consumers(op)
    for k in cutlass.range_constexpr(-(-most(d.hidden, op.ctas) // op.threads)):
        i = c.tid + k * op.threads
        if i < n:
            total = gathered(c, i, g.width)
            if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
                total = round_bf16(total) + rRemote[k]
            if cutlass.const_expr(d.gpus > 1):
                tell_rank(c, "attn", layer, first + i, total)
            post(c, "attn", turn, first + i, total, op)
            if cutlass.const_expr(y is not None):
                y[first + i] = total.to(BFloat16)
            if cutlass.const_expr(nx is not None):
                sSum[i] = total
    if cutlass.const_expr(nx is not None):
        close_half(c, nx, (layer, Int32(0), n, n), cols, op)
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

# ---- kda_half: KDA as half a layer of the decode step: the pieces of `kda`, with nothing awaited before the products that is loaded.

@cute.jit
def use_taps(c: Ctx, p: Place, s: State, op: cutlass.Constexpr):
    """What the taps add to this thread's channel, where `update` looks."""
    sU = view(c, Float32, 0, 3 * HEAD)
    if p.head >= 0 and c.tid < 2 * HEAD + p.count:
        sU[c.tid] = tap_sum(s.taps, s.conv)

@cute.jit
def kda_half(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    slots: cute.Tensor,
    op: cutlass.Constexpr,
    nx: Any = None,
    held: Any = None,
):
    """The box attn of a KDA layer, number `number` of the launch; not hinted at yet."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, KDAS)
    p = place(c, slots, op)
    first, n = share(4 * d.kda_dim + d.f_rank + d.kda_heads, c.cta, op.ctas)
    timeline.mark(c.track, "in_proj", layer)
    s = load_early(c, layer, p, False, op)
    it = drain(c, it, n, Int32(0), rX, op.wide, op, held)
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
    it = out_projection(c, layer, it, rO, None, g, op, nx)
    return it, edge

# ---- mla_attention: Part of MLA: attention of up to 16 heads to one split of the context, with an online softmax (flash decoding).

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

# ---- mla_query: The queries of MLA, W_UK absorbed: a CTA makes columns of one head, all CTAs need all heads.

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
    vectors, groups, pitch = op.groups_of(8)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // 8, c.cta % op.slices, op.slices)
    v, group = c.tid % vectors, c.tid // vectors
    sHead = view(c, BFloat16, op.new_bytes, d.qk_nope + d.qk_rope)
    sPart = view(c, Float32, op.new_bytes + op.head_bytes, groups * pitch)
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
            place = (group * pitch + v * 8) // 4
            for k in cutlass.range_constexpr(2):
                part = cute.local_tile(rS, (4,), (k,))
                cute.autovec_copy(part, cute.local_tile(sPart, (4,), (place + k,)))
        consumers(op)
        post_sums(
            c, "query", turn, (head * d.kv_dim + 8 * first, 8 * n), sPart, (groups, pitch), op
        )
        if c.cta % op.slices == 0 and c.tid < d.qk_rope:
            pe = sHead[d.qk_nope + c.tid].to(Float32)
            post(c, "query", turn, head * d.kv_dim + d.kv_lora + c.tid, pe, op)

@cute.jit
def post_sums(
    c: Ctx, name: cutlass.Constexpr, turn: Int32, place: tuple, sPart: cute.Tensor, shape: cutlass.Constexpr,
    op: cutlass.Constexpr,
):  # fmt: skip
    """Elements of a box, place = (first, number, whole eights or fours): sums of columns of sPart over groups; shape =
    (groups, floats from one to the next)."""
    first, n = place
    groups, pitch = shape
    if cutlass.const_expr(op.spread):
        for i in cutlass.range(c.tid // 8, n, op.threads // 8, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range_constexpr(-(-groups // 8)):
                row = c.lane % 8 + 8 * k
                x = sPart[within(row, groups) * pitch + i]
                total += x if row < groups else Float32(0.0)
            total = lanes_sum(total, 8)
            if c.lane % 8 == 0:
                post(c, name, turn, first + i, total, op)
    else:
        for i in cutlass.range(c.tid, n, op.threads, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range(groups, unroll=8):
                total += sPart[k * pitch + i]
            post(c, name, turn, first + i, total, op)

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

# ---- mla_attend: Attention of all heads over a CTA's pages in the ring: scores, online softmax, weighted sums.

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
def two_chains(
    c: Ctx, row: Int32, sQ: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr
):  # fmt: skip
    """rC[4] = the queries with eight tokens, of which this lane's starts at `row` in the ring: products of even and of
    odd blocks of 32 columns are two chains, each of which waits for itself. Heads that do not exist repeat the last."""
    d, q = op.d, c.lane % 4
    g = within(c.lane // 4, d.mla_heads)
    h = within(c.lane // 4 + 8, d.mla_heads)
    pitch, many = op.query_words // 4, d.kv_dim // 32
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2, 2)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
    rD = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rD.fill(0.0)
    for pair in cutlass.range(many // 2, unroll=1):
        for e in cutlass.range_constexpr(2):
            k = (2 * pair + e) * 4 + q
            cute.autovec_copy(cute.local_tile(c.ring, (4,), (row + k,)), rB[None, e])
            cute.autovec_copy(cute.local_tile(sQ, (4,), (g * pitch + k,)), rA[None, 0, e])
            cute.autovec_copy(cute.local_tile(sQ, (4,), (h * pitch + k,)), rA[None, 1, e])
        mma_16x32(rC, rA[None, None, 0], rB[None, 0])
        mma_16x32(rD, rA[None, None, 1], rB[None, 1])
    if cutlass.const_expr(many % 2):
        k = (many - 1) * 4 + q
        cute.autovec_copy(cute.local_tile(c.ring, (4,), (row + k,)), rB[None, 0])
        cute.autovec_copy(cute.local_tile(sQ, (4,), (g * pitch + k,)), rA[None, 0, 0])
        cute.autovec_copy(cute.local_tile(sQ, (4,), (h * pitch + k,)), rA[None, 1, 0])
        mma_16x32(rC, rA[None, None, 0], rB[None, 0])
    for i in cutlass.range_constexpr(4):
        rC[i] = rC[i] + rD[i]

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
        if cutlass.const_expr(op.brisk):
            two_chains(c, row, sQ, rC, op)
        else:
            for k in cutlass.range(d.kv_dim // 32, unroll=2):
                cute.autovec_copy(cute.local_tile(c.ring, (4,), (row + k * 4 + q,)), rB)
                if g < d.mla_heads:
                    cute.autovec_copy(
                        cute.local_tile(sQ, (4,), (g * (words // 4) + k * 4 + q,)), rA[None, 0]
                    )
                if g + 8 < d.mla_heads:
                    cute.autovec_copy(
                        cute.local_tile(sQ, (4,), ((g + 8) * (words // 4) + k * 4 + q,)),
                        rA[None, 1],
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
def attend(
    c: Ctx, layer: Int32, it: Int32, cache: Cache, physical: Int32, turn: Int32, op: cutlass.Constexpr
):  # fmt: skip
    """Boxes sums and stats of this CTA's pages for all heads, the first of them at `physical`; not even a maximum of
    -inf is an empty element. `empty_sums` comes behind the hint."""
    d = op.d
    each = op.value_each
    words = op.query_words
    sQ = view(c, Uint32, op.new_bytes, d.mla_heads * words)
    sP = view(c, BFloat16, op.new_bytes + 4 * d.mla_heads * words, 16 * (d.page + 8))
    sState = view(c, Float32, op.new_bytes + 4 * d.mla_heads * words + 32 * (d.page + 8), 48)
    if c.cta < cache.pages:
        load_query(c, turn, sQ, op)
    sWord = cute.recast_tensor(sP, Uint32)
    used = d.mla_heads * (d.page + 8) // 2
    for i in cutlass.range(used + c.tid, 8 * (d.page + 8), op.threads, unroll=1):
        # rows of heads that do not exist, which products read
        sWord[i] = Uint32(0)
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
        if cutlass.const_expr(not op.brisk):
            # `patch` has a barrier before the next page's weights
            consumers(op)
    send_sums(c, c.cta < cache.pages, sState, rC, turn, op)
    return it

@cute.jit
def send_sums(
    c: Ctx, any: Boolean, sState: cute.Tensor, rC: cute.Tensor, turn: Int32, op: cutlass.Constexpr
):
    """rC [4, each] of the value warps and the statistics of each head into their boxes, if there are any; with `narrow`
    what these pages alone attend to, in f16. `empty_sums` empties their places for the other turn behind the hint."""
    d = op.d
    if c.tid < d.mla_heads and any:
        i = (c.cta * d.mla_heads + c.tid) * 2
        here = box(c, "stats", turn, op) + Int64(i) * 4
        rTwo = cute.make_rmem_tensor(cute.make_layout((2,)), Float32)
        rTwo[0], rTwo[1] = sState[c.tid], sState[16 + c.tid]
        send_some(here, rTwo, 2)
    here = box(c, "sums", turn, op)
    if cutlass.const_expr(op.narrow):
        if c.warp < op.value_warps and any:
            send_narrow(c, here, sState, rC, op)
    elif c.warp < op.value_warps and any:
        size = min(4, op.value_each)
        rOut = cute.make_rmem_tensor(cute.make_layout((size,)), Float32)
        for i in cutlass.range_constexpr(4):
            first = sum_place(c, i, op)
            if c.lane // 4 + i // 2 * 8 < d.mla_heads:
                for part in cutlass.range_constexpr(op.value_each // size):
                    for n in cutlass.range_constexpr(size):
                        rOut[n] = rC[i, size * part + n]
                    send_some(here + Int64(first + size * part) * 4, rOut, size)

@cute.jit
def send_narrow(c: Ctx, here: Int64, sState: cute.Tensor, rC: cute.Tensor, op: cutlass.Constexpr):
    """Pairs of columns of rC over the sum of their head's weights, into the box at `here`."""
    size = min(4, op.value_each // 2)
    rOut = cute.make_rmem_tensor(cute.make_layout((size,)), Uint32)
    for i in cutlass.range_constexpr(4):
        head = c.lane // 4 + i // 2 * 8
        if head < op.d.mla_heads:
            share = cute.arch.rcp_approx(sState[16 + head])
            first = sum_place(c, i, op)
            for part in cutlass.range_constexpr(op.value_each // 2 // size):
                for n in cutlass.range_constexpr(size):
                    k = 2 * (size * part + n)
                    rOut[n] = pack_f16(rC[i, k] * share, rC[i, k + 1] * share)
                send_words(here + Int64(first + 2 * size * part) * 2, rOut, size)

@cute.jit
def pack_f16(x: Float32, y: Float32):
    """x rounded to f16 in bits 0..15, y in bits 16..31; not even NaN has all bits set."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[y, x]
    )

@cute.jit
def sum_place(c: Ctx, i: cutlass.Constexpr, op: cutlass.Constexpr):
    """Which element of the box a lane's i-th row of sums starts at."""
    d, g, q = op.d, c.lane // 4, c.lane % 4
    head = c.cta * d.mla_heads + g + i // 2 * 8
    return head * d.kv_lora + (c.warp * 8 + 2 * q + i % 2) * op.value_each

@cute.jit
def empty_sums(c: Ctx, turn: Int32, op: cutlass.Constexpr):
    """The places of `send_sums` for the other turn, which all have read by now, each by the thread that fills it."""
    d = op.d
    if c.tid < d.mla_heads:
        i = (c.cta * d.mla_heads + c.tid) * 2
        empty_some(box(c, "stats", 1 - turn, op) + Int64(i) * 4, 2)
    there = box(c, "sums", 1 - turn, op)
    if c.warp < op.value_warps:
        words = op.value_each * op.sums_size // 4
        size = min(4, words)
        for i in cutlass.range_constexpr(4):
            first = sum_place(c, i, op)
            if c.lane // 4 + i // 2 * 8 < d.mla_heads:
                for part in cutlass.range_constexpr(words // size):
                    empty_some(there + Int64(first * op.sums_size + 4 * size * part), size)

# ---- mla: MLA in the persistent kernel: a CTA has a share of the heads' columns, and whole pages of the cache for all heads.

@cute.jit
def join(c: Ctx, turn: Int32, cache: Cache, op: cutlass.Constexpr):
    """Box lat = bf(sum over CTAs of weight * sum) of this CTA's head and columns."""
    d = op.d
    each = 16 // op.sums_size
    vectors, groups, pitch = op.groups_of(each)
    turns = -(-op.ctas // groups)
    head = c.cta // op.slices
    first, n = share(d.kv_lora // each, c.cta % op.slices, op.slices)
    apart = op.sums_size * d.mla_heads * d.kv_lora
    parts = cache.pages if cache.pages < op.ctas else Int32(op.ctas)
    sW = view(c, Float32, 0, op.ctas)
    sPart = view(c, Float32, -(-4 * op.ctas // 16) * 16, groups * pitch)
    v, group = c.tid % vectors, c.tid // vectors
    rX = cute.make_rmem_tensor(cute.make_layout((4, turns)), Uint32)
    rS = cute.make_rmem_tensor(cute.make_layout((each,)), Float32)
    rS.fill(0.0)
    sums = box(c, "sums", turn, op) + Int64(head * (d.kv_lora // each) + first + v) * 16
    mine = head < d.mla_heads and group < groups and v < n
    if head < d.mla_heads:
        for k in cutlass.range_constexpr(turns):
            s = group + k * groups
            if mine and s < parts:
                peek(sums + Int64(s) * apart, rX[None, k])
        if c.warp == 0:
            weights_of(c, head, parts, sW, turn, op)
        consumers(op)
        for k in cutlass.range_constexpr(turns):
            s = group + k * groups
            if mine and s < parts:
                insist(sums + Int64(s) * apart, rX[None, k], op.sums_size, op)
                for e in cutlass.range_constexpr(4):
                    if cutlass.const_expr(op.narrow):
                        x, y = unpack_f16(rX[e, k])
                        rS[2 * e] = rS[2 * e] + x * sW[s]
                        rS[2 * e + 1] = rS[2 * e + 1] + y * sW[s]
                    else:
                        rS[e] = rS[e] + rX[e, k].bitcast(Float32) * sW[s]
        if group < groups:
            place = (group * pitch + v * each) // 4
            for k in cutlass.range_constexpr(each // 4):
                part = cute.local_tile(rS, (4,), (k,))
                cute.autovec_copy(part, cute.local_tile(sPart, (4,), (place + k,)))
        consumers(op)
        place = (head * d.kv_lora + each * first, each * n)
        post_sums(c, "lat", turn, place, sPart, (groups, pitch), op)

@cute.jit
def unpack_f16(pair: Uint32):
    """The f16 in bits 0..15 and that in bits 16..31, as f32."""
    return cute.arch.inline_ptx(
        """{
        .reg .f16 x, y;
        mov.b32 {x, y}, {$r0};
        cvt.f32.f16 {$w0}, x;
        cvt.f32.f16 {$w1}, y;
        }""",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )

@cute.jit
def weights_of(
    c: Ctx, head: Int32, parts: Int32, sW: cute.Tensor, turn: Int32, op: cutlass.Constexpr
):
    """sW[s] = the weight of CTA s's sums of a head, or of what its pages attend to (`narrow`); by one warp."""
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
    weight = cute.arch.rcp_approx(total)
    for k in cutlass.range_constexpr(turns):
        if c.lane + 32 * k < parts:
            x = rS[0, k] * rS[1, k] if cutlass.const_expr(op.narrow) else rS[0, k]
            sW[c.lane + 32 * k] = x * weight

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
def mla(
    c: Ctx,
    layer: Int32,
    number: Int32,
    at_: tuple,
    rX: cute.Tensor,
    cache: Cache,
    rO: cute.Tensor,
    op: cutlass.Constexpr,
    held: Any = None,
):
    """rO words [4, per]: this thread's columns of the gated values of MLA `number` of the launch."""
    it, edge = at_
    d = op.d
    turn = turn_of(c, number, MLAS)
    timeline.mark(c.track, "a_proj", layer)
    first, n = share(d.a_proj_rows, c.cta, op.ctas)
    it = drain(c, it, n, Int32(0), rX, op.wide, op, held)
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
    if cutlass.const_expr(op.idle > 0):
        if c.tid == 0:
            cute.arch.mbarrier_arrive(c.routed + 2)
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
    empty_sums(c, turn, op)
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
    burst: as `in_flight`, of what consumers are at while they wait for no edge: a layer's first matrix behind what the
    ring holds of it, experts' units; 0: as `in_flight`.
    idle: while MLA waits, memory brings o_proj (1), and the front of the FFN too (2), into L2, a little at a time.
    couples: pairs of rows in hand where a stage has many; then, where it has two, it is given back before its product.
    missing: CTAs that may not have hinted yet when boxes are looked into: what is in a box says so itself, and nobody
    gets a layer ahead of another, since each half of a layer takes columns that every CTA makes. kept: the prefix, and
    the bank's rows if `bank` and there is room, stay in shared memory.
    Of MLA: narrow: CTAs send their pages' attention as it is, in f16 (a latent beyond 65504 would not fit), else its
    sums in f32. spread: eight lanes share a column of sums over groups of threads, else one thread has it. brisk:
    scores in two chains of products, a barrier less a page.
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
    narrow: bool = False
    spread: bool = False
    brisk: bool = False

    def __post_init__(self):
        channels = 2 * self.d.head_dim + self.state_rows if "K" in self.d.attn else 0
        if not self.tiled and self.threads < channels:
            raise ValueError(
                f"KDA of one token has a thread for each of {channels} channels, {self.warps} warps are too few"
            )

        heads = max(self.d.kda_heads, self.d.mla_heads) if self.d.attn else 0
        if not self.tiled and heads > self.ctas:
            raise ValueError(f"each of {heads} heads has a CTA or more, {self.ctas} are too few")
        if "E" in self.d.ffn and not self.tiled:
            piece = self.down_rows * (self.down.code_bytes + self.down.scale_bytes)
            if piece > self.stage:
                raise ValueError(f"w2 of one expert is {piece} bytes a CTA, a stage {self.stage}")

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
                ("stats", 4, self.ctas * h * 2), ("sums", self.sums_size, self.ctas * h * d.kv_lora),
                ("lat", 2, h * d.kv_lora), ("out", 2, d.mla_dim),
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
    def sums_size(self):
        """Bytes of an element of MLA's sums."""
        return 2 if self.narrow else 4

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

# ---- tile_pack: MXFP4 codes with the bits of their words in other places, which makes them cheaper to spread (`tile_codes`).

EXPERT_CODES = ("w1", "w3", "w2")

CODE_PACKERS = 256
"""Threads of a CTA that packs, 16 bytes at a time."""

CODE_CTAS = 8
"""CTAs that pack a matrix. Few, since all matrices are packed by one launch, whose warps a race check counts."""

MOST_COPIES = 28 << 30
"""Bytes of copies, else there are none: 16 layers at tp8. A judge keeps weights once and scratch of the candidate, of
an incumbent and of its twin, so that memory holds the codes four times: 123 of 141 GB then."""

def code_words(dims):
    """32-bit words of w1, w3 or w2 of a layer, all experts: equally many."""
    return dims.experts * dims.expert_dim * dims.latent // 8

def code_matrices(dims):
    return len(EXPERT_CODES) * sum(f == "E" for f in dims.ffn)

def copies_fit(dims):
    return 4 * code_words(dims) * code_matrices(dims) <= MOST_COPIES

def code_copies(dims):
    """Workspace: [matrix, words], w1, w3 and w2 of one layer with experts after the other."""
    shape_ = (code_matrices(dims), code_words(dims))
    return {"packed": ("i32", shape_, "undefined", "persistent")}

@cute.jit
def pair_of(word: Uint32, j: cutlass.Constexpr):
    """Codes j and j + 4 where an operand has them: sign at bit 15 of a half, magnitude at 8 to 6."""
    nibbles = (word >> (4 * j)) & Uint32(0x000F000F)
    return (nibbles * Uint32(0x1040)) & Uint32(0x81C081C0)

@cute.jit
def pack_word(word: Uint32):
    """The word of which `spread_packed` makes the operands that `spread` makes of this one.

    Most bits of an operand are bits of the packed word; the others are sums of two or three, solved one by one.
    """
    low = Uint32(0x7FFFFFFF)
    a, b, c, d = pair_of(word, 0), pair_of(word, 1), pair_of(word, 2), pair_of(word, 3)
    turned = b | ((d & low) >> 4)
    p = (turned << 6) | (turned >> 26) | ((c & low) >> 4) | (a & Uint32(0x000000C0))
    p = p | (((a ^ p) >> 8) & Uint32(0x00010001))  # 0 and 16 from 8 and 24
    p = p | ((a ^ (p << 8)) & Uint32(0x00408000))  # 15 from 7, 22 from 14
    p = p | ((a ^ (p << 8)) & Uint32(0x00800000))  # 23 from 15
    p = p | ((a ^ (p << 8) ^ (p << 31)) & Uint32(0x80000000))  # 31 from 23 and 0
    p = p | (((c ^ (p << 31)) >> 4) & Uint32(0x08000000))  # 27 from 0
    return p | (((d >> 30) ^ (p >> 5)) & Uint32(0x00000002))  # 1 from 6

@cute.kernel
def pack_codes_kernel(matrices: tuple, mTo: cute.Tensor, vecs: cutlass.Constexpr):
    """Grid (CTAs, matrices): row y of mTo = matrix y, packed."""
    tid, _, _ = cute.arch.thread_idx()
    cta, y, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    source = matrices[0].iterator.toint()
    for k in cutlass.range_constexpr(1, len(matrices)):
        source = matrices[k].iterator.toint() if y == k else source
    target = mTo.iterator.toint() + Int64(y) * (16 * vecs)
    r = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(cta * CODE_PACKERS + tid, vecs, ctas * CODE_PACKERS, unroll=4):
        words_at(source, i, r)
        for e in cutlass.range_constexpr(4):
            r[e] = pack_word(r[e])
        pointer = cute.make_ptr(
            Uint32, target + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
        )
        cute.autovec_copy(r, cute.make_tensor(pointer, cute.make_layout((4,))))

@cute.jit
def pack_experts(layers: tuple, mTo: cute.Tensor, dims: cutlass.Constexpr, stream):
    """Codes of all layers with experts into their copies."""
    matrices = tuple(getattr(w, name) for w in layers for name in EXPERT_CODES)
    vecs = code_words(dims) // 4
    ctas = min(CODE_CTAS, -(-vecs // CODE_PACKERS))
    pack_codes_kernel(matrices, mTo, vecs).launch(
        grid=(ctas, len(matrices), 1), block=(CODE_PACKERS, 1, 1), stream=stream
    )

def with_copies(layers, mPacked):
    """The tensors of layers (field -> tensor) with the copies in place of codes."""
    found = list(layers)
    for k, fields in enumerate(f for f in found if "w1" in f):
        for e, name in enumerate(EXPERT_CODES):
            fields[name] = mPacked[len(EXPERT_CODES) * k + e, None]
    return found

# ---- unit_plan: Sizes of the decode step whose routed experts are units of tiles and are chosen by a warp of their own.

@dataclass(frozen=True)
class Units(TileOp):
    """The tile kernel's sizes in a ring whose stages somebody else chose."""

    ring: int = 0

    @property
    def stage(self):
        return self.ring

    @property
    def up_half(self):
        """Warps have whole 128 columns here, or none."""
        return False

@dataclass(frozen=True)
class DecodeOp(Op):
    """`Op` of the decode step. units: experts as `units` has them, else as `moe_experts`. shared_first: with them, both
    halves of the shared expert come before the experts, else the second between theirs. router_first: with them, the
    router's rows are a matrix of their own before the latent's, so that the choice is known earlier. twos: stages of
    two wide rows that a warp sums up together. packed: codes of the units come from copies that `tile_pack` made. dots:
    sums of AttnRes are made by who makes the columns (`dots`). hold: a half's first stage is held before its edge."""

    units: bool = False
    shared_first: bool = False
    router_first: bool = False
    twos: int = 1
    packed: bool = False
    dots: bool = False
    hold: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.dots and not (self.bank_held and self.d.gpus == 1):
            raise ValueError("dots: for rows of the bank that are held in registers, on one GPU")
        if self.units and "E" in self.d.ffn:
            refuse_others_tiles(self.d)
            if self.tile.up_bytes > self.stage:
                raise ValueError(
                    f"a unit of experts is {self.tile.up_bytes} bytes, a stage {self.stage}"
                )

    @property
    def held(self):
        """Whether the first stage of a half is held in registers before its edge: where all have two wide rows."""
        return self.hold and self.twos > 1 and self.couples > 1 and one_in_hand(self.wide, self)

    @property
    def dot_columns(self):
        """The most columns that a CTA makes in half a layer, with those that only other ranks make dealt out, too."""
        d = self.d
        ffn = most(d.hidden_local, self.ctas) + most(d.hidden - d.hidden_local, self.ctas)
        return max(most(d.hidden, self.ctas), ffn)

    @property
    def dot_warps(self):
        """Warps that post sums of columns."""
        return min(self.warps, -(-self.dot_columns // 32))

    @property
    def dot_entries(self):
        """Of box dots for half a layer."""
        return self.ctas * self.dot_warps

    @property
    def boxes(self):
        found = Op.boxes.fget(self)
        if self.dots:
            end = sum(2 * self.box_bytes(size, n) for _, size, n in found.values())
            found["dots"] = (end, 4, 2 * 8 * self.dot_entries)
        return found

    @property
    def plain_reductions(self):
        return Op.reductions.fget(self)

    @property
    def reductions(self):
        more = -(-(8 * self.warps + 4 + self.dot_columns) // STRIDE) if self.dots else 0
        return self.plain_reductions + more

    @property
    def fronts(self):
        """Parts of the front of an FFN: router and latent, the shared expert's first half."""
        return 3 if self.router_first else 2

    @property
    def tile(self):
        return Units(
            self.d, self.ctas, self.warps, 0, self.spin, packed=self.packed, ring=self.stage
        )

    @property
    def block(self):
        """Threads of a CTA: consumers, a producer warp, with units a warp that chooses experts."""
        return self.threads + (64 if self.units else 32)

    @property
    def part_rows(self):
        rows = Op.part_rows.fget(self)
        if not self.units or "E" not in self.d.ffn:
            return rows
        return max(rows, 16 * self.tile.held, 16 * self.tile.down_tiles)

    def groups_of(self, each):
        """(vectors, groups, floats from one group's sums to the next's) where a thread has `each` of a CTA's columns of
        the latent. With `spread` eight rows of sums are in different banks."""
        vectors = most(self.d.kv_lora // each, self.slices)
        return vectors, self.threads // vectors, each * vectors + (4 if self.spread else 0)

    def sums_bytes(self, each):
        _, groups, pitch = self.groups_of(each)
        return 4 * groups * pitch

    @property
    def choice_at(self):
        """Where in the pool the choosing warp's scratch is: behind the latent, which is there at the same time."""
        return -(-2 * self.d.latent // 128) * 128

    @property
    def pool(self):
        size = Op.pool.fget(self)
        if "M" in self.d.attn:
            join = 4 * self.ctas + 16 + self.sums_bytes(8 if self.narrow else 4)
            size = max(size, join, self.new_bytes + self.head_bytes + self.sums_bytes(8))
        if not self.units or "E" not in self.d.ffn:
            return size
        return -(-max(size, self.choice_at + 128 + 10 * self.d.experts) // 16) * 16

def ring_stage(dims, ctas, warps, wanted, units):
    """Bytes of a stage: as many as wanted, or as a unit of experts takes."""
    if not units or "E" not in dims.ffn:
        return wanted
    return max(wanted, -(-TileOp(dims, ctas, warps, 0, 0).up_bytes // 128) * 128)

# ---- decode: Persistent decode kernel: one cooperative launch for a run of layers, one row; weights stream through a ring.

TUNABLES = {
    "ring_stages": (0, 7, 6, 5, 4, 3, 2),
    "stage_bytes": (28672, 14336, 4096, 2560),
    "consumer_warps": (14,),
    "ctas": (0, 4, 8, 16, 32, 64, 128, 132),
    "in_flight": (1, 2, 0, 3, 4),
    "hungry": (0, 2, 3, 4, 5),
    "burst": (2, 0, 3, 4),
    "twos": (2, 1),
    "units": (1, 0),
    "shared_first": (0, 1),
    "router_first": (1, 0),
    "packed": (1, 0),
    "couples": (2, 1),
    "idle": (0, 1, 2),
    "bank": (0, 1),
    "narrow": (1, 0),
    "spread": (1, 0),
    "brisk": (1, 0),
    "dots": (1, 0),
    "hold": (1, 0),
    "missing": (4, 0, 16, 64),
    "jitter": (0, 16384),
    "spin_limit": (0, 2000000, 200000),
}

@cute.jit
def attention(
    c: Ctx, layer: Int32, number: tuple, at_: tuple, rX: cute.Tensor, io: Io, op: cutlass.Constexpr, nx: Any,
    held: Any,
):  # fmt: skip
    """Box attn of a layer; number: KDAs and MLAs before it in the launch. nx: `columns.Next`, or None without `dots`;
    held: as of `row_products.drain_pairs`."""
    d = op.d
    it, edge = at_
    what = Int32(field(c, layer, F["kind"], COUNT))
    if cutlass.const_expr("K" in d.attn):
        if what & IS_MLA == 0:
            it, edge = kda_half(c, layer, number[0], (it, edge), rX, io.slots, op, nx, held)
    if cutlass.const_expr("M" in d.attn):
        if what & IS_MLA != 0:
            cache = cache_of(io.lengths, io.table, io.mapping, op)
            go = op.rows(d.mla_dim)
            rO = cute.make_rmem_tensor(cute.make_layout((4, go.per)), Uint32)
            it, edge = mla(c, layer, number[1], (it, edge), rX, cache, rO, op, held)
            it = out_projection(c, layer, it, rO, None, go, op, nx)
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
    if cutlass.const_expr(op.dots):
        open_dots(c, banks, op)
    rX = cute.make_rmem_tensor(cute.make_layout((4, g.per)), Uint32)
    it, edge, routed, kdas, mlas = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    for step in cutlass.range(2 * d.layers + 1, unroll=1):
        h = half(c, step, io, op)
        timeline.mark(c.track, "early", h.layer)
        held = None
        if cutlass.const_expr(op.held):
            held = (hold(c, it, *coming(c, h, op), op), Boolean(True))
        if cutlass.const_expr(op.dots):
            before = early_dots(c, banks, h, op)
        else:
            before = early(c, banks, h.sources, h.weight, h.out, op)
        if step > 0:
            edge += 1
            timeline.mark(c.track, "edge mix", h.layer, kind="edge")
            if cutlass.const_expr("D" in d.ffn):
                wait(c, edge, op)
            elif h.closing:
                wait(c, edge, op)
            else:
                wait(c, edge, op, acquire=False, missing=op.missing)
        timeline.mark(c.track, "mix", h.layer)
        nx, entries = None, None
        if cutlass.const_expr(op.dots):
            entries = ask_dots(c, h, op)
        rP = add(c, h, routed, words, io, ws, op)
        keep(c, h, rP, banks, io, op)
        if cutlass.const_expr(op.dots):
            late_dots(c, h, entries, rP, before, rX, op)
            nx = next_half(c, h, banks, op)
        else:
            late(c, banks, rP, before, h.sources, h.closing, rX, op)
        if not h.closing:
            what = Int32(field(c, h.layer, F["kind"], COUNT))
            if not h.second:
                it, edge = attention(c, h.layer, (kdas, mlas), (it, edge), rX, io, op, nx, held)
                kdas += Int32(1) if what & IS_MLA == 0 else Int32(0)
                mlas += Int32(1) if what & IS_MLA != 0 else Int32(0)
            else:
                if cutlass.const_expr("D" in d.ffn):
                    if what & IS_DENSE != 0:
                        it, edge = dense(c, h.layer, it, edge, rX, ws, op, nx, held)
                if cutlass.const_expr("E" in d.ffn):
                    if what & IS_DENSE == 0:
                        mIds = at(
                            Int32, io.ids.iterator.toint() + Int64(routed * d.topk * 4), d.topk
                        )
                        it, edge = ffn(c, h.layer, routed, (it, edge), rX, mIds, op, nx, held)
                        routed += 1
            if cutlass.const_expr(not op.dots):
                if releases(c, h, op):
                    arrive(c, op)
                else:
                    hint(c, op)
    if c.cta == 0:
        store_wide(c, rX, io.out.iterator.toint(), op)
    timeline.end(c.track)
    leave(c, edge, (routed, kdas, Int32(d.layers), mlas), op)
    if cutlass.const_expr("K" in d.attn):
        move_taps(c, io.slots, op)
    if cutlass.const_expr(d.gpus > 1):
        close_inbox(c, op)

@cute.kernel
def decode_kernel(
    layers: tuple,
    io: Io,
    ws: Space,
    mBank: cute.Tensor,
    mMail: cute.Tensor,
    mSync: cute.Tensor,
    link: Any,
    phases: Any,
    names: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Grid (ctas), cooperative; op.warps consumer warps, a producer warp and, with units, one that chooses experts."""
    c = open_cta(
        layers, mSync, mMail, phases, names, tuple(kind(op.d, n) for n in range(op.d.layers)), op
    )
    if cutlass.const_expr(op.d.gpus > 1):
        open_inbox(c, *link, op)
    if c.warp == op.warps:
        if c.lane == 0:
            produce(c, io, op)
    elif c.warp > op.warps:
        if cutlass.const_expr(op.units):
            choose_all(c, io, op)
    else:
        size = op.d.hidden * 2 * max(1, op.d.bank_rows - op.d.bank_old)
        consume(c, io, ws, mBank.iterator.toint() + Int64(c.cta) * size, op)

def used(op):
    """Bytes of shared memory of a CTA."""
    ring = op.stages * op.stage + 4 * STRIDE * (op.part_rows + op.reductions)
    return ring + 8 * op.d.layers * COUNT + op.pool + 4 * op.kept_words + 2048

def shape(dims, cfg):
    refuse_others(dims)
    ctas, units = ctas_of(dims, cfg), bool(cfg.units) and dims.gpus == 1
    # who brings what MLA leaves idle must have chosen before the next MLA
    with_experts = all(f == "E" for a, f in zip(dims.attn, dims.ffn, strict=True) if a == "M")
    for stages in (cfg.ring_stages,) if cfg.ring_stages else (7, 6, 5, 4, 3):
        op = DecodeOp(
            dims,
            ctas,
            cfg.consumer_warps,
            ring_stage(dims, ctas, cfg.consumer_warps, cfg.stage_bytes, units),
            stages,
            cfg.spin_limit,
            in_flight=cfg.in_flight,
            jitter=cfg.jitter,
            missing=cfg.missing * ctas // 132,
            kept=True,
            hungry=cfg.hungry,
            burst=cfg.burst,
            twos=cfg.twos,
            couples=cfg.couples,
            idle=cfg.idle if units and with_experts else 0,
            bank=bool(cfg.bank),
            units=units,
            shared_first=bool(cfg.shared_first),
            router_first=bool(cfg.router_first) and units,
            packed=bool(cfg.packed) and units and "E" in dims.ffn and copies_fit(dims),
            narrow=bool(cfg.narrow),
            spread=bool(cfg.spread),
            brisk=bool(cfg.brisk),
            # marks take registers, and where there are none left everything is slow
            hold=bool(cfg.hold) and not cfg.timeline,
        )
        op = replace(op, dots=bool(cfg.dots) and op.bank_held and dims.gpus == 1)
        if used(op) <= SHARED_MEMORY:
            return op
    raise ValueError(f"{used(op)} bytes of shared memory: fewer layers or stages of the ring")

def workspace(dims, cfg):
    op = shape(dims, cfg)
    bf = lambda n: ("bf16", (max(n, 8),), "undefined", "step")  # noqa: E731
    between = code_copies(dims) if op.packed else {}
    between |= {"inbox": inbox(dims)} if dims.gpus > 1 else {}
    return {
        **between,
        "hs": bf(dims.dense_dim), "delta": bf(dims.hidden),
        "bank": bf(8 if op.bank_kept else op.ctas * dims.hidden * max(1, dims.bank_rows - dims.bank_old)),
        "weigh": ("f32", ((2 * dims.layers + 1) * dims.hidden,), "undefined", "persistent"),
        "sync": ("i32", (128,), "zero", "persistent"), "mail": ("i32", (op.mail_words,), "undefined", "persistent"),
    }  # fmt: skip

@cute.jit
def prepare(t, cfg, stream):
    """All boxes empty; products of norms and projections of AttnRes; packed codes."""
    empty_boxes(t.workspace.mail, stream)
    w = t.weights
    if cutlass.const_expr(shape(cfg.dims, cfg).packed):
        moes = tuple(w.layers[n] for n in range(cfg.dims.layers) if cfg.dims.ffn[n] == "E")
        pack_experts(moes, t.workspace.packed, cfg.dims, stream)
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
    if cutlass.const_expr(op.packed):
        found = with_copies(found, t.workspace.packed)
    names, tensors = table(found)
    i, o, w = t.inputs, t.outputs, t.workspace
    has_k, has_m = "K" in d.attn, "M" in d.attn
    io = Io(
        i.x0, i.delta if d.first else None, i.bank if d.first else None, i.slots if has_k else None,
        i.lengths if has_m else None, i.block_table if has_m else None, i.slot_mapping if has_m else None,
        o.bank if d.bank_rows > d.bank_old else None, o.ids if "E" in d.ffn else None, o.prefix, o.out,
        t.weights.out_norm, t.workspace.weigh,
    )  # fmt: skip
    ws = Space(None, w.hs, w.delta, None)
    link = (w.inbox, t.peers[0].workspace.inbox, t.rank) if d.gpus > 1 else None
    decode_kernel(
        tensors, io, ws, w.bank, w.mail, w.sync, link, timeline.buffer(t, cfg), names, op
    ).launch(
        grid=(op.ctas, 1, 1), block=(op.block, 1, 1), stream=stream, cooperative=True,
        min_blocks_per_mp=1,
    )  # fmt: skip

# ---- brief: Short forms of activations, in the place of `common`'s in the decode step (`source` says so).

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
