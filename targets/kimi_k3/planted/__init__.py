"""The catalogue of planted kernels of the Kimi K3 targets: edits of their seeds that score the judge.

Each is compiled in the jail and judged like any candidate. What a mistake is worth is measured, not declared: see
`targets.planted`. Nothing here imports CuTe DSL or torch.
"""

from __future__ import annotations

from functools import cache

from targets.kimi_k3.planted import (
    attention,
    controls,
    hacks,
    moe,
    peers,
    persistent,
    products,
    second,
    third,
    unset,
)
from targets.planted import Planted


@cache
def catalogue() -> tuple[Planted, ...]:
    """All of them, in a fixed order."""
    return (
        *products.gemv(), *products.attn_res(), *moe.router(), *attention.kda(), *attention.mla(), *moe.latent_moe(),
        *products.sharded(), *products.decode(), *persistent.kernels(), *hacks.kernels(),
        *second.kernels(), *controls.kernels(), *peers.peers(), *unset.kernels(), *third.kernels(),
    )  # fmt: skip
