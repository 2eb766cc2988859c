"""The torch baseline computes the same step as the reference, in place, through states, on every target."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from targets.base import Options, Workload, find
from targets.kimi_k3 import disturb
from targets.kimi_k3.baseline import compiled
from targets.kimi_k3.baseline.graph import TorchGraphBaseline
from targets.kimi_k3.reference import DTYPES as REAL
from targets.kimi_k3.spec import KimiTarget
from targets.reference import Tensors
from tests.targets import triton_lite
from tests.targets.kimi import PARTS, rel, run, tensors, workload

LIMIT = 0.05


def with_outputs(w: object, t: Tensors) -> Tensors:
    """Clones of the states, and outputs full of NaN or -1."""
    out = dict(t)
    for b in w.buffers:  # type: ignore[attr-defined]
        if b.group == "outputs":
            out[b.name] = torch.full(
                b.shape, -1 if b.dtype == "i32" else float("nan"), dtype=REAL[b.dtype]
            )
        elif b.group == "states":
            out[b.name] = t[b.name].clone()
    return out


def follow(w: Workload, disturbed: str = "", seed: int = 1) -> None:
    """Three steps on carried states, each beside the oracle under the baseline's own routing; no more is written. An
    E4M3 query that rounds the other way moves by a sixteenth, so the limit is what correct schedules differ by."""
    t = tensors(w, seed)
    mine = with_outputs(w, t)
    baseline = TorchGraphBaseline()
    baseline.prepare(w, mine)
    for step in range(3):
        inputs = {k: v for k, v in tensors(w, seed, step).items() if k.startswith("inputs.")}
        if disturbed:
            inputs = disturb.apply(w, disturbed, step, inputs)
        for name, value in inputs.items():
            mine[name].copy_(value)
        before = {k: v.clone() for k, v in mine.items()}
        baseline.step()
        ids = mine.get("outputs.ids")
        expected = run(w, before, ids=ids)
        narrow = w.dims["kv"] == "fp8"
        near = [run(w, before, s, ids).tensors for s in ("framework", "rounded") if narrow]
        for name, value in expected.tensors.items():
            if value.is_floating_point():
                limit = max([LIMIT, *(2 * rel(n[name], value) for n in near)])
                assert rel(mine[name], value) < limit, (name, step)
        for tie in expected.ties:
            differ = (mine["outputs.ids"] != expected.tensors["outputs.ids"]).any(-1)
            assert not (differ & ~tie.allowed).any()
        for name, mask in expected.masks.items():
            kept = [x[name].float()[~mask] for x in (mine, before)]
            assert torch.equal(*kept), name


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("preset, rows", [("tiny", 1), ("tiny-tp2", 4)])
def test_baseline_agrees_with_the_oracle_over_three_steps(
    part: str, preset: str, rows: int
) -> None:
    follow(workload(part, preset, rows=rows))


VARIANTS: list[tuple[str, dict[str, str | int], str]] = [
    ("kda", {"q": 4}, ""), ("kda", {"q": 8}, "null_store"), ("kda", {"q": 2}, "null_request"),
    ("kda", {"q": 4}, "accepted"), ("mla", {"q": 4}, ""), ("mla", {"kv": "fp8"}, ""),
    ("mla", {"q": 4, "kv": "fp8"}, "no_insert"), ("mla", {"q": 2, "kv": "fp8"}, "null_request"),
    ("mla", {"q": 4}, "short"), ("latent-moe", {"experts": "nvfp4"}, ""),
    ("decode", {"q": 2, "taps": "dspark"}, ""), ("decode", {"kv": "fp8", "experts": "nvfp4", "taps": "dspark"}, ""),
]  # fmt: skip


@pytest.mark.parametrize("part, extra, disturbed", VARIANTS)
def test_every_option_has_a_baseline(
    part: str, extra: dict[str, str | int], disturbed: str
) -> None:
    layers = {"decode": 4, "latent-moe": 1}.get(part, 2)
    follow(workload(part, rows=4 if part == "decode" else 8, layers=layers, extra=extra), disturbed)


@pytest.mark.parametrize("extra", [{"router": "sharded"}, {"latent_down": "replicated"}])
def test_whoever_has_the_front_of_the_ffn_the_columns_are_joined(extra: dict[str, str]) -> None:
    follow(workload("latent-moe", "tiny-tp2", rows=2, layers=1, extra=extra))


def test_the_end_of_the_model_and_another_model_have_one() -> None:
    follow(workload("decode", "tiny-end", rows=2, layers=3, extra={"first": 2}))
    follow(find("glm-5.3-flash-kda").workload(Options("tiny", 2, 4)))
    follow(find("glm-5.3-flash-kda").workload(Options("tiny", 1, 4, extra={"q": 2})))


@pytest.mark.parametrize("part", ["kda", "mla"])
@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize("seed", [4, 5])
def test_padding_writes_nothing_and_gives_zero_attention(part: str, q: int, seed: int) -> None:
    """Whatever the padded rows hold, NaN too, and whether the null slot's id is 0 or -1; in the reference as well."""
    w = workload(part, rows=4, extra={"q": q})
    t = disturb.apply(w, "null_request", seed, tensors(w))
    for i in range(w.layers):
        t[f"inputs.x.{i}"] = t[f"inputs.x.{i}"].clone()
        t[f"inputs.x.{i}"][:q] = float("nan")
    mine = with_outputs(w, t)
    baseline = TorchGraphBaseline()
    baseline.prepare(w, mine)
    baseline.step()
    expected = run(w, t)
    for found in (mine, expected.tensors):
        assert all(found[f"outputs.y.{i}"][:q].abs().max() == 0 for i in range(w.layers))
        assert all(found[f"outputs.y.{i}"].isfinite().all() for i in range(w.layers))
        for name, mask in expected.masks.items():
            assert torch.equal(found[name][~mask], t[name][~mask])


