"""Kernels of other libraries: noted where they are missing or wrong, used where they are right and faster."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from targets.kimi_k3.baseline import libraries
from targets.kimi_k3.baseline.libraries import Launch, Shelf, Trial
from targets.kimi_k3.baseline.ops import kda, rms
from targets.kimi_k3.maths.layer import layer_of
from targets.kimi_k3.sizes import EPS
from tests.targets.kimi import rel, tensors, workload


def module(name: str, **content: Any) -> types.ModuleType:
    made: Any = types.ModuleType(name)
    for key, value in content.items():
        setattr(made, key, value)
    return made


def doing(f: Any) -> Launch:
    def launch() -> None:
        f()

    return launch


def shelf(times: list[float]) -> Shelf:
    return Shelf(lambda launches: times.pop(0))


def test_what_is_missing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("quack", "flashinfer", "vllm", "fla"):
        monkeypatch.setitem(sys.modules, name, None)
    s = shelf([])
    assert s.norms() == {} and s.fla() is None
    assert set(s.notes) == {"quack", "flashinfer", "vllm", "fla-core"}
    assert all(said.startswith("skipped: ") for said in s.notes.values())


def test_adapters_call_the_libraries_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()

    def quack(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert eps == EPS
        return rms(x.float(), weight)

    def flashinfer(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        out.copy_(quack(x, weight, eps))

    def vllm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        out.copy_(quack(x, weight, eps))

    monkeypatch.setitem(sys.modules, "quack.rmsnorm", module("quack.rmsnorm", rmsnorm=quack))
    monkeypatch.setitem(sys.modules, "quack", module("quack"))
    monkeypatch.setitem(sys.modules, "flashinfer", module("flashinfer"))
    monkeypatch.setitem(
        sys.modules, "flashinfer.norm", module("flashinfer.norm", rmsnorm=flashinfer)
    )
    monkeypatch.setitem(sys.modules, "vllm", module("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", module("vllm._custom_ops", rms_norm=vllm))
    found = shelf([]).norms()
    assert set(found) == {"quack", "flashinfer", "vllm"}
    for norm in found.values():
        out = torch.empty_like(x)
        norm(x, w, out)
        assert torch.equal(out, rms(x.float(), w))


@pytest.mark.parametrize(
    "factor, times, used, said",
    [
        (1.0, [5.0, 4.0], True, "used: 4.00 us, ours 5.00 us"),
        (1.0, [4.0, 5.0], False, "slower: 5.00 us, ours 4.00 us"),
        (1.1, [5.0, 4.0], False, "skipped: differs from ours by 0.1"),
        (float("nan"), [5.0, 4.0], False, "skipped: differs from ours by nan"),
    ],
)
def test_right_and_faster_is_used(factor: float, times: list[float], used: bool, said: str) -> None:
    out = torch.zeros(8)
    ours: list[Launch] = [doing(lambda: out.fill_(2.0))]
    theirs: list[Launch] = [doing(lambda: out.fill_(2.0 * factor))]
    s = shelf(times)
    assert (s.better(Trial("x", ours, theirs, out)) is theirs) == used
    assert s.notes["x"] == said


def test_foreign_code_that_raises_is_left_out_and_states_are_put_back() -> None:
    state = torch.zeros(4)

    def broken() -> None:
        state.add_(1)
        raise OSError("no such symbol")

    ours: list[Launch] = [doing(lambda: state.add_(1))]
    s = shelf([])
    trial = Trial("x", ours, [broken], torch.ones(2), doing(lambda: state.zero_()))
    assert s.better(trial) is ours
    assert s.notes["x"] == "skipped: OSError: no such symbol" and not state.any()


def recurrent(**a: Any) -> tuple[Tensor, Tensor]:
    """The update as the library documents it: q, k, v, g [B, 1, H, K], a state [B, H, K, V], log decay per channel."""
    q, k, v, g = (a[n][:, 0].float() for n in ("q", "k", "v", "g"))
    q = q / q.square().sum(-1, keepdim=True).add(1e-6).sqrt() * a["scale"]
    k = k / k.square().sum(-1, keepdim=True).add(1e-6).sqrt()
    S = a["initial_state"] * g.exp().unsqueeze(-1)
    d = a["beta"][:, 0].unsqueeze(-1) * (v - torch.einsum("bhkv,bhk->bhv", S, k))
    S = S + k.unsqueeze(-1) * d.unsqueeze(-2)
    return torch.einsum("bhkv,bhk->bhv", S, q).unsqueeze(1), S


def test_the_recurrent_update_feeds_the_library_what_it_expects() -> None:
    """Against the torch baseline: same output before o_proj, same states."""
    w = workload("kda", rows=2, layers=1)
    t = tensors(w)
    mine, other = (layer_of({k: v.clone() for k, v in t.items()}, 0) for _ in range(2))
    x = t["inputs.x.0"]
    prepared = {
        **other.weights, "conv_taps": other.weights["conv"].T.contiguous(),
        "rate": torch.exp(other.weights["A_log"]).unsqueeze(-1),
    }  # fmt: skip
    expected = kda(x, prepared, other.states, t["inputs.slots"])
    y = x @ mine.weights["in_proj"].T
    out = torch.zeros(2, mine.weights["o_proj"].shape[1], dtype=torch.bfloat16)
    libraries.fla_update(recurrent, mine, (y, t["inputs.slots"], out))()
    assert rel(out @ mine.weights["o_proj"].T, expected) < 0.01
    for name in ("S", "conv"):
        assert rel(mine.states[name], other.states[name]) < 0.01


def test_graph_us_is_for_gpus() -> None:
    times: Sequence[Launch] = []
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            libraries.graph_us(times)
