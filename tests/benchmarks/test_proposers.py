"""Scores follow the best candidate so far, and what had been paid by then; a score can be played again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent.fakes import kernel
from agent.models.scripted import ScriptedProposer
from agent.search import Limits
from tests.agent.conftest import fake_target, kit

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "proposers"
__all__ = ["fake_target", "kit"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"proposers_{name}", HERE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_curve_is_of_the_best_so_far(kit: Any) -> None:
    score = load("score")
    run = kit.new(limits=Limits(rounds=3, stop_at=None, patience=None))
    kit.go(run, ScriptedProposer([kernel(90), kernel(95), kernel(60)]))
    history = kit.queries.history(run)
    when = {1: "2026-01-01T00:00:01", 2: "2026-01-01T00:00:03", 3: "2026-01-01T00:00:05"}
    calls = [
        {"date": "2026-01-01T00:00:00", "input_tokens": 100, "output_tokens": 20, "cost": 0.5},
        {"date": "2026-01-01T00:00:04", "input_tokens": 50, "output_tokens": None, "cost": None},
    ]
    s = score.score("gemv", run, history, calls, when)
    seed = score.share(history[0])
    assert s.gain == pytest.approx(100 / 60, rel=0.01) and s.best == pytest.approx(
        seed * s.gain, rel=0.01
    )
    assert [round(p.best / seed, 2) for p in s.curve] == [1.0, 1.11, 1.11, 1.67]
    assert [(p.tokens, p.usd) for p in s.curve] == [(0, 0.0), (120, 0.5), (120, 0.5), (170, 0.5)]
    assert (s.candidates, s.passed, s.failed, s.unpriced) == (3, 3, 0, 1)
    text = score.table([s, s])
    assert "best after 3 candidates, 170 tokens, $0.500" in text and "modelled" in text
    assert score.total([s, s])["best"] == pytest.approx(s.best)


def test_the_set_covers_the_parts_of_a_layer_and_fits_both_devices() -> None:
    tasks = load("tasks").SETS["small-1"]
    assert [t.name for t in tasks] == ["attn-res", "router", "kda-step", "gemv", "latent-moe"]
    options = [t.options(device) for t in tasks for device in ("cpu", "cuda")]
    assert all("tiny" in o if "cpu" in o else "tp8" in o for o in options)


@pytest.mark.slow
def test_a_score_with_the_tuner_and_its_replay_agree(tmp_path: Path) -> None:
    def run(*more: str) -> dict[str, Any]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        command = [
            sys.executable,
            str(HERE),
            "--only",
            "gemv",
            "--rounds",
            "1",
            "--candidates",
            "1",
            "-o",
            str(out),
        ]
        subprocess.run([*command, *more], check=True, capture_output=True, cwd=tmp_path)
        return dict(json.loads((out / "scores.json").read_text()), folder=str(out))

    first = run("--proposer", "tuner")
    again = run("--replay", first["folder"])
    (a,), (b,) = first["scores"], again["scores"]
    assert (
        a["best"] == pytest.approx(b["best"], rel=0.05)
        and a["run"] != b["run"]
        and b["candidates"] == 1
    )
    assert a["kind"] == b["kind"] == "modelled"
