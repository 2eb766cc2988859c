"""Free-running decode against fp64: how far working-precision schedules drift, and which router choices flip.

Every runner carries its own states over all steps. `--tokens oracle`: all are fed the greedy tokens of the oracle, so
that their errors stay comparable. `--tokens own`: each is fed the token that it chose, as a served model is, and its
first other token ends the comparison, for what follows is another text. `--routing own`: each takes the experts it
chose, and one flip moves everything after it. `--routing oracle`: all take the oracle's, and a flip is only counted, so
that what is left is the drift of the numbers.
A random embedding and head stand in for the model's. Numbers of the tiny preset say whether errors accumulate, not how
a trained model answers.

    python benchmarks/drift.py --steps 256 --rows 2 --json drift.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from targets.base import Options, Scalar, Workload, find
from targets.kimi_k3.baseline.graph import TorchGraphBaseline
from targets.kimi_k3.generate import generator
from targets.kimi_k3.maths.precision import SCHEDULES
from targets.kimi_k3.options import resolve
from targets.kimi_k3.reference import DTYPES, IDS, KimiReference, walked
from targets.kimi_k3.routing import Chooser
from targets.reference import Tensors

VOCAB = 1024
REFERENCE = KimiReference()
GRAPH = "graph"
"""The torch baseline as a runner; the others are schedules of the reference."""


@dataclass(frozen=True)
class Flip:
    """A row whose set of experts is not the oracle's. `margin`: between the last chosen and the best refused one of the
    oracle's selection scores; `moved`: the largest change of a score of that row. A flip needs moved >= margin / 2."""

    step: int
    layer: int
    row: int
    margin: float
    moved: float | None


