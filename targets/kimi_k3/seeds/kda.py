"""KDA attention of one layer: input projection, one recurrent update per head, output projection.

The update is one launch, a CTA per head and request: short convolution, decay, delta rule on the f32 state, norm and
gate. The state is in registers, eight lanes to a row of it, loaded before anything that depends on the projection.
Several tokens a request, and models whose output gate has low rank, take a second kernel that walks the tokens.
"""

import cutlass
import cutlass.cute as cute

from targets.kimi_k3.seeds.common import pick, pick_layer
from targets.kimi_k3.seeds.gemv import gemv, gemv_of_sum
from targets.kimi_k3.seeds.gemv_kernel import Extra
from targets.kimi_k3.seeds.kda_tokens import kda_tokens_kernel
from targets.kimi_k3.seeds.kda_update import KdaTensors, kda_kernel, kda_shape

TUNABLES = {
    "kda_threads": (512, 256, 1024),
    "gemv_warps": (8, 4, 16),
    "gemv_tile": (2, 1, 4),
    "gemv_unroll": (4, 2, 7),
    "fuse_add": (True, False),
    "pdl": (False, True),
}
KDA_WEIGHTS = ("in_proj", "f_b", "conv", "A_log", "dt_bias", "o_norm", "o_proj")
KDA_STATES = ("conv", "S")


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


def kda_weights(dims):
    """The names of a layer's weights."""
    return (*KDA_WEIGHTS, "g_b") if dims.gate_rank > 0 else KDA_WEIGHTS


def kda_workspace(dims):
    return {
        "kda_proj": ("bf16", (dims.rows, dims.in_proj_rows), "undefined", "step"),
        "kda_out": ("bf16", (dims.rows, dims.kda_dim), "undefined", "step"),
    }


def workspace(dims, cfg):
    total = {} if cfg.fuse_add else {"sum": ("bf16", (dims.rows, dims.hidden), "undefined", "step")}
    return {**kda_workspace(dims), **total}


@cute.jit
def step(t, cfg, stream):
    """y_i = a of the KDA layer on x_i = bf(inputs.x[i] + y_{i-1}), o_proj and its all-reduce included."""
    x, y, space = t.inputs.x, t.outputs.y, t.workspace
    mSum = None if cfg.fuse_add else space.sum
    remote = [r.attn for r in t.inputs.remote.layers] if cfg.dims.ranks > 1 else None
    gemv(x[0], t.weights.layers[0].in_proj, space.kda_proj, Extra(), cfg, stream)
    for i in cutlass.range(len(x), unroll=1):
        w = pick_layer(t.weights.layers, i, kda_weights(cfg.dims))
        s = pick_layer(t.states.layers, i, KDA_STATES)
        if i > 0:
            gemv_of_sum(pick(x, i), pick(y, i - 1), mSum, w.in_proj, space.kda_proj, cfg, stream)
        kda_core(w, s, t.inputs, space, cfg, stream)
        extra = Extra() if remote is None else Extra(remote=pick(remote, i))
        gemv(space.kda_out, w.o_proj, pick(y, i), extra, cfg, stream)
