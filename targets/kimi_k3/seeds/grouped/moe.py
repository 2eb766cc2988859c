"""The latent MoE FFN with experts grouped by expert, in place of the seed's: `moe_ffn` and what it needs."""

import cutlass
import cutlass.cute as cute

from targets.kimi_k3.seeds.common import divisor_below
from targets.kimi_k3.seeds.gemv import gemv
from targets.kimi_k3.seeds.gemv_kernel import Extra
from targets.kimi_k3.seeds.grouped.aside import group_aside
from targets.kimi_k3.seeds.grouped.codes import Tiling
from targets.kimi_k3.seeds.grouped.experts import grouped_down_kernel, grouped_up_kernel
from targets.kimi_k3.seeds.grouped.pairs import WORDS, Grouping
from targets.kimi_k3.seeds.grouped.product import products
from targets.kimi_k3.seeds.grouped.product_kernel import Output
from targets.kimi_k3.seeds.grouped.slots import Slots, slots_kernel
from targets.kimi_k3.seeds.latent_moe import Remote, nv_of
from targets.kimi_k3.seeds.latent_moe_codes import Codes
from targets.kimi_k3.seeds.router import topk_kernel, topk_shape


def grouping(dims):
    return Grouping(dims.rows, dims.topk, dims.experts, 32)


def up_shape(cfg):
    d = cfg.dims
    if d.expert_dim % 16 or d.latent % 16:
        raise ValueError(
            f"experts of {d.expert_dim} and {d.latent} rows: a product has sixteen at a time"
        )
    tile = divisor_below(d.expert_dim // 16, cfg.up_tile)
    steps = -(-d.latent // 128)
    warps = min(cfg.up_warps, steps)
    ring = min(cfg.up_ring, -(-steps // warps))
    return Tiling(d.topk, d.expert_dim, d.latent // 32, warps, tile, ring, 1, cfg.pdl, nv_of(d))


def down_shape(cfg):
    """Warps, tiles, rings and turns that divide the rows of w2 among CTAs."""
    d = cfg.dims
    units = d.latent // 16
    warps = divisor_below(units, cfg.down_warps)
    ring = divisor_below(units // warps, cfg.down_ring)
    turns = divisor_below(units // warps // ring, cfg.down_turns)
    return Tiling(
        d.topk, d.latent, d.expert_dim // 32, warps, 1, ring, turns, cfg.pdl, nv_of(d)
    )  # fmt: skip


def fours(ctas, op):
    """CTAs an SM that have the registers of so many of four warps."""
    return max(1, ctas * 4 // op.warps)


@cute.jit
def experts(up: tuple, down: Codes, norm, mRemote, space, cfg: cutlass.Constexpr, stream):
    """space.latent_normed from the laid-out latent and the list of pairs: up, down, sum over slots and norm."""
    op, first, second = grouping(cfg.dims), up_shape(cfg), down_shape(cfg)
    grouped_up_kernel(space.latent_laid, up, space.pair_list, space.pair_hidden, first).launch(
        grid=(first.rows // first.height, op.usual, 1), block=(first.warps * 32, 1, 1), stream=stream,
        use_pdl=cfg.pdl, min_blocks_per_mp=fours(cfg.up_ctas, first), preferred_smem_carveout=-1,
    )  # fmt: skip
    rows = 16 * second.ring * second.turns * second.warps
    grouped_down_kernel(space.pair_hidden, down, space.pair_list, space.pair_out, second).launch(
        grid=(second.rows // rows, op.usual, 1), block=(second.warps * 32, 1, 1), stream=stream,
        use_pdl=cfg.pdl, min_blocks_per_mp=fours(cfg.down_ctas, second), preferred_smem_carveout=-1,
    )  # fmt: skip
    last = Slots(cfg.dims.topk, cfg.dims.latent, cfg.dims.eps, cfg.pdl)
    slots_kernel(space.pair_out, space.routed, mRemote, norm, space.latent_normed, last).launch(
        grid=(op.rows, 1, 1), block=(last.threads, 1, 1), stream=stream, use_pdl=cfg.pdl, min_blocks_per_mp=1
    )  # fmt: skip


@cute.jit
def front(mX, w, remote: Remote, mIds, space, cfg: cutlass.Constexpr, stream):
    """The products of x (logits, latent, hidden of the shared expert) in one launch, and the routing."""
    outputs = (
        Output(w.router, space.logits, Extra()),
        Output(w.latent_down, space.latent, Extra()),
        Output(w.shared_gate_up, space.shared_hidden, Extra()),
    )
    products(mX, outputs, (1, 1, 2), cfg, stream)
    op = topk_shape(cfg)
    topk_kernel(space.logits, remote.logits, w.router_bias, mIds, space.routed, op).launch(
        grid=(mX.shape[0], 1, 1), block=(op.warps * 32, 1, 1), stream=stream, use_pdl=op.pdl, min_blocks_per_mp=1
    )  # fmt: skip


@cute.jit
def moe_ffn(mX, w, remote: Remote, mIds, mY, space, cfg: cutlass.Constexpr, stream):
    """mY bf16 [M, hidden] = the FFN's output on mX; mIds i32 [M, topk] receives the routing."""
    front(mX, w, remote, mIds, space, cfg, stream)
    nv = nv_of(cfg.dims)
    up = (Codes(w.w1, w.w1_scale), Codes(w.w3, w.w3_scale))
    if cutlass.const_expr(nv):
        up = (Codes(w.w1, w.w1_scale, w.w1_factor), Codes(w.w3, w.w3_scale, w.w3_factor))
    down = Codes(w.w2, w.w2_scale, w.w2_factor if nv else None)
    shared = Output(w.shared_down, space.shared, Extra(remote=remote.shared, send=remote.send))
    latent = (space.latent, remote.latent)
    group_aside(mIds, latent, space.shared_hidden, shared, space, cfg, stream)
    experts(up, down, w.latent_norm, remote.moe, space, cfg, stream)
    joined = Extra(addend=space.shared, tail=remote.delta)
    gemv(space.latent_normed, w.latent_up, mY, joined, cfg, stream)


def moe_workspace(dims, cfg):
    m, op = dims.rows, grouping(dims)
    return {
        "logits": ("f32", (m, dims.router_rows), "undefined", "step"),
        "routed": ("bf16", (m, dims.topk), "undefined", "step"),
        "latent": ("bf16", (m, dims.latent_rows), "undefined", "step"),
        "latent_laid": ("bf16", (m, dims.latent), "undefined", "step"),
        "pair_list": ("i32", (op.entries + op.usual, WORDS), "undefined", "step"),
        "pair_hidden": ("bf16", (op.pairs, dims.expert_dim), "undefined", "step"),
        "pair_out": ("bf16", (op.pairs, dims.latent), "undefined", "step"),
        "latent_normed": ("bf16", (m, dims.latent), "undefined", "step"),
        "shared_hidden": ("bf16", (m, dims.shared_dim), "undefined", "step"),
        "shared": ("bf16", (m, dims.hidden_local), "undefined", "step"),
    }
