"""The latent MoE FFN of one layer: router, MXFP4 or NVFP4 experts on the latent, shared expert, up-projection.

Experts run per (row, slot) pair on bf16 tensor cores: the 4-bit codes become bf16 by shifts, exactly, and carry their
group's power-of-two scale. Scales from 2^-62 to 2^63 (bytes 65..190) are exact; others are not supported.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint16, Uint32

from targets.kimi_k3.seeds.common import begin, mma_k32, pick, pick_layer, round_bf16, situ, smem
from targets.kimi_k3.seeds.gemv import Extra, add, gemv, gemv_normed, gemv_situ
from targets.kimi_k3.seeds.router import route

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
