"""The latent MoE FFN of one layer for many tokens: a weight is read for many of them at once.

Pairs of tokens and slots are grouped by expert, eight at most to a product of an expert's codes made bf16.
"""

from targets.kimi_k3.seeds.grouped.moe import moe_workspace
from targets.kimi_k3.seeds.latent_moe import step as step  # the candidate's

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
    "topk_warps": (8, 4, 16),
    "pdl": (False, True),
}


def workspace(dims, cfg):
    return {
        **moe_workspace(dims, cfg),
        "sum": ("bf16", (dims.rows, dims.hidden), "undefined", "step"),
    }
