"""One decode step of one tensor-parallel rank for some tokens: the chain of `grouped`, with experts' codes from copies.

With eight tokens experts are bound by what makes their codes bf16, and copies whose bits lie better save a third of it
(`tile_pack`: 1.85 GB more a layer at tp8, for up to 16 layers).
"""

import cutlass.cute as cute

from targets.kimi_k3.seeds.decode import members
from targets.kimi_k3.seeds.decode import step as step  # the candidate's
from targets.kimi_k3.seeds.grouped.decode import chain_workspace
from targets.kimi_k3.seeds.grouped.moe import packed_of
from targets.kimi_k3.seeds.persistent.tile_pack import code_copies, pack_experts

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
    "pdl": (True, False),
    "packed": (1,),
}


def workspace(dims, cfg):
    if not packed_of(cfg):
        raise ValueError("copies of codes: of MXFP4 experts, where memory holds them")
    return {**chain_workspace(dims, cfg), **code_copies(dims)}


@cute.jit
def prepare(t, cfg, stream):
    """Copies of the experts' codes."""
    layers = tuple(t.weights.layers[k] for k in members(cfg.dims.ffn, "E"))
    pack_experts(layers, t.workspace.packed, cfg.dims, stream)
