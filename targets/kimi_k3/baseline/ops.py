"""The pieces of a layer as a careful engineer writes them in torch: batched, BF16 operands, no host synchronisation.

Every function is safe to capture in a CUDA graph: static shapes, no reading back. Unlike `maths` it rounds as torch's
kernels do, so it is judged like a candidate. CPU tensors work too (float32 products), for tests.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def projected(x: Tensor, w: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q | k | v before the convolution, output gate, raw decay, write strength's logits) of every row."""
    heads, rank = w["A_log"].shape[0], w["f_b"].shape[1]
    d = heads * w["o_norm"].shape[0]
    y = F.linear(x, w["in_proj"])
    if "g_b" in w:  # a gate of low rank: q | k | v | b | f_a | g_a
        low = w["g_b"].shape[1]
        sizes = [3 * d, heads, rank, low]
        qkv, b, f_a, g_a, _ = y.split([*sizes, y.shape[1] - sum(sizes)], -1)
        g = F.linear(g_a, w["g_b"])
    else:
        qkv, g, f_a, b = y.split([3 * d, d, rank, y.shape[1] - 4 * d - rank], -1)
    return qkv, g, F.linear(f_a, w["f_b"]), b[:, :heads]


def normed(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of u [.., 3, H, dim], q and k with norm 1 and q scaled."""
    q, k, v = u.unbind(-3)
    q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * u.shape[-1] ** -0.5)
    return q, k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6), v


def delta_rule(
    S: Tensor, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """(the state after one token, what it gives)."""
    q, k, v = qkv
    S = S * decay.unsqueeze(2)
    step = beta * (v - torch.matmul(S, k.unsqueeze(-1)).squeeze(-1))
    S = torch.addcmul(S, step.unsqueeze(-1), k.unsqueeze(2))
    return S, torch.matmul(S, q.unsqueeze(-1)).squeeze(-1)


def kda(x: Tensor, w: Mapping[str, Tensor], state: Mapping[str, Tensor], slots: Tensor) -> Tensor:
    """bf(out W_o^T); S and conv of live slots are updated in place. One token a request."""
    heads, dim = w["A_log"].shape[0], w["o_norm"].shape[0]
    live, index = slots > 0, slots.clamp(min=0).long()
    qkv, g, raw, b = projected(x, w)
    old = state["conv"].index_select(0, index)
    window = torch.cat([old, qkv.unsqueeze(1)], 1)
    u = F.silu((window.float() * w["conv_taps"]).sum(1)).view(-1, 3, heads, dim)
    arg = (raw + w["dt_bias"]).view(-1, heads, dim) * w["rate"]
    decay = torch.exp(GATE_LOWER_BOUND * torch.sigmoid(arg))
    beta = torch.sigmoid(b.float()).unsqueeze(-1)
    before = state["S"].index_select(0, index)
    S, o = delta_rule(before, normed(u), decay, beta)
    keep = live.view(-1, 1, 1)
    out = rms_gate(o, w["o_norm"], g.reshape(-1, heads, dim)).masked_fill(~keep, 0)
    state["conv"].index_copy_(0, index, torch.where(keep, window[:, 1:], old))
    state["S"].index_copy_(0, index, torch.where(keep.unsqueeze(-1), S, before))
    return F.linear(out.view(-1, heads * dim), w["o_proj"])


def rms_gate(o: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    scale = torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS)
    return (o * scale * weight * torch.sigmoid(gate.float())).bfloat16()


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
        gate, up = (
            scaled(w, name, chosen, bmm32(gathered(w, name, chosen, table), part))
            for name in ("w1", "w3")
        )
        h, w2 = situ(gate, up).bfloat16(), gathered(w, "w2", chosen, table)
        if "w2_factor" in w:
            out.append(scaled(w, "w2", chosen, bmm32(w2, h)).bfloat16())
        else:
            out.append(torch.bmm(w2, h))
    return torch.cat(out).view(rows, topk, -1)


def scaled(w: Mapping[str, Tensor], name: str, chosen: Tensor, y: Tensor) -> Tensor:
    """y [P, N, 1] times NVFP4's factor of the whole matrix."""
    factor = w.get(f"{name}_factor")
    return y if factor is None else y * factor.index_select(0, chosen).view(-1, 1, 1)


def gathered(w: Mapping[str, Tensor], name: str, chosen: Tensor, table: Tensor) -> Tensor:
    """[P, N, K] BF16 without NVFP4's factor, exact. Codes go four at a time through a table of 65,536 quadruples."""
    codes = w[name].view(torch.int16).index_select(0, chosen).int() & 0xFFFF
    scale = w[f"{name}_scale"].view(torch.uint8).index_select(0, chosen)
    if w[f"{name}_scale"].dtype == torch.float8_e4m3fn:
        values = F.embedding(codes, table).view(*codes.shape[:2], -1, 16)
        factor = scale.view(torch.float8_e4m3fn).bfloat16()
    else:
        values = F.embedding(codes, table).view(*codes.shape[:2], -1, 32)
        factor = torch.exp2(scale.float() - 127).bfloat16()
    return values.mul_(factor.unsqueeze(-1)).flatten(-2)


def quadruples(device: torch.device) -> Tensor:
    """[65536, 4] BF16: the values of two little-endian bytes of codes."""
    signed = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=device)
    word = torch.arange(1 << 16, device=device)
    return torch.stack([signed[word >> shift & 15] for shift in (0, 4, 8, 12)], -1).bfloat16()


def gated(y: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(y, gate_up).float().chunk(2, -1)
    return F.linear(situ(gate, up).bfloat16(), down)
