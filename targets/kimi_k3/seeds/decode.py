"""One decode step of one tensor-parallel rank through a run of Kimi K3 layers: one launch per operation.

The plain chain that a megakernel has to beat: AttnRes, attention (KDA or MLA), AttnRes, FFN (latent MoE or dense) per
layer, then the closing AttnRes and the final norm. The loop over layers runs on the host while the launches are
recorded, so that equal operations of different layers share one kernel.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from targets.kimi_k3.seeds.attn_res import Mix, MixState, attn_res
from targets.kimi_k3.seeds.collectives import (
    ATTN,
    MOE,
    REDUCE,
    collectives_workspace,
    moe_between,
    site,
    swap,
)
from targets.kimi_k3.seeds.common import begin, pick, pick_layer
from targets.kimi_k3.seeds.gemv import gemv, gemv_situ
from targets.kimi_k3.seeds.gemv_kernel import Extra
from targets.kimi_k3.seeds.kda import KDA_STATES, KDA_WEIGHTS, kda_core, kda_workspace
from targets.kimi_k3.seeds.latent_moe import moe_ffn, moe_remote, moe_weights, moe_workspace
from targets.kimi_k3.seeds.mla import mla_core, mla_workspace
from targets.kimi_k3.seeds.mla_sizes import mla_weights

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
