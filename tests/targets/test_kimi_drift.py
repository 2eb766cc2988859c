"""Free-running decode: errors stay where they were over 256 steps, router flips have small margins, drift is seen."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.drift import Runner, Walk, main, run
from targets.reference import Tensors
from tests.targets.kimi import workload


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_errors_do_not_accumulate_over_256_steps() -> None:
    """Under the oracle's routing, for the schedule with every optional rounding."""
    w = workload("decode", rows=1)
    (d,) = run(w, ["rounded"], Walk(256, own_routing=False))
    s = d.summary()
    assert d.choices == 256 * 5
    assert 1e-3 < float(s["out_first_quarter"]) < 0.05
    assert float(s["out_last_quarter"]) < 1.5 * float(s["out_first_quarter"])
    assert float(s["state_last_quarter"]) < 0.05 and float(s["out_worst"]) < 0.15
    assert len(d.flips) < 0.1 * d.choices
    assert s["flips_not_explained"] == 0 and float(s["flip_margin_worst"]) < 0.05


class Leaking(Runner):
    """Loses three percent of its recurrent states each step."""

    def step(self, inputs: Tensors, ids: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
        got = super().step(inputs, ids)
        if self.name != "oracle":
            self.states |= {k: v * 0.97 for k, v in self.states.items() if k.endswith(".S")}
        return got


def test_a_leaking_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    w = workload("decode", rows=1, layers=3)
    (plain,) = run(w, ["f32"], Walk(12, own_routing=False))
    monkeypatch.setattr("benchmarks.drift.Runner", Leaking)
    (leaking,) = run(w, ["f32"], Walk(12, own_routing=False))
    assert leaking.state[-1] > 0.05 > 3 * plain.state[-1]
    assert leaking.state[-1] > leaking.state[0]


def test_a_runner_on_its_own_tokens_is_compared_until_the_first_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = workload("decode", rows=1, layers=2)
    (fed,) = run(w, ["f32"], Walk(4, own_routing=False))
    (own,) = run(w, ["f32"], Walk(4, own_routing=False, own_tokens=True))
    assert own.parted is None and (own.out, own.state) == (fed.out, fed.state)

    def other(self: Runner, inputs: Tensors, ids: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
        got, chooser = Runner.step(self, inputs, ids)
        if self.name != "oracle" and len(steps) == 1:
            got["outputs.out"] = -got["outputs.out"]
        steps.extend([0] * (self.name != "oracle"))
        return got, chooser

    steps: list[int] = []
    monkeypatch.setattr("benchmarks.drift.Runner", type("Other", (Runner,), {"step": other}))
    (d,) = run(w, ["f32"], Walk(4, own_routing=False, own_tokens=True))
    assert d.parted == 1 and len(d.out) == len(steps) == 2 and d.choices == 2


def test_flips_come_with_their_margin_and_the_baseline_routes_by_itself(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    args = [
        "--steps",
        "4",
        "--rows",
        "2",
        "--runners",
        "rounded,graph",
        "--json",
        str(tmp_path / "d.json"),
    ]
    assert main(args) == 0
    text = capsys.readouterr().out
    runners = json.loads((tmp_path / "d.json").read_text())["runners"]
    assert text.count("flips") == 2
    assert [len(r["flips"]) for r in runners] == [r["summary"]["router_flips"] for r in runners]
    assert all(len(r["out"]) == 4 and 0 < r["out"][0] < 0.1 for r in runners)
    w = workload("decode", rows=4, layers=2)
    (d,) = run(w, ["rounded"], Walk(4))
    assert all(f.margin >= 0 and f.moved is not None and f.moved >= f.margin / 2 for f in d.flips)
    with pytest.raises(ValueError, match="its own experts"):
        run(w, ["graph"], Walk(1, own_routing=False))
