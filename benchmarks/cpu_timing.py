"""How far the cpu device's modelled times are from measured ones, and the fit of the model's constants.

    python benchmarks/cpu_timing.py TIMES.jsonl ARTIFACTS [--facts FOLDER] [--fit] [--markdown FILE]

TIMES: rows of benchmarks/step_times.py, measured on the GPU; ARTIFACTS: a folder below which the artifacts lie, in
folders named by their hash. Counting a large artifact takes seconds to minutes; FOLDER keeps the counts. `--fit` looks
for the constants in `model.BOUNDS` on every second row (by hash) and prints them; the tables are of all rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from sandbox import artifact_store
from sandbox.devices.base import Faulted, Refused
from sandbox.devices.cpu.estimate import given_of, step_facts
from sandbox.devices.cpu.facts import Facts
from sandbox.devices.cpu.model import BOUNDS, H200, Machine, launch_seconds

STEPS = (0.5, 0.25, 0.1, 0.04)


@dataclass(frozen=True)
class Row:
    target: str
    workload: Mapping[str, Any]
    tunables: Mapping[str, Any]
    measured: float
    shares: Sequence[Mapping[str, Any]]
    facts: list[Facts]
    artifact: str

    @property
    def fitted(self) -> bool:
        return int(self.artifact[:2], 16) % 2 == 0


def read(times: Path, root: Path, kept: Path | None) -> list[Row]:
    """Rows whose artifact is there and can be counted; what is left out is said on stderr."""
    where = {p.name: p for p in root.rglob("*") if len(p.name) == 64 and p.is_dir()}
    given: dict[str, Any] = {}
    same: dict[str, Facts] = {}
    out = []
    for line in times.read_text().splitlines():
        r = json.loads(line)
        sha = r["artifact"]
        try:
            facts = [same.setdefault(_key(f), f) for f in _facts(where.get(sha), sha, kept, given)]
        except (Refused, Faulted, KeyError) as error:
            print(f"left out: {r['target']} {sha[:8]}: {error}", file=sys.stderr)
            continue
        out.append(
            Row(
                r["target"],
                r["workload"],
                r["tunables"],
                r["cold_us"],
                r.get("shares", ()),
                facts,
                sha,
            )
        )
    return out


def _facts(folder: Path | None, sha: str, kept: Path | None, given: dict[str, Any]) -> list[Facts]:
    """Counted now, or before. The files of `kept` are pickles of our own."""
    file = kept / f"{sha}.pkl" if kept else None
    if file is not None and file.exists():
        made: list[Facts] = pickle.loads(file.read_bytes())
        return made
    if folder is None:
        raise KeyError("no artifact")
    artifact = artifact_store.load(folder)
    key = json.dumps([artifact.target, dict(artifact.workload)], sort_keys=True)
    if key not in given:
        given.clear()
        given[key] = given_of(artifact)
    made = step_facts(artifact, given[key])
    if file is not None:
        file.write_bytes(pickle.dumps(made))
    return made


def _key(f: Facts) -> str:
    """Equal for launches that the model cannot tell apart, also of different artifacts."""
    plain = (
        f.code,
        f.grid,
        f.block,
        f.smem,
        f.cluster,
        f.pdl,
        sorted(f.far),
        f.memory_bytes,
        f.l2_bytes,
        f.bulk_bytes,
    )
    data = repr(plain).encode() + f.total.tobytes() + f.warps.tobytes()
    return hashlib.sha256(data).hexdigest()


def modelled(row: Row, g: Machine) -> float:
    """Microseconds of the step."""
    return 1e6 * sum(_seconds(f, g) for f in row.facts)


_DONE: dict[tuple[int, Machine], float] = {}


def _seconds(f: Facts, g: Machine) -> float:
    """Facts live as long as the program does, so that their addresses tell them apart."""
    key = (id(f), g)
    if key not in _DONE:
        _DONE[key] = launch_seconds(f, g)
    return _DONE[key]


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks, ties averaged."""
    v = np.asarray(values)
    return np.array([((v < x).sum() + (v <= x).sum() - 1) / 2 for x in v])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) < 3:
        return float("nan")
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def loss(rows: Sequence[Row], g: Machine) -> float:
    """Squared logarithms of modelled over measured, and of how both differ from their target's mean, which counts
    more: that is what choices between tunables hang on."""
    total = 0.0
    by: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        m, t = np.log(modelled(r, g)), np.log(r.measured)
        by.setdefault(r.target, []).append((m, t))
    for pairs in by.values():
        p = np.array(pairs)
        error = p[:, 0] - p[:, 1]
        total += float((error**2).mean()) + 3 * float(((error - error.mean()) ** 2).mean())
    return total / len(by)


