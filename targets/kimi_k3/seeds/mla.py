"""Absorbed MLA attention of one layer over the paged latent cache.

Projections are plain products. The core splits the context over CTAs (flash decoding): scores and latent sums on bf16
tensor cores with up to 16 heads as rows, softmax in f32, then one launch that joins the splits and applies W_UV.
With several tokens a request each row attends by itself, to as many tokens as it sees. An E4M3 cache is widened to
bf16, exactly, on its way to shared memory.
"""

import cutlass
import cutlass.cute as cute

from targets.kimi_k3.seeds.common import pick, pick_layer
from targets.kimi_k3.seeds.gemv import gemv, gemv_normed, gemv_of_sum
from targets.kimi_k3.seeds.gemv_kernel import Extra
from targets.kimi_k3.seeds.mla_absorb import absorb_kernel
from targets.kimi_k3.seeds.mla_attention import attention_kernel
from targets.kimi_k3.seeds.mla_combine import combine_kernel
from targets.kimi_k3.seeds.mla_layout import HEADS, mla_shape, mla_weights

TUNABLES = {
    "kv_splits": (64, 32, 16, 128),
    "mla_warps": (8, 4),
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "fuse_norm": (True, False),
    "fuse_add": (True, False),
    "pdl": (False, True),
}


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


def workspace(dims, cfg):
    total = {} if cfg.fuse_add else {"sum": ("bf16", (dims.rows, dims.hidden), "undefined", "step")}
    return {**mla_workspace(dims, cfg), **total}


@cute.jit
def step(t, cfg, stream):
    """y_i = a of the MLA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    x, y, space = t.inputs.x, t.outputs.y, t.workspace
    mSum = None if cfg.fuse_add else space.sum
    kv = [s.kv for s in t.states.layers]
    remote = [r.attn for r in t.inputs.remote.layers] if cfg.dims.ranks > 1 else None
    gemv(x[0], t.weights.layers[0].a_proj, space.mla_proj, Extra(), cfg, stream)
    for i in cutlass.range(len(x), unroll=1):
        w = pick_layer(t.weights.layers, i, mla_weights(cfg.dims))
        if i > 0:
            gemv_of_sum(pick(x, i), pick(y, i - 1), mSum, w.a_proj, space.mla_proj, cfg, stream)
        mla_core(w, pick(kv, i), t.inputs, space, cfg, stream)
        extra = Extra() if remote is None else Extra(remote=pick(remote, i))
        gemv(space.mla_out, w.o_proj, pick(y, i), extra, cfg, stream)
