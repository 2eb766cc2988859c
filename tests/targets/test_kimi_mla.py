"""MLA against a second implementation: un-absorbed attention over keys and values expanded from the latent cache."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3 import disturb
from targets.kimi_k3.maths import mla as mla_module
from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.maths.precision import ORACLE, Schedule
from targets.reference import Tensors
from tests.targets.kimi import rel, run, tensors, workload


def expanded_mla(w: Workload, t: Tensors, m: int) -> Tensor:
    """Row m of instance 0: per head, keys W_UK c | k_pe and values W_UV c for all visible tokens, no rounding."""
    at = "weights.layers.0."
    d = {k.removeprefix(at): v.double() for k, v in t.items() if k.startswith(at)}
    heads, nope, lora = d["w_uk"].shape
    q_lora, v_dim, rope = d["q_a_norm"].shape[0], d["w_uv"].shape[1], int(w.dims["qk_rope"])
    page, length = int(w.dims["page"]), int(t["inputs.lengths"][m])

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / torch.sqrt((v**2).mean() + 1e-5) * weight

    a = d["a_proj"] @ t["inputs.x.0"][m].double()
    q = (d["q_b"] @ norm(a[:q_lora], d["q_a_norm"])).reshape(heads, nope + rope)
    c, pe, gate = (
        a[q_lora : q_lora + lora],
        a[q_lora + lora : q_lora + lora + rope],
        a[q_lora + lora + rope :],
    )
    new = torch.cat([norm(c, d["kv_a_norm"]), pe])
    kv = t["states.layers.0.kv"]
    rows = []
    for position in range(length - 1):
        rows.append(kv[int(t["inputs.block_table"][m, position // page]), position % page].double())
    cache = torch.stack([*rows, new])
    out = []
    for h in range(heads):
        keys = torch.cat([cache[:, :lora] @ d["w_uk"][h].T, cache[:, lora:]], -1)
        values = cache[:, :lora] @ d["w_uv"][h].T
        p = torch.softmax(keys @ q[h] / (nope + rope) ** 0.5, 0)
        out.append(p @ values)
    y = torch.cat(out) * torch.sigmoid(gate)
    assert y.shape == (heads * v_dim,)
    return d["o_proj"] @ y


def test_absorbed_equals_expanded_attention_without_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = workload("mla", rows=4, layers=1)
    t = tensors(w)
    monkeypatch.setattr(mla_module, "bf", lambda x: x)
    weights = {k.rsplit(".", 1)[1]: v for k, v in t.items() if k.startswith("weights.")}
    layer = Layer(weights, {"kv": t["states.layers.0.kv"].double()}, {})
    pages = mla_module.Paging(
        *(t[f"inputs.{k}"] for k in ("lengths", "block_table", "slot_mapping"))
    )
    got = mla_module.mla(ORACLE, t["inputs.x.0"].double(), layer, pages).partial
    for m in range(4):
        assert rel(got[m], expanded_mla(w, t, m)) < 1e-12


def test_rounding_points_keep_it_within_a_percent() -> None:
    w = workload("mla", rows=4, layers=1)
    t = tensors(w)
    got = run(w, t).tensors["outputs.y.0"]
    expected = torch.stack([expanded_mla(w, t, m) for m in range(4)])
    assert 1e-4 < rel(got, expected) < 1e-2


def test_permuting_pages_changes_nothing() -> None:
    w = workload("mla", rows=4)
    t = tensors(w)
    order = torch.randperm(int(w.dims["pages"]), generator=torch.Generator().manual_seed(3))
    where = order.argsort()
    p = dict(t)
    for i in range(w.layers):
        p[f"states.layers.{i}.kv"] = t[f"states.layers.{i}.kv"][order]
    p["inputs.block_table"] = where[t["inputs.block_table"].long()].to(torch.int32)
    page = int(w.dims["page"])
    slot = t["inputs.slot_mapping"]
    p["inputs.slot_mapping"] = where[slot // page] * page + slot % page
    plain, other = run(w, t).tensors, run(w, p).tensors
    for i in range(w.layers):
        assert torch.equal(plain[f"outputs.y.{i}"], other[f"outputs.y.{i}"])
        assert torch.equal(plain[f"states.layers.{i}.kv"][order], other[f"states.layers.{i}.kv"])


@pytest.mark.parametrize("length, mapping", [(0, -1), (5, -1)])
def test_nothing_is_inserted_for_a_negative_slot(length: int, mapping: int) -> None:
    w = workload("mla", rows=2)
    t = tensors(w)
    t["inputs.lengths"][1], t["inputs.slot_mapping"][1] = length, mapping
    got = run(w, t)
    for i in range(w.layers):
        changed = (got.tensors[f"states.layers.{i}.kv"] != t[f"states.layers.{i}.kv"]).any(-1)
        assert int(changed.sum()) == 1
        assert (got.tensors[f"outputs.y.{i}"][1].abs().max() == 0) == (length == 0)


def test_rows_that_no_request_sees_do_not_matter() -> None:
    w = workload("mla", rows=4)
    t = tensors(w)
    stale = disturb.apply(w, "stale_cache", 1, t)
    plain, other = run(w, t).tensors, run(w, stale).tensors
    assert float(stale["states.layers.0.kv"].float().abs().max()) == 1000
    assert all(
        torch.equal(plain[f"outputs.y.{i}"], other[f"outputs.y.{i}"]) for i in range(w.layers)
    )


def without_maximum(s: Schedule, query: Tensor, cache: Tensor, lora: int) -> Tensor:
    """What `mla.attend` computes, as long as exp() of the scores themselves is a number that is not 0."""
    p = torch.exp(query @ cache.to(s.dtype).T)
    return (p @ cache[:, :lora].to(s.dtype)) / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_shared_keys_need_the_maximum_and_leave_values_in_scale(
    kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = workload("mla", rows=4, extra={"kv": kv})
    spoilt = Counter[str]()
    for seed in range(8):
        t = tensors(w, seed)
        plain = run(w, t, "f32").tensors["outputs.y.0"].float()
        for name in ("saturated", "shared_keys"):
            changed = disturb.apply(w, name, seed, t)
            right = run(w, changed, "f32").tensors["outputs.y.0"].float()
            assert name == "saturated" or 0.5 < float(right.std() / plain.std()) < 2
            with monkeypatch.context() as m:
                m.setattr(mla_module, "attend", without_maximum)
                wrong = run(w, changed, "f32").tensors["outputs.y.0"].float()
            spoilt[name] += not bool(torch.isfinite(wrong).all()) or rel(wrong, right) > 0.1
    assert spoilt["shared_keys"] >= {"bf16": 8, "fp8": 5}[kv] and not spoilt["saturated"]


def test_shared_keys_insert_nothing() -> None:
    """An inserted row would not have the part in common: its weight would be all or nothing."""
    w = workload("mla", rows=4)
    t = disturb.apply(w, "shared_keys", 1, tensors(w))
    got = run(w, t).tensors
    assert all(
        torch.equal(got[f"states.layers.{i}.kv"], t[f"states.layers.{i}.kv"])
        for i in range(w.layers)
    )


def test_lengths_grow_and_slots_stay_along_a_trajectory() -> None:
    w = workload("mla", rows=4)
    first, later = tensors(w, step=0), tensors(w, step=7)
    assert torch.equal(later["inputs.lengths"], first["inputs.lengths"] + 7)
    assert torch.equal(later["inputs.block_table"], first["inputs.block_table"])
    page = int(w.dims["page"])
    for m in range(4):
        last = int(later["inputs.lengths"][m]) - 1
        row = int(later["inputs.block_table"][m, last // page]) * page + last % page
        assert row == int(later["inputs.slot_mapping"][m])
    assert not torch.equal(first["inputs.x.0"], later["inputs.x.0"])
