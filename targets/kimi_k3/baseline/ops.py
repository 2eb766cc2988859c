"""The pieces of a layer as a careful engineer writes them in torch: batched, BF16 operands, no host synchronisation.

Every function is safe to capture in a CUDA graph: static shapes, no reading back. Unlike `maths` it rounds as torch's
kernels do, so it is judged like a candidate. CPU tensors work too (float32 products), for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from targets.kimi_k3.maths.mxfp4 import MAGNITUDES
from targets.kimi_k3.sizes import EPS, GATE_LOWER_BOUND

PAIRS = 128
"""(row, expert) pairs dequantised at a time: bounds the BF16 copies at many rows."""


def mm32(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed, BF16 operands, float32 result."""
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T


def bmm32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [.., N] -> BF16."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return (x * scale * weight).bfloat16()


def mix(sources: list[Tensor], weight: Tensor) -> Tensor:
    """AttnRes mix in float32; `weight` is norm * proj in float32."""
    v = torch.stack(sources).float()
    score = torch.rsqrt(v.square().mean(-1) + EPS) * (v * weight).sum(-1)
    return (torch.softmax(score, 0).unsqueeze(-1) * v).sum(0)


def mix_norm(sources: list[Tensor], weight: Tensor, norm: Tensor) -> Tensor:
    return rms(mix(sources, weight), norm)


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 100.0 * torch.tanh(gate / 4) * torch.sigmoid(gate) * torch.tanh(up / 25)


def reduced(own: Tensor, remote: Mapping[str, Tensor], name: str) -> Tensor:
    return (own + remote[name]).bfloat16() if name in remote else own


def joined(own: Tensor, remote: Mapping[str, Tensor], name: str) -> Tensor:
    return torch.cat([own, remote[name]], -1) if name in remote else own


def kda(x: Tensor, w: Mapping[str, Tensor], state: Mapping[str, Tensor], slots: Tensor) -> Tensor:
    """bf(out W_o^T); S and conv of live slots are updated in place."""
    heads, dim = w["A_log"].shape[0], w["o_norm"].shape[0]
    d, rank = heads * dim, w["f_b"].shape[1]
    live, index = slots > 0, slots.clamp(min=0).long()
    y = F.linear(x, w["in_proj"])
    qkv, g, f_a, b = y.split([3 * d, d, rank, y.shape[1] - 4 * d - rank], -1)
    raw = F.linear(f_a, w["f_b"])
    old = state["conv"].index_select(0, index)
    window = torch.cat([old, qkv.unsqueeze(1)], 1)
    u = F.silu((window.float() * w["conv_taps"]).sum(1)).view(-1, 3, heads, dim)
    q, k, v = u.unbind(1)
    q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * dim**-0.5)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    arg = (raw + w["dt_bias"]).view(-1, heads, dim) * w["rate"]
    decay = torch.exp(GATE_LOWER_BOUND * torch.sigmoid(arg))
    beta = torch.sigmoid(b[:, :heads].float()).unsqueeze(-1)
    before = state["S"].index_select(0, index)
    S = before * decay.unsqueeze(2)
    step = beta * (v - torch.matmul(S, k.unsqueeze(-1)).squeeze(-1))
    S = torch.addcmul(S, step.unsqueeze(-1), k.unsqueeze(2))
    o = torch.matmul(S, q.unsqueeze(-1)).squeeze(-1)
    out = rms_gate(o, w["o_norm"], g.view(-1, heads, dim)) * live.view(-1, 1, 1)
    keep = live.view(-1, 1, 1)
    state["conv"].index_copy_(0, index, torch.where(keep, window[:, 1:], old))
    state["S"].index_copy_(0, index, torch.where(keep.unsqueeze(-1), S, before))
    return F.linear(out.view(-1, d), w["o_proj"])


def rms_gate(o: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    scale = torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS)
    return (o * scale * weight * torch.sigmoid(gate.float())).bfloat16()


@dataclass(frozen=True)
class Paging:
    lengths: Tensor
    block_table: Tensor
    slot_mapping: Tensor