def test_a_row_that_is_not_inserted_leaves_the_cache_alone() -> None:
    w = workload("mla", rows=2)
    t = disturb.apply(w, "no_insert", 5, tensors(w))
    mine = with_outputs(w, t)
    baseline = TorchGraphBaseline()
    baseline.prepare(w, mine)
    baseline.step()
    assert rel(mine["outputs.y.0"], run(w, t).tensors["outputs.y.0"]) < LIMIT
    changed = (mine["states.layers.0.kv"] != t["states.layers.0.kv"]).any(-1)
    assert int(changed.sum()) == 1


def test_targets_name_their_baselines() -> None:
    for part in PARTS:
        target = find(f"kimi-k3-{part}")
        assert isinstance(target, KimiTarget)
        with triton_lite.installed():
            for path in target.baselines.values():
                module, _, cls = path.partition(":")
                assert hasattr(getattr(importlib.import_module(module), cls), "step")


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_read_back_at_real_sizes(part: str) -> None:
    """Fake tensors have shapes and no data: a step that needs a value on the host, as no graph may, raises."""
    fake(workload(part, "tp8", rows=8))
    if part == "decode":
        fake(workload(part, "tp8", rows=8, extra={"q": 8, "kv": "fp8", "experts": "nvfp4"}))


def fake(w: Workload) -> None:
    with FakeTensorMode():
        t = {b.name: torch.empty(b.shape, dtype=REAL[b.dtype]) for b in w.buffers}
        baseline = TorchGraphBaseline()
        baseline.prepare(w, t)
        baseline.step()


def test_inputs_of_one_storage_are_taken_apart_for_the_compiler() -> None:
    whole = torch.zeros(1024, dtype=torch.uint8)
    part = whole[64:128].view(torch.bfloat16)
    alone = compiled.alone(part)
    alone.fill_(3.0)
    assert bool((part == 3.0).all()) and alone.untyped_storage().nbytes() < 1024
