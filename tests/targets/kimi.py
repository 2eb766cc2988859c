"""Shared by the Kimi K3 tests: a workload with its tensors, and distances. No tests of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from targets.base import Options, Scalar, Workload, find
from targets.kimi_k3.reference import KimiReference
from targets.reference import Expected, Tensors

REFERENCE = KimiReference()
PARTS = ("attn-res", "decode", "gemv", "kda", "latent-moe", "mla", "router")


def workload(part: str, preset: str = "tiny", rows: int = 1, **more: object) -> Workload:
    extra: Mapping[str, Scalar] = more.pop("extra", {})  # type: ignore[assignment]
    return find(f"kimi-k3-{part}").workload(Options(preset=preset, rows=rows, extra=extra, **more))  # type: ignore[arg-type]


def tensors(w: Workload, seed: int = 1, step: int = 0) -> Tensors:
    torch.set_num_threads(1)
    r = REFERENCE
    return {
        **r.weights(w, seed, "cpu"),
        **r.states(w, seed, "cpu"),
        **r.inputs(w, seed, step, "cpu"),
    }


def run(w: Workload, t: Tensors, schedule: str = "oracle", ids: Tensor | None = None) -> Expected:
    forced = None if ids is None else {"outputs.ids": ids}
    return REFERENCE.run(w, t, schedule, forced)


def rel(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of a from b."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
