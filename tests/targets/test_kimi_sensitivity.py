"""The judge's bands on these targets: correct torch code passes them, small mistakes do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sandbox.judge import bands
from sandbox.judge.checks import full_mask
from targets.base import Workload
from targets.kimi_k3.baseline.graph import TorchGraphBaseline
from targets.kimi_k3.maths import ffn, kda, mla, precision
from targets.reference import Expected, Tensors
from tests.targets.kimi import REFERENCE, run, tensors, workload
from tests.targets.test_kimi_baseline import with_outputs

MARGIN = 2.0
"""One moment with the band of one moment: the judge keeps the widest band of many."""


def worst(w: Workload, t: Tensors, found: Tensors) -> float:
    """Largest error of any output or state in units of its bound; infinite for an unproved id."""
    expected: Expected = run(w, t)
    ids = found.get("outputs.ids")
    if ids is not None:
        if torch.equal(ids, expected.tensors["outputs.ids"]):
            ids = expected.tensors["outputs.ids"]
        else:
            expected = run(w, t, ids=ids)
            differ = (ids != expected.tensors["outputs.ids"]).any(-1)
            if bool((differ & ~expected.ties[0].allowed).any()):
                return float("inf")
    schedules = [run(w, t, s, ids).tensors for s in REFERENCE.schedules]
    over = []
    for b in w.buffers:
        if b.name not in expected.tensors or b.dtype == "i32":
            continue
        truth = expected.tensors[b.name]
        o = bands.oracle(truth, full_mask(expected.masks.get(b.name), truth))
        band = bands.worst([bands.measure(o, s[b.name]) for s in schedules])
        over.append(bands.measure(o, found[b.name]).over(bands.bound(band, o, b.dtype, w.layers)))
    return max(over)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["decode", "kda", "mla", "latent-moe", "attn-res", "gemv", "router"]
)
@pytest.mark.parametrize("preset, rows", [("tiny", 4), ("tiny-tp2", 2)])
def test_honest_torch_code_is_inside(part: str, preset: str, rows: int) -> None:
    w = workload(part, preset, rows=rows)
    t = tensors(w, seed=7)
    names = REFERENCE.distributions(w)
    if part == "decode":
        names = ("large", "small", "router_ties", "null_request", "short")
    for name in ("plain", *names):
        given = t if name == "plain" else REFERENCE.disturb(w, name, 3, t)
        found = with_outputs(w, given)
        baseline = TorchGraphBaseline()
        baseline.prepare(w, found)
        baseline.step()
        assert worst(w, given, found) < MARGIN, name


attend, combine, delta_rule = mla.attend, ffn.combine, kda.delta_rule


def scaled(s: precision.Schedule, query: Tensor, cache: Tensor, lora: int) -> Tensor:
    return attend(s, 1.01 * query, cache, lora)


def without_first(s: precision.Schedule, query: Tensor, cache: Tensor, lora: int) -> Tensor:
    return attend(s, query, cache[1:], lora)


def without_last(s: precision.Schedule, query: Tensor, cache: Tensor, lora: int) -> Tensor:
    return attend(s, query, cache[:-1], lora)


def flat_situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * up


def one_short(f: Tensor, weights: Tensor) -> Tensor:
    return combine(f[:, :-1], weights[:, :-1])


def biased(logits: Tensor, bias: Tensor, ids: Tensor) -> ffn.Routing:
    chosen = ffn.scores(logits, bias)[1].gather(-1, ids)
    return ffn.Routing(logits, ids, precision.bf(chosen / chosen.sum(-1, keepdim=True)))


def strong(
    S: Tensor, qkv: tuple[Tensor, Tensor, Tensor], gam: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    return delta_rule(S, qkv, gam, 1.01 * beta)


def coarse(
    S: Tensor, qkv: tuple[Tensor, Tensor, Tensor], gam: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    new, o = delta_rule(S, qkv, gam, beta)
    return new * 1.001, o


Mistake = tuple[str, Any, str, Any | Callable[..., Any]]
MISTAKES: dict[str, Mistake] = {
    "attention scale 1 % off": ("mla", mla, "attend", scaled),
    "first cache row dropped": ("mla", mla, "attend", without_first),
    "own row not seen": ("mla", mla, "attend", without_last),
    "ten times the norm epsilon (mla)": ("mla", precision, "EPS", 1e-4),
    "ten times the norm epsilon (kda)": ("kda", precision, "EPS", 1e-4),
    "ten times the norm epsilon (moe)": ("latent-moe", precision, "EPS", 1e-4),
    "ten times the norm epsilon (attn-res)": ("attn-res", precision, "EPS", 1e-4),
    "ten times the L2 epsilon": ("kda", kda, "L2_EPS", 1e-5),
    "gate bound 1 % off": ("kda", kda, "GATE_LOWER_BOUND", -4.95),
    "write strength 1 % off": ("kda", kda, "delta_rule", strong),
    "state 0.1 % too large": ("kda", kda, "delta_rule", coarse),
    "activation without its upper bound": ("latent-moe", ffn, "situ", flat_situ),
    "last expert left out": ("latent-moe", ffn, "combine", one_short),
    "weights from the biased scores": ("latent-moe", ffn, "weigh", biased),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_outside(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one input distribution shows each by twice its bound."""
    part, module, name, wrong = MISTAKES[mistake]
    w = workload(part, rows=2)
    t = tensors(w, seed=11)
    shown = 0.0
    for distribution in ("plain", *REFERENCE.distributions(w)):
        given = t if distribution == "plain" else REFERENCE.disturb(w, distribution, 3, t)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            found = run(w, given, "f32").tensors
        shown = max(shown, worst(w, given, found))
        if shown > MARGIN:
            return
    raise AssertionError(f"{mistake}: at most {shown:.2f} of the bound")