@dataclass
class Drift:
    """One runner: relative L2 distance of outputs.out and of all recurrent states from the oracle, step by step."""

    name: str
    out: list[float] = field(default_factory=list)
    state: list[float] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)
    choices: int = 0
    tokens_differ: int = 0
    parted: int | None = None
    """The first step that chose another token than the oracle."""

    def summary(self) -> dict[str, float | int | str | None]:
        quarter = max(1, len(self.out) // 4)
        return {
            "runner": self.name, "steps": len(self.out), "out_first_quarter": mean(self.out[:quarter]),
            "out_last_quarter": mean(self.out[-quarter:]), "out_worst": max(self.out),
            "state_first_quarter": mean(self.state[:quarter]), "state_last_quarter": mean(self.state[-quarter:]),
            "state_worst": max(self.state), "router_choices": self.choices, "router_flips": len(self.flips),
            "flip_margin_worst": max((f.margin for f in self.flips), default=0.0),
            "flips_not_explained": sum(f.moved is not None and f.moved < f.margin / 2 for f in self.flips),
            "tokens_differ": self.tokens_differ, "first_other_token": self.parted,
        }  # fmt: skip


def mean(xs: Sequence[float]) -> float:
    return sum(xs) / len(xs)


@dataclass
class Runner:
    """A schedule, or the baseline, with its own states."""

    name: str
    w: Workload
    states: Tensors
    weights: Tensors

    def step(self, inputs: Tensors, ids: Tensor | None = None) -> tuple[Tensors, Chooser | None]:
        """`ids`: experts to take; the returned ids are the runner's own choice all the same."""
        t = {**self.weights, **self.states, **inputs}
        if self.name == GRAPH:
            return self._graph(t), None
        chooser = Chooser(int(self.w.dims["topk"]), ids)
        got = walked(resolve(self.w.target, self.w.options), t, (SCHEDULES[self.name], chooser)).out
        got[IDS] = torch.stack(chooser.own)
        dtypes = {b.name: DTYPES[b.dtype] for b in self.w.buffers}
        out = {k: v.to(dtypes[k]) for k, v in got.items()}
        self.states = {k: out[k] for k in self.states}
        return out, chooser

    def _graph(self, t: Tensors) -> Tensors:
        t |= {
            b.name: torch.zeros(b.shape, dtype=DTYPES[b.dtype])
            for b in self.w.buffers
            if b.group == "outputs"
        }
        t |= {k: v.clone() for k, v in self.states.items()}
        one = TorchGraphBaseline()
        one.prepare(self.w, t)
        one.step()
        self.states = {k: t[k] for k in self.states}
        return t


@dataclass(frozen=True)
class Walk:
    steps: int = 256
    seed: int = 1
    own_routing: bool = True
    own_tokens: bool = False


def run(w: Workload, names: Sequence[str], walk: Walk) -> list[Drift]:
    """Drifts of `names`, all against one oracle trajectory."""
    torch.set_num_threads(1)
    seed = walk.seed
    if GRAPH in names and not walk.own_routing:
        raise ValueError(f"{GRAPH} always takes its own experts")
    weights, states = REFERENCE.weights(w, seed, "cpu"), REFERENCE.states(w, seed, "cpu")
    oracle, *others = (Runner(n, w, dict(states), weights) for n in ("oracle", *names))
    drifts = [Drift(n) for n in names]
    hidden = int(w.dims["hidden"])
    embed = torch.randn(VOCAB, hidden, generator=generator(seed, "embed", "cpu")).bfloat16()
    head = torch.randn(VOCAB, hidden, generator=generator(seed, "head", "cpu"))
    tokens = torch.zeros(w.rows, dtype=torch.long)
    for step in range(walk.steps):
        inputs = REFERENCE.inputs(w, seed, step, "cpu")
        want, chosen = oracle.step(inputs | {"inputs.x0": embed[tokens]})
        assert chosen is not None
        before, tokens = tokens, greedy(want, head)
        for runner, d in zip(others, drifts, strict=True):
            if walk.own_tokens and d.parted is not None:
                continue  # it decodes another text: nothing to compare
            ids = None if walk.own_routing else want[IDS]
            got, chooser = runner.step(inputs | {"inputs.x0": embed[before]}, ids)
            differ = int((greedy(got, head) != tokens).sum())
            d.tokens_differ += differ
            d.parted = step if differ and d.parted is None else d.parted
            d.out.append(rel(got["outputs.out"], want["outputs.out"]))
            d.state.append(max(distances(runner.states, oracle.states)))
            d.choices += want[IDS].shape[0] * w.rows
            d.flips += list(flips(step, chosen, got[IDS], chooser))
    return drifts


def greedy(out: Tensors, head: Tensor) -> Tensor:
    return (out["outputs.out"].float() @ head.T).argmax(-1)


def distances(a: Tensors, b: Tensors) -> Iterator[float]:
    """Of the recurrent states and caches that steps write."""
    for name, value in a.items():
        yield rel(value, b[name])


def rel(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def flips(step: int, oracle: Chooser, ids: Tensor, seen: Chooser | None) -> Iterator[Flip]:
    """Rows of this step whose sets differ. `seen`: the runner's logits, None where they stay inside."""
    for layer, own in enumerate(oracle.own):
        differs = (own.sort(-1).values != ids[layer].long().sort(-1).values).any(-1)
        for row in differs.nonzero().flatten().tolist():
            z = oracle.z[layer][row].sort(descending=True).values
            moved = None
            if seen is not None:
                moved = float((seen.z[layer][row].double() - oracle.z[layer][row]).abs().max())
            yield Flip(step, layer, row, float(z[oracle.topk - 1] - z[oracle.topk]), moved)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--preset", default="tiny")
    p.add_argument("--rows", type=int, default=2)
    p.add_argument("--steps", type=int, default=256)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--kv", default="bf16", choices=("bf16", "fp8"))
    p.add_argument("--routing", default="own", choices=("own", "oracle"))
    p.add_argument("--tokens", default="oracle", choices=("oracle", "own"))
    p.add_argument(
        "--runners", default=None, help="schedules of the reference, or graph, with commas"
    )
    p.add_argument("--json", type=Path, default=None, help="write all steps and flips here")
    a = p.parse_args(argv)
    extra: dict[str, Scalar] = {} if a.kv == "bf16" else {"kv": a.kv}
    w = find("kimi-k3-decode").workload(Options(a.preset, rows=a.rows, extra=extra))
    own = a.routing == "own"
    usual = "f32,rounded,framework" + (",graph" if own else "")
    drifts = run(w, (a.runners or usual).split(","), Walk(a.steps, a.seed, own, a.tokens == "own"))
    for d in drifts:
        s = d.summary()
        print(
            f"{d.name:<10} out {s['out_first_quarter']:.4f} -> {s['out_last_quarter']:.4f} "
            f"(worst {s['out_worst']:.4f}), "
            f"states {s['state_first_quarter']:.4f} -> {s['state_last_quarter']:.4f}, flips {s['router_flips']} of "
            f"{s['router_choices']} (margin <= {s['flip_margin_worst']:.2e}, {s['flips_not_explained']} unexplained), "
            f"{s['tokens_differ']} tokens differ"
            + ("" if d.parted is None else f", the first at step {d.parted}")
        )
    if a.json:
        data = {
            "workload": w.key,
            "seed": a.seed,
            "routing": a.routing,
            "tokens": a.tokens,
            "runners": [asdict(d) | {"summary": d.summary()} for d in drifts],
        }
        a.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
