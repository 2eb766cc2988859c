"""KDA attention of one token per request: projections, short convolution, gated delta rule, gated norm, o_proj."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.maths.precision import Schedule, bf, linear, rms, sigmoid, total
from targets.kimi_k3.sizes import GATE_LOWER_BOUND

L2_EPS = 1e-6


@dataclass(frozen=True)
class KdaResult:
    """`partial`: bf(out W_o^T) before the all-reduce. `S`, `conv`: new content of the slots of the `live` requests."""

    partial: Tensor
    S: Tensor
    conv: Tensor
    live: Tensor


def kda(s: Schedule, x: Tensor, layer: Layer, slots: Tensor) -> KdaResult:
    """x [M, hidden] BF16 values; states S [slots, H, V, K] and conv [slots, 3, 3D]; slots [M], <= 0 a null request.

    States are not written; a null request has zero attention output.
    """
    w, state = layer.weights, layer.states
    heads, dim = w["A_log"].shape[0], w["o_norm"].shape[0]
    d, rank = heads * dim, w["f_b"].shape[1]
    live = slots > 0
    index = slots.clamp(min=0).long()
    y = bf(linear(s, x, w["in_proj"]))
    qkv, g, f_a, b = (
        y[:, : 3 * d],
        y[:, 3 * d : 4 * d],
        y[:, 4 * d : 4 * d + rank],
        y[:, 4 * d + rank :],
    )
    raw = bf(linear(s, f_a, w["f_b"]))
    window = torch.cat([state["conv"][index].to(s.dtype), qkv[:, None]], 1)
    u = short_conv(s, window, w["conv"])
    q, k, v = (part.reshape(-1, heads, dim) for part in u.split(d, -1))
    q = q * torch.rsqrt(total(s, q * q) + L2_EPS) * dim**-0.5
    k = k * torch.rsqrt(total(s, k * k) + L2_EPS)
    rate = torch.exp(w["A_log"].to(s.dtype))[:, None]
    arg = (raw + w["dt_bias"].to(s.dtype)).reshape(-1, heads, dim)
    gam = GATE_LOWER_BOUND * sigmoid(rate * arg)
    beta = sigmoid(b[:, :heads])
    S, o = delta_rule(state["S"][index].to(s.dtype), (q, k, v), gam, beta)
    if s.round_o:
        o = bf(o)
    gate = sigmoid(g).reshape(-1, heads, dim)
    out = bf(rms(s, o, w["o_norm"]) * gate).reshape(-1, d)
    out = torch.where(live[:, None], out, torch.zeros_like(out))
    return KdaResult(bf(linear(s, out, w["o_proj"])), S, window[:, 1:], live)


def short_conv(s: Schedule, window: Tensor, weight: Tensor) -> Tensor:
    """window [M, 4, 3D] oldest first, weight [3D, 4] -> SiLU of the four-tap sum."""
    t = (window * weight.to(s.dtype).T).sum(1)
    u = t * sigmoid(t)
    return bf(u) if s.round_u else u


def delta_rule(
    S: Tensor, qkv: tuple[Tensor, Tensor, Tensor], gam: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence. S [M, H, V, K]; q, k, gam [M, H, K]; v [M, H, V]; beta [M, H] -> (S, o [M, H, V])."""
    q, k, v = qkv
    S = S * torch.exp(gam)[:, :, None, :]
    d = beta[..., None] * (v - (S * k[:, :, None, :]).sum(-1))
    S = S + d[..., None] * k[:, :, None, :]
    return S, (S * q[:, :, None, :]).sum(-1)
