"""What the baselines of a workload do on this GPU: right or wrong, time of a step in a CUDA graph, time by kernel.

    python benchmarks/baseline_kernels.py --preset tp8 --rows 1 --baselines mix,compile,graph --json out.json
    python benchmarks/baseline_kernels.py --preset tp8 --rows 1 --tune 60       tiles of the mix, one place at a time

For those who work on baselines; what is reported of them comes from the judge. It reads no candidate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from sandbox.judge.case import load_attribute
from targets.base import Options, find
from targets.kimi_k3.reference import DTYPES, KimiReference

STEPS, REPLAYS = 8, 25
CHOICES = {
    "bn": (1, 2, 4, 8, 16, 32, 64), "bk": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4),
}  # fmt: skip
PLACES = (
    "in_proj", "front", "up", "down", "o_proj", "shared_down", "latent_up", "kda", "attn_res", "select", "a_proj",
    "q_b", "attention", "join", "query",
)  # fmt: skip


class Bench:
    """One workload on the current GPU."""

    def __init__(self, options: Options, target: str) -> None:
        self.target = find(target)
        self.w = self.target.workload(options)
        self.reference = KimiReference()
        r = self.reference
        self.t = {
            **r.weights(self.w, 1, "cuda"), **r.states(self.w, 1, "cuda"), **r.inputs(self.w, 1, 0, "cuda"),
        }  # fmt: skip
        for b in self.w.buffers:
            if b.group == "outputs":
                self.t[b.name] = torch.zeros(b.shape, dtype=DTYPES[b.dtype], device="cuda")
        self.states = {k: v.clone() for k, v in self.t.items() if k.startswith("states.")}

    def restore(self) -> None:
        for k, v in self.states.items():
            self.t[k].copy_(v)

    def prepared(self, name: str) -> Any:
        one = load_attribute(self.target.baselines[name])()  # type: ignore[attr-defined]
        one.prepare(self.w, self.t)
        return one

    def worst(self, one: Any) -> tuple[str, float]:
        """The tensor farthest from the oracle, relative L2, with the baseline's own choice of experts."""
        self.restore()
        one.step()
        torch.cuda.synchronize()
        mine = {k: v.clone() for k, v in self.t.items() if k.startswith(("outputs.", "states."))}
        self.restore()
        ids = mine.get("outputs.ids")
        forced = None if ids is None else {"outputs.ids": ids}
        expected = self.reference.run(self.w, self.t, "oracle", forced)
        found = {"": 0.0}
        for name, value in expected.tensors.items():
            if value.is_floating_point():
                a, b = mine[name].double(), value.double()
                found[name] = float((a - b).norm() / b.norm().clamp(min=1e-30))
        if ids is not None:
            differ = int((ids != expected.tensors["outputs.ids"]).any(-1).sum())
            print(
                f"   {differ} of {ids[..., 0].numel()} rows are routed otherwise than by the oracle",
                flush=True,
            )
        name = max(found, key=lambda k: -1.0 if found[k] != found[k] else found[k])
        nan = [k for k, v in found.items() if v != v]
        return (nan[0], float("nan")) if nan else (name, found[name])

    def us(self, one: Any) -> float:
        """Median microseconds of a step in a graph of some."""
        self.restore()
        for _ in range(2):
            one.step()
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(STEPS):
                one.step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(REPLAYS):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / STEPS)
        return median(times[3:])

    def kernels(self, one: Any) -> dict[str, tuple[float, float]]:
        """Kernel -> (calls, microseconds) of one step, launched one by one."""
        self.restore()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(4):
                one.step()
            torch.cuda.synchronize()
        table: dict[str, list[float]] = defaultdict(list)
        for e in found.events():
            if str(e.device_type).endswith("CUDA"):
                table[e.name.split("(")[0][:60]].append(e.device_time)
        return {
            k: (len(v) / 4, sum(v) / 4) for k, v in sorted(table.items(), key=lambda x: -sum(x[1]))
        }


def report(bench: Bench, name: str) -> dict[str, Any]:
    """Check, time and profile one baseline; an exception is its result."""
    begin = time.monotonic()
    try:
        one = bench.prepared(name)
        where, error = bench.worst(one)
        ready = time.monotonic() - begin
        us = bench.us(one)
        table = bench.kernels(_unlinked(bench, one))
    except Exception as failure:
        print(f"{name}: {type(failure).__name__}: {str(failure)[-1500:]}", flush=True)
        return {"baseline": name, "error": str(failure)[:2000]}
    layers = bench.w.layers
    floor = bench.w.floor.bytes / 4.39e12 * 1e6
    print(
        f"{name}: worst {error:.4f} in {where}; {us:.1f} us a step, {us / layers:.1f} a layer, {us / floor:.2f} x the "
        f"floor at 4.39 TB/s; ready after {ready:.1f} s", flush=True,
    )  # fmt: skip
    for kernel, (calls, spent) in list(table.items())[:24]:
        print(f"   {calls:6.1f} x {spent / calls:8.2f} us = {spent:8.1f}  {kernel}", flush=True)
    return {"baseline": name, "worst": [where, error], "us": us, "ready_s": ready, "kernels": table}


