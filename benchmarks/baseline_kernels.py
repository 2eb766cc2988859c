"""What the baselines of a workload do on this GPU: right or wrong, time of a step in a CUDA graph, time by kernel.

    python benchmarks/baseline_kernels.py --preset tp8 --rows 1 --baselines mix,compile,graph --json out.json
    python benchmarks/baseline_kernels.py --preset tp8 --rows 1 --compile       Triton kernels that --tune tries; no GPU
    python benchmarks/baseline_kernels.py --preset tp8 --rows 1 --tune 60       tiles of the mix, one place at a time

For those who work on baselines; what is reported of them comes from the judge. It reads no candidate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import triton_offline
from sandbox.judge.case import load_attribute
from targets.base import Options, find
from targets.kimi_k3.baseline import tiles
from targets.kimi_k3.reference import DTYPES, KimiReference

STEPS, REPLAYS = 8, 12
MOST_BYTES = 16384
"""Bytes of W in flight that a variant may have for each warp."""
CHOICES = {
    "bn": (1, 2, 4, 8, 16, 32, 64), "bk": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4),
}  # fmt: skip
PLACES = (
    "up", "down", "kda", "front", "in_proj", "rank", "o_proj", "latent_up", "attn_res", "a_proj", "attention", "join",
    "q_b", "query",
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

    def worst(self, one: Any, quiet: bool = False) -> tuple[str, float]:
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
        if ids is not None and not quiet:
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
    launcher = __import__("targets.kimi_k3.baseline.launcher", fromlist=["PDL"])
    before = launcher.PDL
    launcher.PDL = False
    try:
        again = type(one)()
        again.prepare(bench.w, bench.t)
    finally:
        launcher.PDL = before
    return again


def settle(one: Any) -> None:
    """What the device chose when this plan was made holds for later ones: to try it again takes seconds."""
    make = one.make
    if make.routed.way is not None:
        tiles.WAYS[make.mp] = (make.routed.way,)
    tiles.MEASURED.update({(place, make.mp): tiles.BLAS for place in make.blas.places})
    tiles.BLAS_TRIED = ()


def tune(bench: Bench, seconds: float) -> dict[str, Any]:
    """Every tile of `variants` at one place after the other, kept where the whole step is faster by it."""
    end = time.monotonic() + seconds
    asked = recorder(tiles)
    chosen = bench.prepared("mix")
    settle(chosen)
    mp = chosen.make.mp
    first = best = bench.us(bench.prepared("mix"))
    seen: dict[str, float] = {}
    for place in [p for p in PLACES if p in asked and asked[p].kind == "triton"]:
        for tile in variants(asked[place], mp):
            if time.monotonic() > end:
                break
            us = tried(bench, (place, mp), tile, best * 0.998)
            seen[f"{place} {tile}"] = us
            if us < best * 0.998:
                best = us
                tiles.MEASURED[place, mp] = tile
                print(f"{place} {tile}: {best:.1f} us", flush=True)
    print(
        f"tuned from {first:.1f} to {best:.1f} us a step, {max(0, end - time.monotonic()):.0f} s left",
        flush=True,
    )
    kept = {f"{k}": str(v) for k, v in tiles.MEASURED.items()}
    return {"from": first, "to": best, "tiles": kept, "tried": seen}


def ahead(options: Options, target: str) -> None:
    """Compile what `tune` will try, without a GPU, by a third of the cores: others may be at work."""
    begin, mp = time.monotonic(), 1 if options.rows == 1 else max(16, tiles.power(options.rows))
    asked = recorder(tiles)
    triton_offline.compiled(options, target)
    jobs = [
        (options, target, p, mp, t)
        for p in PLACES if p in asked for t in variants(asked[p], mp) if t.kind == "triton"
    ]  # fmt: skip
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 4) // 3), get_context("spawn")) as pool:
        for said in filter(None, pool.map(triton_offline.warm, jobs)):
            print(f"   {said}", flush=True)
    print(f"{len(jobs)} tiles compiled in {time.monotonic() - begin:.0f} s", flush=True)


def variants(t: tiles.Tile, mp: int) -> list[tiles.Tile]:
    """Tiles near `t` that a Triton kernel may hold in registers and shared memory."""
    found = []
    warped = _near("warps", t.warps) if mp == 1 else tuple({t.warps, 8})
    for bn, bk, warps in product(_near("bn", t.bn), _near("bk", t.bk), warped):
        wide = bn * bk if mp == 1 else max(bn * bk, bn * mp * 4, mp * bk)
        if wide * 2 <= MOST_BYTES * warps and (mp == 1 or t.bn < 16 or bn >= 16):
            found.append(tiles.Tile(bn, bk, warps, t.stages))
    return found


def _near(field: str, value: int) -> tuple[int, ...]:
    if value not in CHOICES[field] or (value == 1 and field in ("bn", "bk")):
        return (value,)
    at = CHOICES[field].index(value)
    return CHOICES[field][max(0, at - 1) : at + 2]


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


def tried(bench: Bench, key: tuple[str, int], tile: Any, limit: float) -> float:
    """Microseconds with that tile; infinite if it does not compile, or is below `limit` and wrong."""
    before = tiles.MEASURED.get(key)
    tiles.MEASURED[key] = tile
    try:
        one = bench.prepared("mix")
        us = bench.us(one)
        if us < limit and not bench.worst(one, quiet=True)[1] < 0.05:
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
    option("--compile", action="store_true", help="only compile what --tune tries; needs no GPU")
    option("--json")
    a = parser.parse_args()
    options = Options(a.preset, a.layers, a.rows, a.context)
    if a.compile:
        ahead(options, a.target)
        return
    begin = time.monotonic()
    bench = Bench(options, a.target)
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