def mla(x: Tensor, w: Mapping[str, Tensor], kv: Tensor, pages: Paging) -> Tensor:
    """bf(y W_o^T); the new rows are inserted in place. Gathers every page of a request and masks by length."""
    heads, nope, lora = w["w_uk"].shape
    v_dim, rope = w["w_uv"].shape[1], kv.shape[-1] - lora
    a = F.linear(x, w["a_proj"])
    q_c, kv_c, k_pe, gate = a.split([w["q_a_norm"].shape[0], lora, rope, heads * v_dim], -1)
    q = F.linear(rms(q_c.float(), w["q_a_norm"]), w["q_b"]).view(-1, heads, nope + rope)
    q_nope, q_pe = q.split([nope, rope], -1)
    latent = torch.bmm(q_nope.transpose(0, 1), w["w_uk"]).transpose(0, 1)
    insert(kv, torch.cat([rms(kv_c.float(), w["kv_a_norm"]), k_pe], -1), pages)
    cache = kv[pages.block_table.long()].flatten(1, 2)
    score = bmm32(torch.cat([latent, q_pe], -1), cache.transpose(1, 2)) * (nope + rope) ** -0.5
    hidden = torch.arange(cache.shape[1], device=kv.device) >= pages.lengths.view(-1, 1, 1)
    score = score.masked_fill(hidden, -1e30)
    p = torch.exp(score - score.amax(-1, keepdim=True))
    lat = bmm32(p.bfloat16(), cache[..., :lora]) / p.sum(-1, keepdim=True)
    lat = lat.bfloat16()
    v = torch.bmm(lat.transpose(0, 1), w["w_uv"].transpose(1, 2)).transpose(0, 1).flatten(1)
    y = (v.float() * torch.sigmoid(gate.float())).bfloat16()
    y = y.masked_fill((pages.lengths <= 0).view(-1, 1), 0)
    return F.linear(y, w["o_proj"])


def insert(kv: Tensor, row: Tensor, p: Paging) -> None:
    """A row that is not to be inserted rewrites its request's own last row with what is there: no branch, no clash."""
    page = kv.shape[1]
    last = (p.lengths.long() - 1).clamp(min=0)
    own = p.block_table.long().gather(1, (last // page).view(-1, 1)).view(-1) * page + last % page
    wanted = p.slot_mapping >= 0
    at = torch.where(wanted, p.slot_mapping, own)
    flat = kv.view(-1, kv.shape[-1])
    flat.index_copy_(0, at, torch.where(wanted.view(-1, 1), row, flat.index_select(0, at)))


def select(logits: Tensor, bias: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(ids int64, weights BF16), ties to the lower id."""
    s = torch.sigmoid(logits)
    ids = torch.sort(s + bias, dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = s.gather(-1, ids)
    return ids, (chosen / (chosen.sum(-1, keepdim=True) + 1e-20)).bfloat16()


def routed(
    y: Tensor, w: Mapping[str, Tensor], remote: Mapping[str, Tensor], topk: int
) -> tuple[Tensor, Tensor]:
    """(ids, weights) of the router on y."""
    logits = joined(mm32(y, w["router"]), remote, "logits")
    return select(logits, w["router_bias"], topk)


def moe(
    y: Tensor, w: Mapping[str, Tensor], remote: Mapping[str, Tensor], how: tuple[Tensor, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, delta, what is sent to the other ranks: no columns on one rank). `how` = (table of quadruples, topk)."""
    table, topk = how
    ids, weights = routed(y, w, remote, topk)
    latent = joined(F.linear(y, w["latent_down"]), remote, "latent")
    f = experts(latent, ids, w, table)
    part = (weights.float().unsqueeze(-1) * f.float()).sum(1).bfloat16()
    z = reduced(part, remote, "moe")
    u = F.linear(rms(z.float(), w["latent_norm"]), w["latent_up"])
    shared = gated(y, w["shared_gate_up"], w["shared_down"])
    local = u.shape[-1]
    own = u + reduced(shared[:, :local], remote, "shared")
    return ids, joined(own, remote, "delta"), shared[:, local:]


def experts(latent: Tensor, ids: Tensor, w: Mapping[str, Tensor], table: Tensor) -> Tensor:
    """f [M, topk, L] BF16: the routed experts' weights are gathered, dequantised to BF16 and multiplied in a batch."""
    rows, topk = ids.shape
    x = latent.unsqueeze(1).expand(rows, topk, -1).reshape(rows * topk, -1, 1)
    out = []
    for at in range(0, rows * topk, PAIRS):
        chosen, part = ids.reshape(-1)[at : at + PAIRS], x[at : at + PAIRS]
        gate, up = (bmm32(gathered(w, name, chosen, table), part) for name in ("w1", "w3"))
        out.append(torch.bmm(gathered(w, "w2", chosen, table), situ(gate, up).bfloat16()))
    return torch.cat(out).view(rows, topk, -1)


def gathered(w: Mapping[str, Tensor], name: str, chosen: Tensor, table: Tensor) -> Tensor:
    """[P, N, K] BF16. Codes go four at a time through a table of 65,536 quadruples."""
    codes = w[name].view(torch.int16).index_select(0, chosen).int() & 0xFFFF
    values = F.embedding(codes, table).view(*codes.shape[:2], -1, 32)
    scale = w[f"{name}_scale"].index_select(0, chosen)
    return values.mul_(torch.exp2(scale.float() - 127).bfloat16().unsqueeze(-1)).flatten(-2)


def quadruples(device: torch.device) -> Tensor:
    """[65536, 4] BF16: the values of two little-endian bytes of codes."""
    signed = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=device)
    word = torch.arange(1 << 16, device=device)
    return torch.stack([signed[word >> shift & 15] for shift in (0, 4, 8, 12)], -1).bfloat16()


def gated(y: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(y, gate_up).float().chunk(2, -1)
    return F.linear(situ(gate, up).bfloat16(), down)
