"""AttnRes: the prefix update, and the softmax mix of earlier block rows with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from targets.kimi_k3.maths.precision import Schedule, bf, inverse_rms, rms, total


def mix(s: Schedule, sources: Sequence[Tensor], norm: Tensor, proj: Tensor) -> Tensor:
    """m [M, hidden] of sources [M, hidden] each, the prefix last; not rounded.

    The score of a source normalises it; the mix takes it as it is. One source gives itself exactly.
    """
    v = torch.stack(list(sources))
    weight = norm.to(s.dtype) * proj.to(s.dtype)
    score = inverse_rms(s, v) * total(s, v * weight)
    return (torch.softmax(score, 0) * v).sum(0)


def mix_norm(
    s: Schedule, sources: Sequence[Tensor], weights: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """bf(RMS(m; out)); `weights` = (norm, proj, out). m is not rounded before the norm, as in vLLM's fused kernel; the
    modelling code published with the checkpoint rounds it to BF16. That is outside the bound, by a quarter in a chain
    of AttnRes: nobody who is judged here does it, and a planted kernel that does must be caught."""
    norm, proj, out = weights
    return bf(rms(s, mix(s, sources, norm, proj), out))