def fit(rows: Sequence[Row], g: Machine) -> Machine:
    """Coordinate descent on relative steps."""
    best = loss(rows, g)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name, (low, high) in BOUNDS.items():
                for factor in (1 + step, 1 / (1 + step)):
                    tried = replace(g, **{name: min(high, max(low, getattr(g, name) * factor))})
                    value = loss(rows, tried)
                    if value < best * 0.999:
                        g, best, moved = tried, value, True
            print(f"step {step} loss {best:.5f}", file=sys.stderr)
    return g


def table(rows: Sequence[Row], g: Machine) -> list[str]:
    """Markdown: one line a target, then all."""
    lines = [
        "| target | artifacts | measured us | rank correlation | median error | largest error |",
        "|---|---|---|---|---|---|",
    ]
    names = sorted({r.target for r in rows})
    for name in [*names, "all"]:
        chosen = [r for r in rows if name in (r.target, "all")]
        a, b = [modelled(r, g) for r in chosen], [r.measured for r in chosen]
        errors = [abs(x / y - 1) for x, y in zip(a, b, strict=True)]
        lines.append(
            f"| {name} | {len(chosen)} | {min(b):.0f} to {max(b):.0f} | {spearman(a, b):.2f} "
            f"| {100 * median(errors):.0f} % | {100 * max(errors):.0f} % |"
        )
    return lines


def detail(rows: Sequence[Row], g: Machine) -> list[str]:
    lines = [
        "| target | rows | tunables off the most frequent | measured us | modelled us | fitted on |"
    ]
    lines.append("|---|---|---|---|---|---|")
    usual: dict[str, dict[str, Any]] = {}
    for r in rows:
        for k, v in r.tunables.items():
            usual.setdefault(r.target, {}).setdefault(k, []).append(v)
    for r in sorted(rows, key=lambda r: (r.target, r.workload["rows"], r.measured)):
        common = {k: max(set(v), key=v.count) for k, v in usual[r.target].items()}
        other = ", ".join(f"{k} {v}" for k, v in r.tunables.items() if common[k] != v)
        lines.append(
            f"| {r.target} | {r.workload['rows']} | {other} | {r.measured:.1f} | {modelled(r, g):.1f} "
            f"| {'yes' if r.fitted else 'no'} |"
        )
    return lines


def kernels(rows: Sequence[Row], g: Machine) -> None:
    """Measured and modelled shares by kernel, on stderr: for finding out what the model lacks."""
    sums: dict[tuple[str, str], list[float]] = {}
    for r in rows:
        if len(r.shares) != len(r.facts):
            continue
        for share, f in zip(r.shares, r.facts, strict=True):
            s = sums.setdefault((r.target, f"{share['kernel'][:24]} {share['grid']}"), [0, 0, 0])
            s[0] += 1
            s[1] += share["us"]
            s[2] += 1e6 * _seconds(f, g)
    for (target, kernel), (n, t, m) in sorted(sums.items()):
        print(
            f"{target[8:]:12} {kernel:50} n {n:4.0f} {t / n:7.2f} {m / n:7.2f} {m / t:5.2f}",
            file=sys.stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=Path)
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(args.times, args.artifacts, args.facts)
    g = H200
    if args.fit:
        g = fit([r for r in rows if r.fitted], g)
        print({name: float(f"{getattr(g, name):.4g}") for name in BOUNDS})
    if args.kernels:
        kernels(rows, g)
    print("\n".join(table(rows, g)))
    if args.markdown:
        args.markdown.write_text("\n".join([*table(rows, g), "", *detail(rows, g), ""]))


if __name__ == "__main__":
    main()