def _unlinked(bench: Bench, one: Any) -> Any:
    """The same without programmatic launches, under which a kernel's time includes its waiting."""
    make = getattr(one, "make", None)
    if make is None:
        return one
    parts = __import__("targets.kimi_k3.baseline.parts", fromlist=["Maker"])
    before = parts.PDL
    parts.PDL = False
    try:
        again = type(one)()
        again.prepare(bench.w, bench.t)
    finally:
        parts.PDL = before
    return again


def tune(bench: Bench, seconds: float) -> dict[str, Any]:
    """Change one number of one place's tile at a time, keep what makes the whole step faster."""
    from targets.kimi_k3.baseline import tiles

    end = time.monotonic() + seconds
    best = bench.us(bench.prepared("mix"))
    first, mp = best, bench.prepared("mix").make.mp
    asked = recorder(tiles)
    bench.prepared("mix")
    for place in [p for p in PLACES if p in asked]:
        for field in ("bn", "warps", "bk", "stages"):
            for direction in (1, -1):
                while time.monotonic() < end:
                    now = tiles.MEASURED.get((place, mp), asked[place])
                    values = CHOICES[field]
                    at = (
                        values.index(getattr(now, field)) + direction
                        if getattr(now, field) in values
                        else -1
                    )
                    if not 0 <= at < len(values):
                        break
                    us = tried(bench, (place, mp), replace(now, **{field: values[at]}))
                    if us >= best * 0.998:
                        break
                    best = us
                    tiles.MEASURED[place, mp] = replace(now, **{field: values[at]})
                    print(f"{place} {tiles.MEASURED[place, mp]}: {best:.1f} us", flush=True)
    print(
        f"tuned from {first:.1f} to {best:.1f} us a step, {max(0, end - time.monotonic()):.0f} s left",
        flush=True,
    )
    return {"from": first, "to": best, "tiles": {f"{k}": str(v) for k, v in tiles.MEASURED.items()}}


def recorder(tiles: Any) -> dict[str, Any]:
    """The tile that each place gets by rule, filled while a plan is made."""
    seen: dict[str, Any] = {}

    def noted(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(place: str, *more: Any) -> Any:
            seen[place] = f(place, *more)
            return seen[place]

        return call

    tiles.product, tiles.fixed = noted(tiles.product), noted(tiles.fixed)
    return seen


def tried(bench: Bench, key: tuple[str, int], tile: Any) -> float:
    """Microseconds with that tile; infinite if it does not compile or is wrong."""
    from targets.kimi_k3.baseline import tiles

    before = tiles.MEASURED.get(key)
    tiles.MEASURED[key] = tile
    try:
        one = bench.prepared("mix")
        us = bench.us(one)
        if not bench.worst(one)[1] < 0.05:
            us = float("inf")
    except Exception as failure:
        print(f"   {key} {tile}: {type(failure).__name__} {str(failure)[:120]}", flush=True)
        us = float("inf")
    del tiles.MEASURED[key]
    if before is not None:
        tiles.MEASURED[key] = before
    return us


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--target", default="kimi-k3-decode")
    option("--preset", default="tp8")
    option("--layers", type=int)
    option("--rows", type=int, default=1)
    option("--context", type=int)
    option("--baselines", default="mix,compile,graph")
    option("--tune", type=float, default=0.0)
    option("--json")
    a = parser.parse_args()
    begin = time.monotonic()
    bench = Bench(Options(a.preset, a.layers, a.rows, a.context), a.target)
    torch.cuda.synchronize()
    print(f"{a.preset} rows {a.rows}: tensors after {time.monotonic() - begin:.1f} s", flush=True)
    with torch.inference_mode():
        found: dict[str, Any] = {n: report(bench, n) for n in a.baselines.split(",") if n}
        if a.tune:
            found["tune"] = tune(bench, a.tune)
    if a.json:
        with open(a.json, "w") as out:
            json.dump({"preset": a.preset, "rows": a.rows, **found}, out, indent=1)


if __name__ == "__main__":
    main()
