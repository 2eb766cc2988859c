"""Absorbed MLA over the paged latent cache: q new tokens per request, no RoPE, sigmoid output gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.maths.precision import Schedule, bf, f8, linear, output_gate, rms


@dataclass(frozen=True)
class Paging:
    """lengths [B], block_table [B, pages per request], slot_mapping [M] (negative: not inserted); M = B q rows."""

    lengths: Tensor
    block_table: Tensor
    slot_mapping: Tensor

    @property
    def tokens(self) -> int:
        return self.slot_mapping.shape[0] // self.lengths.shape[0]

    def visible(self, m: int) -> int:
        """Cache rows that row m sees: its own, and those of earlier tokens."""
        length = int(self.lengths[m // self.tokens])
        return length - self.tokens + 1 + m % self.tokens if length > 0 else 0


@dataclass(frozen=True)
class MlaResult:
    """`partial`: bf(y W_o^T) before the all-reduce. `row` [M, kv_dim]: the new cache rows, inserted or not."""

    partial: Tensor
    row: Tensor


def mla(s: Schedule, x: Tensor, layer: Layer, pages: Paging) -> MlaResult:
    """x [M, hidden] BF16 values; state kv [pages, page, kv_dim] is written in place (the new rows) before it is read.

    An E4M3 cache holds values over `k_scale`, and the query is rounded to E4M3 over `q_scale`; softmax weights are not
    rounded to it. Sizes of the heads come from w_uk [H, nope, kv_lora] and w_uv [H, v, kv_lora].
    """
    w, kv = layer.weights, layer.states["kv"]
    heads, nope, lora = w["w_uk"].shape
    v_dim, rope = w["w_uv"].shape[1], kv.shape[-1] - lora
    a = bf(linear(s, x, w["a_proj"]))
    q_c, kv_c, k_pe, gate = a.split([w["q_a_norm"].shape[0], lora, rope, heads * v_dim], -1)
    q_n = bf(rms(s, q_c, w["q_a_norm"]))
    fp8 = kv.dtype == torch.float8_e4m3fn
    k_scale, q_scale = (w[n].to(s.dtype) if fp8 else 1.0 for n in ("k_scale", "q_scale"))
    row = torch.cat([bf(rms(s, kv_c, w["kv_a_norm"])), k_pe], -1)
    row = f8(row / k_scale) if fp8 else row
    q = bf(linear(s, q_n, w["q_b"])).reshape(-1, heads, nope + rope)
    q_latent = bf(torch.einsum("mhn,hnc->mhc", q[..., :nope], w["w_uk"].to(s.dtype)))
    insert(kv, row, pages.slot_mapping)
    query = torch.cat([q_latent, q[..., nope:]], -1)
    query = f8(query / q_scale) if fp8 else query
    query = query * ((nope + rope) ** -0.5 * q_scale * k_scale)
    lat = torch.stack(
        [attend(s, query[m], cached_rows(kv, pages, m), lora) for m in range(x.shape[0])]
    )
    lat = bf(lat * k_scale)
    v = bf(torch.einsum("mhc,hvc->mhv", lat, w["w_uv"].to(s.dtype))).flatten(1)
    y = bf(v * output_gate(s, gate))
    live = (pages.lengths > 0).repeat_interleave(pages.tokens)
    y = torch.where(live[:, None], y, torch.zeros_like(y))
    return MlaResult(bf(linear(s, y, w["o_proj"])), row)


def insert(kv: Tensor, row: Tensor, slot_mapping: Tensor) -> None:
    """Write the new rows in place; a negative slot is not inserted."""
    chosen = slot_mapping >= 0
    kv.view(-1, kv.shape[-1])[slot_mapping[chosen]] = row[chosen].to(kv.dtype)


def cached_rows(kv: Tensor, pages: Paging, m: int) -> Tensor:
    """The cache rows that row m sees, in order, [length, kv_dim]."""
    length = max(pages.visible(m), 0)
    owned = pages.block_table[m // pages.tokens, : -(-length // kv.shape[1])].long()
    return kv[owned].reshape(-1, kv.shape[-1])[:length]


def attend(s: Schedule, query: Tensor, cache: Tensor, lora: int) -> Tensor:
    """query [H, kv_dim] (scaled), cache [length, kv_dim] -> lat [H, lora], not rounded; zero for length 0."""
    if cache.shape[0] == 0:
        return query.new_zeros(query.shape[0], lora)
    cache = cache.to(s.dtype)
    score = query @ cache.T
    p = torch.exp(score - score.amax(-1, keepdim=True))
    norm = p.sum(-1, keepdim=True)
    if s.round_p == "after":
        return bf(p / norm) @ cache[:, :lora]
    if s.round_p == "before":
        p = bf(p)
    return (p @ cache[:, :lora]) / norm
