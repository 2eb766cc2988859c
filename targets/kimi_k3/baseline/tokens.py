"""KDA of several tokens a request as torch operations, for verification steps. As `ops` otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from targets.kimi_k3.baseline.ops import delta_rule, normed, projected, rms_gate
from targets.kimi_k3.sizes import GATE_LOWER_BOUND


def kda_tokens(
    x: Tensor, w: Mapping[str, Tensor], state: Mapping[str, Tensor], slots: tuple[Tensor, Tensor]
) -> Tensor:
    """bf(out W_o^T) of rows grouped by request; `slots` = (ids [B, q], accepted [B]). Everything is read before the
    first write, for a request's slots change places: the state after token t goes to slot t, the page to slot 0."""
    ids, accepted = slots
    requests, tokens = ids.shape
    heads, dim = w["A_log"].shape[0], w["o_norm"].shape[0]
    kept = accepted.long().view(-1, 1) - 1
    start = ids.gather(1, kept).view(-1)
    live = start > 0
    qkv, g, raw, b = projected(x, w)
    page = state["conv"].index_select(0, ids[:, 0].clamp(min=0).long())
    at = (kept + torch.arange(3, device=x.device)).unsqueeze(-1).expand(-1, -1, page.shape[-1])
    seq = torch.cat([page.gather(1, at), qkv.view(requests, tokens, -1)], 1)
    u = F.silu((seq.unfold(1, 4, 1).float() * w["conv"]).sum(-1))
    q, k, v = normed(u.view(requests, tokens, 3, heads, dim))
    arg = (raw + w["dt_bias"]).view(-1, heads, dim) * w["rate"]
    decay = torch.exp(GATE_LOWER_BOUND * torch.sigmoid(arg)).view(requests, tokens, heads, dim)
    beta = torch.sigmoid(b.float()).view(requests, tokens, heads, 1)
    S = state["S"].index_select(0, start.clamp(min=0).long())
    states, outs = [], []
    for t in range(tokens):
        S, o = delta_rule(S, (q[:, t], k[:, t], v[:, t]), decay[:, t], beta[:, t])
        states.append(S)
        outs.append(o)
    o = torch.stack(outs, 1).view(-1, heads, dim)
    alive = live.view(-1, 1).expand(-1, tokens).reshape(-1, 1, 1)
    out = rms_gate(o, w["o_norm"], g.reshape(-1, heads, dim)).masked_fill(~alive, 0)
    stored = live.view(-1, 1) & (ids > 0)
    store(state["S"], torch.stack(states, 1).flatten(0, 1), (ids.reshape(-1), stored.reshape(-1)))
    store(state["conv"], seq[:, 1:], (ids[:, 0], stored[:, 0]))
    return F.linear(out.view(-1, heads * dim), w["o_proj"])


def store(state: Tensor, new: Tensor, where: tuple[Tensor, Tensor]) -> None:
    """`where` = (ids, whether each is stored); what is not stored rewrites the null slot with what it holds."""
    ids, stored = where
    index = torch.where(stored, ids, torch.zeros_like(ids)).long()
    keep = stored.view(-1, *([1] * (new.ndim - 1)))
    state.index_copy_(0, index, torch.where(keep, new, state.index_select(0, index)))
