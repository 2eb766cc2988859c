"""The latent MoE FFN of one layer: router, MXFP4 or NVFP4 experts on the latent, shared expert, up-projection.

Experts run per (row, slot) pair on bf16 tensor cores: the 4-bit codes become bf16 by shifts, exactly, and carry their
group's power-of-two scale. Scales from 2^-62 to 2^63 (bytes 65..190) are exact; others are not supported.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from targets.kimi_k3.seeds.common import pick, pick_layer
from targets.kimi_k3.seeds.gemv import add, gemv, gemv_normed, gemv_situ
from targets.kimi_k3.seeds.gemv_kernel import Extra
from targets.kimi_k3.seeds.latent_moe_codes import Codes, Experts
from targets.kimi_k3.seeds.latent_moe_experts import expert_down_kernel, expert_up_kernel
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
