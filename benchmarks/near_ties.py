"""How near the last chosen expert is to the first one not chosen, and how often noise in x changes the choice.

    python benchmarks/near_ties.py --preset tp8 --rows 8 [--noise 6e-4] [--trials 40]

Two right kernels round differently: after a few instances of a chain their x differ by some 1e-3 of its norm. This says
how many of a step's choices that flips, so that other ids in places can be told from a fault. Plain arithmetic on the
reference's weights of one instance, in fp64; it runs no kernel and times nothing.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from targets.base import Options, find
from targets.kimi_k3.reference import KimiReference

SEED = 5


def router(preset: str, rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """(router rows, biases, x of the first instance, experts of a token) of a chain of one FFN."""
    workload = find("kimi-k3-latent-moe").workload(Options(preset, 1, rows))
    reference = KimiReference()
    weights = reference.weights(workload, SEED, "cpu")
    mine = {n.rsplit(".", 1)[-1]: x.double() for n, x in weights.items() if "router" in n}
    inputs = reference.inputs(workload, SEED, 0, "cpu")
    x = next(x for n, x in inputs.items() if n.startswith("inputs.x"))
    far = [x.double().reshape(rows, -1) for n, x in inputs.items() if n.endswith("logits")]
    if far:
        raise SystemExit("the router is sharded here: take a preset whose ranks have all experts")
    return mine["router"], mine["router_bias"], x.double().reshape(rows, -1), workload.dims["topk"]


def chosen(x: Tensor, rows: Tensor, bias: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(ids in rising order, distance of the last chosen score from the next) of each token."""
    score = torch.sigmoid(x @ rows.T) + bias
    top = score.topk(topk + 1, 1)
    return top.indices[:, :topk].sort(1).values, top.values[:, topk - 1] - top.values[:, topk]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tp8")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--noise", type=float, nargs="+", default=[3e-4, 6e-4, 2e-3, 5e-3])
    parser.add_argument("--trials", type=int, default=40)
    asked = parser.parse_args()
    torch.manual_seed(SEED)
    rows, bias, given, topk = router(asked.preset, asked.rows)
    flips = dict.fromkeys(asked.noise, 0)
    gaps: list[Tensor] = []
    for _ in range(asked.trials):
        signs = torch.sign(torch.randn(given.shape[1], dtype=torch.double))
        x = (given * signs).to(torch.bfloat16).double()
        ids, gap = chosen(x, rows, bias, topk)
        gaps.append(gap)
        for noise in asked.noise:
            size = x.pow(2).mean(1, keepdim=True).sqrt() * noise
            moved = chosen(x + torch.randn_like(x) * size, rows, bias, topk)[0]
            flips[noise] += int((moved != ids).any(1).sum())
    all_ = torch.cat(gaps)
    data = {
        "preset": asked.preset, "rows": asked.rows, "choices": all_.numel(),
        "gap_median": all_.median().item(), "gap_tenth": all_.quantile(0.1).item(),
        "changed": {str(k): v / all_.numel() for k, v in flips.items()},
    }  # fmt: skip
    print(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
