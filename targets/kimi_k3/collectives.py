"""The exchanges with other ranks, named and placed: what a target on several GPUs has to implement. No torch.

A rank alone reads what the others would send from `inputs.remote.layers.N.<name>` (`maths.exchange.Loopback`); real
ranks put their own `maths.exchange.Exchange` in its place, and nothing else of the mathematics changes. Reductions take
BF16 partials, add them in FP32 in rank order 0 .. T-1 and round once to BF16, so that all ranks hold the same bits.
The embedding before the stack and the head behind it exchange too; they are not part of a step here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from targets.kimi_k3.buffers import Shape
from targets.kimi_k3.options import Run

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Collective:
    """`width`: columns of one row over all ranks; with a gather each rank brings its share, with a reduction a partial
    of all of them. `partial`: dtype that crosses the link."""

    name: str
    place: str
    operation: Operation
    partial: str
    width: Callable[[Shape], int]

    def sent(self, p: Shape) -> int:
        """Bytes of one row that this rank hands to each other rank."""
        item = 4 if self.partial == "f32" else 2
        shares = p.sizes.ranks if self.operation in ("all_gather", "reduce_scatter") else 1
        return item * self.width(p) // shares

    def received(self, p: Shape) -> int:
        """Bytes of one row that this rank takes from all others, each partial or share by itself (one-shot)."""
        return (p.sizes.ranks - 1) * self.sent(p)


ATTN = Collective(
    "attn", "after o_proj of KDA and MLA", "all_reduce", "bf16", lambda p: p.sizes.hidden
)
LATENT = Collective(
    "latent",
    "front of the FFN, sharded latent-down",
    "all_gather",
    "bf16",
    lambda p: p.sizes.latent,
)
LOGITS = Collective(
    "logits", "front of the FFN, sharded router", "all_gather", "f32", lambda p: p.sizes.experts
)
MOE = Collective(
    "moe",
    "after the experts, before the latent norm",
    "all_reduce",
    "bf16",
    lambda p: p.sizes.latent,
)
SHARED = Collective(
    "shared", "after the shared expert", "reduce_scatter", "bf16", lambda p: p.sizes.hidden
)
DELTA = Collective(
    "delta", "after the up-projection", "all_gather", "bf16", lambda p: p.sizes.hidden
)
DENSE = Collective(
    "dense", "after the dense down-projection", "all_reduce", "bf16", lambda p: p.sizes.hidden
)
ALL = (ATTN, LOGITS, LATENT, MOE, SHARED, DELTA, DENSE)


def of_layer(run: Run, n: int) -> tuple[Collective, ...]:
    """Those of layer n of a stack, in the order of the step; none on one rank."""
    p = run.shape
    if p.sizes.ranks == 1:
        return ()
    if run.ffn[n] == "D":
        return (ATTN, DENSE)
    front = (*((LOGITS,) if p.router_sharded else ()), *((LATENT,) if p.latent_sharded else ()))
    return (ATTN, *front, MOE, SHARED, DELTA)
