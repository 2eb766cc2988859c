"""MLA as torch operations: any number of tokens a request, a BF16 or E4M3 cache. As `ops` otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from targets.kimi_k3.baseline.ops import bmm32, rms

MOST = 448.0


@dataclass(frozen=True)
class Paging:
    lengths: Tensor
    block_table: Tensor
    slot_mapping: Tensor


def e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x over the scale as E4M3, saturating."""
    return (x.float() / scale).clamp(-MOST, MOST).to(torch.float8_e4m3fn)


def mla(x: Tensor, w: Mapping[str, Tensor], kv: Tensor, pages: Paging) -> Tensor:
    """bf(y W_o^T); the new rows are inserted in place. Gathers every page of a request and masks the unseen."""
    heads, nope, lora = w["w_uk"].shape
    v_dim, rope = w["w_uv"].shape[1], kv.shape[-1] - lora
    requests = pages.lengths.shape[0]
    tokens = x.shape[0] // requests
    a = F.linear(x, w["a_proj"])
    q_c, kv_c, k_pe, gate = a.split([w["q_a_norm"].shape[0], lora, rope, heads * v_dim], -1)
    q = F.linear(rms(q_c.float(), w["q_a_norm"]), w["q_b"]).view(-1, heads, nope + rope)
    q_nope, q_pe = q.split([nope, rope], -1)
    latent = torch.bmm(q_nope.transpose(0, 1), w["w_uk"]).transpose(0, 1)
    query, row = (
        torch.cat([latent, q_pe], -1),
        torch.cat([rms(kv_c.float(), w["kv_a_norm"]), k_pe], -1),
    )
    narrow = kv.dtype == torch.float8_e4m3fn
    if narrow:
        query, row = e4m3(query, w["q_scale"]).bfloat16(), e4m3(row, w["k_scale"])
    insert(kv, row, pages)
    cache = gathered(kv, pages.block_table)
    score = bmm32(query.reshape(requests, tokens * heads, -1), cache.transpose(1, 2))
    score = score * (nope + rope) ** -0.5
    if narrow:
        score = score * (w["q_scale"] * w["k_scale"])
    score = score.view(requests, tokens, heads, -1).masked_fill(unseen(pages, tokens, cache), -1e30)
    p = torch.exp(score - score.amax(-1, keepdim=True)).view(requests, tokens * heads, -1)
    lat = bmm32(p.bfloat16(), cache[..., :lora]) / p.sum(-1, keepdim=True)
    lat = (lat * w["k_scale"] if narrow else lat).bfloat16().view(-1, heads, lora)
    v = torch.bmm(lat.transpose(0, 1), w["w_uv"].transpose(1, 2)).transpose(0, 1).flatten(1)
    y = (v.float() * torch.sigmoid(gate.float())).bfloat16()
    nothing = (pages.lengths <= 0).view(-1, 1).expand(-1, tokens).reshape(-1, 1)
    return F.linear(y.masked_fill(nothing, 0), w["o_proj"])


def unseen(pages: Paging, tokens: int, cache: Tensor) -> Tensor:
    """[B, tokens, 1, T]: token t of a request of length L sees the first L - tokens + 1 + t rows."""
    later = torch.arange(1 - tokens, 1, device=cache.device)
    seen = (pages.lengths.view(-1, 1) + later).view(-1, tokens, 1, 1)
    return torch.arange(cache.shape[1], device=cache.device) >= seen


def gathered(kv: Tensor, table: Tensor) -> Tensor:
    """[B, T, width] BF16. Pages of E4M3 are gathered as bytes."""
    if kv.dtype == torch.float8_e4m3fn:
        return kv.view(torch.uint8)[table.long()].flatten(1, 2).view(kv.dtype).bfloat16()
    return kv[table.long()].flatten(1, 2)


def insert(kv: Tensor, row: Tensor, p: Paging) -> None:
    """A row that is not to be inserted rewrites what its place holds: no branch, no clash."""
    page, requests = kv.shape[1], p.lengths.shape[0]
    tokens = p.slot_mapping.shape[0] // requests
    back = torch.arange(-tokens, 0, device=kv.device)
    place = (p.lengths.long().view(-1, 1) + back).clamp(min=0)
    own = (p.block_table.long().gather(1, place // page) * page + place % page).view(-1)
    wanted = p.slot_mapping >= 0
    at = torch.where(wanted, p.slot_mapping, own)
    flat = kv.view(-1, kv.shape[-1])
    if kv.dtype == torch.float8_e4m3fn:
        flat, row = flat.view(torch.uint8), row.view(torch.uint8)
    flat.index_copy_(0, at, torch.where(wanted.view(-1, 1), row, flat.index_select(0, at)))
