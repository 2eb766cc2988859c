"""Bytes and flops that one step cannot avoid: weights once, recurrent states and caches once each way.

Routed experts count as often as they are distinct: expected for the static floor, or from the ids really routed. The
exchange buffers (`inputs.remote`, `outputs.send`) count; activations between operations stay on chip and do not.
Not an estimate of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sandbox.artifact import Buffer
from sandbox.dtypes import nbytes
from targets.base import Floor
from targets.kimi_k3.buffers import Row, Shape, expert_weights

EXPERT_BUFFERS = tuple(
    f"{w}{part}" for w in ("w1", "w2", "w3") for part in ("", "_scale", "_factor")
)


def expected_distinct(experts: int, topk: int, rows: int) -> float:
    """Distinct experts of `rows` independent uniform draws of `topk` out of `experts`."""
    return experts * (1.0 - (1.0 - topk / experts) ** rows)


def expert_bytes(p: Shape) -> int:
    """Codes and scales of one routed expert on this rank."""
    return row_bytes(expert_weights(p)) // p.sizes.experts


def row_bytes(rows: Iterable[Row]) -> int:
    return sum(nbytes(dtype, shape) for _, dtype, shape in rows)


def is_expert(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in EXPERT_BUFFERS


def dense_weight_bytes(buffers: Sequence[Buffer]) -> int:
    """All weights but the routed experts."""
    return sum(b.nbytes for b in buffers if b.group == "weights" and not is_expert(b.name))


def state_bytes(p: Shape, kda_layers: int, mla_layers: int, length: int) -> tuple[int, int]:
    """(read, written): of each request one S and three taps, and the cache rows of the old tokens of `length`; S once a
    token, the conv page, and q new rows. With q > 1 every token leaves its whole state."""
    s = p.sizes
    state, tap = 4 * s.kda_heads * s.head_dim**2, 2 * 3 * s.kda_dim
    row = (1 if p.kv == "fp8" else 2) * s.kv_dim
    read = kda_layers * (state + 3 * tap) + mla_layers * max(length - p.q, 0) * row
    written = kda_layers * (p.q * state + p.taps_kept * tap) + mla_layers * p.q * row
    return p.requests * read, p.requests * written


def flops(p: Shape, buffers: Sequence[Buffer], mla_layers: int, length: int) -> int:
    """Multiply-adds of the matrix products (two flops each), `topk` experts a row; attention over `length` tokens."""
    s = p.sizes
    matrix = sum(
        2 * b.nbytes // 2 for b in buffers
        if b.group == "weights" and b.dtype == "bf16" and len(b.shape) > 1
    )  # fmt: skip
    layers = sum(1 for b in buffers if b.name.endswith(".w1"))
    experts = layers * s.topk * 2 * 3 * s.latent * s.expert_dim
    attention = mla_layers * 2 * s.mla_heads * length * (s.kv_dim + s.kv_lora)
    return p.rows * (matrix + experts + attention)


def traffic(buffers: Sequence[Buffer], mark: str) -> int:
    return sum(b.nbytes for b in buffers if b.name.startswith(mark))


def floor(
    p: Shape,
    buffers: Sequence[Buffer],
    counts: tuple[int, int],
    distinct: Sequence[float] | None = None,
) -> Floor:
    """Floor of a step over `counts` = (KDA, MLA) layers. `distinct`: experts read per MoE layer; None = expected."""
    kda_layers, mla_layers = counts
    moe_layers = sum(1 for b in buffers if b.name.endswith(".w1"))
    if distinct is None and moe_layers:
        distinct = [expected_distinct(p.sizes.experts, p.sizes.topk, p.rows)] * moe_layers
    # the router alone chooses experts and reads none of them
    routed = round(sum(distinct) * expert_bytes(p)) if distinct and moe_layers else 0
    read, written = state_bytes(p, kda_layers, mla_layers, p.context)
    read += dense_weight_bytes(buffers) + routed + traffic(buffers, "inputs.remote.")
    written += traffic(buffers, "outputs.send.")
    return Floor(read, written, flops(p, buffers, mla_layers, p.context))


def distinct_of(ids: Iterable[Iterable[int]]) -> int:
    """Distinct experts among the ids of one layer, [rows][topk]."""
    return len({e for row in ids for e in row})


def distinct_by_layer(ids: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """`outputs.ids` as nested lists [MoE layer][row][rank] -> distinct experts of each layer."""
    return [float(distinct_of(layer)) for layer in ids]
