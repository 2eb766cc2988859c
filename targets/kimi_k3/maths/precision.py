"""Schedules (how a step is computed) and the few numeric primitives that depend on them.

The oracle is float64 between the defined BF16 rounding points. Working schedules accumulate in float32, in different
orders, and take or leave the roundings that real kernels differ in: together they show how far correct kernels spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from targets.kimi_k3.sizes import EPS


@dataclass(frozen=True)
class Schedule:
    """`chunks`: split-K parts, added last to first. `framework`: products as torch computes them for BF16 tensors.

    The optional roundings, where published implementations differ; the oracle has none of them. `round_u`, `round_o`:
    KDA's conv output and attention output cross kernels in vLLM 0.33.0's stock path and are BF16 there; its fused
    kernels keep FP32. `round_squares`: vLLM's stock tail rounds the squares in the latent norm to BF16, torch's RMSNorm
    does not. `round_p`: softmax weights fed to a tensor core, before they are normalised (flash attention) or after
    (torch's softmax in BF16). `half_gate`: output gates carry eleven bits, as in fp16 or from an approximate
    instruction; without it all schedules agree to the bit where a context has one token, and a right kernel has nowhere
    to be.
    """

    name: str
    dtype: torch.dtype = torch.float32
    chunks: int = 1
    framework: bool = False
    round_u: bool = False
    round_o: bool = False
    round_squares: bool = False
    round_p: Literal["no", "before", "after"] = "no"
    half_gate: bool = False


ORACLE = Schedule("oracle", torch.float64)
SCHEDULES = {
    s.name: s
    for s in (
        ORACLE,
        Schedule("f32"),
        Schedule("split", chunks=8),
        Schedule("conv", chunks=2, round_u=True),
        Schedule(
            "mixed", chunks=16, round_o=True, round_squares=True, round_p="before", half_gate=True
        ),
        Schedule(
            "rounded", chunks=4, round_u=True, round_o=True, round_squares=True, round_p="before"
        ),
        Schedule("framework", framework=True, round_u=True, round_o=True, round_p="after"),
    )
}


SPARE = {
    s.name: s
    for s in (
        *(Schedule(f"{n} parts", chunks=n) for n in (2, 3, 5, 6, 7, 12, 24, 32)),
        *(Schedule(f"{n} parts, gates", chunks=n, half_gate=True) for n in (9, 20)),
        Schedule("10 parts, o", chunks=10, round_o=True, round_p="before"),
        Schedule("14 parts, u", chunks=14, round_u=True, round_p="after"),
    )
}
"""For a second look: a value that lies on the edge of a rounding falls the other way in few orders of a sum, and what
follows from it (all that is computed of that value) then shows in none of a few schedules."""


def bf(x: Tensor) -> Tensor:
    """Round to nearest even BF16, keep the working dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def f8(x: Tensor) -> Tensor:
    """Round to nearest even E4M3, saturating at 448, keep the working dtype."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def output_gate(s: Schedule, x: Tensor) -> Tensor:
    """sigmoid, as the factor of an attention's output."""
    gate = sigmoid(x)
    return gate.to(torch.float16).to(gate.dtype) if s.half_gate else gate


def total(s: Schedule, x: Tensor) -> Tensor:
    """Sum over the last dimension, kept."""
    if s.chunks == 1 or x.shape[-1] < 2 * s.chunks:
        return x.sum(-1, keepdim=True)
    parts = [c.sum(-1, keepdim=True) for c in x.chunk(s.chunks, -1)]
    return added_up(parts)


def added_up(parts: list[Tensor]) -> Tensor:
    """Last to first, so that the order differs from a plain loop's."""
    out = parts[-1]
    for part in reversed(parts[:-1]):
        out = out + part
    return out


def linear(s: Schedule, x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed, not rounded (but by the framework's own BF16 output)."""
    if s.framework:
        return (x.to(torch.bfloat16) @ weight.to(torch.bfloat16).T).to(s.dtype)
    return linear_wide(s, x, weight)


def linear_wide(s: Schedule, x: Tensor, weight: Tensor) -> Tensor:
    """As `linear`, where even a framework gives a float32 result (router logits)."""
    if s.chunks == 1:
        return x @ weight.to(s.dtype).T
    return added_up(
        [
            a @ b.to(s.dtype).T
            for a, b in zip(x.chunk(s.chunks, -1), weight.chunk(s.chunks, -1), strict=True)
        ]
    )


def rms(s: Schedule, x: Tensor, weight: Tensor) -> Tensor:
    """x * rsqrt(mean(x^2) + 1e-5) * weight, not rounded."""
    return x * inverse_rms(s, x) * weight.to(s.dtype)


def inverse_rms(s: Schedule, x: Tensor, square_bf16: bool = False) -> Tensor:
    squares = bf(x * x) if square_bf16 else x * x
    return torch.rsqrt(total(s, squares) / x.shape[-1] + EPS)


def situ(gate: Tensor, up: Tensor) -> Tensor:
    """SiTU(g, u) = 4 tanh(g / 4) sg(g) * 25 tanh(u / 25)."""
    return 4 * torch.tanh(gate / 4) * sigmoid(gate) * 25 * torch.tanh(up / 25)
