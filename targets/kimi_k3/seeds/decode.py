"""One decode step of one tensor-parallel rank through a run of Kimi K3 layers: one launch per operation.

The plain chain that a megakernel has to beat: AttnRes, attention (KDA or MLA), AttnRes, FFN (latent MoE or dense) per
layer, then the closing AttnRes and the final norm. The loop over layers runs on the host while the launches are
recorded, so that equal operations of different layers share one kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from targets.kimi_k3.seeds.attn_res import Mix, MixState, attn_res
from targets.kimi_k3.seeds.common import pick, pick_layer
from targets.kimi_k3.seeds.gemv import Extra, gemv, gemv_situ
from targets.kimi_k3.seeds.kda import KDA_STATES, KDA_WEIGHTS, kda_core, kda_workspace
from targets.kimi_k3.seeds.latent_moe import MOE_WEIGHTS, moe_ffn, moe_remote, moe_workspace
from targets.kimi_k3.seeds.mla import MLA_WEIGHTS, mla_core, mla_workspace

TUNABLES = {
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "attn_res_vectors": (1, 2, 4),
    "kda_threads": (512, 256, 1024),
    "kv_splits": (64, 32, 16, 128),
    "mla_warps": (8, 4),
    "expert_up_warps": (4, 2, 8),
    "expert_down_warps": (4, 8, 2),
    "expert_unroll": (4, 2, 8),
    "topk_warps": (8, 4, 16),
    "fuse_norm": (True, False),
    "pdl": (False, True),
}
RES_WEIGHTS = (
    "attn_res_norm",
    "attn_res_proj",
    "attn_norm",
    "mlp_res_norm",
    "mlp_res_proj",
    "mlp_norm",
)


def members(kinds, kind):
    """Layers of one kind, in order."""
    return [n for n, k in enumerate(kinds) if k == kind]


def mask(kinds, kind):
    """Bit n is set when layer n is of that kind: a constant that the host loop can test with a run-time n."""
    return sum(1 << n for n in members(kinds, kind))


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
    sharded = d.ranks > 1
    extra = Extra(remote=pick([r.attn for r in t.inputs.remote.layers], n)) if sharded else Extra()
    if cutlass.const_expr("K" in d.attn):
        if bit(mask(d.attn, "K"), n, d.layers) == 1:
            w = pick_member(t.weights.layers, d.attn, "K", n, KDA_WEIGHTS)
            s = pick_member(t.states.layers, d.attn, "K", n, KDA_STATES)
            gemv(space.x, w.in_proj, space.kda_proj, Extra(), cfg, stream)
            kda_core(w, s, t.inputs.slots, space, cfg, stream)
            gemv(space.kda_out, w.o_proj, space.attn, extra, cfg, stream)
    if cutlass.const_expr("M" in d.attn):
        if bit(mask(d.attn, "M"), n, d.layers) == 1:
            w = pick_member(t.weights.layers, d.attn, "M", n, MLA_WEIGHTS)
            s = pick_member(t.states.layers, d.attn, "M", n, ("kv",))
            gemv(space.x, w.a_proj, space.mla_proj, Extra(), cfg, stream)
            mla_core(w, s.kv, t.inputs, space, cfg, stream)
            gemv(space.mla_out, w.o_proj, space.attn, extra, cfg, stream)


@cute.jit
def ffn(n, t, cfg: cutlass.Constexpr, stream):
    """space.delta = output of the FFN of layer n on space.x."""
    d, space = cfg.dims, t.workspace
    sharded = d.ranks > 1
    if cutlass.const_expr("D" in d.ffn):
        if bit(mask(d.ffn, "D"), n, d.layers) == 1:
            w = pick_member(t.weights.layers, d.ffn, "D", n, ("dense_gate_up", "dense_down"))
            gemv_situ(space.x, w.dense_gate_up, space.dense_hidden, cfg, stream)
            extra = Extra()
            if cutlass.const_expr(sharded):
                dense = [t.inputs.remote.layers[k].dense for k in members(d.ffn, "D")]
                extra = Extra(remote=dense[0])
            gemv(space.dense_hidden, w.dense_down, space.delta, extra, cfg, stream)
    if cutlass.const_expr("E" in d.ffn):
        if bit(mask(d.ffn, "E"), n, d.layers) == 1:
            which = bits_before(mask(d.ffn, "E"), n, d.layers)
            experts = members(d.ffn, "E")
            w = pick_layer([t.weights.layers[k] for k in experts], which, MOE_WEIGHTS)
            remote = [t.inputs.remote.layers[k] for k in experts] if sharded else None
            send = [t.outputs.send.layers[k] for k in experts] if sharded else None
            ids = t.outputs.ids[which, None, None]
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
    return found


@cute.jit
def mix_before_attention(n, t, w, cfg: cutlass.Constexpr, stream):
    """AttnRes at the entry of layer n: P <- bf(P + delta), banked when n opens a block."""
    d, space = cfg.dims, t.workspace
    layer = n + d.first
    first_delta = t.inputs.delta if d.first > 0 else space.delta
    prefix = pick([t.inputs.x0, t.outputs.prefix], Int32(1) if n > 0 else Int32(0))
    delta = pick([first_delta, space.delta], Int32(1) if n > 0 else Int32(0))
    opens = layer % d.block == 0
    row = layer // d.block - d.bank_old if opens else -1
    add = Int32(1) if layer > 0 else Int32(0)
    state = MixState((layer + d.block - 1) // d.block, Int32(row), add, Int32(0))
    mix = Mix(
        prefix, t.outputs.prefix, delta, *bank(t, d), w.attn_res_norm, w.attn_res_proj, w.attn_norm, space.x
    )  # fmt: skip
    attn_res(mix, state, cfg, stream)


@cute.jit
def mix_before_ffn(n, t, w, cfg: cutlass.Constexpr, stream):
    """AttnRes between attention and FFN: P <- a when layer n opens a block, else P <- bf(P + a)."""
    d, space = cfg.dims, t.workspace
    layer = n + d.first
    opens = layer % d.block == 0
    prefix = pick([t.outputs.prefix, space.attn], Int32(1) if opens else Int32(0))
    add = Int32(0) if opens else Int32(1)
    state = MixState(layer // d.block + 1, Int32(-1), add, Int32(0))
    mix = Mix(
        prefix, t.outputs.prefix, space.attn, *bank(t, d), w.mlp_res_norm, w.mlp_res_proj, w.mlp_norm, space.x
    )  # fmt: skip
    attn_res(mix, state, cfg, stream)


@cute.jit
def step(t, cfg, stream):
    """The layers of the run, then h = the closing AttnRes and out = bf(RMS(h; out_norm))."""
    d = cfg.dims
    for n in cutlass.range(d.layers, unroll=1):
        w = pick_layer(t.weights.layers, n, RES_WEIGHTS)
        mix_before_attention(n, t, w, cfg, stream)
        attention(n, t, cfg, stream)
        mix_before_ffn(n, t, w, cfg, stream)
        ffn(n, t, cfg, stream)
    closing = Mix(
        t.outputs.prefix, t.outputs.prefix, t.workspace.delta, *bank(t, d), t.weights.out_res_norm,
        t.weights.out_res_proj, t.weights.out_norm, t.outputs.out,
    )  # fmt: skip
    attn_res(closing, MixState(Int32(d.bank_rows), Int32(-1), Int32(1), Int32(1)), cfg, stream)
