"""KDA attention of q tokens per request: projections, short convolution, gated delta rule, gated norm, o_proj."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.maths.precision import Schedule, bf, linear, output_gate, rms, sigmoid, total
from targets.kimi_k3.sizes import GATE_LOWER_BOUND

L2_EPS = 1e-6


@dataclass(frozen=True)
class Slots:
    """`ids` [B, q]: where the state after each token goes. `accepted` [B], 1..q: the request starts from the state in
    its slot `accepted - 1`, and from the conv taps of that many kept tokens in the page of its slot 0. A request whose
    starting slot is <= 0 is null; another slot <= 0 is not written.
    """

    ids: Tensor
    accepted: Tensor

    @property
    def start(self) -> Tensor:
        return self.ids.gather(1, self.accepted.long()[:, None] - 1)[:, 0]


@dataclass(frozen=True)
class KdaResult:
    """`partial`: bf(out W_o^T) before the all-reduce. `S` [B, q, H, V, K]: after each token. `conv` [B, q + 2, 3D]: the
    new page. `live` [B]: requests that are not null.
    """

    partial: Tensor
    S: Tensor
    conv: Tensor
    live: Tensor


@dataclass(frozen=True)
class Projected:
    """Of every row: qkv [M, 3D] before the convolution, gate [M, H, V], decay argument [M, H, K], beta [M, H]."""

    qkv: Tensor
    gate: Tensor
    arg: Tensor
    beta: Tensor


def kda(s: Schedule, x: Tensor, layer: Layer, slots: Slots) -> KdaResult:
    """x [M, hidden] BF16 values, the q rows of a request together; states S [slots, H, V, K], conv [slots, q + 2, 3D].

    States are not written; a null request has zero attention output in all its rows (vLLM's stock
    Triton kernel for verification zeroes the first row only). A_log is one number a head, as vLLM reads it; one
    third-party oracle takes the stored 128 values for channels.
    """
    w, state = layer.weights, layer.states
    heads, dim = w["A_log"].shape[0], w["o_norm"].shape[0]
    d, (requests, tokens) = heads * dim, slots.ids.shape
    live = slots.start > 0
    seen = project(s, x, w)
    seq = torch.cat(
        [history(state["conv"], slots).to(s.dtype), seen.qkv.reshape(requests, tokens, -1)], 1
    )
    rate = torch.exp(w["A_log"].to(s.dtype))[:, None]
    gam = (GATE_LOWER_BOUND * sigmoid(rate * seen.arg)).reshape(requests, tokens, heads, dim)
    beta = seen.beta.reshape(requests, tokens, heads)
    S = state["S"][slots.start.clamp(min=0).long()].to(s.dtype)
    states, outs = [], []
    for t in range(tokens):
        u = short_conv(s, seq[:, t : t + 4], w["conv"])
        q, k, v = (part.reshape(-1, heads, dim) for part in u.split(d, -1))
        q = q * torch.rsqrt(total(s, q * q) + L2_EPS) * dim**-0.5
        k = k * torch.rsqrt(total(s, k * k) + L2_EPS)
        S, o = delta_rule(S, (q, k, v), gam[:, t], beta[:, t])
        states.append(S)
        outs.append(bf(o) if s.round_o else o)
    o = torch.stack(outs, 1).reshape(-1, heads, dim)
    out = bf(rms(s, o, w["o_norm"]) * seen.gate).reshape(-1, d)
    kept = live.repeat_interleave(tokens)
    out = torch.where(kept[:, None], out, torch.zeros_like(out))
    return KdaResult(bf(linear(s, out, w["o_proj"])), torch.stack(states, 1), seq[:, 1:], live)


def history(conv: Tensor, slots: Slots) -> Tensor:
    """[B, 3, 3D]: the taps before the first new token, columns accepted - 1 to accepted + 1 of the page of slot 0."""
    page = conv[slots.ids[:, 0].clamp(min=0).long()]
    at = slots.accepted.long()[:, None] - 1 + torch.arange(3, device=conv.device)
    return page.gather(1, at[:, :, None].expand(-1, -1, page.shape[-1]))


def project(s: Schedule, x: Tensor, w: Mapping[str, Tensor]) -> Projected:
    """Rows of in_proj: q | k | v | g | f_a | b, or with a low-rank gate (weights g_b) q | k | v | b | f_a | g_a."""
    heads, dim = w["A_log"].shape[0], w["o_norm"].shape[0]
    d, rank = heads * dim, w["f_b"].shape[1]
    y = bf(linear(s, x, w["in_proj"]))
    if "g_b" in w:
        sizes = [3 * d, heads, rank, w["g_b"].shape[1]]
        qkv, b, f_a, g_a = y[:, : sum(sizes)].split(sizes, -1)
        g = bf(linear(s, g_a, w["g_b"]))
    else:
        qkv, g, f_a, b = y[:, : 4 * d + rank + heads].split([3 * d, d, rank, heads], -1)
    raw = bf(linear(s, f_a, w["f_b"]))
    arg = (raw + w["dt_bias"].to(s.dtype)).reshape(-1, heads, dim)
    return Projected(qkv, output_gate(s, g).reshape(-1, heads, dim), arg, sigmoid(b))


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
