"""How far legitimate schedules and right kernels stray from the oracle, figure by figure: the evidence for the judge's
bounds.

    python benchmarks/judge_bounds.py --device cuda --case latent-moe:tp8:12:8 --case persistent:tp8:4:1 -o bounds.json

Judges the seeds with all that a tier asks for but timing, and keeps for every tensor of every moment the errors of the
kernel and of each schedule. Prints, for each figure, what a bound of F x the largest error of a schedule would need.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from agent.offline import options_json
from sandbox.compile_client import CompileClient, CompileSettings
from sandbox.devices.base import Device
from sandbox.jobs import CompileJob, JudgeJob
from sandbox.judge import bands
from sandbox.judge import judge as judging
from sandbox.judge.checks import Band, Checker, Moment
from sandbox.judge.tiers import FULL
from sandbox.judge.ties import Settled
from sandbox.verdict import Failure
from targets.base import Options, find
from targets.kimi_k3.seeds import persistent

FIGURES = ("rel_l2", "max_abs", "norm_ratio", "cell_rel_l2", "cell_norm_ratio", "gain", "cell_gain")
ROWS: list[dict[str, Any]] = []


def figures(o: bands.Oracle, t: torch.Tensor) -> dict[str, float]:
    """Those of the judge, and the gain: how much of the error lies along the oracle."""
    out = {k: float(v) for k, v in asdict(bands.measure(o, t)).items()}
    apart = o.view(t) - o.values
    along = (apart * o.values).sum(1)
    out["gain"] = abs(float(along.sum() / o.values.square().sum()))
    out["cell_gain"] = float((along / o.scale.square()).abs().max())
    return out


class Recorder(Checker):
    """A checker that keeps every figure of every moment."""

    def _numbers(self, s: Settled, m: Moment, band: Band) -> list[Failure]:
        reference, w = self.case.reference, self.case.workload
        runs = {
            name: reference.run(w, m.given, name, s.choices or None).tensors
            for name in reference.schedules
            if name != "oracle"
        }
        for b in self.case.buffers("outputs", "states"):
            expected = s.expected.tensors.get(b.name)
            if expected is None or not expected.dtype.is_floating_point:
                continue
            mask = s.expected.masks.get(b.name)
            o = bands.oracle(expected, None if mask is None else mask.expand(expected.shape))
            if not o.values.numel():
                continue
            ROWS.append({
                "case": w.target, "tensor": b.name, "band": band, "where": m.where.text(), "spread": o.spread,
                "cell_spread": o.cell_spread, "elements": o.elements, "floor": asdict(bands.floor_of(o, b.dtype)),
                "kernel": figures(o, m.after[b.name]), "schedules": {n: figures(o, r[b.name]) for n, r in runs.items()},
            })  # fmt: skip
        return super()._numbers(s, m, band)


def device_of(kind: str, state: Path) -> Device:
    made: Any
    if kind == "cuda":
        from sandbox.devices.cuda import CudaDevice

        made = CudaDevice.open(0, state)
    else:
        from sandbox.devices.cpu import CpuDevice

        made = CpuDevice()
    device: Device = made
    return device


def judge(case: str, device: Device, compiler: CompileClient, seeds: int) -> str:
    """`case`: part:preset:layers:rows. Returns how it ended."""
    part, preset, layers, rows = case.split(":")
    name = "kimi-k3-" + ("decode" if part == "persistent" else part)
    target = find(name)
    w = target.workload(Options(preset, int(layers), int(rows)))
    source = persistent.source() if part == "persistent" else target.seed_source()
    outcome = compiler.compile(CompileJob(source, name, w.key, w.dims, w.buffers))
    if outcome.artifact is None:
        return f"not compiled: {outcome.failure}"
    job = JudgeJob(outcome.artifact, name, options_json(w.options), device.kind)
    todo = replace(
        FULL, seeds=seeds, steps=2, long=4, repeats=1, blocks=2, rounds=1, cold=False, probes=False
    )
    before = len(ROWS)
    verdict = judging.run(job, device, None, todo)
    for row in ROWS[before:]:
        row["case"] = case
    return f"{verdict.status}: {verdict.failure.message if verdict.failure else ''}"


def needed(case: str) -> Mapping[str, Mapping[str, float]]:
    """For each figure: the kernel's largest error less its floor, in units of the schedules' largest of that moment."""
    out: dict[str, dict[str, float]] = {}
    rows = [r for r in ROWS if r["case"] == case]
    for figure in FIGURES:
        unit = figure.replace("gain", "norm_ratio")
        ratios = []
        for r in rows:
            band = max(s[figure] for s in r["schedules"].values())
            over = r["kernel"][figure] - r["floor"][unit]
            ratios.append(max(0.0, over) / band if band > 0 else 0.0)
        ratios.sort()
        out[figure] = {"median": ratios[len(ratios) // 2], "largest": ratios[-1]} if ratios else {}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", action="append", required=True, metavar="PART:PRESET:LAYERS:ROWS")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("-o", "--output", type=Path, default=Path("bounds.json"))
    asked = parser.parse_args()
    judging.Checker = Recorder  # type: ignore[misc, attr-defined]
    ended: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        device = device_of(asked.device, Path(folder))
        with CompileClient(CompileSettings(Path(folder), deadline_s=280)) as compiler:
            for case in asked.case:
                ended[case] = judge(case, device, compiler, asked.seeds)
                print(case, ended[case])
                for figure, x in needed(case).items():
                    print(
                        f"  {figure:<16} " + "  ".join(f"{k} {v:.2f}" for k, v in x.items()),
                        flush=True,
                    )
                asked.output.write_text(json.dumps({"ended": ended, "rows": ROWS}))


if __name__ == "__main__":
    main()
