"""The targets on several GPUs: tensors of all ranks by `NAME@N`, and a step of all ranks in lockstep. Torch.

Every rank has weights, states and inputs of its own where they are split, and the same where they are replicated. The
reference runs one thread for each rank; what they exchange are tensors. It is no model of time or of ordering.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sandbox.artifact import on_rank, rank_of
from targets.base import Workload
from targets.kimi_k3.maths.precision import Schedule, bf
from targets.kimi_k3.maths.step import Step, walk
from targets.kimi_k3.options import PAIRED, Run, split
from targets.kimi_k3.routing import Chooser
from targets.reference import Tensors

WAIT_S = 600.0
_SPLIT = {
    "in_proj", "f_b", "conv", "A_log", "dt_bias", "o_proj", "q_b", "w_uk", "w_uv", "a_proj", "w1", "w2", "w3",
    "latent_up", "shared_gate_up", "shared_down", "dense_gate_up", "dense_down", "S",
}  # fmt: skip
"""Leaves of weights and states that differ from rank to rank; `latent_down` and `router` where they are sharded."""


def gpus(w: Workload) -> int:
    return 1 + max(b.rank for b in w.buffers)


def of_rank(w: Workload, rank: int) -> Workload:
    """The workload as that rank sees it: its own buffers by their plain names."""
    own = tuple(replace(b, name=b.name.partition("@")[0]) for b in w.buffers if b.rank == rank)
    return replace(w, buffers=own)


def tensors_of(tensors: Mapping[str, Tensor], rank: int) -> Tensors:
    return {n.partition("@")[0]: t for n, t in tensors.items() if rank_of(n) == rank}


def together(parts: list[Tensors]) -> Tensors:
    return {on_rank(n, rank): t for rank, part in enumerate(parts) for n, t in part.items()}


def replicated(w: Workload, name: str) -> bool:
    """Whether all ranks hold the same values in the buffer of this plain name."""
    group, leaf = name.split(".", 1)[0], name.rsplit(".", 1)[-1].partition("_")[0]
    last = name.rsplit(".", 1)[-1]
    if group == "inputs":
        return split(w.target)[1] not in PAIRED or name == "inputs.x0"
    if group == "outputs":
        return True
    sharded = {"latent_down": "latent_sharded", "router": "router_sharded"}
    if last in sharded:
        return not w.dims[sharded[last]]
    return last not in _SPLIT and leaf not in ("w1", "w2", "w3")


Draw = Callable[[Workload, int], Tensors]


def drawn(w: Workload, seed: int, draw: Draw) -> Tensors:
    """What `draw(workload of a rank, seed)` makes, replicated or of each rank's own seed."""
    parts: list[Tensors] = []
    for rank in range(gpus(w)):
        one = of_rank(w, rank)
        if rank == 0:
            parts.append(draw(one, seed))
            continue
        own = tuple(b for b in one.buffers if not replicated(w, b.name))
        made = draw(replace(one, buffers=own), seed + 0x51ED27 * rank)
        parts.append({n: made[n] if n in made else t for n, t in parts[0].items()})
    if split(w.target)[1] not in PAIRED:
        _same_rows(w, parts)
    return together(parts)


def _same_rows(w: Workload, parts: list[Tensors]) -> None:
    """Rows of in_proj and a_proj that every rank has: f_a, and the latent queries, keys and values."""
    wide, gate, f_rank = (int(w.dims[n]) for n in ("kda_dim", "mla_dim", "f_rank"))
    rows = {"in_proj": slice(4 * wide, 4 * wide + f_rank), "a_proj": slice(0, -gate)}
    for name, first in parts[0].items():
        same = rows.get(name.rsplit(".", 1)[-1])
        for other in parts[1:]:
            if same is not None:
                other[name][same] = first[same]


def each(w: Workload, tensors: Tensors, change: Callable[[Workload, Tensors], Tensors]) -> Tensors:
    """A change of one rank's tensors, made to all; what is replicated stays so."""
    n = gpus(w)
    return together([change(of_rank(w, r), tensors_of(tensors, r)) for r in range(n)])


@dataclass
class Wire:
    """What the ranks put there, by call; every rank makes the same calls in the same order."""

    ranks: int
    put: dict[tuple[int, str, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=WAIT_S)

    def all(self, layer: int, name: str, rank: int, value: Tensor) -> list[Tensor]:
        self.put[layer, name, rank] = value
        self.barrier.wait()
        return [self.put[layer, name, r] for r in range(self.ranks)]


@dataclass(frozen=True)
class Peer:
    """`maths.exchange.Exchange` with real ranks."""

    wire: Wire
    layer: int
    rank: int

    def all_reduce(self, name: str, partial: Tensor) -> Tensor:
        return bf(_sum(self.wire.all(self.layer, name, self.rank, partial)))

    def all_gather(self, name: str, own: Tensor) -> Tensor:
        return torch.cat(self.wire.all(self.layer, name, self.rank, own), -1)

    def reduce_scatter(
        self, name: str, partial: Tensor, width: int
    ) -> tuple[Tensor, Tensor | None]:
        mine = slice(self.rank * width, (self.rank + 1) * width)
        parts = self.wire.all(self.layer, name, self.rank, partial)
        return bf(_sum([p[:, mine] for p in parts])), None


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for one in parts[1:]:
        total = total + one
    return total


def walk_all(part: str, run: Run, tensors: Tensors, how: tuple[Schedule, Chooser]) -> Step:
    """One step of every rank with true exchanges: rank 0's, with the results and masks of all. Other ranks route by
    the same forced ids. Raises what a rank raised first."""
    schedule, chooser = how
    wire, found = Wire(run.shape.gpus), []
    for rank in range(run.shape.gpus):
        mine = chooser if rank == 0 else Chooser(chooser.topk, chooser.forced)
        step = Step(run, tensors_of(tensors, rank), schedule, mine)
        step.peers = _peers(wire, rank)
        found.append(step)
    _run(part, found, wire)
    found[0].out = together([s.out for s in found])
    found[0].masks = together([s.masks for s in found])
    return found[0]


def _peers(wire: Wire, rank: int) -> Callable[[int], Peer]:
    return lambda n: Peer(wire, n, rank)


def _run(part: str, found: list[Step], wire: Wire) -> None:
    """A thread for each rank."""
    failed: list[BaseException] = []

    def go(step: Step) -> None:
        try:
            with torch.inference_mode():
                walk(part, step)
        except threading.BrokenBarrierError as error:
            failed.append(error)  # behind the error of the rank that broke it
        except BaseException as error:  # raised again in the caller's thread
            failed.insert(0, error)
            wire.barrier.abort()

    threads = [threading.Thread(target=go, args=(s,)) for s in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
