"""One decode step of one tensor-parallel rank through a run of Kimi K3 layers for many tokens, a launch per operation.

The seed's chain, in which each weight is read for many tokens at once: routed experts run over pairs grouped by expert,
up to eight together, dense products over all tokens; products of the same x and what need not wait for each other share
a launch. `attention` and `ffn` are the seed's but for the exchange between GPUs, whose kernels the candidate would
carry for nothing.
"""

import cutlass
import cutlass.cute as cute

from targets.kimi_k3.seeds.common import pick, pick_layer
from targets.kimi_k3.seeds.decode import bit, bits_before, mask, members, numbered, pick_member
from targets.kimi_k3.seeds.decode import step as step  # the candidate's
from targets.kimi_k3.seeds.gemv import gemv, gemv_situ
from targets.kimi_k3.seeds.gemv_kernel import Extra
from targets.kimi_k3.seeds.grouped.moe import moe_ffn, moe_workspace
from targets.kimi_k3.seeds.kda import KDA_STATES, KDA_WEIGHTS, kda_core, kda_workspace
from targets.kimi_k3.seeds.latent_moe import moe_remote, moe_weights
from targets.kimi_k3.seeds.mla import mla_core, mla_workspace
from targets.kimi_k3.seeds.mla_layout import mla_weights

TUNABLES = {
    "up_warps": (4, 8, 2),
    "up_tile": (2, 1),
    "up_ring": (2, 1, 4),
    "up_ctas": (3, 4, 2, 1),
    "down_warps": (4, 8, 2),
    "down_ring": (2, 1, 4),
    "down_ctas": (3, 4, 2, 1),
    "down_turns": (4, 7, 2, 1),
    "product_warps": (8, 4),
    "product_tile": (4, 2, 3),
    "product_ring": (4, 2, 1),
    "product_splits": (4, 8, 1),
    "attn_res_vectors": (2, 1, 4),
    "kda_threads": (512, 256, 1024),
    "kv_splits": (64, 32, 16, 128),
    "mla_warps": (8, 4),
    "topk_warps": (8, 4, 16),
    "fuse_norm": (False,),
    "pdl": (False, True),
}


@cute.jit
def attention(n, t, cfg: cutlass.Constexpr, stream):
    """space.attn = a of layer n on space.x, o_proj and its all-reduce included."""
    d, space = cfg.dims, t.workspace
    extra = Extra()
    if cutlass.const_expr(d.ranks > 1):
        extra = Extra(remote=pick([r.attn for r in t.inputs.remote.layers], n))
    if cutlass.const_expr("K" in d.attn):
        if bit(mask(d.attn, "K"), n, d.layers) == 1:
            w = pick_member(t.weights.layers, d.attn, "K", n, KDA_WEIGHTS)
            s = pick_member(t.states.layers, d.attn, "K", n, KDA_STATES)
            gemv(space.x, w.in_proj, space.kda_proj, Extra(), cfg, stream)
            kda_core(w, s, t.inputs, space, cfg, stream)
            gemv(space.kda_out, w.o_proj, space.attn, extra, cfg, stream)
    if cutlass.const_expr("M" in d.attn):
        if bit(mask(d.attn, "M"), n, d.layers) == 1:
            w = pick_member(t.weights.layers, d.attn, "M", n, mla_weights(d))
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
                extra = Extra(remote=t.inputs.remote.layers[members(d.ffn, "D")[0]].dense)
            gemv(space.dense_hidden, w.dense_down, space.delta, extra, cfg, stream)
    if cutlass.const_expr("E" in d.ffn):
        if bit(mask(d.ffn, "E"), n, d.layers) == 1:
            which = bits_before(mask(d.ffn, "E"), n, d.layers)
            layers = members(d.ffn, "E")
            w = pick_layer([t.weights.layers[k] for k in layers], which, moe_weights(d))
            remote = [t.inputs.remote.layers[k] for k in layers] if sharded else None
            send = [numbered(t.outputs.send.layers, k) for k in layers] if sharded else None
            ids = t.outputs.ids[which, None, None]
            exchange = moe_remote(remote, send, which, d)
            moe_ffn(space.x, w, exchange, ids, space.delta, space, cfg, stream)


def workspace(dims, cfg):
    if dims.gpus > 1:
        raise ValueError(f"{dims.gpus} GPUs: this chain exchanges nothing itself")
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
